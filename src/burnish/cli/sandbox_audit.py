"""`burnish sandbox audit`: what was done in boxes, and whether the record was tampered with."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from burnish.sandbox.audit.events import Line
    from burnish.sandbox.audit.verify import Report

_JSON = Parameter(name="--json")


def verify(
    path: Path | None = None,
    /,
    *,
    heads: Path | None = None,
    as_json: Annotated[bool, _JSON] = False,
) -> int:
    """Check logs: edited, removed, reordered, cut, copied. Exits with 1 if anything is wrong.

    Args:
        path: a log, or a directory of them; by default that of the daemon.
        heads: the file of heads, if it is kept elsewhere.
        as_json: one JSON array of reports.
    """
    from burnish.cli.console import people, table, write_json
    from burnish.sandbox.remote.daemon import audit_folder

    if path is None:
        path = audit_folder()
    else:
        _require_file(path)
    reports = _reports(path, heads)
    if as_json:
        write_json(reports)
    elif reports:
        people().print(table(("", "box", "lines", "log", ""), [_row(r) for r in reports]))
    else:
        sys.stderr.write(f"There are no logs in {path}.\n")
    return int(not all(report.ok for report in reports))


def show(path: Path, /, *, as_json: Annotated[bool, _JSON] = False) -> None:
    """Print a log, one event a line; digests and limits with --json only.

    Args:
        path: the log.
        as_json: JSON lines, as they were written.
    """
    from burnish.cli.console import people, table, write_json
    from burnish.sandbox.audit.verify import read

    _require_file(path)
    lines = list(read(path))
    if as_json:
        for line in lines:
            write_json(line)
        return
    people().print(table(("#", "time", "event", "what"), [_event_row(line) for line in lines]))


def _require_file(path: Path) -> None:
    from burnish.core.disk import require_regular

    require_regular(path, "give the path of an audit log")


def _reports(path: Path, heads: Path | None) -> tuple["Report", ...]:
    from burnish.core.disk import require_regular
    from burnish.sandbox.audit import verify as verify_alone
    from burnish.sandbox.audit import verify_all, verify_one
    from burnish.sandbox.audit.heads import HEADS

    if heads is not None:
        require_regular(heads, f"give the file of heads, {HEADS}")
    if path.is_dir():
        return verify_all(path, heads)
    return (verify_alone(path),) if heads is None else verify_one(path, heads)


def _row(report: "Report") -> tuple[str, str, str, str, str]:
    finding = report.finding
    if finding is not None:
        where = f" at line {finding.line}" if finding.line else ""
        what = f"{finding.problem}{where}: {finding.detail}"
    elif report.num_lost:
        what = f"{report.num_lost} lines could not be written"
    else:
        what = "" if report.ended else "no end yet"
    return "ok" if report.ok else "BAD", report.box or "-", str(report.num_lines), report.path, what


def _event_row(line: "Line") -> tuple[str, str, str, str]:
    import shlex
    import time

    import msgspec

    from burnish.observe.printable import printable

    fields = msgspec.to_builtins(line.event)
    kind = str(fields.pop("kind"))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(line.time_s))
    what = []
    if "argv" in fields:
        what.append(shlex.join(fields.pop("argv")))
    for name, value in fields.items():
        # Digests and limits are for programs: --json.
        plain = isinstance(value, str | int | float) and not name.endswith("_digest")
        if plain and value not in ("", False):
            what.append(f"{name}={value}")
    return str(line.number), when, kind, printable("  ".join(what), keep="")
