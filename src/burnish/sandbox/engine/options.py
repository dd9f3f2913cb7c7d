"""Options of `run` that podman and docker share: what a container may do. Pure."""

import csv
import io
from pathlib import Path

import msgspec

from burnish.sandbox.commands import HOSTNAME, WORK
from burnish.sandbox.oci.spec import Bind, BoxSpec, Seccomp


def container_options(spec: BoxSpec, name: str, seccomp_file: Path) -> list[str]:
    """Everything off that can be off. The image and its command are not among them.

    Args:
        spec: what the box is.
        name: of the container.
        seccomp_file: where `seccomp_profile` was written.
    """
    options = [
        "--interactive", f"--name={name}", "--network=none", "--read-only", "--cap-drop=ALL",
        "--security-opt=no-new-privileges", f"--security-opt=seccomp={seccomp_file}",
        f"--user={spec.uid}:{spec.gid}", f"--hostname={HOSTNAME}", f"--workdir={WORK}",
        "--log-driver=none", "--entrypoint=",
    ]  # fmt: skip
    for bind in spec.binds:
        options += ["--mount", mount_words(bind)]
    return options


def make_covers(place: Path) -> tuple[Bind, ...]:
    """What boxes see instead of this machine's `/sys`, and of queues that they could fill.

    Args:
        place: an absent directory.
    """
    (place / "fs" / "cgroup").mkdir(mode=0o755, parents=True)
    empty = str(place / "fs" / "cgroup")
    return (
        Bind(source=str(place), destination="/sys"),
        Bind(source=empty, destination="/sys/fs/cgroup"),
        Bind(source=empty, destination="/dev/mqueue"),
    )


def mount_words(bind: Bind) -> str:
    """As one argument, in the CSV that engines read."""
    words = ["type=bind", f"src={bind.source}", f"dst={bind.destination}"]
    if not bind.writable:
        words.append("readonly")
    return csv_words(words)


def csv_words(words: list[str]) -> str:
    """As one line of CSV."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(words)
    return line.getvalue()


def seccomp_profile(section: Seccomp) -> bytes:
    """The filter as engines read it: the section of the specification by other rules.

    They want one form of a call's name list and number only, which the section already has.
    """
    return msgspec.json.encode(section)
