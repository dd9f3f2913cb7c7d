"""What is alike in every box, and how sure that is: the one list, for code, doctor and docs."""

from collections.abc import Iterable
from enum import StrEnum

from burnish.core.boxes import Capabilities, Feature
from burnish.core.records import Record


class Degree(StrEnum):
    """How far one can rely on it."""

    GUARANTEED = "guaranteed"
    """The same in every box, and a test compares two."""
    BEST_EFFORT = "best effort"
    """Mostly the same; nothing enforces it."""
    NOT_POSSIBLE = "not possible"
    """Linux has no means that holds against the program."""
    NOT_HERE = "not here"
    """This backend cannot do it, and refuses `Policy.deterministic`."""


class Item(Record, frozen=True, kw_only=True):
    """One thing that a program may see."""

    what: str
    """Its name."""
    degree: Degree
    """How far one can rely on it."""
    asked: bool = False
    """Only in boxes with `Policy.deterministic`."""
    why: str
    """By what, or why not."""


ITEMS = (
    Item(
        what="process ids",
        degree=Degree.GUARANTEED,
        why="a process id name space of its own, in which a box does the same in the same order",
    ),
    Item(what="host name", degree=Degree.GUARANTEED, why="a name space of its own"),
    Item(what="user ids", degree=Degree.GUARANTEED, why="a name space of its own"),
    Item(
        what="environment, locale, time zone",
        degree=Degree.GUARANTEED,
        why="nothing of the host's is passed on; C.UTF-8 and UTC",
    ),
    Item(
        what="hash seed of Python",
        degree=Degree.GUARANTEED,
        why="PYTHONHASHSEED=0, in warm Python too; not under `python -I`",
    ),
    Item(
        what="address space layout",
        degree=Degree.GUARANTEED,
        asked=True,
        why="no randomisation (personality)",
    ),
    Item(what="processors", degree=Degree.GUARANTEED, asked=True, why="one, by affinity"),
    Item(
        what="order of directory entries",
        degree=Degree.BEST_EFFORT,
        why="as the file system gives it",
    ),
    Item(
        what="order in which threads and processes run",
        degree=Degree.BEST_EFFORT,
        asked=True,
        why="one processor, but the host's scheduler",
    ),
    Item(
        what="a fixed wall clock",
        degree=Degree.NOT_POSSIBLE,
        why="time name spaces shift the monotonic clock only, never CLOCK_REALTIME, and a library "
        "that is loaded first is passed by with one system call: a program that asks gets the "
        "real time",
    ),
    Item(
        what="a fixed monotonic clock",
        degree=Degree.NOT_POSSIBLE,
        why="a time name space can move its start, but it runs on",
    ),
    Item(
        what="random bytes of the kernel",
        degree=Degree.NOT_POSSIBLE,
        why="`getrandom` and `/dev/urandom` have no seed: generators that seed themselves differ",
    ),
    Item(
        what="how much work fits into a time limit",
        degree=Degree.NOT_POSSIBLE,
        why="the host's speed and load",
    ),
)


def determinism(capabilities: Capabilities) -> tuple[Item, ...]:
    """The items as they are on a backend."""
    if Feature.DETERMINISTIC in capabilities.features:
        return ITEMS
    return tuple(
        Item(what=item.what, degree=Degree.NOT_HERE, asked=True, why="takes the native backend")
        if item.asked
        else item
        for item in ITEMS
    )


def summary(items: Iterable[Item]) -> str:
    """In one line, by degree."""
    by_degree: dict[Degree, list[str]] = {degree: [] for degree in Degree}
    for item in items:
        by_degree[item.degree].append(item.what)
    return "; ".join(
        f"{degree}: {', '.join(found)}" for degree, found in by_degree.items() if found
    )
