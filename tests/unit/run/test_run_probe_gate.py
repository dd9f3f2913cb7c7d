import asyncio

from burnish.run.probe_gate import ProbeGate


def begun(gate: ProbeGate, *samples: int) -> list[int]:
    """Samples of d/1 that may start now."""

    async def look() -> list[int]:
        waits = {n: asyncio.ensure_future(gate.wait("d/1", n)) for n in samples}
        for _ in range(3):
            await asyncio.sleep(0)
        free = [n for n, task in waits.items() if task.done()]
        for task in waits.values():
            task.cancel()
        return free

    return asyncio.run(look())


def test_what_is_no_probe_starts_at_once():
    assert begun(ProbeGate(), 0, 5) == [0, 5]


def test_the_first_go_ahead_and_one_that_comes_through_frees_the_others_once():
    gate = ProbeGate()
    assert gate.starts("d/1", 2, 6) == 2
    assert begun(gate, 0, 1, 2, 5) == [0, 1]
    assert gate.ended("d/1", well=True) == 4
    assert begun(gate, 2, 5) == [2, 5]
    assert gate.ended("d/1", well=True) == 0


def test_if_all_of_the_first_fail_the_others_may_try():
    gate = ProbeGate()
    gate.starts("d/1", 2, 6)
    assert gate.ended("d/1", well=False) == 0
    assert begun(gate, 3) == []
    assert gate.ended("d/1", well=False) == 4
    assert begun(gate, 3) == [3]


def test_a_group_smaller_than_a_probe_goes_ahead_whole():
    gate = ProbeGate()
    assert gate.starts("d/1", 4, 2) == 2
    assert gate.ended("d/1", well=False) == 0
    assert gate.ended("d/1", well=False) == 0


def test_nobody_waits_for_a_group_that_is_gone():
    gate = ProbeGate()
    gate.starts("d/1", 1, 3)
    gate.gone("d/1")
    assert begun(gate, 2) == [2]
    assert gate.ended("d/1", well=True) == 0
