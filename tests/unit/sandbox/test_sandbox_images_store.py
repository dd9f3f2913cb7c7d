import io
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from burnish.core.errors import UserError
from burnish.sandbox.archive.entry import ArchiveLimits
from burnish.sandbox.images.manifest import check_name
from burnish.sandbox.images.repository import Repository
from burnish.sandbox.images.store import ImagesConfig, ImageStore, default_directory


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    path = tmp_path / "rootfs"
    (path / "usr/bin").mkdir(parents=True)
    (path / "bin").symlink_to("usr/bin")
    (path / "usr/bin/tool").write_text("tool")
    (path / "usr/bin/tool").chmod(0o4755)
    os.link(path / "usr/bin/tool", path / "usr/bin/alias")
    (path / "etc").mkdir(mode=0o700)
    return path


def leftovers(store: ImageStore) -> list[str]:
    root = store._repository.root
    return sorted(os.listdir(root / "staging"))


def test_a_directory_becomes_an_image_of_its_own(store: ImageStore, rootfs: Path) -> None:
    image = store.add_directory("base", rootfs)
    assert image == store.resolve("base")
    assert (image.root / "usr/bin/tool").read_text() == "tool"
    assert stat.S_IMODE((image.root / "usr/bin/tool").stat().st_mode) == 0o755
    assert (image.root / "usr/bin/alias").stat().st_nlink == 2
    assert os.readlink(image.root / "bin") == "usr/bin"
    (rootfs / "usr/bin/tool").write_text("changed")
    assert store.verify("base"), "a copy does not change with its source"
    assert leftovers(store) == []


def test_one_tree_has_one_digest_however_it_came(
    store: ImageStore, rootfs: Path, tmp_path: Path
) -> None:
    wanted = store.add_directory("base", rootfs).digest
    names = sorted(str(path.relative_to(rootfs)) for path in rootfs.rglob("*"))
    for index, (order, mode) in enumerate([(names, "w:gz"), (names[::-1], "w")]):
        path = tmp_path / f"{index}.tar"
        with tarfile.open(path, mode) as tar:
            for name in order:
                tar.add(rootfs / name, name, recursive=False)
        image = store.add_tar(f"tar{index}", path)
        assert image.digest == wanted
        assert image.root == store.resolve("base").root, "kept once"
    if shutil.which("zstd"):
        subprocess.run(["zstd", "-q", tmp_path / "1.tar"], check=True)
        assert store.add_tar("zstd", tmp_path / "1.tar.zst").digest == wanted


def test_members_may_lie_below_links_but_never_outside(store: ImageStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, target in (
            ("bin", "usr/bin"),
            ("abs", "/usr"),
            ("out", f"../../{'../' * 20}tmp"),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
        for name in ("usr/bin/a", "bin/b", "abs/c", "out/d"):
            info = tarfile.TarInfo(name)
            info.size = 1
            if name == "out/d":
                folder = tarfile.TarInfo("tmp")
                folder.type = tarfile.DIRTYPE
                tar.addfile(folder)
            tar.addfile(info, io.BytesIO(b"x"))
    root = store.add_tar("links", tmp_path / "a.tar").root
    for name in ("usr/bin/a", "usr/bin/b", "usr/c", "tmp/d"):
        assert (root / name).read_bytes() == b"x"
    assert not os.path.exists("/tmp/d")
    assert os.listdir(outside) == []


Member = tuple[str, bytes, str]


def hostile(path: Path, *members: Member) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, kind, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)
    return path


@pytest.mark.parametrize(
    "members",
    [
        [("/etc/x", tarfile.REGTYPE, "")],
        [("a/../../x", tarfile.REGTYPE, "")],
        [("h", tarfile.LNKTYPE, "../../secret")],
        [("l", tarfile.SYMTYPE, "/secret"), ("h", tarfile.LNKTYPE, "l/x")],
        [("gone", tarfile.SYMTYPE, "nowhere"), ("gone/x", tarfile.REGTYPE, "")],
        [("loop", tarfile.SYMTYPE, "loop"), ("loop/x", tarfile.REGTYPE, "")],
        [("f", tarfile.REGTYPE, ""), ("f/x", tarfile.REGTYPE, "")],
        [(".wh.x", tarfile.REGTYPE, "")],
        [("d/.wh..wh..opq", tarfile.REGTYPE, "")],
    ],
)
def test_hostile_archives_leave_nothing(
    members: list[Member], store: ImageStore, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UserError):
        store.add_tar("bad", hostile(tmp_path / "a.tar", *members))
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "a.tar"])
    assert store.list() == ()
    assert leftovers(store) == []


