"""What a box uses, sampled."""

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from burnish.core.boxes import Limits
from burnish.sandbox.native import gauge
from burnish.sandbox.outcome import Cause


def test_a_command_is_not_blamed_for_what_ran_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(gauge, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    # We are below it, with more than a MiB.
    init = cast(Any, SimpleNamespace(pid=os.getppid()))
    census = gauge.Census(in_memory=False)
    assert census.below(init).memory_bytes > 1
    clock.now_s += 0.001
    measure = gauge.Gauge(None, census)
    measure.begin(Limits(memory_bytes=2**20, num_pids=10_000), init, busy=False)
    cause, pause_s = measure.over_limit(init)
    assert cause is None, "the last look was before it began"
    clock.now_s += pause_s
    assert measure.over_limit(init)[0] is Cause.MEMORY
