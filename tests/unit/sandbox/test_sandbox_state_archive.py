import contextlib
import io
import os
import resource
import socket
import stat
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.core.errors import UserError
from burnish.sandbox.archive.entry import ArchiveLimits
from burnish.sandbox.archive.removal import remove_tree
from burnish.sandbox.archive.stop import Stop, Stopped
from burnish.sandbox.state.export import digest, export_layers
from burnish.sandbox.state.imports import import_tar
from burnish.sandbox.state.squash import squash

Layer = tuple[int, Path]
Make = Callable[[], Layer]
BASE = 1_900_000_000 if os.geteuid() == 0 else os.geteuid()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes empty layers."""
    opened: list[int] = []

    def new() -> Layer:
        path = tmp_path / f"layer{len(opened)}"
        path.mkdir()
        opened.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
        return opened[-1], path

    yield new
    for descriptor in opened:
        # Others that clean up go no deeper than Python's stack.
        for name in os.listdir(descriptor):
            remove_tree(descriptor, os.fsencode(name))
        os.close(descriptor)


def tar_of(path: Path, *members: tuple[Any, ...]) -> Path:
    """An archive of (name, type, target or content)."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, *rest in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                content = rest[0] if rest else b""
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
                continue
            info.mode = 0o755
            info.linkname = rest[0] if rest else ""
            tar.addfile(info)
    return path


FILE, FOLDER, LINK, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
HOSTILE = {
    "absolute": [("/etc/x", FILE, b"x")],
    "climbing": [("../secret", FILE, b"x")],
    "climbing later": [("a", FOLDER), ("a/../../secret", FILE, b"x")],
    "through a link": [("way", LINK, ".."), ("way/secret", FILE, b"x")],
    "through an absolute link": [("way", LINK, "/tmp"), ("way/x", FILE, b"x")],
    "through a link within": [("d", FOLDER), ("way", LINK, "d"), ("way/x", FILE, b"x")],
    "folder through a link": [("way", LINK, ".."), ("way/new", FOLDER)],
    "whiteout through a link": [("way", LINK, ".."), ("way/.wh.secret", FILE)],
    "opaque through a link": [("way", LINK, ".."), ("way/.wh..wh..opq", FILE)],
    "hard link out": [("h", HARD, "../secret")],
    "absolute hard link": [("h", HARD, "/etc/passwd")],
    "hard link through a link": [("way", LINK, ".."), ("h", HARD, "way/secret")],
    "hard link to nothing": [("h", HARD, "nothing")],
    "hard link to itself": [("h", FILE, b"x"), ("h", HARD, "h")],
    "hard link to a directory": [("d", FOLDER), ("h", HARD, "d")],
    "character device": [("null", tarfile.CHRTYPE)],
    "block device": [("disk", tarfile.BLKTYPE)],
    "pipe": [("pipe", tarfile.FIFOTYPE)],
    "below a file": [("f", FILE, b"x"), ("f/x", FILE, b"x")],
    "whiteout of nothing": [(".wh.", FILE)],
    "whiteout of itself": [("d/.wh..", FILE)],
    "whiteout of the parent": [("d/.wh...", FILE)],
    "whiteout of a mark": [(".wh..wh.x", FILE)],
    "whiteout as directory": [(".wh.x", FOLDER)],
    "whiteout as link": [(".wh.x", LINK, "y")],
    "below a whiteout": [(".wh.x/y", FILE, b"x")],
    "whiteout below a file": [("f", FILE, b"x"), ("f/.wh.x", FILE)],
    "all of the image": [(".wh..wh..opq", FILE)],
    "opaque file": [("f", FILE, b"x"), ("f/.wh..wh..opq", FILE)],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_are_refused_and_touch_nothing_outside(
    case: str, make: Make, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    descriptor, _ = make()
    source = tar_of(tmp_path / "a.tar", *HOSTILE[case])
    before = sorted(os.listdir(tmp_path))
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match=r"."):
        import_tar(source, descriptor, BASE)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "secret").read_text() == "secret"
    assert (tmp_path / "secret").stat().st_nlink == 1
    assert os.listdir("/proc/self/fd") == open_before


