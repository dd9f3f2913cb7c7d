import asyncio
import contextlib

from burnish.core.boxes import ExecStatus, Limits
from burnish.sandbox.measured import BoxUse, MeasuredPool


def test_commands_and_waits_are_counted_once(plain_pool):
    pool = MeasuredPool(plain_pool)

    async def main():
        async with pool.acquire() as box:
            await box.write_file("f", b"x")
            assert await box.read_file("f") == b"x"
            for code in (0, 0, 3):
                await box.exec(("sh", "-c", f"exit {code}"), limits=Limits(wall_s=60))
        async with pool.acquire():
            pass

    asyncio.run(main())
    use = pool.take()
    assert use.commands == {ExecStatus.OK: 2, ExecStatus.EXIT: 1}
    assert len(use.exec_s) == 3
    assert len(use.waits_s) == 2
    assert all(seconds > 0 for seconds in use.exec_s)
    assert pool.take() == BoxUse()


def test_what_a_box_has_beyond_commands_goes_through():
    class Stateful:
        id = "x"

        async def snapshot(self):
            return "frozen"

    class Pool:
        capabilities = None

        def acquire(self, image=None, policy=None):

            return contextlib.nullcontext(Stateful())

    async def main():
        async with MeasuredPool(Pool()).acquire() as box:
            return box.id, await box.snapshot()

    assert asyncio.run(main()) == ("x", "frozen")
