"""`burnish sandbox create`, `destroy`, `allow`, `list` and so on: boxes and their daemon."""

import sys
from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from burnish.core.boxes import Policy, Privileges
from burnish.core.errors import UserError

if TYPE_CHECKING:
    from burnish.sandbox.remote.client import RemotePool

_JSON = Parameter(name="--json")


def create(
    *,
    image: str | None = None,
    allow: list[str] | None = None,
    privileges: Privileges = Privileges.NONE,
    deterministic: bool = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Make a box and print its id. It lives until `burnish sandbox destroy`.

    Args:
        image: its file system, a name of `burnish sandbox image list`; by default this machine's
            own programs, read-only.
        allow: a host that it may reach, as pypi.org or *.example.org:8443; may be repeated.
        privileges: "packages" lets its root change owners, as installing packages takes.
        deterministic: the same process ids, host name, time zone and so on each time.
        as_json: one JSON object.
    """
    from burnish.cli.console import write_json
    from burnish.cli.sandbox_daemon import with_new_box

    policy = Policy(allow=tuple(allow or ()), privileges=privileges, deterministic=deterministic)
    info = with_new_box(lambda pool: pool.create(image, policy, detached=True))
    if as_json:
        write_json(info)
        return
    sys.stdout.write(f"{info.id}\n")


def destroy(box: list[str], /, *, as_json: Annotated[bool, _JSON] = False) -> None:
    """End boxes: their processes and files are gone.

    Args:
        box: ids.
        as_json: one JSON array of the ids.
    """
    from burnish.cli.console import write_json
    from burnish.cli.sandbox_daemon import with_boxes_of

    if not box:
        raise UserError("there is no id.", fix="burnish sandbox list")
    for box_id in box:
        with_boxes_of(box_id, partial(_destroy, box_id))
    if as_json:
        write_json(box)


def allow(box: str, /, *host: str, as_json: Annotated[bool, _JSON] = False) -> None:
    """Replace the list of hosts that a box may reach. Connections to others are cut.

    Args:
        box: id of the box.
        host: such as pypi.org or *.example.org:8443; without any the box has no network.
        as_json: one JSON object.
    """
    from burnish.cli.console import write_json
    from burnish.cli.sandbox_daemon import with_box

    with_box(box, lambda b: b.set_allow(host))
    if as_json:
        write_json({"id": box, "allow": host})


def list_boxes(*, as_json: Annotated[bool, _JSON] = False) -> None:
    """List the boxes.

    Args:
        as_json: one JSON array.
    """
    from burnish.cli.console import people, table, write_json
    from burnish.cli.sandbox_daemon import if_running

    infos = if_running(lambda pool: pool.boxes()) or ()
    if as_json:
        write_json(infos)
        return
    if not infos:
        sys.stderr.write("There are no boxes. burnish sandbox create makes one.\n")
        return
    rows = [
        (
            info.id,
            info.image or "(host)",
            duration(info.age_s),
            str(info.num_commands),
            "running" if info.busy else "idle",
            ", ".join(info.policy.allow) or "none",
        )
        for info in infos
    ]
    people().print(table(("id", "image", "age", "commands", "state", "network"), rows))


def stats(*, as_json: Annotated[bool, _JSON] = False) -> None:
    """How the daemon of the boxes is doing.

    Args:
        as_json: one JSON object; null if no daemon runs.
    """
    from burnish.cli.console import people, table, write_json
    from burnish.cli.sandbox_daemon import if_running
    from burnish.sandbox.remote.daemon import audit_folder, log_file

    found = if_running(lambda pool: pool.stats())
    if as_json:
        write_json(found)
        return
    if found is None:
        sys.stderr.write("No daemon runs. burnish sandbox create starts one.\n")
        return
    rows = [
        ("boxes", f"{found.num_boxes} of {found.max_boxes}, {found.num_created} made so far"),
        ("waiting", f"{found.num_waiting} requests for a box"),
        ("commands", f"{found.num_running} running, {found.num_commands} so far"),
        ("infra errors", str(found.num_infra_errors)),
        ("backend", found.backend),
        ("process", f"{found.pid}, up {duration(found.uptime_s)}"),
        ("log", str(log_file())),
        ("audit", str(audit_folder())),
    ]
    people().print(table(("", ""), rows))


def stop(*, as_json: Annotated[bool, _JSON] = False) -> None:
    """End the daemon and all boxes.

    Args:
        as_json: {"stopped": false} if there was none.
    """
    from burnish.cli.console import write_json
    from burnish.sandbox.remote import daemon

    stopped = daemon.stop()
    if as_json:
        write_json({"stopped": stopped})
    elif not stopped:
        sys.stderr.write("No daemon runs.\n")


def sweep(*, as_json: Annotated[bool, _JSON] = False) -> None:
    """Remove what killed processes left on this machine: control groups, files, sockets.

    Boxes end with the process that holds them, however it ends. What cannot end by itself is
    removed by the next start, or by this.

    Args:
        as_json: one JSON array of what was removed.
    """
    from burnish.cli.console import people, table, write_json
    from burnish.sandbox.leftovers import sweep_leftovers

    removed = sweep_leftovers()
    if as_json:
        write_json(removed)
    elif removed:
        people().print(table(("removed", "where"), [(r.kind, r.path) for r in removed]))
    else:
        sys.stderr.write("Nothing was left behind.\n")


def _destroy(box_id: str, pool: "RemotePool") -> Awaitable[None]:
    return pool.destroy(box_id, strict=True)


def duration(seconds: float) -> str:
    """As people say it: 7 s, 5 min, 3 h, 2 d."""
    for unit_s, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{int(seconds // unit_s)} {name}"
    return f"{int(seconds)} s"
