import asyncio
import os
import signal

import pytest

from burnish.run.interrupts import Interrupts


def test_the_first_interrupt_is_gentle_and_the_second_cancels():
    stops = []

    async def main():
        interrupts = Interrupts(asyncio.current_task())
        with interrupts.installed(), interrupts.gently(lambda: stops.append(1)):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.01)
            assert stops == [1]
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(5)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert stops == [1]


def test_an_interrupt_outside_of_any_phase_cancels():
    async def main():
        interrupts = Interrupts(asyncio.current_task())
        with interrupts.installed():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(5)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


def test_handlers_are_gone_afterwards():
    async def main():
        with Interrupts(asyncio.current_task()).installed():
            pass

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) == before