def test_links_that_point_out_are_kept_as_they_are(make: Make, tmp_path: Path) -> None:
    descriptor, path = make()
    import_tar(tar_of(tmp_path / "a.tar", ("l", LINK, "../../etc/passwd")), descriptor, BASE)
    assert os.readlink(path / "l") == "../../etc/passwd"


def test_the_last_of_equal_names_wins_but_directories_are_merged(
    make: Make, tmp_path: Path
) -> None:
    descriptor, path = make()
    source = tar_of(
        tmp_path / "a.tar",
        ("a", FILE, b"1"),
        ("a", FOLDER),
        ("a/x", FILE, b"x"),
        ("a/deep/er", FILE, b"x"),
        ("a", FILE, b"2"),
        ("l", LINK, "../secret"),
        ("l", FILE, b"not through the link"),
        ("d", FOLDER),
        ("d/x", FILE, b"x"),
        ("d", FOLDER),
    )
    import_tar(source, descriptor, BASE)
    assert (path / "a").read_bytes() == b"2"
    assert (path / "l").read_bytes() == b"not through the link"
    assert (path / "d/x").exists()


@pytest.mark.parametrize("late", [False, True])
def test_marks_hide_lower_layers_and_never_their_own(
    late: bool, make: Make, tmp_path: Path
) -> None:
    marks = [
        (".wh.gone", FILE),
        (".wh.again", FILE),
        (".wh.folder", FILE),
        ("opaque/.wh..wh..opq", FILE),
        ("opaque/.wh.x", FILE),
    ]
    members = [("again", FILE, b"x"), ("folder/x", FILE, b"x"), ("opaque/own", FILE, b"x")]
    descriptor, path = make()
    ordered = [*members, *marks] if late else [*marks, *members]
    import_tar(tar_of(tmp_path / "a.tar", *ordered), descriptor, BASE)
    gone = (path / "gone").lstat()
    assert stat.S_ISCHR(gone.st_mode)
    assert gone.st_rdev == 0
    assert (path / "again").read_bytes() == b"x"
    for name in ("folder", "opaque"):
        assert os.getxattr(path / name, "user.overlay.opaque") == b"y"
    assert (path / "opaque/own").exists()


def test_owners_are_shifted_and_set_id_bits_dropped(make: Make, tmp_path: Path) -> None:
    descriptor, path = make()
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, uid in (("f", FILE, 7), ("d", FOLDER, 9), ("big", FILE, 2**31)):
            info = tarfile.TarInfo(name)
            info.type, info.uid, info.gid, info.mode = kind, uid, uid + 1, 0o6755
            tar.addfile(info)
    import_tar(tmp_path / "a.tar", descriptor, BASE)
    assert stat.S_IMODE((path / "f").stat().st_mode) == 0o755
    assert stat.S_IMODE((path / "d").stat().st_mode) == 0o755
    if os.geteuid() == 0:
        assert (path / "f").stat().st_uid == BASE + 7
        assert (path / "d").stat().st_gid == BASE + 10
        assert (path / "big").stat().st_uid == BASE + 65534


def test_limits_bound_what_is_unpacked(make: Make, tmp_path: Path) -> None:
    source = tar_of(tmp_path / "a.tar", *((f"f{i}", FILE, b"x" * 1000) for i in range(10)))
    with pytest.raises(ValueError, match="members"):
        import_tar(source, make()[0], BASE, ArchiveLimits(num_entries=9))
    with pytest.raises(ValueError, match="content"):
        import_tar(source, make()[0], BASE, ArchiveLimits(data_bytes=9999))


def test_a_source_that_is_no_file_neither_blocks_nor_crashes(make: Make, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "absent", tmp_path, Path("/dev/zero")):
        with pytest.raises(UserError):
            import_tar(path, make()[0], BASE)


