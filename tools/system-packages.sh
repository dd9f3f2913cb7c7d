#!/bin/sh
# Installs the system packages that burnish uses, when that needs no password.
# Missing bubblewrap is not fatal here: `burnish doctor` names what it costs and the fix.
#
#   system-packages.sh PYTHON [COMMAND=PACKAGE ...]    what else to install where COMMAND is missing
set -eu
python="$1"
shift
missing=""
for each in "$@"; do
    command -v "${each%%=*}" >/dev/null 2>&1 || missing="$missing ${each#*=}"
done
command -v bwrap >/dev/null 2>&1 || missing="$missing bubblewrap"
# Without these, boxes are made by a helper in Python, at a third of the speed.
if ! command -v "${CC:-cc}" >/dev/null 2>&1; then
    missing="$missing gcc libc6-dev"
elif [ ! -e /usr/include/stdio.h ] && command -v apt-get >/dev/null 2>&1; then
    missing="$missing libc6-dev"
fi
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing $(
    "$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
    echo "These are missing; install them with your package manager:$missing" >&2
    exit 0
fi
if [ "$(id -u)" = 0 ]; then
    sudo=""
elif sudo -n true 2>/dev/null; then
    sudo="sudo"
else
    echo "These are missing. Fix: sudo apt-get install$missing" >&2
    exit 0
fi
echo "Installing$missing"
# A stale index is no reason to stop: the packages may be in it all the same.
$sudo env DEBIAN_FRONTEND=noninteractive apt-get update -qq || echo "apt-get update failed; going on" >&2
# shellcheck disable=SC2086 # the list is meant to split
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null ||
    echo "apt-get install failed. Fix: sudo apt-get install$missing" >&2
