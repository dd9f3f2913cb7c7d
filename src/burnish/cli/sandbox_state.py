"""`burnish sandbox snapshot`, `rollback`, `forget`, `fork`, `export`, `import`: files of a box."""

import errno
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from burnish.core.errors import UserError

if TYPE_CHECKING:
    from burnish.sandbox.remote.box import RemoteStatefulBox

_JSON = Parameter(name="--json")


def snapshot(box: str, /, *, as_json: Annotated[bool, _JSON] = False) -> None:
    """Freeze the files of a box and print the id of the snapshot. Its processes end.

    Args:
        box: id of the box.
        as_json: one JSON object.
    """
    from burnish.cli.console import write_json
    from burnish.cli.sandbox_daemon import with_box

    made = with_box(box, lambda b: b.snapshot())
    if as_json:
        write_json(made)
        return
    sys.stdout.write(f"{made.id}\n")


def rollback(box: str, snapshot_id: str, /, *, as_json: Annotated[bool, _JSON] = False) -> None:
    """Put the files of a box back to a snapshot. Its processes end.

    Args:
        box: id of the box.
        snapshot_id: what `burnish sandbox snapshot` printed.
        as_json: one JSON object.
    """
    from burnish.cli.console import write_json
    from burnish.cli.sandbox_daemon import with_box

    with_box(box, lambda b: b.rollback_to(snapshot_id))
    if as_json:
        write_json({"id": box, "snapshot": snapshot_id})


def forget(box: str, snapshot_id: list[str], /, *, as_json: Annotated[bool, _JSON] = False) -> None:
    """Free what only these snapshots need. Boxes keep their files; nobody can go back to them.

    Args:
        box: id of any box of the same daemon.
        snapshot_id: what `burnish sandbox snapshot` printed.
        as_json: one JSON object.
    """
    from burnish.cli.console import write_json
    from burnish.cli.sandbox_daemon import with_box

    if not snapshot_id:
        raise UserError("there is no id.", fix=f"burnish sandbox snapshot {box} prints one")

    async def forget_all(on: "RemoteStatefulBox") -> None:
        for name in snapshot_id:
            await on.forget_id(name)

    with_box(box, forget_all)
    if as_json:
        write_json({"id": box, "forgotten": snapshot_id})


def fork(
    box: str,
    /,
    *,
    number: Annotated[int, Parameter(name=["-n", "--number"])] = 1,
    snapshot_id: Annotated[str | None, Parameter(name="--snapshot")] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Make boxes with the files of another one and print their ids.

    Args:
        box: id of the box.
        number: how many.
        snapshot_id: start from this snapshot instead of the present state.
        as_json: one JSON array.
    """
    from burnish.cli.console import write_json
    from burnish.cli.sandbox_daemon import with_box

    if number < 1:
        raise UserError(f"-n {number} is below 1.", fix="use 1 or more")
    try:
        made = with_box(box, lambda b: b.fork_boxes(number, snapshot_id))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"-n {number}: {error}.", fix="ask for fewer") from error
    if as_json:
        write_json(made)
        return
    sys.stdout.write("".join(f"{info.id}\n" for info in made))


def export(
    box: str,
    file: Path,
    /,
    *,
    snapshot_id: Annotated[str | None, Parameter(name="--snapshot")] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Write what a box changed to a tar file and print the digest of its content.

    Args:
        box: id of the box.
        file: where to write; replaced if it exists.
        snapshot_id: this snapshot instead of the present state.
        as_json: one JSON object.
    """
    from burnish.cli.console import write_json
    from burnish.cli.sandbox_daemon import with_box

    if not file.parent.is_dir() or file.is_dir():
        raise UserError(f"{file} cannot be written.", fix="give a file in a directory that exists")
    try:
        digest = with_box(box, lambda b: b.export_to(file, snapshot_id))
    except OSError as error:
        what = f"{file}: {error.strerror or error}."
        raise UserError(what, fix="give a file that can be written") from error
    if as_json:
        write_json({"id": box, "file": file, "digest": digest})
        return
    sys.stdout.write(f"{digest}\n")


def import_(box: str, file: Path, /, *, as_json: Annotated[bool, _JSON] = False) -> None:
    """Put the files of a tar into a box, on top of what is there.

    Names in it count from the root of the box, as export writes them: work/x is /work/x.

    Args:
        box: id of the box.
        file: a tar, of `burnish sandbox export` or of any origin.
        as_json: one JSON object.
    """
    from burnish.cli.console import write_json
    from burnish.cli.sandbox_daemon import with_box

    if not file.is_file():
        raise UserError(f"there is no file {file}.", fix="name a tar file")
    if not file.stat().st_size:
        raise UserError(f"{file} is empty, which no tar is.", fix="make it anew: tar cf FILE ...")
    try:
        with_box(box, lambda b: b.import_tar(file))
    except UserError:
        raise
    except ValueError as error:
        # It names the file.
        raise UserError(f"{error}.", fix="make a tar of plain files and links") from error
    except OSError as error:
        what = f"{file}: {error.strerror or error}."
        fix = "give a file that can be read"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = (
                f"burnish sandbox exec {box} --disk 1G --memory 2G -- true gives the box more room"
            )
        raise UserError(what, fix=fix) from error
    if as_json:
        write_json({"id": box, "file": file})
