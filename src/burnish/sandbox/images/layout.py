"""An OCI image layout: blobs by digest, each checked against it, and the choice of one image."""

import hashlib
import io
import platform
import re
from pathlib import Path
from typing import TypeVar

import msgspec

from burnish.core.errors import UserError
from burnish.sandbox.archive.compression import open_regular

_T = TypeVar("_T")
_MAX_JSON_BYTES = 4 * 2**20
_CHUNK = 2**20
_MAX_NESTING = 4
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_TAG_KEYS = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Platform(msgspec.Struct):
    """What an image runs on."""

    architecture: str = ""
    """`amd64`, `arm64`."""
    os: str = ""
    """`linux`."""


class Descriptor(msgspec.Struct, rename="camel"):
    """A reference to a blob."""

    digest: str
    """`sha256:` and 64 digits."""
    size: int
    """Bytes."""
    media_type: str = ""
    """What it is."""
    annotations: dict[str, str] | None = None
    """Among them the tag."""
    platform: Platform | None = None
    """In an index of several."""


class Index(msgspec.Struct):
    """`index.json`, or an index of one image for several platforms."""

    manifests: list[Descriptor]
    """Images or further indexes."""


class Manifest(msgspec.Struct):
    """One image."""

    config: Descriptor
    """Its settings."""
    layers: list[Descriptor]
    """Lowest first."""


class RunSettings(msgspec.Struct, rename="pascal"):
    """How to run an image."""

    env: list[str] | None = None
    """`NAME=value`."""
    working_dir: str | None = None
    """Where to start."""
    user: str | None = None
    """As whom."""


class RootFs(msgspec.Struct):
    """Digests of the plain layers."""

    diff_ids: list[str]
    """Lowest first."""


class ImageConfig(msgspec.Struct):
    """What a manifest's `config` holds."""

    rootfs: RootFs
    """Layers."""
    architecture: str = ""
    """As in `Platform`."""
    config: RunSettings | None = None
    """How to run it."""


class Layout:
    """A layout directory of unknown origin."""

    def __init__(self, path: Path) -> None:
        """Look whether it is one.

        Raises:
            UserError: it is not.
        """
        self._path = path
        if not (path / "index.json").is_file() or not (path / "blobs").is_dir():
            raise UserError(
                f"{path} is not an OCI image layout: it has no index.json and blobs.",
                fix="make one: skopeo copy docker://python:3.12-slim oci:DIRECTORY:latest",
            )

    def manifest(self, tag: str | None) -> Manifest:
        """The image of a tag, for this machine.

        Raises:
            UserError: no such tag, or not for this machine.
            ValueError: damaged.
        """
        with open_regular(self._path / "index.json") as file:
            index = _decode(file.read(_MAX_JSON_BYTES), Index, "index.json")
        descriptor = _by_tag(index, tag, self._path)
        for _ in range(_MAX_NESTING):
            data = self.read(descriptor)
            if b'"manifests"' not in data or b'"layers"' in data:
                return _decode(data, Manifest, descriptor.digest)
            descriptor = _for_this_machine(_decode(data, Index, descriptor.digest))
        raise ValueError("indexes within indexes without end")

    def config(self, manifest: Manifest) -> ImageConfig:
        """Settings of an image.

        Raises:
            UserError: it is for another machine.
            ValueError: damaged.
        """
        config = _decode(self.read(manifest.config), ImageConfig, manifest.config.digest)
        if config.architecture not in ("", architecture()):
            raise UserError(
                f"the image is for {config.architecture}; this machine is {architecture()}.",
                fix="copy the one for this machine: skopeo copy --override-arch ARCH ...",
            )
        if len(config.rootfs.diff_ids) != len(manifest.layers):
            raise ValueError("manifest and config differ in their number of layers")
        return config

    def read(self, descriptor: Descriptor) -> bytes:
        """A small blob whose digest was checked."""
        if not 0 <= descriptor.size <= _MAX_JSON_BYTES:
            raise ValueError(f"{descriptor.digest} has {descriptor.size:,} bytes: too many")
        with self._open(descriptor) as file:
            data = file.read(descriptor.size + 1)
        if len(data) != descriptor.size or sha256(data) != descriptor.digest:
            raise ValueError(f"blob {descriptor.digest} is not what its digest says")
        return data

    def open_layer(self, descriptor: Descriptor) -> io.BufferedReader:
        """A large blob, at its start, whose digest was checked."""
        file = self._open(descriptor)
        try:
            result = hashlib.sha256()
            size = 0
            while chunk := file.read(_CHUNK):
                size += len(chunk)
                result.update(chunk)
            if size != descriptor.size or f"sha256:{result.hexdigest()}" != descriptor.digest:
                raise ValueError(f"blob {descriptor.digest} is not what its digest says")
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def _open(self, descriptor: Descriptor) -> io.BufferedReader:
        match = _DIGEST.fullmatch(descriptor.digest)
        if match is None:
            raise ValueError(f"{descriptor.digest[:100]!r} is not a sha256 digest")
        path = self._path / "blobs" / "sha256" / match[1]
        if not path.is_file():
            raise ValueError(f"blob {descriptor.digest} is missing")
        return open_regular(path)


def sha256(data: bytes) -> str:
    """`sha256:` and 64 digits."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def architecture() -> str:
    """This machine in the words of OCI."""
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def _by_tag(index: Index, tag: str | None, path: Path) -> Descriptor:
    tagged: dict[str, Descriptor] = {}
    for descriptor in index.manifests:
        for key in _TAG_KEYS:
            name = (descriptor.annotations or {}).get(key)
            if name is not None:
                tagged.setdefault(name, descriptor)
                tagged.setdefault(name.rpartition(":")[2], descriptor)
    if tag is None:
        digests = {descriptor.digest for descriptor in index.manifests}
        if len(digests) == 1:
            return index.manifests[0]
        tag = "latest"
    if tag not in tagged:
        raise UserError(
            f"{path} has no image with the tag {tag[:100]!r}.",
            fix=f"choose one of: {', '.join(sorted(tagged)[:20]) or '(none has a tag)'}.",
        )
    return tagged[tag]


def _for_this_machine(index: Index) -> Descriptor:
    for descriptor in index.manifests:
        runs_on = descriptor.platform or Platform()
        if runs_on.os == "linux" and runs_on.architecture == architecture():
            return descriptor
    raise UserError(
        f"the image has no variant for linux/{architecture()}.", fix="use another image."
    )


def _decode(data: bytes, kind: type[_T], what: str) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{what} is damaged: {error}") from error
