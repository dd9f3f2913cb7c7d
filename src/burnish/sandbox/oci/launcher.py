"""The shell that waits in a container for its command. Pure: the same input gives the same text.

It cannot be handed descriptors (gVisor passes none), so it reads the command from files that lie on
a read-only mount, and reports on stderr before anything but ours has run:

    READY  --> the runtime has done its part      (we write a line to its stdin)
    STARTED -> limits are set, the program is next

As process 1 it stays the parent of the program. It takes in orphans, and it is the last to go.
"""

import shlex
from collections.abc import Mapping

from burnish.sandbox.commands import BASE_ENV, WORK

SHELL = "/bin/sh"
INBOX = "/run/box"
"""Where the box sees `SCRIPT` and `STDIN`, and cannot write."""
SCRIPT, STDIN = "script", "stdin"
READY = b"burnish: ready\n"
STARTED = b"burnish: started\n"

ENDED = "ended"
"""A named pipe there, where boxes can keep processes."""
# It stays only if the program left something behind. `wait` also reaps orphans, as long as it has a
# child to wait for; an image may have no `sleep`.
_KEEP = (
    "code=$?; set -- /proc/[0-9]*; [ $# -gt 1 ] || exit $code; "
    f"printf MARK; printf MARK >&3; echo $code >{INBOX}/{ENDED}; exec 3>&-; "
    "sleep 2147483647 & wait; read -r go"
)

NET = "/run/net"
"""Where a box that needs the relay sees `RELAY` and `SOCKET`."""
RELAY, SOCKET = "relay.py", "socket"


def launcher(relay_port: int = 0) -> tuple[str, ...]:
    """The shell's command line.

    Args:
        relay_port: where the relay listens, before the command is known; 0: no relay. If it does
            not come up, programs find nobody there.
    """
    relay = f"python3 -I -S {NET}/{RELAY} {NET}/{SOCKET} {relay_port} </dev/null >/dev/null 2>&1; "
    waits = f"echo {READY.decode().strip()!r} >&2 && read -r go && . {INBOX}/{SCRIPT}"
    return (SHELL, "-c", (relay if relay_port else "") + waits)


def launcher_script(
    argv: tuple[str, ...],
    env: Mapping[str, str],
    cwd: str,
    ulimits: list[str],
    *,
    reports: bool = False,
    end_mark: bytes = b"",
) -> bytes:
    """Runs the program under its limits and passes on how it ended.

    The parent closes its own stderr, on which a shell would comment the death of its child.

    Args:
        argv: program and arguments.
        env: variables.
        cwd: where it starts.
        ulimits: commands that set limits.
        reports: its stdin, which the program does not get, goes both ways: say there that the
            program has ended.
        end_mark: say it in `ENDED` instead, and stay, if anything of the program is left. Before
            that this ends stdout and stderr, which a runtime may pass on late.
    """
    words = [f"exec 2>&3 3>&- <{INBOX}/{STDIN}", *ulimits, "unset go PWD OLDPWD SHLVL HOSTNAME _"]
    words += [f"export {name}={shlex.quote(value)}" for name, value in {**BASE_ENV, **env}.items()]
    words.append(f"echo {STARTED.decode().strip()!r} >&2")
    if cwd != WORK:
        # After the report: a directory that a program has removed is no failure of the box.
        words.append(f"{{ cd -- {shlex.quote(cwd)} || exit 127; }}")
    words.append(f"exec {shlex.join(argv)}")
    end = (
        _KEEP.replace("MARK", end_mark.decode())
        if end_mark
        else "code=$?; echo $code >&0; exit $code"
        if reports
        else "exit $?"
    )
    lines = ("exec 3>&2 2>/dev/null", f"( {' && '.join(words)} )", end, "")
    return "\n".join(lines).encode("utf-8", "surrogateescape")