@pytest.mark.parametrize("tool", ["gz", "bz2", "xz"])
def test_compressed_archives_are_read_and_damaged_ones_refused(
    tool: str, make: Make, tmp_path: Path
) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, f"w:{tool}") as tar:
        info = tarfile.TarInfo("f")
        info.size = 100_000
        tar.addfile(info, io.BytesIO(os.urandom(100_000)))
    descriptor, layer = make()
    import_tar(path, descriptor, BASE)
    assert (layer / "f").stat().st_size == 100_000
    whole = path.read_bytes()
    for damaged in (whole[:5000], whole[:5000] + b"\0" * 50 + whole[5050:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"."):
            import_tar(path, make()[0], BASE)


def test_the_archive_of_a_box_holds_no_special_files_and_no_forged_marks(
    make: Make, tmp_path: Path
) -> None:
    descriptor, path = make()
    (path / "f").write_text("x")
    plain = export_layers([descriptor], tmp_path / "a.tar", BASE)
    os.mkfifo(path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "socket"))
    assert export_layers([descriptor], tmp_path / "b.tar", BASE) == plain
    with tarfile.open(tmp_path / "b.tar") as tar:
        assert tar.getnames() == ["f"]
    (path / "sub").mkdir()
    (path / "sub/.wh.passwd").write_text("x")
    with pytest.raises(ValueError, match=r"wh\.passwd"):
        export_layers([descriptor], tmp_path / "b.tar", BASE)
    assert sorted(p.name for p in tmp_path.glob("*.t*")) == ["a.tar", "b.tar"]
    with tarfile.open(tmp_path / "b.tar") as tar:
        assert tar.getnames() == ["f"], "the old archive is untouched"


def test_an_archive_never_takes_the_place_of_a_pipe(make: Make, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="no regular file"):
        export_layers([make()[0]], tmp_path / "pipe", BASE)
    assert (tmp_path / "pipe").is_fifo()


def test_pipes_and_sockets_survive_a_squash(make: Make) -> None:
    descriptor, path = make()
    os.mkfifo(path / "pipe", 0o640)
    os.link(path / "pipe", path / "pipe2")
    into, merged = make()
    squash([descriptor], into)
    assert stat.S_ISFIFO((merged / "pipe").stat().st_mode)
    assert stat.S_IMODE((merged / "pipe").stat().st_mode) == 0o640


def test_a_terabyte_of_holes_costs_nothing(make: Make, tmp_path: Path) -> None:
    descriptor, path = make()
    with open(path / "f", "wb") as file:
        file.truncate(2**39)
        file.seek(2**38)
        file.write(b"x")
    content = export_layers([descriptor], tmp_path / "a.tar", BASE)
    assert (tmp_path / "a.tar").stat().st_size < 100_000
    into, again = make()
    import_tar(tmp_path / "a.tar", into, BASE)
    assert digest([into], BASE) == content
    assert (again / "f").stat().st_size == 2**39
    assert (again / "f").stat().st_blocks < 100
    squashed, merged = make()
    squash([descriptor], squashed)
    assert (merged / "f").stat().st_blocks < 100


def test_many_names_of_one_file_are_stored_and_read_once(make: Make, tmp_path: Path) -> None:
    descriptor, path = make()
    (path / "f").write_bytes(os.urandom(2**20))
    for index in range(200):
        os.link(path / "f", path / f"f{index}")
    content = export_layers([descriptor], tmp_path / "a.tar", BASE)
    assert (tmp_path / "a.tar").stat().st_size < 2**20 + 300 * 1024
    for fill in (
        lambda into: import_tar(tmp_path / "a.tar", into, BASE),
        lambda into: squash([descriptor], into),
    ):
        into, again = make()
        fill(into)
        assert digest([into], BASE) == content
        assert (again / "f7").stat().st_nlink == 201


def nest(descriptor: int, depth: int, name: str) -> int:
    """Directories in each other; returns the innermost, open."""
    current = os.dup(descriptor)
    for _ in range(depth):
        os.mkdir(name, dir_fd=current)
        below = os.open(name, os.O_RDONLY, dir_fd=current)
        os.close(current)
        current = below
    return current


