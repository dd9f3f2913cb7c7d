"""Entry when the directory is run: `python3 -I -S -B <directory> ...` (see `__init__`)."""

import importlib
import os
import sys
import types

PACKAGE = "burnish_box"


def _load() -> types.ModuleType:
    """The package under a name of its own, so that nothing else of Burnish needs to be there."""
    here = os.path.dirname(os.path.abspath(__file__))
    parent = types.ModuleType(PACKAGE)
    parent.__path__ = [os.path.dirname(here)]
    sys.modules[PACKAGE] = parent
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    return importlib.import_module(f"{PACKAGE}.{os.path.basename(here)}.start")


if __name__ == "__main__":
    sys.exit(_load().main(sys.argv[1:]))
