#!/bin/sh
# Prints the first Python >= 3.11 on PATH; says what to install if there is none.
set -eu
for candidate in ${PYTHON:-} python3.13 python3.12 python3.11 python3; do
    if command -v "$candidate" >/dev/null 2>&1 &&
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        command -v "$candidate"
        exit 0
    fi
done
echo "burnish needs Python 3.11 or newer; found $(python3 --version 2>/dev/null || echo none)." >&2
echo "Fix: sudo apt-get install python3.11 python3.11-venv, or: make PYTHON=/path/to/python3.12 ..." >&2
exit 1