def test_deep_directories_need_few_descriptors(make: Make, tmp_path: Path) -> None:
    (descriptor, _), (into, _), (merged, _) = make(), make(), make()
    current = nest(descriptor, 400, "d")
    os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=current))
    os.close(current)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
    try:
        content = export_layers([descriptor], tmp_path / "a.tar", BASE)
        import_tar(tmp_path / "a.tar", into, BASE)
        squash([descriptor], merged)
        assert digest([into], BASE) == digest([merged], BASE) == content
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("depth", "name"), [(400, "d" * 250), (2100, "d")])
def test_what_no_path_can_say_is_merged_but_refused_by_archives(
    depth: int, name: str, make: Make, tmp_path: Path
) -> None:
    (descriptor, path), (upper, upper_path), (merged, merged_path) = make(), make(), make()
    current = nest(descriptor, depth, name)
    with open(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=current), "wb") as file:
        file.write(b"content")
    os.link("f", "g", src_dir_fd=current, dst_dir_fd=current)
    os.symlink("f", "l", dir_fd=current)
    os.mkdir("closed", 0o500, dir_fd=current)
    os.link("f", path / "z", src_dir_fd=current)
    os.chmod(path / name, 0o751)
    os.close(current)
    (upper_path / "z").write_bytes(b"hides that name")
    archive = tmp_path / "a.tar"
    archive.write_bytes(b"old")
    with pytest.raises(UserError, match="directories deep"):
        export_layers([descriptor], archive, BASE)
    assert archive.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "layer0", "layer1", "layer2"]
    with pytest.raises(ValueError, match="directories deep"):
        digest([descriptor], BASE)
    open_before = os.listdir("/proc/self/fd")
    squash([descriptor, upper], merged)
    assert os.listdir("/proc/self/fd") == open_before
    assert sorted(os.listdir(merged_path)) == [name, "z"]
    assert stat.S_IMODE((merged_path / name).stat().st_mode) == 0o751
    current = os.dup(merged)
    for _ in range(depth):
        below = os.open(name, os.O_RDONLY, dir_fd=current)
        os.close(current)
        current = below
    with open(os.open("g", os.O_RDONLY, dir_fd=current), "rb") as file:
        assert file.read() == b"content"
    assert os.stat("f", dir_fd=current).st_ino == os.stat("g", dir_fd=current).st_ino
    assert os.stat("f", dir_fd=current).st_nlink == 2
    assert os.readlink("l", dir_fd=current) == "f"
    assert stat.S_IMODE(os.stat("closed", dir_fd=current).st_mode) == 0o500
    os.close(current)


def test_work_on_layers_ends_where_it_is_stopped_and_leaves_no_file(
    make: Make, tmp_path: Path
) -> None:
    (descriptor, path), (into, into_path) = make(), make()
    (path / "a").write_bytes(b"a" * 2**20)
    (path / "b").write_bytes(b"b")
    stop = Stop()
    stop.set()
    with pytest.raises(Stopped):
        export_layers([descriptor], tmp_path / "a.tar", BASE, stop)
    assert sorted(os.listdir(tmp_path)) == ["layer0", "layer1"]
    with pytest.raises(Stopped):
        squash([descriptor], into, stop)
    assert os.listdir(into_path) == []
    export_layers([descriptor], tmp_path / "a.tar", BASE)
    with pytest.raises(Stopped):
        import_tar(tmp_path / "a.tar", into, BASE, stop=stop)
    assert os.listdir(into_path) == []
    taken = stop.among(iter(range(3)))
    with pytest.raises(Stopped):
        next(taken)


def build(path: Path) -> None:
    (path / "d").mkdir()
    (path / "d/f").write_bytes(b"content")
    (path / "d/g").write_bytes(b"content")
    (path / "l").symlink_to("d")


CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda path: (path / "d/f").write_bytes(b"Content"),
    "length": lambda path: os.truncate(path / "d/f", 100),
    "mode": lambda path: (path / "d/f").chmod(0o600),
    "mode of a directory": lambda path: (path / "d").chmod(0o700),
    "name": lambda path: (path / "d/f").rename(path / "d/h"),
    "a new file": lambda path: (path / "n").touch(),
    "a new directory": lambda path: (path / "n").mkdir(),
    "target": lambda path: ((path / "l").unlink(), (path / "l").symlink_to("e")),
    "attribute": lambda path: os.setxattr(path / "d/f", "user.a", b"1"),
    "whiteout": lambda path: os.mknod(path / "w", stat.S_IFCHR, 0),
    "other whiteout": lambda path: (
        (path / "w").touch(),
        os.setxattr(path / "w", "user.overlay.whiteout", b""),
    ),
    "opaque": lambda path: os.setxattr(path / "d", "user.overlay.opaque", b"y"),
}
SAME: dict[str, Callable[[Path], object]] = {
    "time": lambda path: os.utime(path / "d/f", (1, 1)),
    "hard link instead of copy": lambda path: (
        (path / "d/g").unlink(),
        os.link(path / "d/f", path / "d/g"),
    ),
    "order": lambda path: ((path / "d/f").unlink(), (path / "d/f").write_bytes(b"content")),
    "not really opaque": lambda path: os.setxattr(path / "d", "user.overlay.opaque", b"x"),
    "overlayfs's own notes": lambda path: os.setxattr(path / "d", "user.overlay.origin", b"y"),
}


