import io
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.sandbox.archive.entry import ArchiveLimits, Entry, EntryKind, Extent, check_path
from burnish.sandbox.archive.tar_reader import TarReader
from burnish.sandbox.archive.tar_writer import TarWriter

LIMITS = ArchiveLimits(num_entries=100, data_bytes=2**20, file_bytes=2**42, header_bytes=4 * 2**20)
Member = tuple[Entry, bytes]


def read_all(data: bytes, limits: ArchiveLimits = LIMITS) -> list[Member]:
    reader = TarReader(io.BytesIO(data), limits)
    return [(entry, b"".join(part for _, part in reader.chunks())) for entry in reader]


def write_all(members: list[Member]) -> bytes:
    stream = io.BytesIO()
    writer = TarWriter(stream, 2**30)
    for entry, content in members:
        writer.add(entry, [content] if content else [])
    writer.finish()
    return stream.getvalue()


names = st.lists(
    st.binary(min_size=1, max_size=255).filter(
        lambda part: b"/" not in part and b"\0" not in part and part not in (b".", b"..")
    ),
    min_size=1,
    max_size=6,
).map(b"/".join)
attributes = st.dictionaries(
    st.sampled_from(["user.a", "user.b.c", "user.\u00e4"]), st.binary(max_size=300), max_size=2
)


@st.composite
def members(draw: Any) -> Member:
    kind = draw(st.sampled_from([EntryKind.FILE, EntryKind.FOLDER, EntryKind.SYMLINK]))
    content = draw(st.binary(max_size=2000)) if kind is EntryKind.FILE else b""
    extents = None
    size = len(content)
    if content and draw(st.booleans()):
        cut = draw(st.integers(0, len(content) - 1))
        far = draw(st.integers(cut, 2**40))
        extents = tuple(x for x in (Extent(0, cut), Extent(far, len(content) - cut)) if x.length)
        size = far + len(content) - cut + draw(st.integers(0, 2**33))
    entry = Entry(
        path=draw(names),
        kind=kind,
        mode=draw(st.integers(0, 0o1777)),
        uid=draw(st.integers(0, 65535)),
        gid=draw(st.integers(0, 65535)),
        size=size,
        mtime_ns=draw(st.integers(-(10**18), 10**20)),
        target=draw(names) if kind is EntryKind.SYMLINK else b"",
        xattrs=draw(attributes) if kind is not EntryKind.SYMLINK else {},
        extents=extents,
    )
    return entry, content


@given(st.lists(members(), max_size=5))
@settings(deadline=None)
def test_what_is_written_is_read(written: list[Member]) -> None:
    archive = write_all(written)
    assert read_all(archive) == written
    assert len(archive) % 512 == 0


@given(st.lists(members(), max_size=5))
@settings(deadline=None)
def test_python_reads_what_is_written(written: list[Member]) -> None:
    with tarfile.open(fileobj=io.BytesIO(write_all(written)), mode="r:") as tar:
        found = tar.getmembers()
        for (entry, content), member in zip(written, found, strict=True):
            assert member.name.encode("utf-8", "surrogateescape") == entry.path
            assert (member.mode, member.uid, member.gid) == (entry.mode, entry.uid, entry.gid)
            assert member.size == (entry.size if entry.kind is EntryKind.FILE else 0)
            if entry.extents is None and content:
                file = tar.extractfile(member)
                assert file is not None
                assert file.read() == content


