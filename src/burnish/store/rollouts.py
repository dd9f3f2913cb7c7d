"""Rollouts on disk: groups of the training pool, their advantages, and evaluations."""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from burnish.core.disk import write_atomically
from burnish.core.group_id import parse_group_id
from burnish.core.records import CreditSpan, Group, Message, Rollout, Turn, Verdict
from burnish.store.schema import ADVANTAGES, ROLLOUTS
from burnish.store.segments import (
    Piece,
    Row,
    SegmentLog,
    read_parquet,
    read_piece,
    read_rows,
    to_parquet,
)

# A segment of 32 groups of 8 rollouts of 300 tokens has 1.0 MB: small enough to read for one group
# and to rewrite, large enough that 10,000 groups are some 300 files.
GROUPS_PER_SEGMENT = 32
# Advantages are one entry per training step.
_STEPS_PER_SEGMENT = 64


class StoredRollout(NamedTuple):
    """A rollout as reports see it."""

    rollout: Rollout
    """The record, bit for bit."""
    advantages: tuple[float, ...] | None
    """Per token, if it was trained."""


class RolloutStore:
    """The writer of `rollouts/` and `advantages/`. May be called from any thread.

    An appended group is there after a kill at any later moment, exactly once.
    """

    def __init__(self, directory: Path, groups_per_segment: int = GROUPS_PER_SEGMENT) -> None:
        """Open or create `directory`."""
        self._lock = threading.Lock()
        directory.mkdir(exist_ok=True)
        self._groups = SegmentLog(directory / "groups", ROLLOUTS, groups_per_segment)
        self._advantages = SegmentLog(directory / "advantages", ADVANTAGES, _STEPS_PER_SEGMENT)
        self._places = self._index()

    def append(self, group: Group) -> None:
        """Make a finished group durable. A group is stored once.

        Raises:
            DiskFullError: the group is whole or absent; `in` tells.
        """
        assert group.rollouts, f"{group.group_id} has no rollouts"
        rows = [group_row(group, rollout) for rollout in group.rollouts]
        with self._lock:
            assert group.group_id not in self._places, f"{group.group_id} is stored already"
            self._places[group.group_id] = self._groups.append(rows)
            if self._groups.compact():
                self._places = self._index()

    def append_advantages(self, step: int, advantages: Mapping[str, Sequence[float]]) -> None:
        """Join per-token advantages to rollouts by id. A later call for the same id wins."""
        rows = [
            {"rollout_id": name, "step": step, "advantages": [float(v) for v in values]}
            for name, values in advantages.items()
        ]
        with self._lock:
            self._advantages.append(rows)
            self._advantages.compact()

    def __contains__(self, group_id: str) -> bool:
        with self._lock:
            return group_id in self._places

    def group_ids(self) -> frozenset[str]:
        """Ids of all stored groups: what `Ledger.rollback_to` asks for."""
        with self._lock:
            return frozenset(self._places)

    def get_group(self, group_id: str) -> Group | None:
        """A stored group, exactly as it was appended."""
        with self._lock:
            piece = self._places.get(group_id)
            if piece is None:
                return None
            rows = read_piece(piece, ROLLOUTS, where=("group_id", group_id))
        return Group(
            group_id=group_id,
            domain=rows[0]["domain"],
            index=rows[0]["task_index"],
            dispatched_version=rows[0]["dispatched_version"],
            rollouts=tuple(rollout_from_row(row) for row in rows),
        )

    def discard(self, group_ids: Iterable[str]) -> None:
        """Forget groups: they will be sampled again. A crash leaves each whole or gone."""
        with self._lock:
            gone = set(group_ids) & set(self._places)
            if gone:
                pieces = {self._places[group_id] for group_id in gone}
                self._groups.rewrite(lambda row: row["group_id"] not in gone, pieces)
                self._places = self._index()

    def groups_newer_than(self, version: int) -> frozenset[str]:
        """Groups that hold a token sampled from weights after `version`.

        After a rollback to a checkpoint at `version` those weights do not exist yet.
        """
        with self._lock:
            rows = [
                row
                for piece in self._groups.pieces
                for row in read_piece(piece, ROLLOUTS, ["group_id", "weight_versions"])
            ]
        # A rollout that failed at once has no tokens.
        newest = ((r["group_id"], max(r["weight_versions"], default=-1)) for r in rows)
        return frozenset(group_id for group_id, found in newest if found > version)

    def rollback_to(self, step: int) -> None:
        """Forget advantages of later steps. Groups stay: finished work is used again."""
        with self._lock:
            self._advantages.rewrite(lambda row: row["step"] <= step)

    def close(self) -> None:
        """Compact what is waiting."""
        with self._lock:
            self._groups.compact(everything=True)
            self._advantages.compact(everything=True)
            self._places = self._index()

    def _index(self) -> dict[str, Piece]:
        return {
            row["group_id"]: piece
            for piece in self._groups.pieces
            for row in read_piece(piece, ROLLOUTS, ["group_id"])
        }


