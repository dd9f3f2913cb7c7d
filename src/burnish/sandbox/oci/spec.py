"""`config.json` of the OCI runtime specification, as far as boxes need it."""

from collections.abc import Sequence

import msgspec

from burnish.core.records import Record
from burnish.sandbox.commands import BASE_ENV, HOSTNAME, WORK


class _Spec(Record, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Fields have the specification's names in JSON; what is not set is left out."""


class User(_Spec, frozen=True, kw_only=True):
    """Who runs."""

    uid: int
    gid: int


class CapabilitySets(_Spec, frozen=True, kw_only=True, omit_defaults=False):
    """All empty: present, because a runtime takes what is absent for its own default."""

    bounding: tuple[str, ...] = ()
    effective: tuple[str, ...] = ()
    inheritable: tuple[str, ...] = ()
    permitted: tuple[str, ...] = ()
    ambient: tuple[str, ...] = ()


class Process(_Spec, frozen=True, kw_only=True):
    """Process 1."""

    user: User
    args: tuple[str, ...]
    env: tuple[str, ...]
    cwd: str
    capabilities: CapabilitySets
    no_new_privileges: bool

    def __post_init__(self) -> None:
        """The specification wants an absolute directory and a program."""
        assert self.cwd.startswith("/")
        assert self.args


class Root(_Spec, frozen=True, kw_only=True):
    """The root file system."""

    path: str
    readonly: bool


class Mount(_Spec, frozen=True, kw_only=True):
    """One mount; later ones lie on earlier ones."""

    destination: str
    type: str
    source: str
    options: tuple[str, ...]


class IdMapping(_Spec, frozen=True, kw_only=True):
    """Ids of the box and what they are outside."""

    container_id: int = msgspec.field(name="containerID")
    host_id: int = msgspec.field(name="hostID")
    size: int


class Namespace(_Spec, frozen=True, kw_only=True):
    """A new namespace."""

    type: str


class Argument(_Spec, frozen=True, kw_only=True, omit_defaults=False):
    """A condition on an argument of a call. For a masked one `value` is the mask."""

    index: int
    value: int
    value_two: int = 0
    op: str


class CallRule(_Spec, frozen=True, kw_only=True):
    """What happens on some calls."""

    names: tuple[str, ...]
    action: str
    errno_ret: int | None = None
    args: tuple[Argument, ...] = ()


class Seccomp(_Spec, frozen=True, kw_only=True):
    """The system-call filter."""

    default_action: str
    default_errno_ret: int | None = None
    architectures: tuple[str, ...]
    syscalls: tuple[CallRule, ...]


class Linux(_Spec, frozen=True, kw_only=True):
    """What exists on Linux only."""

    namespaces: tuple[Namespace, ...]
    uid_mappings: tuple[IdMapping, ...] = ()
    gid_mappings: tuple[IdMapping, ...] = ()
    masked_paths: tuple[str, ...]
    readonly_paths: tuple[str, ...]
    seccomp: Seccomp | None = None
    cgroups_path: str | None = None


class Spec(_Spec, frozen=True, kw_only=True):
    """The whole file."""

    oci_version: str
    hostname: str
    root: Root
    process: Process
    mounts: tuple[Mount, ...]
    linux: Linux
    annotations: dict[str, str] = msgspec.field(default_factory=dict)


class Bind(Record, frozen=True, kw_only=True):
    """Something of the host that a box sees."""

    source: str
    destination: str
    writable: bool = False


class BoxSpec(Record, frozen=True, kw_only=True):
    """What differs between boxes."""

    root: str
    """Directory with the root file system, which becomes read-only."""
    args: tuple[str, ...]
    """The launcher."""
    uid: int
    """User inside."""
    gid: int
    """Group inside."""
    uid_map: tuple[IdMapping, ...] = ()
    """Users of the box's user namespace; empty: it has none."""
    gid_map: tuple[IdMapping, ...] = ()
    """Groups of it."""
    binds: tuple[Bind, ...]
    """In order."""
    seccomp: Seccomp | None = None
    cgroups_path: str | None = None
    annotations: dict[str, str] = msgspec.field(default_factory=dict)


# As Docker and podman have them.
_MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
    "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/proc/kmsg",
    "/sys/firmware", "/sys/devices/virtual/powercap",
)  # fmt: skip
_READ_ONLY = ("/dev", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_NAMESPACES = ("pid", "ipc", "uts", "mount", "network")


def build_spec(box: BoxSpec) -> Spec:
    """The configuration of one container. Pure."""
    namespaces = (*_NAMESPACES, *(("user",) if box.uid_map else ()))
    return Spec(
        oci_version="1.0.2",
        hostname=HOSTNAME,
        root=Root(path=box.root, readonly=True),
        process=Process(
            user=User(uid=box.uid, gid=box.gid),
            args=box.args,
            env=(f"PATH={BASE_ENV['PATH']}",),
            cwd=WORK,
            capabilities=CapabilitySets(),
            no_new_privileges=True,
        ),
        mounts=(*_mounts(), *_binds(box.binds)),
        linux=Linux(
            namespaces=tuple(Namespace(type=name) for name in namespaces),
            uid_mappings=box.uid_map,
            gid_mappings=box.gid_map,
            masked_paths=_MASKED,
            readonly_paths=_READ_ONLY,
            seccomp=box.seccomp,
            cgroups_path=box.cgroups_path,
        ),
        annotations=box.annotations,
    )


def _mounts() -> tuple[Mount, ...]:
    """`/dev` has room for its few nodes only: it lies on no limited file system of the box."""
    quiet = ("nosuid", "noexec", "nodev")
    dev = ("nosuid", "strictatime", "mode=755", "size=64k", "nr_inodes=64")
    return (
        Mount(destination="/proc", type="proc", source="proc", options=quiet),
        Mount(destination="/dev", type="tmpfs", source="tmpfs", options=dev),
    )


def _binds(binds: Sequence[Bind]) -> tuple[Mount, ...]:
    made = []
    for bind in binds:
        # Below a read-only directory of the host anything may be mounted; not below ours.
        how = ("bind", "rw") if bind.writable else ("rbind", "ro")
        options = (*how, "private", "nosuid", "nodev")
        made.append(
            Mount(destination=bind.destination, type="bind", source=bind.source, options=options)
        )
    return tuple(made)