@pytest.mark.parametrize("change", [*CHANGES, *SAME])
def test_the_digest_tells_what_a_layer_shows(change: str, make: Make) -> None:
    descriptor, path = make()
    build(path)
    before = digest([descriptor], BASE)
    (CHANGES | SAME)[change](path)
    assert (digest([descriptor], BASE) == before) == (change in SAME)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away: run as root")
def test_the_digest_depends_on_owners_in_the_box_only(make: Make) -> None:
    contents = []
    for base in (1_900_000_000, 100_000):
        descriptor, path = make()
        build(path)
        for name in ("d", "d/f", "d/g", "l"):
            os.chown(path / name, base + 5, base, follow_symlinks=False)
        contents.append(digest([descriptor], base))
    assert contents[0] == contents[1]
    os.chown(path / "d/f", 100_006, 100_000)
    assert digest([descriptor], 100_000) != contents[0]


def test_layers_of_nothing_are_equal_to_each_other(make: Make, tmp_path: Path) -> None:
    empty = digest([], BASE)
    assert digest([make()[0], make()[0]], BASE) == empty
    assert export_layers([], tmp_path / "a.tar", BASE) == empty


names = st.lists(
    st.binary(min_size=1, max_size=12).filter(
        lambda part: not set(part) & {0, 47} and not part.startswith(b".")
    ),
    min_size=1,
    max_size=3,
)
actions = st.tuples(
    names,
    st.sampled_from(["file", "folder", "link", "whiteout", "opaque", "hole"]),
    st.binary(max_size=50),
    st.integers(0, 0o777),
)


def apply(top: Path, parts: list[bytes], kind: str, content: bytes, mode: int) -> None:
    path = os.path.join(os.fsencode(top), *parts)
    try:
        if kind == "whiteout":
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.mknod(path, stat.S_IFCHR, 0)
        elif kind in ("folder", "opaque"):
            os.makedirs(path, exist_ok=True)
            os.chmod(path, mode | 0o700)
            if kind == "opaque":
                os.setxattr(path, "user.overlay.opaque", b"y")
        elif kind == "link":
            os.makedirs(os.path.dirname(path), exist_ok=True)
            # Longer than any name, so that nothing is written through a link.
            os.symlink(b"leads nowhere " + content.replace(b"\0", b""), path)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
                file.seek(10**6 if kind == "hole" else 0)
                file.write(content)
    except (FileExistsError, FileNotFoundError, NotADirectoryError):
        return


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)
@given(st.lists(st.lists(actions, max_size=8), max_size=3))
def test_export_import_export_changes_nothing(
    make: Make, tmp_path: Path, layers: list[list[Any]]
) -> None:
    opened = []
    for layer in layers:
        descriptor, path = make()
        opened.append(descriptor)
        for action in layer:
            apply(path, *action)
    base = 0 if os.geteuid() == 0 else BASE
    content = export_layers(opened, tmp_path / "a.tar", base)
    assert digest(opened, base) == content
    into, _ = make()
    import_tar(tmp_path / "a.tar", into, BASE)
    assert export_layers([into], tmp_path / "b.tar", BASE) == content
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    merged, _ = make()
    squash(opened, merged)
    assert export_layers([merged], tmp_path / "b.tar", base) == content
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