def made_by_python(form: int, names: list[str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for index, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.uid = 10, 1_000_000_000 + index, 1000
            tar.addfile(info, io.BytesIO(b"0123456789"))
    return stream.getvalue()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_form_that_python_writes_is_read(form: int) -> None:
    names = ["a", "d/" + "b" * 90, "/".join(["x" * 60] * 3)]
    if form != tarfile.USTAR_FORMAT:
        names += ["/".join(["y" * 200] * 4), "\u00e4/\u20ac"]
    found = read_all(made_by_python(form, names))
    assert [entry.path.decode() for entry, _ in found] == names
    assert {content for _, content in found} == {b"0123456789"}
    assert {entry.uid for entry, _ in found} == {1000}


@pytest.mark.parametrize(
    "options",
    [["--format=gnu", "-S"], ["--format=posix", "-S"], ["--format=posix", "--sparse-version=0.1"]],
)
def test_sparse_files_of_gnu_tar_are_read(options: list[str], tmp_path: Path) -> None:
    if shutil.which("tar") is None:
        pytest.skip("needs GNU tar")
    with open(tmp_path / "sparse", "wb") as file:
        for index in range(40):
            file.seek(index * 2**20)
            file.write(b"x" * 5000)
        file.truncate(2**36)
    archive = tmp_path / "a.tar"
    if "-S" not in options:
        options = [*options, "-S"]
    subprocess.run(["tar", "-C", tmp_path, *options, "-cf", archive, "sparse"], check=True)
    limits = LIMITS._replace(file_bytes=2**36)
    reader = TarReader(io.BytesIO(archive.read_bytes()), limits)
    entry = next(iter(reader))
    assert (entry.path, entry.size) == (b"sparse", 2**36)
    found = dict(reader.chunks())
    for index in range(40):
        assert found[index * 2**20][:5000] == b"x" * 5000
    with pytest.raises(ValueError, match="too many"):
        read_all(archive.read_bytes(), limits._replace(file_bytes=2**36 - 1))


def test_gnu_tar_restores_what_is_written(tmp_path: Path) -> None:
    if shutil.which("tar") is None:
        pytest.skip("needs GNU tar")
    sparse = Entry(
        path=b"dir/sp\xffarse",
        kind=EntryKind.FILE,
        mode=0o640,
        size=2**30,
        extents=(Extent(2**20, 4),),
    )
    folder = Entry(path=b"dir", kind=EntryKind.FOLDER, mode=0o750)
    link = Entry(path=b"dir/l", kind=EntryKind.SYMLINK, mode=0o777, target=b"../" + b"t" * 150)
    hard = Entry(path=b"again", kind=EntryKind.HARDLINK, mode=0, target=sparse.path)
    data = write_all([(folder, b""), (sparse, b"data"), (link, b""), (hard, b"")])
    subprocess.run(["tar", "-C", tmp_path, "-xf", "-"], input=data, check=True)
    found = Path(
        bytes(tmp_path).decode() + "/dir/" + b"sp\xffarse".decode(errors="surrogateescape")
    )
    assert found.stat().st_size == 2**30
    assert found.stat().st_nlink == 2
    with open(found, "rb") as file:
        file.seek(2**20 - 2)
        assert file.read(8) == b"\0\0data\0\0"
    assert len(str((tmp_path / "dir/l").readlink())) == 153


def block_of(name: bytes = b"f", letter: bytes = b"0", size: int = 0, mode: int = 0o644) -> bytes:
    info = tarfile.TarInfo("x")
    info.size, info.mode = size, mode
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[:100] = name.ljust(100, b"\0")
    block[156:157] = letter
    return seal(block)


def seal(block: bytearray) -> bytes:
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    return bytes(block)


@pytest.mark.parametrize(
    "name", [b"/etc/passwd", b"../x", b"a/../../x", b"a/..", b"..", b"x" * 256 + b"/y"]
)
def test_names_that_lead_out_are_refused(name: bytes) -> None:
    with pytest.raises(ValueError, match=r"absolute|leads out|too long"):
        check_path(name)
    if len(name) < 100:
        with pytest.raises(ValueError, match=r"absolute|leads out"):
            read_all(block_of(name))
        hard = bytearray(block_of(b"h", b"1"))
        hard[157:257] = name.ljust(100, b"\0")
        with pytest.raises(ValueError, match=r"absolute|leads out"):
            read_all(seal(hard))


def test_set_id_bits_never_come_through() -> None:
    [(entry, _)] = read_all(block_of(mode=0o6755))
    assert entry.mode == 0o755


def test_devices_and_pipes_are_told_apart_and_have_no_content() -> None:
    data = b"".join(block_of(letter, letter, size=512) for letter in (b"3", b"4", b"6"))
    assert [entry.kind for entry, _ in read_all(data)] == [EntryKind.SPECIAL] * 3


def test_attributes_that_would_forge_layers_are_dropped() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("x")
        info.pax_headers = {
            f"SCHILY.xattr.{name}": "y"
            for name in (
                "user.overlay.opaque",
                "user.overlay.redirect",
                "trusted.overlay.opaque",
                "security.capability",
                "user.mine",
            )
        }
        tar.addfile(info)
    [(entry, _)] = read_all(stream.getvalue())
    assert entry.xattrs == {"user.mine": b"y"}


def pax(payload: bytes) -> bytes:
    return block_of(b"p", b"x", len(payload)) + payload + bytes(-len(payload) % 512)


def record(text: str) -> bytes:
    length = len(text) + 2
    while len(str(length)) + 2 + len(text) != length:
        length += 1
    return f"{length} {text}\n".encode()


@pytest.mark.parametrize(
    "payload",
    [
        b"5 a=b\n",
        b"6 a=b\n6 a=",
        b"6 ab \n",
        b"-6 a=b\n",
        b"6",
        b" a=b\n",
        b"99999999999 a=b\n",
        b"12 size=-12\n",
        b"13 uid=1e300\n",
        b"14 mtime=NaNN\n",
        b"22 GNU.sparse.major=1\n" + b"25 GNU.sparse.realsize=5\n",
        b"22 GNU.sparse.major=2\n",
        b"25 GNU.sparse.numblocks=1\n",
    ],
)
def test_damaged_extended_headers_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_all(pax(payload) + block_of())


@pytest.mark.parametrize(
    "numbers", ["5,1,2,2", "0,5,3,2", "0,100", "0,3", "0", "9,1", "0,5,9,0,x,1"]
)
def test_damaged_sparse_maps_are_refused(numbers: str) -> None:
    payload = record(f"GNU.sparse.map={numbers}") + record("GNU.sparse.size=9")
    with pytest.raises(ValueError, match=r"sparse|number"):
        read_all(pax(payload) + block_of(size=5) + b"12345".ljust(512, b"\0"))


def test_a_sparse_file_needs_a_size_even_if_it_is_all_hole() -> None:
    payload = record("GNU.sparse.major=1") + record("GNU.sparse.minor=0")
    content = block_of(size=512) + b"0\n".ljust(512, b"\0")
    with pytest.raises(ValueError, match="damaged sparse map"):
        read_all(pax(payload) + content)
    read_all(pax(payload + record("GNU.sparse.realsize=9")) + content)


def test_bombs_run_into_limits() -> None:
    one = LIMITS._replace(num_entries=3)
    with pytest.raises(ValueError, match="more than 3 members"):
        read_all(block_of() * 4, one)
    with pytest.raises(ValueError, match="bytes of content"):
        read_all(block_of(size=8**10), LIMITS)
    long = block_of(b"n", b"L", 2**24 + 1)
    with pytest.raises(ValueError, match="too long"):
        read_all(long, LIMITS._replace(header_bytes=2**30))
    many = (block_of(b"n", b"L", 1024) + bytes(1024)) * 100
    with pytest.raises(ValueError, match="too long"):
        read_all(many, LIMITS._replace(header_bytes=50 * 1024))


def test_an_archive_that_is_cut_off_is_refused() -> None:
    entry = Entry(path=b"x" * 200, kind=EntryKind.FILE, mode=0o644, size=600)
    whole = write_all([(entry, b"z" * 600)])
    for length in range(1, len(whole) - 1024, 100):
        with pytest.raises(ValueError, match=r"cut off|extended|damaged"):
            read_all(whole[:length])


@given(data=st.data(), written=st.lists(members(), min_size=1, max_size=3))
@settings(deadline=None, max_examples=300)
def test_garbage_is_a_value_error_and_nothing_else(data: Any, written: list[Member]) -> None:
    archive = bytearray(write_all(written))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(archive) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=20))
        archive[position : position + len(patch)] = patch
        header = position // 512 * 512
        if data.draw(st.booleans()) and len(archive) >= header + 512:
            # With a right checksum the damage gets further.
            archive[header : header + 512] = seal(archive[header : header + 512])
    try:
        found = read_all(bytes(archive))
    except ValueError:
        return
    for entry, content in found:
        assert not entry.path.startswith(b"/")
        assert b".." not in entry.path.split(b"/")
        assert entry.mode & ~0o1777 == 0
        assert len(content) <= LIMITS.data_bytes


def test_equal_trees_give_equal_bytes() -> None:
    entry = Entry(path=b"a", kind=EntryKind.FILE, mode=0o644, mtime_ns=10**18 + 1, size=3)
    assert write_all([(entry, b"abc")]) == write_all([(entry, b"abc")])


def test_content_of_another_length_is_not_written_as_if_it_fitted() -> None:
    entry = Entry(path=b"a", kind=EntryKind.FILE, mode=0o644, size=3)
    for content in (b"ab", b"abcd"):
        with pytest.raises(ValueError, match="announced"):
            write_all([(entry, content)])
