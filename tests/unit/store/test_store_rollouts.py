import math
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.errors import UserError
from burnish.core.records import (
    Credit,
    CreditSpan,
    Failure,
    Group,
    Message,
    Rollout,
    ToolCall,
    Turn,
    Verdict,
)
from burnish.core.vocabulary import CreditSource, FailureKind, Outcome, StopReason
from burnish.store.rollouts import (
    RolloutStore,
    read_evaluation,
    read_rollouts,
    rollout_from_row,
    rollout_row,
    write_evaluation,
)
from burnish.store.schema import METRICS, ROLLOUTS
from burnish.store.segments import SegmentLog, read_rows


def rollout(domain: str = "add", index: int = 0, sample: int = 0, version: int = 3) -> Rollout:
    return Rollout(
        rollout_id=f"{domain}/{index}/{sample}",
        group_id=f"{domain}/{index}",
        domain=domain,
        environment_digest="sha256:00",
        token_ids=(5, 6, 7, 8),
        num_prompt_tokens=2,
        sampled_mask=(False, False, True, True),
        logprobs=(0.0, 0.0, -0.1, -1e-300),
        weight_versions=(-1, -1, version, version),
        turns=(Turn(start=2, end=4, stop_reason=StopReason.STOP),),
        messages=(
            Message(role="user", content="1 + 1?"),
            Message(
                role="assistant",
                content="2\u2028\ud800",
                tool_calls=(ToolCall(name="calc", arguments={"a": [1, None, 2.5], "b": {}}),),
            ),
        ),
        verdict=Verdict(
            outcome=Outcome.SCORED,
            score=0.1 + 0.2,
            passed=False,
            credits=(Credit(source=CreditSource.OUTCOME, value=1 / 3, turn=0, note="x"),),
            evidence={"got": "2", "big": 2**80, "ratio": 0.1},
        ),
        spans=(CreditSpan(source=CreditSource.OUTCOME, value=1 / 3, weight=0.6, start=2, end=4),),
        seed=2**63 - 1,
        duration_s=0.1,
    )


def group(index: int = 0, domain: str = "add", version: int = 3, samples: int = 3) -> Group:
    return Group(
        group_id=f"{domain}/{index}",
        domain=domain,
        index=index,
        dispatched_version=version,
        rollouts=tuple(rollout(domain, index, sample, version) for sample in range(samples)),
    )


def bits(values: tuple[float, ...]) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_group_comes_back_exactly(tmp_path: Path, compacted: bool, reopened: bool) -> None:
    store = RolloutStore(tmp_path / "rollouts", groups_per_segment=2 if compacted else 99)
    groups = [group(index) for index in range(3)]
    for g in groups:
        store.append(g)
    if reopened:
        store = RolloutStore(tmp_path / "rollouts", groups_per_segment=99)
    assert [store.get_group(g.group_id) for g in groups] == groups
    assert store.get_group("add/99") is None
    assert store.group_ids() == {"add/0", "add/1", "add/2"}
    assert "add/1" in store
    assert "add/99" not in store


floats = st.floats(width=64)


@settings(deadline=None, max_examples=40)
@given(
    logprobs=st.lists(floats, max_size=8),
    score=st.none() | floats,
    versions=st.integers(-1, 2**31 - 1),
    text=st.text(st.characters()),
    seed=st.integers(-(2**63), 2**63 - 1),
    evidence=st.dictionaries(
        st.text(),
        st.recursive(st.none() | st.booleans() | st.integers() | floats | st.text(), st.lists),
        max_size=3,
    ),
)
def test_any_rollout_survives_its_row_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    logprobs: list[float],
    score: float | None,
    versions: int,
    text: str,
    seed: int,
    evidence: dict[str, Any],
) -> None:
    length = len(logprobs)
    original = msgspec.structs.replace(
        rollout(),
        token_ids=tuple(range(length)),
        sampled_mask=(True,) * length,
        logprobs=tuple(logprobs),
        weight_versions=(versions,) * length,
        messages=(Message(role="tool", content=text),),
        verdict=Verdict(outcome=Outcome.SCORED, score=score, passed=None, evidence=evidence),
        seed=seed,
    )
    log = SegmentLog(tmp_path_factory.mktemp("rows") / "log", ROLLOUTS, 99)
    log.append([rollout_row(original, 0, 0)])
    (waiting,) = log.rows()
    log.compact(everything=True)
    (compacted,) = log.rows()
    for row in (waiting, compacted):
        found = rollout_from_row(row)
        assert bits(found.logprobs) == bits(original.logprobs)
        # repr, because a nan differs from itself.
        assert repr(found) == repr(original)


