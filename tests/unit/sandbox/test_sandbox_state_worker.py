import ctypes
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from burnish.core.errors import ClassifiedFailure, UserError
from burnish.sandbox.archive.stop import Stop, Stopped
from burnish.sandbox.state.worker import NamespaceWorker

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="maps ids for another user: run as root")
OWNER, FIRST = 54321, 1_900_000_000
_CLONE_NEWUSER = 0x10000000


@pytest.fixture
def worker() -> Iterator[NamespaceWorker]:
    """In a namespace of an ordinary user: 0 is that user, 1 and up a subordinate range."""
    ready, made = os.pipe()
    hold, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.setgroups([])
        os.setresgid(OWNER, OWNER, OWNER)
        os.setresuid(OWNER, OWNER, OWNER)
        done = ctypes.CDLL(None).unshare(_CLONE_NEWUSER)
        os.write(made, b"x" if done == 0 else b"-")
        os.read(hold, 1)
        os._exit(0)
    try:
        if os.read(ready, 1) != b"x":
            pytest.skip("needs user namespaces of ordinary users: see `burnish doctor`")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text(f"0 {OWNER} 1\n1 {FIRST} 65535\n")
        namespace = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
        yield NamespaceWorker(namespace)
        os.close(namespace)
    finally:
        for descriptor in (ready, made, hold, end):
            os.close(descriptor)
        os.waitpid(child, 0)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory of the owner of the namespace, who could not enter one of pytest's."""
    path = Path(tempfile.mkdtemp())
    os.chown(path, OWNER, OWNER)
    yield path
    shutil.rmtree(path)


def new(path: Path) -> int:
    path.mkdir()
    os.chown(path, OWNER, OWNER)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def test_ids_of_the_box_are_kept_and_closed_files_read(
    worker: NamespaceWorker, public: Path
) -> None:
    layer = new(public / "layer")
    for name, uid in (("root", OWNER), ("nobody", FIRST + 65533)):
        (public / "layer" / name).write_text(name)
        os.chown(public / "layer" / name, uid, uid)
        (public / "layer" / name).chmod(0)
    content = worker.export_layers([layer], public / "a.tar")
    assert worker.digest([layer]) == content
    with tarfile.open(public / "a.tar") as tar:
        assert {m.name: (m.uid, m.gid) for m in tar.getmembers()} == {
            "root": (0, 0),
            "nobody": (65534, 65534),
        }
    assert (public / "a.tar").stat().st_uid == OWNER
    into, merged = new(public / "into"), new(public / "merged")
    worker.import_tar(public / "a.tar", into)
    worker.squash([layer], merged)
    assert worker.digest([into]) == worker.digest([merged]) == content
    assert (public / "into/nobody").stat().st_uid == FIRST + 65533
    for descriptor in (layer, into, merged):
        os.close(descriptor)


def test_errors_come_back_as_what_they_are(worker: NamespaceWorker, public: Path) -> None:
    layer = new(public / "layer")
    with pytest.raises(UserError, match="cannot be read"):
        worker.import_tar(public / "absent", layer)
    with tarfile.open(public / "usr.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("usr/x"))
    with pytest.raises(UserError, match=r"usr/x.* would be hidden"):
        worker.import_tar(public / "usr.tar", layer, covered=("/usr",))
    (public / "text").write_text("x" * 1000)
    with pytest.raises(ValueError, match="not a tar"):
        worker.import_tar(public / "text", layer)
    with pytest.raises(OSError, match=r"a\.tar|ermitted|denied|such"):
        worker.export_layers([layer], Path("/proc/a.tar"))
    os.close(layer)
    with pytest.raises(ClassifiedFailure, match=r"worker"):
        NamespaceWorker(os.open("/dev/null", os.O_RDONLY))._call("nonsense", ())  # type: ignore[arg-type]


def test_a_worker_that_is_stopped_leaves_nothing_half_written(
    worker: NamespaceWorker, public: Path
) -> None:
    layer = new(public / "layer")
    for index in range(100):
        (public / f"layer/{index}").write_bytes(b"x" * 100_000)
    stop = Stop()
    stop.set()
    with pytest.raises(Stopped):
        worker.export_layers([layer], public / "a.tar", stop)
    os.close(layer)
    assert {path.name for path in public.iterdir()} <= {"layer", "a.tar"}