def test_devices_pipes_and_overlay_marks_do_not_come_along(
    store: ImageStore, tmp_path: Path
) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind in (
            ("null", tarfile.CHRTYPE),
            ("whiteout", tarfile.CHRTYPE),
            ("disk", tarfile.BLKTYPE),
            ("pipe", tarfile.FIFOTYPE),
            ("d", tarfile.DIRTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type = kind
            info.devmajor, info.devminor = (0, 0) if name == "whiteout" else (1, 3)
            info.pax_headers = {"SCHILY.xattr.user.overlay.opaque": "y"}
            tar.addfile(info)
    root = store.add_tar("odd", path).root
    assert os.listdir(root) == ["d"]
    assert os.listxattr(root / "d") == []


def test_bombs_are_refused(store: ImageStore, tmp_path: Path) -> None:
    path = tmp_path / "bomb.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo("zeros")
        info.size = 50 * 2**20
        with open("/dev/zero", "rb") as zeros:
            tar.addfile(info, zeros)
    assert path.stat().st_size < 10**5
    small = ImageStore(tmp_path / "small", ArchiveLimits(data_bytes=10 * 2**20))
    with pytest.raises(UserError, match="bytes of content"):
        small.add_tar("bomb", path)
    folder = tmp_path / "many"
    folder.mkdir()
    for index in range(30):
        (folder / str(index)).touch()
    few = ImageStore(tmp_path / "few", ArchiveLimits(num_entries=20))
    with pytest.raises(UserError, match="20"):
        few.add_directory("many", folder)
    assert few.list() == small.list() == ()


def test_removing_frees_a_tree_with_its_last_name(store: ImageStore, rootfs: Path) -> None:
    root = store.add_directory("one", rootfs).root
    store.add_directory("two", rootfs)
    store.remove("one")
    assert root.exists()
    assert [summary.name for summary in store.list()] == ["two"]
    store.remove("two")
    assert not root.exists()
    with pytest.raises(UserError, match="no image 'two'"):
        store.resolve("two")
    with pytest.raises(UserError, match="no image"):
        store.remove("two")
    assert leftovers(store) == []
    assert os.listdir(store._repository.root / "leases") == []


def test_an_image_in_use_stays(store: ImageStore, rootfs: Path, tmp_path: Path) -> None:
    store.add_directory("base", rootfs)
    other = ImageStore(tmp_path / "store")
    with other.lease("base") as image:
        with pytest.raises(UserError, match="in use"):
            store.remove("base")
        (rootfs / "new").touch()
        store.add_directory("base", rootfs)
        assert image.root.exists(), "who uses the old image keeps it"
        assert store.resolve("base").root != image.root
    store.add_directory("other", rootfs)
    assert not image.root.exists()


def test_a_changed_tree_is_found(store: ImageStore, rootfs: Path) -> None:
    image = store.add_directory("base", rootfs)
    assert store.verify("base")
    (image.root / "usr/bin/tool").write_text("t00l")
    assert not store.verify("base")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a b", "x" * 129, "a\n", ".json"])
def test_names_that_are_no_names_are_refused(name: str, store: ImageStore) -> None:
    with pytest.raises(UserError, match="cannot name"):
        check_name(name)
    with pytest.raises(UserError, match="cannot name"):
        store.resolve(name)


def test_mistakes_are_one_line(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive" * 100)
    for act in (
        lambda: store.add_directory("x", tmp_path / "absent"),
        lambda: store.add_directory("x", tmp_path / "text"),
        lambda: store.add_directory("x", tmp_path),
        lambda: store.add_tar("x", tmp_path / "absent"),
        lambda: store.add_tar("x", tmp_path),
        lambda: store.add_tar("x", tmp_path / "text"),
        lambda: store.add_oci("x", tmp_path),
        lambda: store.add_oci("x", tmp_path / "text"),
        lambda: store.add_debootstrap("x", "--help"),
        lambda: store.add_debootstrap("x", "bookworm", ["--include=x"]),
        lambda: store.add_debootstrap("x", "bookworm", mirror="-o x"),
        lambda: ImageStore(tmp_path / "text"),
        lambda: ImageStore(tmp_path / "text" / "below"),
    ):
        with pytest.raises(UserError) as caught:
            act()
        assert "\n" not in str(caught.value)
    assert leftovers(store) == []


def test_a_record_of_another_version_is_refused(store: ImageStore, rootfs: Path) -> None:
    store.add_directory("base", rootfs)
    path = store._repository.root / "names/base.json"
    path.write_text(path.read_text().replace('"version":1', '"version":2'))
    with pytest.raises(UserError, match="version 2"):
        store.resolve("base")
    path.write_text("garbage")
    with pytest.raises(UserError, match="damaged"):
        store.resolve("base")


ADD = """
import sys
from pathlib import Path
from typing import Any
from burnish.sandbox.images.store import ImageStore
print("ready", flush=True)
print(ImageStore(Path(sys.argv[1])).add_tar("base", Path(sys.argv[2])).digest, flush=True)
"""


def big_tar(path: Path, marker: bytes, count: int = 3000) -> Path:
    with tarfile.open(path, "w") as tar:
        for index in range(count):
            info = tarfile.TarInfo(f"d{index % 30}/f{index}")
            info.size = len(marker)
            tar.addfile(info, io.BytesIO(marker))
    return path


def test_a_killed_add_leaves_nothing_half_there(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    source = big_tar(tmp_path / "a.tar", b"x")
    staging = tmp_path / "store/staging"
    for _ in range(3):
        command = [sys.executable, "-c", ADD, str(tmp_path / "store"), str(source)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            # As soon as it has unpacked something it is killed.
            while not any(staging.glob("*/rootfs/d*")) and child.poll() is None:
                pass
            child.send_signal(signal.SIGKILL)
    assert len(list(staging.iterdir())) >= 2, "the last one left its work"
    assert store.list() == ()
    image = store.add_tar("base", source)
    assert store.verify("base")
    assert len(list(image.root.rglob("f*"))) == 3000
    assert leftovers(store) == [], "swept"


def test_adding_one_name_from_many_processes_gives_one_whole_image(tmp_path: Path) -> None:
    sources = [big_tar(tmp_path / f"{i}.tar", b"%d" % i, 300) for i in range(2)]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", ADD, str(tmp_path / "store"), str(sources[i % 2])],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(3)
    ]
    printed = [child.communicate()[0].split() for child in children]
    assert {child.returncode for child in children} == {0}
    digests = {words[-1] for words in printed}
    assert len(digests) == 2
    store = ImageStore(tmp_path / "store")
    assert [summary.name for summary in store.list()] == ["base"]
    assert store.resolve("base").digest in digests
    assert store.verify("base")
    store.remove("base")
    assert os.listdir(tmp_path / "store/trees") == []
    assert leftovers(store) == []


def test_an_add_returns_what_it_added_although_the_name_is_another_s_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = (big_tar(tmp_path / f"{i}.tar", b"%d" % i, 3) for i in range(2))
    store = ImageStore(tmp_path / "store")
    commit = Repository.commit

    def commit_and_lose(repository: Repository, *args: Any) -> None:
        commit(repository, *args)
        monkeypatch.undo()
        ImageStore(tmp_path / "store").add_tar("base", other)

    monkeypatch.setattr(Repository, "commit", commit_and_lose)
    added = store.add_tar("base", mine)
    assert added.digest == ImageStore(tmp_path / "apart").add_tar("base", mine).digest
    assert store.resolve("base").digest != added.digest


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that another user can enter."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def as_user(uid: int, act: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="changes its user: run as root")
def test_an_ordinary_user_owns_and_can_read_and_remove_everything(public: Path) -> None:
    with tarfile.open(public / "a.tar", "w") as tar:
        for name, kind in (("closed", tarfile.DIRTYPE), ("closed/f", tarfile.REGTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.uid, info.gid = kind, 0, 123, 456
            tar.addfile(info)

    def act() -> None:
        store = ImageStore(public / "store")
        image = store.add_tar("base", public / "a.tar")
        status = (image.root / "closed/f").stat()
        assert (status.st_uid, status.st_gid) == (54321, 54321)
        assert (image.root / "closed/f").read_bytes() == b""
        assert store.verify("base")
        (image.root / "closed").chmod(0)
        store.remove("base")
        assert not image.root.exists()

    assert as_user(54321, act) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away: run as root")
def test_root_keeps_owners(store: ImageStore, rootfs: Path) -> None:
    os.chown(rootfs / "etc", 123, 456)
    os.chown(rootfs / "bin", 7, 8, follow_symlinks=False)
    os.chown(rootfs / "usr", 2**31, 0)
    root = store.add_directory("base", rootfs).root
    assert ((root / "etc").stat().st_uid, (root / "etc").stat().st_gid) == (123, 456)
    assert (root / "bin").lstat().st_uid == 7
    assert (root / "usr").stat().st_uid == 65534, "boxes have no such user"
    assert store.verify("base")


def fake_tool(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_suite_is_made_by_mmdebstrap(
    store: ImageStore, rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""echo "$@" > {tmp_path}/arguments
    for word; do case $word in *.tar) out=$word;; esac; done
    tar -C {rootfs} -cf "$out" ."""
    fake_tool(tmp_path / "bin", "mmdebstrap", script)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    image = store.add_debootstrap("deb", "bookworm", ["python3", "git"], "http://mirror/debian")
    assert (image.root / "usr/bin/tool").exists()
    arguments = (tmp_path / "arguments").read_text()
    assert "--include=python3,git bookworm" in arguments
    assert arguments.split()[-1] == "http://mirror/debian"
    fake_tool(tmp_path / "bin", "mmdebstrap", "echo 'E: no such suite' >&2; exit 25")
    with pytest.raises(UserError, match="no such suite"):
        store.add_debootstrap("bad", "nonsense")
    assert [summary.name for summary in store.list()] == ["deb"]


def test_without_a_tool_the_command_that_installs_it_is_named(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("burnish.sandbox.images.debootstrap._SYSTEM_PATH", str(tmp_path))
    with pytest.raises(UserError, match="apt-get install mmdebstrap"):
        store.add_debootstrap("deb", "bookworm")


def test_the_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "burnish/images"
    ImagesConfig().open()
    assert (tmp_path / "burnish/images/trees").is_dir()
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert default_directory() == Path.home() / ".local/share/burnish/images"


def test_work_in_progress_is_never_swept(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(60):
                with store._repository.staging() as stage:
                    (stage / "file").touch()
                    (stage / "file").rename(stage / "moved")
                    assert (stage / "moved").exists()
        except (OSError, AssertionError) as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert leftovers(store) == []
