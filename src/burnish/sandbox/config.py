"""How boxes are made on this machine."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from burnish.core.config import Config

Backend = Literal[
    "auto", "native", "bubblewrap", "crun", "runc", "gvisor", "podman", "docker", "remote"
]


class SandboxConfig(Config):
    """Where model-written code runs."""

    backend: Backend = "auto"
    """What runs the boxes; `auto` takes native, else bubblewrap (`burnish doctor` lists them).
    `podman` and `docker` run every command in a container of that engine."""
    max_boxes: int = Field(default=8, ge=1, le=65536)
    """Boxes alive at once; more callers wait."""
    control_groups: bool = True
    """Use them where the host lets us; without, memory, CPU and processes are sampled."""
    helper: Literal["auto", "c", "python"] = "auto"
    """Native boxes: `c` is compiled when Burnish is installed, `python` needs no compiler and takes
    longer; `auto` takes the compiled one if it is there."""
    warm_boxes: int = Field(default=8, ge=0, le=65536)
    """Native boxes that may be kept ready beyond `max_boxes`; about 1 MiB each."""
    storage: Literal["memory", "disk"] = "memory"
    """Native boxes: where what they write lies. `memory` counts within `memory_bytes`; `disk` takes
    root, loop devices and mkfs.ext4, and sets `disk_bytes` aside for each box."""
    storage_directory: Path | None = None
    """With `storage = "disk"`: a directory on the disk for that. Absent: `/var/tmp`."""
    lease_s: float | None = Field(default=None, gt=0)
    """Boxes of this machine end so long after they were handed out, used or not. Absent: never."""
    audit: Path | None = None
    """Directory for a hash-chained log of every box: `burnish sandbox audit verify` checks it."""
    images: Path | None = None
    """Where root file systems are kept; absent: `burnish/images` below `$XDG_DATA_HOME`."""
    private_hosts: tuple[str, ...] = ()
    """NAME:PORT of mirrors that an allow-list may reach although their address is private."""
    hosts: tuple[str, ...] = ()
    """Of the remote backend: URLs where `burnish sandbox serve` answers."""
    token_file: Path | None = None
    """Of the remote backend: a file with the token of the hosts."""
