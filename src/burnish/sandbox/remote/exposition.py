"""What a server tells Prometheus (`GET /metrics`)."""

import os
import resource
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from burnish import __version__
from burnish.core.boxes import ExecStatus, SandboxPool
from burnish.sandbox.forwarding import innermost
from burnish.sandbox.native.pool import NativePool
from burnish.sandbox.remote.messages import Stats
from burnish.telemetry.prometheus import Family, Histogram, Kind, Point

_PREFIX = "burnish_sandbox_"


class Observed:
    """What a server counts for this page alone."""

    def __init__(self) -> None:
        """Start at zero; every way to end is there from the start, so that rates are right."""
        self.commands = dict.fromkeys(ExecStatus, 0)
        self.command_s = Histogram()
        self.box_wait_s = Histogram()

    def families(self, stats: Stats, pool: SandboxPool) -> Iterator[Family]:
        """All numbers, as of now."""
        labels = {"backend": stats.backend, "version": __version__}
        yield _gauge("info", "Which server this is; always 1.", 1, labels)
        yield _gauge("uptime_seconds", "Since the start of the server.", stats.uptime_s)
        yield _gauge("boxes", "Boxes alive.", stats.num_boxes)
        yield _gauge("boxes_limit", "Boxes that may be alive at once.", stats.max_boxes)
        yield _gauge("waiting_requests", "Requests that wait for a box.", stats.num_waiting)
        yield _gauge("running_commands", "Commands that run now.", stats.num_running)
        yield _counter("boxes_created_total", "Boxes handed out.", stats.num_created)
        yield _counter(
            "boxes_expired_total", "Boxes ended as their client vanished.", stats.num_expired
        )
        yield _counter(
            "refused_requests_total", "Requests with a wrong token or none.", stats.num_refused
        )
        yield _family(
            "commands_total",
            Kind.COUNTER,
            "Commands that ended, by how.",
            (Point(count, {"status": status}) for status, count in self.commands.items()),
        )
        yield _family(
            "command_duration_seconds",
            Kind.HISTOGRAM,
            "From the request to the end of a command.",
            self.command_s.points(),
        )
        yield _family(
            "box_wait_seconds",
            Kind.HISTOGRAM,
            "From the request to a box that is ready.",
            self.box_wait_s.points(),
        )
        native = innermost(pool)
        if isinstance(native, NativePool):
            yield from _native(native)
        yield from _process()


def _native(pool: NativePool) -> Iterator[Family]:
    stats = pool.stats()
    yield _gauge("warm_boxes", "Boxes that are ready before anybody asks.", stats.warm)
    yield _gauge("snapshots", "Snapshots that are kept.", stats.snapshots)
    yield _counter("warm_hits_total", "Boxes that were ready when asked for.", stats.warm_hits)
    yield _counter("boxes_made_total", "Boxes made, warm ones included.", stats.created)
    yield _counter("boxes_failed_total", "Boxes that could not be made.", stats.creates_failed)
    yield _counter("helpers_lost_total", "Helpers that ended by themselves.", stats.helpers_lost)


def _process() -> Iterator[Family]:
    """Of the server itself, under the names that every exporter uses."""
    times = os.times()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    for name, kind, meaning, value in (
        ("cpu_seconds_total", Kind.COUNTER, "User and system time.", times.user + times.system),
        ("resident_memory_bytes", Kind.GAUGE, "Memory in RAM.", pages * resource.getpagesize()),
        ("open_fds", Kind.GAUGE, "Open files.", len(os.listdir("/proc/self/fd"))),
        ("max_fds", Kind.GAUGE, "Files that may be open.", most_files),
    ):
        yield Family(f"process_{name}", kind, meaning, (Point(value),))


def _gauge(
    name: str, meaning: str, value: float, labels: Mapping[str, str] | None = None
) -> Family:
    return _family(name, Kind.GAUGE, meaning, (Point(value, labels or {}),))


def _counter(name: str, meaning: str, value: float) -> Family:
    return _family(name, Kind.COUNTER, meaning, (Point(value),))


def _family(name: str, kind: Kind, meaning: str, points: Iterable[Point]) -> Family:
    return Family(_PREFIX + name, kind, meaning, tuple(points))
