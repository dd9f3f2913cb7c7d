"""Files on their way: bounded together, and gone with their session."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from burnish.core.clock import ManualClock
from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.problems import Refused
from burnish.sandbox.remote.spool import Spool
from burnish.sandbox.remote.tenants import Owner

NOBODY = Owner("session-1", "")
ANN, ANN_AGAIN, BOB = Owner("a1", "ann"), Owner("a2", "ann"), Owner("b1", "bob")


@pytest.fixture
def spool() -> Iterator[Spool]:
    made = Spool(ManualClock(), max_bytes=60, max_all_bytes=100)
    yield made
    made.close()


def receive(spool: Spool, owner: Owner, *sizes: int) -> str:
    async def chunks() -> AsyncIterator[bytes]:
        for size in sizes:
            yield bytes(size)

    return asyncio.run(spool.receive(owner, chunks()))


def refusal(spool: Spool, owner: Owner, *sizes: int) -> ProblemKind:
    with pytest.raises(Refused) as refused:
        receive(spool, owner, *sizes)
    return refused.value.problem.kind


def test_one_file_is_bounded(spool: Spool) -> None:
    receive(spool, NOBODY, 30, 30)
    spool.release(NOBODY.session)
    assert refusal(spool, NOBODY, 30, 31) is ProblemKind.TOO_LARGE


def test_all_files_together_are_bounded_and_what_was_refused_is_gone(spool: Spool) -> None:
    first = receive(spool, NOBODY, 60)
    assert refusal(spool, NOBODY, 30, 11) is ProblemKind.USER
    receive(spool, NOBODY, 40)
    spool.remove(first)
    receive(spool, NOBODY, 60)


def test_a_named_user_has_half_in_all_sessions_together(spool: Spool) -> None:
    receive(spool, ANN, 30)
    assert refusal(spool, ANN_AGAIN, 21) is ProblemKind.USER
    receive(spool, ANN_AGAIN, 20)
    receive(spool, BOB, 50)


def test_files_go_with_their_session(spool: Spool) -> None:
    gone, kept = receive(spool, ANN, 10), receive(spool, BOB, 10)
    path = spool.find(gone)
    spool.release(ANN.session)
    assert not path.exists()
    with pytest.raises(Refused):
        spool.find(gone)
    assert spool.find(kept).stat().st_size == 10


def test_what_comes_for_a_session_that_has_ended_is_refused(spool: Spool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"before"
        spool.release(ANN.session)
        yield b"after"

    with pytest.raises(Refused) as refused:
        asyncio.run(spool.receive(ANN, chunks()))
    assert refused.value.problem.kind is ProblemKind.NO_REQUEST
