"""Whether the tiles of this CPU (AMX) may be used.

No machine of ours has them. So at load a small problem of attention is computed with and without,
in a process of its own: what would be an illegal instruction ends that one alone.
"""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

from burnish.model.kernels.build import INSTALL_FIX

_CHECK_S = 60.0
"""It takes 25 ms; a machine that swaps may need longer."""

# Neither torch nor this package, which take seconds.
_CHECK = """
import ctypes, sys
for runtime in sys.argv[2:]:
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
library = ctypes.CDLL(sys.argv[1])
library.burnish_tiles()
sys.exit(10 * library.burnish_check_tiles())
"""
_DIFFERENT = 10


class Tiles(IntEnum):
    """What `burnish_tiles` answers; the order matches library.c."""

    ABSENT = 0
    """This CPU has none."""
    REFUSED = 1
    """The system does not let this process use them."""
    GRANTED = 2
    """They may be used."""


def tiles_problem(library: ctypes.CDLL, path: Path, runtimes: Sequence[Path]) -> str | None:
    """Why the tiles that this CPU has cannot be used, in one line; None if they can.

    Args:
        library: the kernels.
        path: of their file.
        runtimes: OpenMP's, which it needs.
    """
    if library.burnish_tiles() != Tiles.GRANTED:
        return "AMX is not for this process: the system must be Linux 5.16 or newer and allow it"
    if not hasattr(library, "attend_pages_amx"):
        return f"AMX was unknown to the compiler of the kernels: {INSTALL_FIX}; GCC 11 knows it"
    return self_check_problem(path, runtimes)


def self_check_problem(path: Path, runtimes: Sequence[Path]) -> str | None:
    """What is wrong with attention by tiles, in one line; None if it agrees with that without."""
    command = [sys.executable, "-I", "-S", "-c", _CHECK, str(path), *map(str, runtimes)]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_CHECK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the self-check of AMX attention did not run ({type(error).__name__})"
    if done.returncode == 0:
        return None
    if done.returncode == _DIFFERENT:
        return "the self-check of AMX attention gave other results than AVX-512"
    if done.returncode < 0:
        return f"the self-check of AMX attention died of {signal.Signals(-done.returncode).name}"
    return f"the self-check of AMX attention did not run (status {done.returncode})"
