"""What lies on disk for a container: a root file system for the box, a bundle for each command."""

import base64
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from burnish.sandbox.commands import WORK
from burnish.sandbox.engine.options import seccomp_profile
from burnish.sandbox.host_view import GROUP, PASSWD, HostPath
from burnish.sandbox.keeper.namespace import bind, mount_overlay, mount_plain_tmpfs
from burnish.sandbox.network.relay import relay_source
from burnish.sandbox.oci.filter import oci_filter, plain_filter
from burnish.sandbox.oci.launcher import ENDED, INBOX, NET, RELAY, launcher
from burnish.sandbox.oci.podman import SECCOMP_FILE, add_mount_points
from burnish.sandbox.oci.runtime import FilterForm, Runtime
from burnish.sandbox.oci.spec import Bind, BoxSpec, build_spec
from burnish.sandbox.oci.users import BoxUsers
from burnish.sandbox.seccomp import build_filter

_MOUNT_POINTS = ("proc", "dev", "dev/shm", "work", "tmp", "etc", "run", "run/box", "run/net")
_ROOT_BYTES = 2**20
_CRIU_ANNOTATION = "org.criu.config"
_BPF_ANNOTATION = "run.oci.seccomp_bpf_data"


class HostRoot(NamedTuple):
    """The root file system of boxes without an image: mount points, links, four files of /etc."""

    path: Path
    binds: tuple[Bind, ...]
    """What is mounted into it."""


def make_host_root(
    place: Path, system: tuple[HostPath, ...], hidden: tuple[str, ...], *, engine: bool = False
) -> HostRoot:
    """Everything but /usr and the like is ours.

    Args:
        place: an absent directory.
        system: directories of this host that programs need.
        hidden: directories below them that must look empty.
        engine: podman will use it.
    """
    place.mkdir(mode=0o711)
    mount_plain_tmpfs(str(place), size_bytes=_ROOT_BYTES)
    root, empty = place / "root", place / "empty"
    for folder in (*_MOUNT_POINTS, *(entry.path[1:] for entry in system if entry.link is None)):
        (root / folder).mkdir(mode=0o755, parents=True, exist_ok=True)
    empty.mkdir(mode=0o755)
    binds = []
    for entry in system:
        if entry.link is not None:
            (root / entry.path[1:]).symlink_to(entry.link)
        else:
            binds.append(Bind(source=entry.path, destination=entry.path))
    binds += [Bind(source=str(empty), destination=path) for path in hidden]
    (root / "etc" / "passwd").write_text(PASSWD, encoding="ascii")
    (root / "etc" / "group").write_text(GROUP, encoding="ascii")
    for name in ("ld.so.cache", "alternatives"):
        source = Path("/etc") / name
        if source.is_dir():
            (root / "etc" / name).mkdir(mode=0o755)
        elif source.exists():
            (root / "etc" / name).touch(mode=0o644)
        else:
            continue
        binds.append(Bind(source=str(source), destination=str(source)))
    if engine:
        add_mount_points(root)
    return HostRoot(root, tuple(binds))


def make_image_root(place: Path, image: Path, *, engine: bool = False) -> Path:
    """The image with our mount points laid over it; the image itself is never written.

    Args:
        place: an absent directory.
        image: directory with its root file system.
        engine: podman will use it.

    Raises:
        OSError: it is not a directory, or cannot be mounted.
    """
    if not (image / "bin" / "sh").is_symlink() and not (image / "bin" / "sh").exists():
        raise OSError(0, f"the image {image} has no /bin/sh, which starts its commands")
    points, lower, root = place / "points", place / "image", place / "root"
    for folder in _MOUNT_POINTS:
        (points / folder).mkdir(mode=0o755, parents=True, exist_ok=True)
    if engine:
        add_mount_points(points)
    for directory in (lower, root):
        directory.mkdir(mode=0o755)
    bind(str(image), str(lower))
    mount_overlay(str(root), (str(points), str(lower)))
    return root


def storage_binds(storage: Path, inbox: Path) -> tuple[Bind, ...]:
    """What the box may write, and where its commands come from."""
    places = {"work": WORK, "tmp": "/tmp", "shm": "/dev/shm"}
    writable = (
        Bind(source=str(storage / name), destination=place, writable=True)
        for name, place in places.items()
    )
    return (*writable, Bind(source=str(inbox), destination=INBOX))


def write_bundle(
    bundle: Path,
    *,
    runtime: Runtime,
    root: HostRoot,
    storage: Path,
    users: BoxUsers,
    cgroups_path: str | None,
    relay_port: int,
    criu_config: Path | None = None,
) -> BoxSpec:
    """What a runtime reads, and an inbox; unless `relay_port` is 0 a relay and its place.

    With `criu_config` the program may be kept, and saved by a CRIU with these settings.

    Returns:
        What the box is.
    """
    inbox = bundle / "inbox"
    inbox.mkdir(mode=0o755)
    binds = (*root.binds, *storage_binds(storage, inbox))
    if relay_port:
        net = bundle / "net"
        net.mkdir(mode=0o755)
        (net / RELAY).write_bytes(relay_source())
        binds = (*binds, Bind(source=str(net), destination=NET))
    (bundle / "state").mkdir(mode=0o711)
    annotations = {}
    if criu_config is not None:
        os.mkfifo(inbox / ENDED)
        os.chmod(inbox / ENDED, 0o602)  # users of the box are others on the host
        annotations[_CRIU_ANNOTATION] = str(criu_config)
    # A runtime that does not know the annotation uses the section.
    if runtime.filter_form is FilterForm.BYTES:
        annotations[_BPF_ANNOTATION] = base64.b64encode(build_filter()).decode()
    plain = runtime.filter_form is FilterForm.PLAIN_NAMES
    box = BoxSpec(
        root=str(root.path),
        args=launcher(relay_port),
        uid=users.inside.uid,
        gid=users.inside.gid,
        uid_map=users.uid_map,
        gid_map=users.gid_map,
        binds=binds,
        seccomp=plain_filter() if plain else oci_filter(),
        cgroups_path=cgroups_path,
        annotations=annotations,
    )
    if runtime.is_engine:
        assert box.seccomp is not None
        (bundle / SECCOMP_FILE).write_bytes(seccomp_profile(box.seccomp))
    else:
        (bundle / "config.json").write_bytes(msgspec.json.encode(build_spec(box)))
        os.chmod(bundle / "config.json", 0o644)
    return box
