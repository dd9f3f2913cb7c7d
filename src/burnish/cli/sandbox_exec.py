"""`burnish sandbox exec`: a command in a box, as if it were one here."""

import math
import os
import re
import select
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import Parameter

from burnish.core.errors import ClassifiedFailure, UserError

if TYPE_CHECKING:
    from burnish.core.boxes import ExecResult, Limits

EXIT_TIMEOUT = 124
EXIT_INFRA = 125
EXIT_SIGNAL = 128
_SIGKILL = 9
_FLAGS = {
    "wall_s": "--timeout",
    "cpu_s": "--timeout",
    "memory_bytes": "--memory",
    "disk_bytes": "--disk",
    "stdout_bytes": "--output",
    "num_pids": "--pids",
}
_RAISED_BY = {
    "timeout": "--timeout",
    "oom": "--memory",
    "disk": "--disk",
    "pids": "--pids",
    "output": "--output",
}
_HINT_S = 2.0
# What the daemon takes as one request (`max_request_bytes`): endless input would fill our memory.
_MAX_STDIN_BYTES = 128 * 2**20


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Flags of the limits."""

    timeout: float = 60.0
    """Seconds; CPU time is bounded by as much on every processor."""
    memory: str = "256M"
    """Bytes, as 256M or 2G; files in the box count."""
    disk: str = "64M"
    """Bytes of files."""
    pids: int = 64
    """Processes and threads."""
    output: str = "16M"
    """Bytes kept of each of stdout and stderr; a command that writes more is ended."""


def execute(
    box: str,
    /,
    *command: str,
    bounds: Annotated[Bounds, Parameter(name="*")] = Bounds(),
    env: list[str] | None = None,
    cwd: str | None = None,
    keep: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Run a command in a box: burnish sandbox exec ID [options] -- CMD...

    Standard input is passed on, to its end; < /dev/null gives none. The exit status is the
    command's; 124 after the time limit, 125 if the box failed, 128+n for signal n, 137 for
    any other limit. Files, and nothing else, stay for the next command.

    Args:
        box: id of the box.
        command: program and arguments.
        bounds: limits.
        env: one variable, as NAME=value; may be repeated.
        cwd: directory in the box; without, where its image says, else /work.
        keep: let processes that it leaves behind live on.
        as_json: the whole result as one JSON object.
    """
    from burnish.cli.console import write_json

    result = _run(box, command, bounds, {"env": _variables(env or []), "cwd": cwd, "keep": keep})
    if as_json:
        write_json(_as_data(result))
    else:
        _show(result)
    return exit_status(result)


def exit_status(result: "ExecResult") -> int:
    """What a shell would see; 0 exactly for `ok`."""
    from burnish.core.boxes import ExecStatus

    match result.status:
        case ExecStatus.OK:
            return 0
        case ExecStatus.TIMEOUT:
            return EXIT_TIMEOUT
        case ExecStatus.INFRA_ERROR:
            return EXIT_INFRA
        case _ if result.exit_code:
            return result.exit_code
        case _:
            return EXIT_SIGNAL + (result.signal or _SIGKILL)


def num_bytes(text: str, flag: str) -> int:
    """A size, as 4096, 64K, 256M or 2G.

    Raises:
        UserError: it is none; names the flag.
    """
    found = re.fullmatch(r"(\d{1,15})([KMGT]?)(i?B)?", text, re.IGNORECASE | re.ASCII)
    if not found:
        raise UserError(f"{flag} {text} is no size.", fix=f"as in {flag} 256M or {flag} 2G")
    return int(found[1]) << (10 * " KMGT".index(found[2].upper() or " "))


