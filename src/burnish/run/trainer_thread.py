"""The trainer on a thread of its own, so that the event loop goes on while it computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class TrainerThread:
    """Runs calls one after the other, with a CPU thread count of its own.

    OpenMP's thread count belongs to the calling thread, so it is set on this one.
    """

    def __init__(self, num_threads: int) -> None:
        """Start the thread."""
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="trainer",
            initializer=torch.set_num_threads,
            initargs=(num_threads,),
        )

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `function` on the thread and await its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Wait for the call in progress and stop."""
        self._executor.shutdown(wait=True, cancel_futures=True)
