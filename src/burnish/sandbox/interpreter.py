"""The Python interpreter that model-written code gets inside a box.

It is the system's own, below /usr: the one that runs this program may live in a home directory,
which no box may see.
"""

import os

PYTHON_FIX = "sudo apt-get install python3"
_CANDIDATES = ("/usr/bin/python3", "/usr/local/bin/python3")


def find_python() -> str | None:
    """Path inside the box, or None if the system has no interpreter below /usr."""
    for path in _CANDIDATES:
        if os.access(path, os.X_OK) and os.path.realpath(path).startswith("/usr/"):
            return path
    return None


def python_argv(*arguments: str) -> tuple[str, ...]:
    """Command for isolated Python: no user site, no environment, no bytecode files.

    `python_argv("solution.py")` or `python_argv("-c", code)`. With `-I` Python ignores
    PYTHONHASHSEED; code whose output depends on the order of a set stays random.
    """
    return (find_python() or "python3", "-I", "-S", "-B", *arguments)