def _run(
    box: str, command: tuple[str, ...], bounds: Bounds, options: dict[str, Any]
) -> "ExecResult":
    from burnish.cli.sandbox_daemon import with_box
    from burnish.sandbox.outcome import infra_error

    limits = _limits(bounds)
    cwd = options["cwd"]
    if cwd is not None and not cwd.startswith("/"):
        raise UserError(f"--cwd {cwd} is no absolute path.", fix=f"--cwd /work/{cwd}")
    if not command:
        raise UserError("there is no command.", fix=f"burnish sandbox exec {box} -- CMD...")
    stdin = _read_stdin(sys.stdin)
    try:
        return with_box(
            box, lambda b: b.exec_or_raise(command, stdin=stdin, limits=limits, **options)
        )
    except UserError:
        raise
    except ValueError as error:
        fix = "shorten the command or its input: burnish sandbox import takes large files"
        raise UserError(f"{error}.", fix=fix) from error
    except (ClassifiedFailure, OSError) as error:
        return infra_error(str(error))


def _limits(bounds: Bounds) -> "Limits":
    from burnish.core.boxes import Limits
    from burnish.sandbox.limits import check_limits

    limits = Limits(
        wall_s=bounds.timeout,
        cpu_s=bounds.timeout * (os.cpu_count() or 1),
        memory_bytes=num_bytes(bounds.memory, "--memory"),
        disk_bytes=num_bytes(bounds.disk, "--disk"),
        stdout_bytes=num_bytes(bounds.output, "--output"),
        num_pids=bounds.pids,
    )
    try:
        check_limits(limits)
    except ValueError as error:
        name, _, rest = str(error).removeprefix("limits.").partition(" ")
        flag = _FLAGS[name]
        fix = f"{'lower' if 'at most' in rest else 'raise'} {flag}"
        if not math.isfinite(bounds.timeout):
            fix = "as in --timeout 60"
        raise UserError(f"{flag}: {name} {rest}.", fix=fix) from error
    return limits


def _variables(given: list[str]) -> dict[str, str]:
    variables = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"--env {text[:80]} is no NAME=value.", fix="as in --env SEED=7")
        variables[name] = value
    return variables


def _read_stdin(stream: TextIO) -> bytes:
    """All of it. A terminal gives nothing: there is nobody to talk to in the box yet.

    Raises:
        UserError: it is more than a command may be given.
    """
    try:
        descriptor = stream.fileno()
    except OSError:
        return stream.read().encode()
    if stream.isatty():
        return b""
    if not select.select((descriptor,), (), (), _HINT_S)[0]:
        sys.stderr.write("burnish: reading standard input to its end; < /dev/null gives none\n")
    with open(descriptor, "rb", closefd=False) as file:
        data = file.read(_MAX_STDIN_BYTES + 1)
    if len(data) > _MAX_STDIN_BYTES:
        most = f"{_MAX_STDIN_BYTES >> 20} MiB"
        raise UserError(
            f"standard input is more than the {most} that a command can be given.",
            fix=f"head -c {_MAX_STDIN_BYTES} bounds it; burnish sandbox import takes large files",
        )
    return data


def _show(result: "ExecResult") -> None:
    _write(sys.stdout, result.stdout)
    _write(sys.stderr, result.stderr)
    if result.message:
        flag = _RAISED_BY.get(result.status)
        hint = f" ({flag} raises it)" if flag else ""
        sys.stderr.write(f"burnish: {result.status}: {result.message}{hint}\n")


def _write(stream: TextIO, data: bytes) -> None:
    """Bytes as they are; on a terminal without what could move its cursor or set its title."""
    from burnish.observe.printable import printable

    if not stream.isatty():
        stream.flush()
        stream.buffer.write(data)
    else:
        stream.write(printable(data.decode("utf-8", "replace").replace("\r\n", "\n")))
    stream.flush()


def _as_data(result: "ExecResult") -> dict[str, Any]:
    """For programs: text where it is text, base64 where it is not."""
    import base64

    import msgspec

    data: dict[str, Any] = msgspec.to_builtins(result)
    data["exit_status"] = exit_status(result)
    for name in ("stdout", "stderr"):
        raw: bytes = getattr(result, name)
        data[name] = raw.decode("utf-8", "replace")
        try:
            raw.decode()
        except UnicodeDecodeError:
            data[f"{name}_base64"] = base64.b64encode(raw).decode()
    return data