def test_a_file_that_changes_under_the_reader_is_an_error_not_a_lie(
    make: Make, tmp_path: Path
) -> None:
    descriptor, path = make()
    (path / "f").write_bytes(os.urandom(8 * 2**20))
    stop = threading.Event()

    def shake() -> None:
        while not stop.is_set():
            os.truncate(path / "f", 0)
            os.truncate(path / "f", 8 * 2**20)

    thread = threading.Thread(target=shake)
    thread.start()
    try:
        for _ in range(20):
            with contextlib.suppress(OSError, ValueError):
                export_layers([descriptor], tmp_path / "a.tar", BASE)
    finally:
        stop.set()
        thread.join()
    if (tmp_path / "a.tar").exists():
        with tarfile.open(tmp_path / "a.tar") as tar:
            assert tar.getnames() == ["f"]


@pytest.mark.parametrize(
    "members",
    [
        [("usr/bin/x", FILE, b"x")],
        [("usr/local", FOLDER)],
        [("./usr/x", FILE, b"x")],
        [("usr", LINK, "/work")],
        [("bin/sh", FILE, b"x")],
        [("bin", FOLDER)],
        [("usr/.wh.bin", FILE)],
        [("usr/.wh..wh..opq", FILE)],
        [(".wh.usr", FILE)],
        [("etc/alternatives/x", LINK, "x")],
        [("work/h", FILE, b"x"), ("usr/h", HARD, "work/h")],
        [("proc/x", FILE, b"x")],
        [("dev/shm/x", FILE, b"x")],
    ],
    ids=lambda members: members[-1][0],
)
def test_files_that_the_box_would_not_see_are_refused_by_name(
    make: Make, tmp_path: Path, members: list[tuple[Any, ...]]
) -> None:
    source = tar_of(tmp_path / "a.tar", ("work", FOLDER), *members)
    covered = ("/usr", "/bin", "/etc/alternatives")
    with pytest.raises(UserError, match="would be hidden") as refused:
        import_tar(source, make()[0], BASE, covered=covered)
    assert members[-1][0].removeprefix("./") in refused.value.what
    assert "leave" in refused.value.fix


def test_what_only_sounds_like_a_covered_folder_is_taken(make: Make, tmp_path: Path) -> None:
    members = [("usr2/x", FILE, b"x"), ("work/usr/x", FILE, b"x"), ("proc", FOLDER)]
    # As in root file systems of others, for mounts.
    members += [("dev", FOLDER), ("dev/console", FILE), ("dev/fd", LINK, "/proc/self/fd")]
    descriptor, path = make()
    source = tar_of(tmp_path / "a.tar", *members)
    import_tar(source, descriptor, BASE, covered=("/usr", "/bin"))
    assert (path / "work/usr/x").read_bytes() == b"x"


@pytest.mark.parametrize(
    "member",
    [
        ("dev", LINK, "/etc"),
        ("proc", LINK, "/etc"),
        ("work", LINK, "/etc"),
        ("tmp", FILE, b"x"),
        (".wh.dev", FILE),
        (".wh.proc", FILE),
        (".wh.work", FILE),
        (".wh.usr", FILE),
        (".wh.bin", FILE),
    ],
)
def test_what_every_box_needs_is_not_taken_from_it(
    member: tuple[Any, ...], make: Make, tmp_path: Path
) -> None:
    descriptor, path = make()
    with pytest.raises(UserError, match="nothing would start"):
        import_tar(tar_of(tmp_path / "a.tar", member), descriptor, BASE)
    assert os.listdir(path) == []


def test_a_root_file_system_with_links_of_its_own_is_taken(make: Make, tmp_path: Path) -> None:
    members = [("dev", FOLDER), ("work", FOLDER), ("bin", LINK, "usr/bin"), ("work/dev", LINK, "x")]
    descriptor, path = make()
    import_tar(tar_of(tmp_path / "a.tar", *members), descriptor, BASE)
    assert sorted(os.listdir(path)) == ["bin", "dev", "work"]


@pytest.mark.parametrize(("name", "value"), [("n" * 300, "x"), ("n", "x" * 70_000)])
def test_attributes_that_no_file_can_have_are_the_fault_of_the_archive(
    name: str, value: str, make: Make, tmp_path: Path
) -> None:
    info = tarfile.TarInfo("f")
    info.pax_headers = {f"SCHILY.xattr.user.{name}": value}
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    with pytest.raises(ValueError, match="longer than Linux"):
        import_tar(tmp_path / "a.tar", make()[0], BASE)