def test_a_failed_rollout_keeps_its_failure(tmp_path: Path) -> None:
    failure = Failure(kind=FailureKind.SANDBOX, where="sandbox.start", message="no bwrap")
    verdict = Verdict(outcome=Outcome.INVALID_INFRA, score=None, passed=None, failure=failure)
    failed = msgspec.structs.replace(rollout(), verdict=verdict, spans=())
    write_evaluation(tmp_path / "before.parquet", [failed, rollout(sample=1)])
    assert read_evaluation(tmp_path / "before.parquet") == [failed, rollout(sample=1)]


def test_evidence_of_any_kind_is_kept_for_people() -> None:
    verdict = Verdict(
        outcome=Outcome.SCORED,
        score=math.inf,
        passed=True,
        evidence={"object": object, "set": {1}, "bytes": b"\xff", "keys": {1: (2, 3)}},
    )
    row = rollout_row(msgspec.structs.replace(rollout(), verdict=verdict), 0, 0)
    found = rollout_from_row(row).verdict
    assert found.score == math.inf
    assert found.evidence["object"] == "<class 'object'>"
    assert found.evidence["keys"] == {"1": [2, 3]}


def test_a_group_is_stored_once(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "rollouts")
    store.append(group(1))
    with pytest.raises(AssertionError, match="already"):
        store.append(group(1))
    with pytest.raises(AssertionError, match="no rollouts"):
        store.append(group(2, samples=0))


def test_ragged_streams_are_our_bug(tmp_path: Path) -> None:
    ragged = msgspec.structs.replace(rollout(), logprobs=(0.0,))
    with pytest.raises(AssertionError, match="ragged"):
        write_evaluation(tmp_path / "a.parquet", [ragged])


def test_advantages_join_and_the_last_wins_and_rollback_forgets_them(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "rollouts")
    store.append(group(0, samples=2))
    store.append_advantages(1, {"add/0/0": (0.0, 0.0, 1.5, 1.5)})
    store.append_advantages(2, {"add/0/0": (0.0, 0.0, -1.0, -0.0)})
    found = {s.rollout.rollout_id: s.advantages for s in read_rollouts(tmp_path / "rollouts")}
    assert found == {"add/0/0": (0.0, 0.0, -1.0, -0.0), "add/0/1": None}
    store.rollback_to(1)
    found = {s.rollout.rollout_id: s.advantages for s in read_rollouts(tmp_path / "rollouts")}
    assert found["add/0/0"] == (0.0, 0.0, 1.5, 1.5)
    assert "add/0" in store


def test_discarded_groups_are_gone_and_may_come_again(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "rollouts", groups_per_segment=2)
    for index in range(5):
        store.append(group(index, version=index))
    assert store.groups_newer_than(2) == {"add/3", "add/4"}
    store.discard(store.groups_newer_than(2))
    assert store.group_ids() == {"add/0", "add/1", "add/2"}
    store.append(group(4, version=9))
    reopened = RolloutStore(tmp_path / "rollouts")
    assert reopened.get_group("add/4") == group(4, version=9)
    assert len(list(read_rollouts(tmp_path / "rollouts"))) == 12


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_store_rollouts import group
from burnish.store.rollouts import RolloutStore
store = RolloutStore(Path(sys.argv[1]), groups_per_segment=4)
n = int(sys.argv[2])
while True:
    store.append(group(n))
    sys.stdout.write(f"{n}\\n"); sys.stdout.flush()
    n += 1
