"""The helper's binary: building it, and whether the one beside this file fits its sources.

The build hook of the package runs this file on its own, so it imports nothing of ours.
"""

import errno
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).with_name("zygote")
BINARY = Path(__file__).with_name("_zygote")
"""Where the build puts it; never under version control."""

WARNINGS = ("-std=gnu11", "-Wall", "-Wextra", "-Werror")
_HARDENED = ("-O2", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2")
# A static binary maps a quarter of the memory areas, which every box's fork has to copy. Not every
# C library comes with the archive, and some want position-independent code: so in this order.
_LINKS = (("-static",), ("-static-pie", "-fPIE"), ("-pie", "-fPIE", "-Wl,-z,relro,-z,now"))
_MFD_EXEC = 0x10
_MARK = b"burnish-helper-source:"


@cache
def source_digest() -> str:
    """SHA-256 over names and contents of the sources."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def find_compiler() -> list[str] | None:
    """`$CC`, else `cc`, `gcc` or `clang`; None without any."""
    words = shlex.split(os.environ.get("CC", ""))
    if words:
        return words if shutil.which(words[0]) else None
    found = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    return [found] if found else None


def build_helper(destination: Path = BINARY, flags: Sequence[str] | None = None) -> str | None:
    """Compile the helper.

    Args:
        destination: replaced at once, so that a helper that is being started is never half written.
        flags: instead of those of a release, such as `-fsanitize=address`.

    Returns:
        None, or what went wrong, in one line.
    """
    compiler = find_compiler()
    if compiler is None:
        return "there is no C compiler (sudo apt-get install gcc libc6-dev)"
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    mark = f'-DSOURCE_DIGEST="{source_digest()}"'
    choices = [(*_HARDENED, *link) for link in _LINKS] if flags is None else [tuple(flags)]
    message = ""
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".build-") as directory:
        made = Path(directory, "zygote")
        for choice in choices:
            command = [*compiler, *WARNINGS, *choice, mark, "-o", str(made), *sources]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                made.replace(destination)
                return None
            message = (done.stderr.strip().splitlines() or ["no message"])[0]
    return f"the C compiler {shlex.join(compiler)} failed: {message}"


def helper_problem() -> str | None:
    """Why there is no usable binary, and the fix; None if there is one."""
    if not BINARY.is_file():
        return "it was not built: install a C compiler, then Burnish again (pip install -e .)"
    if not os.access(BINARY, os.X_OK):
        return f"{BINARY} is not executable"
    if _MARK + source_digest().encode() not in BINARY.read_bytes():
        return "it was built from other sources: install Burnish again (pip install -e .)"
    return None


def detached_copy(binary: str) -> int:
    """A copy in memory to run instead of the file.

    `#!/proc/self/exe` in a script of a box leads to what its init runs. Where root of the box is
    the user that owns this file, the box could change its mode or make it unusable (of the kind of
    CVE-2019-5736).

    Raises:
        OSError: this kernel runs no files in memory (`vm.memfd_noexec`).
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        copy = os.memfd_create("init", flags | _MFD_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        copy = os.memfd_create("init", flags)  # a kernel before 6.3
    with open(binary, "rb") as file:
        view = memoryview(file.read())
    while view:
        view = view[os.write(copy, view) :]
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(copy, fcntl.F_ADD_SEALS, seals)
    return copy


def find_helper() -> Path | None:
    """The binary, if it is there and was built from the sources that are here."""
    return BINARY if helper_problem() is None else None
