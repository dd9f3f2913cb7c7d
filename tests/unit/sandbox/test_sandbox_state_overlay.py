"""What archives and squashed layers show must be what the kernel's overlayfs shows.

The test runs itself in a user and mount namespace of its own, where it may mount.
"""

import contextlib
import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from burnish.core.disk import DiskFullError
from burnish.sandbox.archive.digest import tree_digest
from burnish.sandbox.archive.walk import NodeKind, walk
from burnish.sandbox.state.export import digest, export_layers
from burnish.sandbox.state.imports import import_tar
from burnish.sandbox.state.squash import squash

_NAMES = ("a", "b", "c", "d")
_UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = (*_UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt")
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_shows_squashed_and_imported_layers_as_it_showed_the_originals(
    seed: int, tmp_path: Path
) -> None:
    if not _can_mount():
        pytest.skip("needs user namespaces that may mount: see `burnish doctor`")
    command = (*_UNSHARE, sys.executable, __file__, str(tmp_path), str(seed))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    whiteouts, opaques = (int(word) for word in done.stdout.split())
    assert whiteouts > 2, "the trial must have met whiteouts"
    assert opaques > 2, "and opaque directories"


@pytest.mark.parametrize("size", ["size=1m", "nr_inodes=20"])
def test_a_full_layer_says_so(size: str, tmp_path: Path) -> None:
    if not _can_mount():
        pytest.skip("needs user namespaces that may mount: see `burnish doctor`")
    command = (*_UNSHARE, sys.executable, __file__, str(tmp_path), size)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["import", "squash", "export"]


def _mount(*arguments: str) -> None:
    subprocess.run(("mount", *arguments), check=True)


@contextlib.contextmanager
def _overlay(place: Path, lowers: list[Path], upper: Path | None) -> Iterator[Path]:
    """A mount of layers, lowest first."""
    target = place / "merged"
    target.mkdir(exist_ok=True)
    options = "userxattr,lowerdir=" + ":".join(str(path) for path in reversed(lowers))
    if upper is not None:
        work = upper.with_name(upper.name + "-work")
        work.mkdir(exist_ok=True)
        options += f",upperdir={upper},workdir={work}"
    _mount("-t", "overlay", "overlay", "-o", options, str(target))
    try:
        yield target
    finally:
        subprocess.run(("umount", str(target)), check=True)


def _change(dice: random.Random, top: Path) -> None:
    """Something that a program might do."""
    depth = dice.randint(1, 3)
    path = top.joinpath(*(dice.choice(_NAMES) for _ in range(depth)))
    if any(top.joinpath(*path.relative_to(top).parts[:index]).is_symlink() for index in (1, 2)):
        # Links must not lead the trial out of its directory; the last name may be one.
        path = top / path.relative_to(top).parts[0]
    action = dice.choice(
        ("file", "file", "folder", "folder", "remove", "remove", "remove", "link", "hard")
    )
    with contextlib.suppress(NotADirectoryError, FileNotFoundError, FileExistsError):
        if action == "remove" or path.is_symlink() or (path.exists() and action != "file"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            if action == "remove":
                return
        if action == "folder":
            path.mkdir(parents=dice.random() < 0.7)
            path.chmod(dice.choice((0o755, 0o700, 0o1777)))
        elif action == "link":
            path.symlink_to(dice.choice(("a", "../b", "/c")))
        elif action == "hard":
            others = [
                other for other in top.rglob("*") if other.is_file() and not other.is_symlink()
            ]
            if others:
                os.link(dice.choice(sorted(others)), path)
        elif not path.is_dir():
            path.write_bytes(dice.randbytes(dice.choice((0, 10, 70_000))))
            if dice.random() < 0.3:
                os.setxattr(path, "user.note", dice.randbytes(5))


def _new(path: Path) -> Path:
    path.mkdir()
    return path


def _shown(place: Path, lowers: list[Path]) -> str:
    # overlayfs wants two lower layers or an upper one.
    with _overlay(place, [_new_or_old(place / "nothing"), *lowers], None) as merged:
        descriptor = os.open(merged, os.O_RDONLY)
        try:
            return tree_digest([descriptor], 0, overlay=False)
        finally:
            os.close(descriptor)


def _new_or_old(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


def _trial(place: Path, dice: random.Random) -> tuple[int, int]:
    image = _new(place / "image")
    for _ in range(60):
        _change(dice, image)
    layers: list[Path] = []
    for index in range(4):
        upper = _new(place / f"layer{index}")
        with _overlay(place, [image, *layers], upper) as merged:
            for _ in range(20):
                _change(dice, merged)
        layers.append(upper)
    wanted = _shown(place, [image, *layers])
    with contextlib.ExitStack() as stack:

        def opened(path: Path) -> int:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            return descriptor

        descriptors = [opened(path) for path in layers]
        content = export_layers(descriptors, place / "layers.tar", 0)
        assert digest(descriptors, 0) == content
        import_tar(place / "layers.tar", imported := opened(_new(place / "imported")), 0)
        squash(descriptors, squashed := opened(_new(place / "squashed")))
        squash(descriptors[1:3], opened(_new(place / "middle")))
        assert digest([imported], 0) == content
        assert digest([squashed], 0) == content
        assert _shown(place, [image, place / "imported"]) == wanted
        assert _shown(place, [image, place / "squashed"]) == wanted
        middle = [layers[0], place / "middle", layers[3]]
        assert _shown(place, [image, *middle]) == wanted
        assert digest([opened(path) for path in middle], 0) == content
        export_layers([squashed], place / "again.tar", 0)
        assert (place / "again.tar").read_bytes() == (place / "layers.tar").read_bytes()
        nodes = list(walk(descriptors, overlay=True))
    whiteouts = sum(node.kind is NodeKind.WHITEOUT for node in nodes)
    return whiteouts, sum(node.opaque for node in nodes)


def _main(place: Path, seed: int) -> None:
    dice = random.Random(seed)
    whiteouts = opaques = 0
    for _ in range(6):
        _mount("-t", "tmpfs", "none", str(place))
        more_whiteouts, more_opaques = _trial(place, dice)
        whiteouts += more_whiteouts
        opaques += more_opaques
        subprocess.run(("umount", str(place)), check=True)
    sys.stdout.write(f"{whiteouts} {opaques}\n")


def _fill(place: Path, size: str) -> None:
    source = _new(place / "source")
    for index in range(40):
        (source / f"f{index}").write_bytes(bytes(range(256)) * 256)
    small = _new(place / "small")
    _mount("-t", "tmpfs", "none", "-o", size, str(small))
    with contextlib.ExitStack() as stack:

        def opened(path: Path) -> int:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            return descriptor

        export_layers([opened(source)], place / "a.tar", 0)
        for name, act in (
            ("import", lambda into: import_tar(place / "a.tar", into, 0)),
            ("squash", lambda into: squash([opened(source)], into)),
        ):
            try:
                act(opened(_new(small / name)))
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    sys.stdout.write(f"{name} ")
            shutil.rmtree(small / name)
        old = small / "old.tar"
        old.write_text("old")
        if size != "size=1m":
            for index in range(40):
                with contextlib.suppress(OSError):
                    (small / str(index)).touch()
        try:
            export_layers([opened(source)], old, 0)
        except DiskFullError:
            if old.read_text() == "old" and not list(small.glob(".*")):
                sys.stdout.write("export")


if __name__ == "__main__":
    if sys.argv[2].isdigit():
        _main(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        _fill(Path(sys.argv[1]), sys.argv[2])
