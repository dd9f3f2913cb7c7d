import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from burnish.core.errors import UserError
from burnish.sandbox.archive.entry import ArchiveLimits
from burnish.sandbox.images.layout import RunSettings, architecture
from burnish.sandbox.images.oci import read_settings
from burnish.sandbox.images.store import ImageStore

FILE, FOLDER, LINK, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
REF = "org.opencontainers.image.ref.name"


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


def layer(*members: tuple[Any, ...]) -> bytes:
    """A plain layer of (name, type, target or content)."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, kind, *rest in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o755
            content = rest[0] if rest and kind == FILE else b""
            info.linkname = rest[0] if rest and kind != FILE else ""
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


class Builder:
    """Writes a layout by hand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "blobs/sha256").mkdir(parents=True)
        self.manifests: list[dict[str, Any]] = []

    def blob(self, data: bytes, **more: Any) -> dict[str, Any]:
        digits = hashlib.sha256(data).hexdigest()
        (self.path / "blobs/sha256" / digits).write_bytes(data)
        return {"digest": f"sha256:{digits}", "size": len(data), "mediaType": "x", **more}

    def image(self, *layers: bytes, tag: str = "latest", arch: str = "", **config: Any) -> None:
        diff_ids = [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in layers]
        settings = {
            "architecture": arch or architecture(),
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
            "config": config,
        }
        blobs = [self.blob(gzip.compress(data, mtime=0)) for data in layers]
        manifest = {"schemaVersion": 2, "config": self.json(settings), "layers": blobs}
        self.add(self.json(manifest), tag)

    def json(self, value: object, **more: Any) -> dict[str, Any]:
        return self.blob(json.dumps(value).encode(), **more)

    def add(self, descriptor: dict[str, Any], tag: str) -> None:
        self.manifests.append({**descriptor, "annotations": {REF: tag}})
        index = {"schemaVersion": 2, "manifests": self.manifests}
        (self.path / "index.json").write_text(json.dumps(index))
        (self.path / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')


@pytest.fixture
def build(tmp_path: Path) -> Builder:
    return Builder(tmp_path / "layout")


def tree(root: Path) -> dict[str, str]:
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = "-> " + os.readlink(path)
        elif path.is_dir():
            found[name] = "/"
        else:
            found[name] = path.read_text()
    return found


def test_upper_layers_replace_hide_and_empty(build: Builder, store: ImageStore) -> None:
    build.image(
        layer(
            ("keep", FILE, b"1"),
            ("gone", FILE, b"1"),
            ("folder/x", FILE, b"1"),
            ("folder/y", FILE, b"1"),
            ("all/x", FILE, b"1"),
            ("turned", FILE, b"1"),
            ("linked", FOLDER),
            ("linked/x", FILE, b"1"),
        ),
        layer(
            # Marks hide what lies below, wherever they stand.
            ("all/own", FILE, b"2"),
            ("all/.wh..wh..opq", FILE),
            (".wh.gone", FILE),
            ("folder/.wh.x", FILE),
            (".wh.never-there", FILE),
            ("turned", FOLDER),
            ("turned/x", FILE, b"2"),
            ("linked", LINK, "folder"),
            ("again", FILE, b"2"),
            (".wh.again", FILE),
        ),
        layer(("again2", HARD, "again"), ("linked/z", FILE, b"3")),
        Env=["PATH=/bin:/usr/bin", "A=b=c", "bad name=1", "novalue"],
        WorkingDir="/work",
        User="1000:100",
    )
    image = store.add_oci("base", build.path)
    assert tree(image.root) == {
        "keep": "1",
        "folder": "/",
        "folder/y": "1",
        "folder/z": "3",
        "all": "/",
        "all/own": "2",
        "turned": "/",
        "turned/x": "2",
        "linked": "-> folder",
        "again": "2",
        "again2": "2",
    }
    assert (image.root / "again").stat().st_nlink == 2
    assert image.env == {"PATH": "/bin:/usr/bin", "A": "b=c"}
    assert (image.workdir, image.user) == ("/work", "1000:100")
    assert store.verify("base")


@pytest.mark.parametrize(
    "second",
    [
        layer((".wh..", FILE)),
        layer(("etc/.wh...", FILE)),
        layer((".wh.", FILE)),
        layer((".wh..wh.plnk", FILE)),
        layer((".wh.etc", FOLDER)),
        layer((".wh.etc/passwd", FILE, b"x")),
        layer((".wh.etc", LINK, "/")),
        layer(("../.wh.secret", FILE)),
        layer(("/.wh.secret", FILE)),
        layer(("h", HARD, "../../../../secret")),
        layer(("/abs", FILE, b"x")),
    ],
)
def test_forged_layers_are_refused(
    second: bytes, build: Builder, store: ImageStore, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    build.image(layer(("etc/passwd", FILE, b"root")), second)
    with pytest.raises(UserError):
        store.add_oci("bad", build.path)
    assert (tmp_path / "secret").read_text() == "secret"
    assert store.list() == ()
    assert os.listdir(tmp_path / "store/staging") == []


def test_whiteouts_do_not_follow_links_out(
    build: Builder, store: ImageStore, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    up = "/".join([".."] * 20)
    build.image(
        layer(("way", LINK, f"{up}{outside}"), ("abs", LINK, str(outside)), ("x", FILE, b"x")),
        layer(
            ("way/.wh.secret", FILE),
            ("abs/.wh.secret", FILE),
            ("way/.wh..wh..opq", FILE),
            (".wh.x", FILE),
        ),
    )
    image = store.add_oci("links", build.path)
    assert (outside / "secret").read_text() == "secret"
    assert "x" not in tree(image.root)


def damaged_blob(build: Builder, kind: str) -> None:
    blobs = sorted((build.path / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    index = json.loads((build.path / "index.json").read_text())
    manifest = build.path / "blobs/sha256" / index["manifests"][0]["digest"][7:]
    content = json.loads(manifest.read_text())
    if kind == "manifest":
        manifest.write_text(json.dumps(content) + " ")
    elif kind in ("config", "layer"):
        part = content["config"] if kind == "config" else content["layers"][0]
        path = build.path / "blobs/sha256" / part["digest"][7:]
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    elif kind == "missing":
        (build.path / "blobs/sha256" / content["layers"][0]["digest"][7:]).unlink()
    elif kind == "pipe":
        path = build.path / "blobs/sha256" / content["layers"][0]["digest"][7:]
        path.unlink()
        os.mkfifo(path)
    elif kind == "longer":
        path = build.path / "blobs/sha256" / content["layers"][0]["digest"][7:]
        path.write_bytes(path.read_bytes() + b"x")
    elif kind == "traversal":
        index["manifests"][0]["digest"] = "sha256:../../index.json"
        (build.path / "index.json").write_text(json.dumps(index))
    elif kind == "size":
        index["manifests"][0]["size"] = 2**40
        (build.path / "index.json").write_text(json.dumps(index))
    else:
        (build.path / "index.json").write_text("{" * 100_000)
    assert blobs


@pytest.mark.parametrize(
    "kind",
    ["manifest", "config", "layer", "missing", "pipe", "longer", "traversal", "size", "index"],
)
def test_blobs_that_are_not_what_their_digest_says_are_refused(
    kind: str, build: Builder, store: ImageStore
) -> None:
    build.image(layer(("x", FILE, b"x")))
    damaged_blob(build, kind)
    with pytest.raises(UserError):
        store.add_oci("bad", build.path)
    assert store.list() == ()


def test_a_layer_that_unpacks_to_something_else_is_refused(
    build: Builder, store: ImageStore
) -> None:
    data = layer(("x", FILE, b"x"))
    config = {"rootfs": {"diff_ids": [f"sha256:{'0' * 64}"]}}
    manifest = {"config": build.json(config), "layers": [build.blob(data)]}
    build.add(build.json(manifest), "latest")
    with pytest.raises(UserError, match="unpack"):
        store.add_oci("bad", build.path)


def test_the_number_of_layers_must_agree(build: Builder, store: ImageStore) -> None:
    config = {"rootfs": {"diff_ids": []}}
    manifest = {"config": build.json(config), "layers": [build.blob(layer(("x", FILE, b"x")))]}
    build.add(build.json(manifest), "latest")
    with pytest.raises(UserError, match="number of layers"):
        store.add_oci("bad", build.path)


def test_tags_choose_among_images(build: Builder, store: ImageStore) -> None:
    build.image(layer(("one", FILE, b"1")), tag="1.0")
    assert "one" in tree(store.add_oci("only", build.path).root)
    build.image(layer(("two", FILE, b"2")), tag="registry.example/two:2.0")
    assert "one" in tree(store.add_oci("a", build.path, "1.0").root)
    assert "two" in tree(store.add_oci("b", build.path, "2.0").root)
    for tag in (None, "3.0"):
        with pytest.raises(UserError, match=r"1\.0, 2\.0"):
            store.add_oci("c", build.path, tag)


def test_an_index_of_platforms_gives_the_one_of_this_machine(
    build: Builder, store: ImageStore
) -> None:
    build.image(layer(("foreign", FILE, b"x")), tag="f", arch="s390x")
    build.image(layer(("own", FILE, b"x")), tag="o")
    platforms = (
        {"os": "linux", "architecture": "s390x"},
        {"os": "linux", "architecture": architecture()},
    )
    entries = [
        {"digest": m["digest"], "size": m["size"], "platform": platform}
        for m, platform in zip(build.manifests, platforms, strict=True)
    ]
    build.add(build.json({"schemaVersion": 2, "manifests": entries}), "multi")
    build.add(build.json({"schemaVersion": 2, "manifests": entries[:1]}), "foreign")
    assert "own" in tree(store.add_oci("multi", build.path, "multi").root)
    with pytest.raises(UserError, match="no variant"):
        store.add_oci("x", build.path, "foreign")
    with pytest.raises(UserError, match="is for s390x"):
        store.add_oci("x", build.path, "f")


def test_limits_count_all_layers(build: Builder, tmp_path: Path) -> None:
    build.image(*(layer((f"f{index}", FILE, b"x" * 1000)) for index in range(5)))
    for limits in (ArchiveLimits(num_entries=4), ArchiveLimits(data_bytes=4900)):
        with pytest.raises(UserError, match="more than"):
            ImageStore(tmp_path / "small", limits).add_oci("x", build.path)
    exact = ArchiveLimits(num_entries=5, data_bytes=30_000)
    ImageStore(tmp_path / "exact", exact).add_oci("x", build.path)


def test_an_archive_of_a_layout_is_read(build: Builder, store: ImageStore, tmp_path: Path) -> None:
    build.image(layer(("x", FILE, b"x")))
    with tarfile.open(tmp_path / "image.tar", "w") as tar:
        tar.add(build.path, ".")
    image = store.add_oci("archive", tmp_path / "image.tar")
    assert image.digest == store.add_oci("folder", build.path).digest


@pytest.mark.parametrize("user", ["1" * 5000, "a:" + "1" * 5000, "4294967295", "a" * 5000])
def test_an_image_that_runs_as_nobody_there_can_be_is_refused(
    build: Builder, store: ImageStore, user: str
) -> None:
    build.image(layer(("f", FILE, b"1")), User=user)
    with pytest.raises(UserError, match="which nobody can be"):
        store.add_oci("x", build.path)


def test_settings_that_boxes_cannot_have_are_left_out() -> None:
    settings = read_settings(
        RunSettings(env=["A=1", "=2", "B\0=3", "C=4\0", "D E=5", "F"], working_dir="relative")
    )
    assert settings.env == {"A": "1"}
    assert settings.workdir == ""


@pytest.mark.skipif(
    shutil.which("umoci") is None or shutil.which("skopeo") is None or os.geteuid() != 0,
    reason="needs root, and: sudo apt-get install umoci skopeo",
)
def test_images_of_umoci_and_skopeo_unpack_as_umoci_does(store: ImageStore, tmp_path: Path) -> None:
    layout, bundle = tmp_path / "oci", tmp_path / "bundle"

    def umoci(*arguments: object) -> None:
        subprocess.run(["umoci", *map(str, arguments)], check=True, capture_output=True)

    umoci("init", "--layout", layout)
    umoci("new", "--image", f"{layout}:v1")
    umoci("unpack", "--image", f"{layout}:v1", bundle)
    rootfs = bundle / "rootfs"
    (rootfs / "etc").mkdir()
    (rootfs / "etc/a").write_text("1")
    (rootfs / "gone/deep").mkdir(parents=True)
    (rootfs / "gone/deep/x").write_text("x")
    umoci("repack", "--refresh-bundle", "--image", f"{layout}:v1", bundle)
    shutil.rmtree(rootfs / "gone")
    (rootfs / "etc/a").unlink()
    (rootfs / "etc/b").write_text("2")
    os.link(rootfs / "etc/b", rootfs / "etc/c")
    os.chown(rootfs / "etc/b", 5, 6)
    umoci("repack", "--image", f"{layout}:v1", bundle)
    umoci("config", "--image", f"{layout}:v1", "--config.env", "A=b", "--config.user", "u")
    image = store.add_oci("umoci", layout, "v1")
    assert image.digest == store.add_directory("bundle", rootfs).digest
    assert (image.env["A"], image.user) == ("b", "u")
    archive = f"oci-archive:{tmp_path}/a.tar:v1"
    command = ["skopeo", "copy", "--insecure-policy", f"oci:{layout}:v1", archive]
    subprocess.run(command, check=True, capture_output=True)
    assert store.add_oci("skopeo", tmp_path / "a.tar").digest == image.digest
