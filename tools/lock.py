"""Prints the installed versions as a constraint file: what CI installs, and everybody else."""

import sys
from importlib.metadata import distributions

# torch stays a range so that pip may take a CPU build; the others are tools of the environment.
LEFT_OUT = {"torch", "triton", "pip", "setuptools", "wheel", "burnish"}


def main() -> None:
    """Write `name==version` lines, local build tags removed."""
    pins = {}
    for dist in distributions():
        name = dist.metadata["Name"].lower().replace("_", "-")
        if name not in LEFT_OUT and not name.startswith("nvidia-"):
            pins[name] = dist.version.split("+")[0]
    sys.stdout.write("# Written by `make lock`; used as a constraint file by the Makefile.\n")
    for name in sorted(pins):
        sys.stdout.write(f"{name}=={pins[name]}\n")


if __name__ == "__main__":
    main()