"""


def test_a_killed_store_holds_every_acknowledged_group_exactly_once(tmp_path: Path) -> None:
    path, expected = tmp_path / "rollouts", 0
    here = str(Path(__file__).parent)
    for round_ in range(4):
        command = [sys.executable, "-c", WRITER, str(path), str(expected), here]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            acknowledged = [int(process.stdout.readline()) for _ in range(6 + 3 * round_)]
            os.kill(process.pid, signal.SIGKILL)
            acknowledged += [int(line) for line in process.stdout]
        # A reader needs no recovery by the writer.
        seen = [s.rollout.rollout_id for s in read_rollouts(path)]
        expected = len(seen) // 3
        assert seen == [f"add/{n}/{sample}" for n in range(expected) for sample in range(3)]
        assert expected > acknowledged[-1]
        assert len(RolloutStore(path).group_ids()) == expected


def test_a_reader_beside_a_writer_sees_a_prefix_every_time(tmp_path: Path) -> None:
    path, here = tmp_path / "rollouts", str(Path(__file__).parent)
    command = [sys.executable, "-c", WRITER, str(path), "0", here]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lengths = []
        for _ in range(40):
            acknowledged = int(process.stdout.readline())
            seen = [s.rollout.rollout_id for s in read_rollouts(path)]
            lengths.append(len(seen) // 3)
            expected = [f"add/{n}/{sample}" for n in range(lengths[-1]) for sample in range(3)]
            assert seen == expected
            assert lengths[-1] > acknowledged
        os.kill(process.pid, signal.SIGKILL)
    assert lengths == sorted(lengths)


def test_a_rollout_without_tokens_is_stored_and_is_of_no_version(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "rollouts")
    empty = msgspec.structs.replace(
        rollout(),
        token_ids=(),
        sampled_mask=(),
        logprobs=(),
        weight_versions=(),
        turns=(),
        spans=(),
    )
    stored = msgspec.structs.replace(group(), rollouts=(empty,))
    store.append(stored)
    store.close()
    assert store.get_group("add/0") == stored
    assert store.groups_newer_than(-2) == {"add/0"}
    assert store.groups_newer_than(-1) == frozenset()


def crash_points(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many file operations `run` makes: each is a place for a crash."""
    count = 0
    for name in ("replace", "unlink"):
        real = getattr(os, name)

        def counted(*args: Any, _real: Any = real, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return _real(*args, **kwargs)

        monkeypatch.setattr(os, name, counted)
    run()
    monkeypatch.undo()
    return count


@pytest.mark.parametrize("operation", ["append", "compact", "rewrite 1", "rewrite 4"])
def test_a_crash_between_any_two_file_operations_loses_and_doubles_nothing(
    tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared(name: str) -> SegmentLog:
        log = SegmentLog(tmp_path / name, METRICS, 3)
        for step in range(5):
            log.append([{"step": step, "name": "loss", "label": "", "value": 0.0}])
            if step < 4:
                log.compact()
        return log

    def act(log: SegmentLog) -> None:
        if operation == "append":
            log.append([{"step": 5, "name": "loss", "label": "", "value": 0.0}])
        elif operation == "compact":
            log.compact(everything=True)
        else:
            # Step 1 is in a segment, step 4 in an entry.
            log.rewrite(lambda row: row["step"] != int(operation.split()[1]))

    log = prepared("count")
    before = [row["step"] for row in log.rows()]
    points = crash_points(lambda: act(log), monkeypatch)
    after = [row["step"] for row in log.rows()]
    assert points > 0
    for point in range(points):
        log, left = prepared(f"at{point}"), point

        def crash_later(real: Any) -> Any:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                if left == 0:
                    raise KeyboardInterrupt
                left -= 1
                return real(*args, **kwargs)

            return wrapper

        monkeypatch.setattr(os, "replace", crash_later(os.replace))
        monkeypatch.setattr(os, "unlink", crash_later(os.unlink))
        with pytest.raises(KeyboardInterrupt):
            act(log)
        monkeypatch.undo()
        directory = tmp_path / f"at{point}"
        assert [r["step"] for r in read_rows(directory, METRICS)] in (before, after)
        reopened = SegmentLog(directory, METRICS, 3)
        assert [r["step"] for r in reopened.rows()] in (before, after)
        reopened.append([{"step": 9, "name": "loss", "label": "", "value": 0.0}])
        assert [r["step"] for r in read_rows(directory, METRICS)][-1] == 9


@pytest.mark.parametrize("keep", [0, 3, 100, -1, -8])
@pytest.mark.parametrize("suffix", [".entry", ".parquet"])
def test_a_truncated_file_is_named_in_one_line(tmp_path: Path, keep: int, suffix: str) -> None:
    store = RolloutStore(tmp_path / "rollouts", groups_per_segment=2)
    for index in range(3):
        store.append(group(index))
    (path,) = (tmp_path / "rollouts" / "groups").glob(f"*{suffix}")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="damaged") as caught:
        list(read_rollouts(tmp_path / "rollouts"))
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="damaged"):
        RolloutStore(tmp_path / "rollouts")


def test_a_file_of_another_table_or_version_is_refused(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path / "log", METRICS, 1)
    log.append([{"step": 0, "name": "loss", "label": "", "value": 0.0}])
    newer = msgspec.structs.replace(METRICS, version=2)
    for table, held in [(newer, "metrics version 1"), (ROLLOUTS, "metrics version 1")]:
        with pytest.raises(UserError, match=f"holds {held}, this program reads {table.name}"):
            list(read_rows(tmp_path / "log", table))
    log.compact()
    with pytest.raises(UserError, match="this program reads metrics version 2"):
        list(read_rows(tmp_path / "log", newer))
