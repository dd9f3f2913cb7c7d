"""Whether CRIU can save and restore process trees on this host: found by doing it.

CRIU below 4 fails on current kernels (3.17 on 6.18: it does not know the layout of the vDSO), and a
version says nothing about what a container forbids. So a sleeping process is dumped and restored,
in process and mount namespaces of its own, which end with the probe.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import NamedTuple

_LEAST_VERSION = 4
_DEADLINE_S = 10.0
# 60 ms are usual, on a loaded host a second.
_FIX = "install CRIU 4 or later (criu.org; the package of Debian 12 is too old)"

# It dies with the namespace, so nothing is left, whatever fails. CRIU takes no open file that was
# opened outside of the namespace: the sleeping process has three of its own.
_SCRIPT = """
import os, subprocess, sys
criu, folder = sys.argv[1:]
null = subprocess.DEVNULL
sleeper = subprocess.Popen(
    ["sleep", "1000"], stdin=null, stdout=null, stderr=null, start_new_session=True, cwd="/"
)
while open(f"/proc/{sleeper.pid}/comm").read() != "sleep\\n":
    pass
for what in (["dump", "-t", str(sleeper.pid)], ["restore", "-d"]):
    log = f"{what[0]}.log"
    done = subprocess.run([criu, *what, "-D", folder, "-o", log, "-v1"], stdin=null)
    if done.returncode:
        if os.path.exists(os.path.join(folder, log)):
            sys.exit(open(os.path.join(folder, log), errors="replace").read())
        sys.exit(f"{what[0]}: exit status {done.returncode}")
    if what[0] == "dump" and sleeper.wait(2) == 0:
        sys.exit("the process ended by itself")
if open(f"/proc/{sleeper.pid}/comm").read() != "sleep\\n":
    sys.exit("the restored process is gone")
"""


class CriuProbe(NamedTuple):
    """What CRIU can do here."""

    usable: bool
    """A process was dumped and restored."""
    detail: str
    """What was found, in one line."""
    fix: str
    """What to do; empty if it is usable."""
    path: str = ""
    """Of the program, if it is usable."""


def criu_probe(program: str | None = None) -> CriuProbe:
    """Try it once: 0.1 s, at most 10 s. Never raises for what the host lacks.

    Args:
        program: path of `criu`; by default it is looked up in PATH.
    """
    path = shutil.which(program or "criu")
    if path is None:
        return CriuProbe(False, "no criu", _FIX)
    version = _version(path)
    if version is None:
        return CriuProbe(False, f"{path} does not say its version", _FIX)
    if int(version.split(".")[0]) < _LEAST_VERSION:
        return CriuProbe(False, f"{path} is version {version}", _FIX)
    if os.geteuid() != 0:
        return CriuProbe(False, f"{path} {version} needs root", "run as root")
    problem = _round_trip(path)
    if problem is not None:
        fix = "run on a host or in a container that allows CRIU (`criu check` says more)"
        return CriuProbe(False, f"{path} {version}: {problem}", fix)
    return CriuProbe(True, f"{path} {version} dumps and restores", "", path)


def _version(path: str) -> str | None:
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, check=False, timeout=_DEADLINE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(rb"Version: (\d{1,6}(?:\.\d{1,6})*)", done.stdout)
    return match[1].decode("ascii") if match else None


def _round_trip(path: str) -> str | None:
    """None if it worked, else why not."""
    unshare = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
    with tempfile.TemporaryDirectory(prefix="burnish-criu-") as folder:
        try:
            process = subprocess.Popen(
                [*unshare, sys.executable, "-I", "-c", _SCRIPT, path, folder],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return f"unshare: {error.strerror}"
        with process:
            try:
                said, _ = process.communicate(timeout=_DEADLINE_S)
            except subprocess.TimeoutExpired:
                # --kill-child: with unshare dies the first process of the namespace, so all.
                os.killpg(process.pid, signal.SIGKILL)
                return f"no end within {_DEADLINE_S:.0f} s"
    if process.returncode == 0:
        return None
    lines = said.decode("utf-8", "replace").split("\n")
    words = [" ".join(line.split()) for line in lines if line.strip()]
    return (words[-1] if words else f"exit status {process.returncode}")[:200]
