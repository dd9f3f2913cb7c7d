"""Users of one server: to each the boxes of the others are not there."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from burnish.core.boxes import Snapshot, StatefulSandbox
from burnish.core.errors import UserError
from burnish.sandbox.remote.box import RemoteStatefulBox
from burnish.sandbox.remote.client import RemotePool
from burnish.sandbox.remote.messages import ProblemKind
from burnish.sandbox.remote.problems import RemoteFailure

Served = Any  # conftest.Served
Connect = Callable[..., RemotePool]


@pytest.fixture
def served(serve: Callable[..., Served], tmp_path: Path) -> Served:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("ann a-token-of-anns-own\nbob a-token-of-bobs-own\n")
    return serve(4, listen="127.0.0.1:0", token_file=tokens)


@pytest.fixture
def ann(served: Served, connect: Connect) -> RemotePool:
    return connect(served.url, "a-token-of-anns-own")


@pytest.fixture
def bob(served: Served, connect: Connect) -> RemotePool:
    return connect(served.url, "a-token-of-bobs-own")


def box_of(pool: RemotePool, box_id: str) -> RemoteStatefulBox:
    return cast(RemoteStatefulBox, pool.attach(box_id))


def test_a_user_lists_own_boxes_only_from_any_session(
    served: Served, connect: Connect, ann: RemotePool, bob: RemotePool
) -> None:
    again = connect(served.url, "a-token-of-anns-own")

    async def main() -> None:
        anns, bobs = await ann.create(), await bob.create()
        for pool, mine in ((ann, anns), (again, anns), (bob, bobs)):
            assert [info.id for info in await pool.boxes()] == [mine.id]
        # Another session of the same user works in the box.
        assert (await box_of(again, anns.id).exec(("cat", "x"))).stdout == b"x"
        await again.destroy(anns.id, strict=True)
        assert await ann.boxes() == ()

    asyncio.run(main())


Use = Callable[[RemoteStatefulBox, Path], Awaitable[object]]
USES: dict[str, Use] = {
    "exec": lambda box, _: box.exec_or_raise(("cat", "x")),
    "write": lambda box, _: box.write_file("f", b"x"),
    "read": lambda box, _: box.read_file("f"),
    "allow": lambda box, _: box.set_allow(()),
    "snapshot": lambda box, _: box.snapshot(),
    "rollback": lambda box, _: box.rollback_to("snap-1"),
    "forget": lambda box, _: box.forget_id("snap-1"),
    "fork": lambda box, _: box.fork_boxes(1),
    "export": lambda box, folder: box.export_to(folder / "out.tar"),
    "import": lambda box, folder: box.import_tar(folder / "tokens"),
    "destroy": lambda box, _: box._pool.destroy(box.id, strict=True),
}


@pytest.mark.parametrize("verb", USES)
def test_the_box_of_another_user_answers_as_if_it_were_not_there(
    served: Served, ann: RemotePool, bob: RemotePool, tmp_path: Path, verb: str
) -> None:
    async def main() -> None:
        info = await ann.create()
        box = box_of(ann, info.id)
        await box.write_file("f", b"anns")
        await box.snapshot()
        said = []
        for box_id in (info.id, "0" * len(info.id)):
            with pytest.raises(RemoteFailure) as refused:
                await USES[verb](box_of(bob, box_id), tmp_path)
            assert refused.value.kind is ProblemKind.NO_BOX
            said.append(str(refused.value).replace(box_id, "ID"))
        assert said[0] == said[1]
        assert served.pool.num_started == 0
        assert await box.read_file("f") == b"anns"
        await box.rollback_to("snap-1")
        (known,) = await ann.boxes()
        assert not known.busy

    asyncio.run(main())


def test_destroying_what_is_of_another_user_does_nothing(
    served: Served, ann: RemotePool, bob: RemotePool
) -> None:
    async def main() -> None:
        info = await ann.create()
        await bob.destroy(info.id)
        assert len(await ann.boxes()) == 1

    asyncio.run(main())


def test_a_snapshot_of_another_user_is_none_and_stays(
    served: Served, ann: RemotePool, bob: RemotePool
) -> None:
    async def main() -> None:
        async with ann.acquire() as one, bob.acquire() as other:
            anns, bobs = cast(StatefulSandbox, one), cast(StatefulSandbox, other)
            await anns.write_file("f", b"anns")
            taken = await anns.snapshot()
            for use in (bobs.rollback, lambda it: bobs.fork(1, it).__aenter__()):
                with pytest.raises(UserError, match="there is no snapshot"):
                    await use(Snapshot(id=taken.id, image="", num_layers=0))
            await bobs.forget(taken)
            await anns.write_file("f", b"changed")
            await anns.rollback(taken)
            assert await anns.read_file("f") == b"anns"

    asyncio.run(main())


def test_a_session_of_another_user_is_another_one_whatever_its_name(
    ann: RemotePool, bob: RemotePool
) -> None:
    async def main() -> None:
        bob.wire._headers["Burnish-Session"] = ann.wire.session
        info = await ann.create()
        await bob.create()
        await bob.close()
        assert [left.id for left in await ann.boxes()] == [info.id]

    asyncio.run(main())


def test_a_fork_belongs_to_who_asked_for_it(serve: Callable[..., Served], connect: Connect) -> None:
    # Without names boxes are everybody's, and each session pays for those that it made.
    served = serve(4)
    maker, forker = connect(served.url), connect(served.url)

    async def main() -> None:
        box = await maker.create()
        (fork,) = await box_of(forker, box.id).fork_boxes(1)
        await maker.close()
        assert [info.id for info in await forker.boxes()] == [fork.id]
        await forker.close()
        assert served.pool.boxes == []

    asyncio.run(main())
