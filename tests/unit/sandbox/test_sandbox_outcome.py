import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.boxes import ExecStatus
from burnish.sandbox.outcome import Cause, Evidence, classify, cpu_used_up

PLAIN = Evidence(
    started=True,
    cause=None,
    wait_code=0,
    output_cut=False,
    oom_kills=0,
    pids_refused=0,
    disk_full=False,
    stderr=b"",
)


@pytest.mark.parametrize(
    ("changes", "status", "exit_code", "number"),
    [
        ({}, ExecStatus.OK, 0, None),
        ({"wait_code": 1}, ExecStatus.EXIT, 1, None),
        ({"wait_code": 255}, ExecStatus.EXIT, 255, None),
        ({"wait_code": 128 + 11}, ExecStatus.SIGNAL, None, 11),
        ({"wait_code": 128 + 24}, ExecStatus.SIGNAL, None, 24),
        ({"wait_code": 128 + 24, "cpu_used_up": True}, ExecStatus.TIMEOUT, None, 24),
        ({"wait_code": 1, "cpu_used_up": True}, ExecStatus.EXIT, 1, None),
        ({"wait_code": 128 + 25}, ExecStatus.DISK, None, 25),
        ({"wait_code": 128 + 31}, ExecStatus.POLICY, None, 31),
        ({"cause": Cause.WALL, "wait_code": -9}, ExecStatus.TIMEOUT, None, 9),
        ({"cause": Cause.CPU, "wait_code": -9}, ExecStatus.TIMEOUT, None, 9),
        ({"cause": Cause.MEMORY, "wait_code": -9}, ExecStatus.OOM, None, 9),
        ({"cause": Cause.PIDS, "wait_code": -9}, ExecStatus.PIDS, None, 9),
        ({"cause": Cause.OUTPUT, "wait_code": -9}, ExecStatus.OUTPUT, None, 9),
        ({"oom_kills": 1, "wait_code": 137}, ExecStatus.OOM, None, 9),
        ({"oom_kills": 1, "wait_code": 0}, ExecStatus.OOM, None, 9),
        ({"output_cut": True}, ExecStatus.OUTPUT, 0, None),
        ({"pids_refused": 3}, ExecStatus.OK, 0, None),
        ({"pids_refused": 3, "wait_code": 1}, ExecStatus.PIDS, 1, None),
        ({"disk_full": True}, ExecStatus.OK, 0, None),
        ({"disk_full": True, "wait_code": 1}, ExecStatus.DISK, 1, None),
        ({"wait_code": -9}, ExecStatus.INFRA_ERROR, None, None),
        ({"wait_code": 128, "is_complete": False}, ExecStatus.INFRA_ERROR, None, None),
        ({"wait_code": 0, "is_complete": False}, ExecStatus.INFRA_ERROR, None, None),
        ({"wait_code": 137, "is_complete": False}, ExecStatus.SIGNAL, None, 9),
        ({"wait_code": 128, "is_complete": False, "oom_kills": 1}, ExecStatus.OOM, None, 9),
        (
            {"wait_code": 128, "is_complete": False, "cause": Cause.WALL},
            ExecStatus.TIMEOUT,
            None,
            9,
        ),
        ({"started": False, "wait_code": 1}, ExecStatus.INFRA_ERROR, None, None),
        ({"started": False, "cause": Cause.START}, ExecStatus.INFRA_ERROR, None, None),
    ],
)
def test_each_ending_has_its_status(
    changes: dict[str, object], status: ExecStatus, exit_code: int | None, number: int | None
) -> None:
    ending = classify(PLAIN._replace(**changes))  # type: ignore[arg-type]
    assert (ending.status, ending.exit_code, ending.signal) == (status, exit_code, number)


@given(
    wait_code=st.integers(0, 255),
    stderr=st.binary(max_size=50),
    cause=st.sampled_from([None, *set(Cause) - {Cause.START}]),
    counts=st.tuples(*[st.integers(0, 2)] * 2),
    flags=st.tuples(*[st.booleans()] * 2),
)
def test_nothing_that_a_program_can_do_is_a_broken_box(
    wait_code: int,
    stderr: bytes,
    cause: Cause | None,
    counts: tuple[int, int],
    flags: tuple[bool, bool],
) -> None:
    evidence = Evidence(True, cause, wait_code, flags[0], *counts, flags[1], stderr)
    ending = classify(evidence)
    assert ending.status is not ExecStatus.INFRA_ERROR
    assert (ending.status is ExecStatus.OK) <= (ending.exit_code == 0)
    assert ending.signal is None or ending.signal in signal.valid_signals()


@given(stderr=st.binary(max_size=2000), wait_code=st.integers(-64, 255))
def test_a_box_that_did_not_start_says_why_in_one_line(stderr: bytes, wait_code: int) -> None:
    ending = classify(PLAIN._replace(started=False, stderr=stderr, wait_code=wait_code))
    assert ending.status is ExecStatus.INFRA_ERROR
    assert ending.message
    assert "\n" not in ending.message
    assert len(ending.message) < 400


def test_what_was_measured_says_whether_cpu_time_may_be_up() -> None:
    assert not cpu_used_up(0.02, 1.0)
    assert not cpu_used_up(4.9, 10.0)
    # Less than the limit, as ticks are counted and not time.
    assert cpu_used_up(0.82, 1.0)