def read_rollouts(directory: Path) -> Iterator[StoredRollout]:
    """All stored rollouts of a finished or live run, in the order of completion."""
    advantages = {
        row["rollout_id"]: tuple(row["advantages"])
        for row in read_rows(directory / "advantages", ADVANTAGES)
    }
    for row in read_rows(directory / "groups", ROLLOUTS):
        yield StoredRollout(rollout_from_row(row), advantages.get(row["rollout_id"]))


def write_evaluation(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Write `evals/<name>.parquet`, whole or not at all.

    Raises:
        DiskFullError: an older file of this name is untouched.
    """
    rows = []
    for rollout in rollouts:
        index = parse_group_id(rollout.group_id).item
        rows.append(rollout_row(rollout, index, rollout.oldest_version))
    write_atomically(path, to_parquet(rows, ROLLOUTS))


def read_evaluation(path: Path) -> list[Rollout]:
    """Read what `write_evaluation` wrote.

    Raises:
        UserError: if the file is damaged or of another version.
        FileNotFoundError: if it is absent.
    """
    return [rollout_from_row(row) for row in read_parquet(path, ROLLOUTS).to_pylist()]


def group_row(group: Group, rollout: Rollout) -> Row:
    """One row of the `rollouts` table."""
    assert (rollout.group_id, rollout.domain) == (group.group_id, group.domain)
    return rollout_row(rollout, group.index, group.dispatched_version)


def rollout_row(rollout: Rollout, task_index: int, dispatched_version: int) -> Row:
    """One row of the `rollouts` table."""
    length = len(rollout.token_ids)
    streams = (rollout.sampled_mask, rollout.logprobs, rollout.weight_versions)
    assert all(len(s) == length for s in streams), f"{rollout.rollout_id}: ragged streams"
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "domain": rollout.domain,
        "task_index": task_index,
        "dispatched_version": dispatched_version,
        "environment_digest": rollout.environment_digest,
        "outcome": rollout.verdict.outcome.value,
        "score": rollout.verdict.score,
        "passed": rollout.verdict.passed,
        "token_ids": list(rollout.token_ids),
        "num_prompt_tokens": rollout.num_prompt_tokens,
        "sampled_mask": list(rollout.sampled_mask),
        "logprobs": list(rollout.logprobs),
        "weight_versions": list(rollout.weight_versions),
        "turns": _to_json(rollout.turns),
        "messages": _to_json(rollout.messages),
        "verdict": _to_json(rollout.verdict),
        "spans": _to_json(rollout.spans),
        "seed": rollout.seed,
        "duration_s": float(rollout.duration_s),
    }


def rollout_from_row(row: Row) -> Rollout:
    """The inverse of `rollout_row`."""
    return Rollout(
        rollout_id=row["rollout_id"],
        group_id=row["group_id"],
        domain=row["domain"],
        environment_digest=row["environment_digest"],
        token_ids=tuple(row["token_ids"]),
        num_prompt_tokens=row["num_prompt_tokens"],
        sampled_mask=tuple(row["sampled_mask"]),
        logprobs=tuple(row["logprobs"]),
        weight_versions=tuple(row["weight_versions"]),
        turns=_from_json(row["turns"], tuple[Turn, ...]),
        messages=_from_json(row["messages"], tuple[Message, ...]),
        verdict=_from_json(row["verdict"], Verdict),
        spans=_from_json(row["spans"], tuple[CreditSpan, ...]),
        seed=row["seed"],
        duration_s=row["duration_s"],
    )


def _to_json(value: Any) -> str:
    # The standard library's JSON, because msgspec's turns nan into null and refuses integers above
    # 64 bits and lone surrogates; all three occur in what models write and verifiers note.
    # Evidence may hold anything: an unknown object is kept as its repr, for people to read.
    return json.dumps(msgspec.to_builtins(value, str_keys=True, enc_hook=repr))


def _from_json(text: str, kind: Any) -> Any:
    return msgspec.convert(json.loads(text), kind)
