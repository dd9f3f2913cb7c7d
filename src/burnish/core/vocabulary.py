"""Closed vocabularies. One sentence per value; nothing outside this file invents another."""

from enum import StrEnum


class Split(StrEnum):
    """Which pool of items a task comes from. The pools of one environment never share an item."""

    TRAIN = "train"
    """Items that may be trained on."""
    HELD_OUT = "held_out"
    """Items that only evaluation may see."""


class StopReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """A stop token was sampled (it is the last token of the generation)."""
    LENGTH = "length"
    """The token budget ran out."""
    ABORTED = "aborted"
    """The request was cancelled from outside; its tokens must not be trained on."""


class Outcome(StrEnum):
    """What became of an episode, beside its score."""

    SCORED = "scored"
    """The verifier gave a score; `score` is a number."""
    INVALID_INFRA = "invalid_infra"
    """Infrastructure, sandbox or verifier failed; `score` is None and nothing may be learned."""
    INVALID_ENVIRONMENT = "invalid_environment"
    """The environment or its data is broken; `score` is None and the environment is to blame."""


class FailureKind(StrEnum):
    """Who is to blame for a failure. One taxonomy from the sandbox to the reported number."""

    INFRA = "infra"
    """The machine or the framework: out of memory, a dead process, a full disk."""
    SANDBOX = "sandbox"
    """The isolation layer could not start, run or stop a box."""
    ENVIRONMENT = "environment"
    """Code of an environment raised."""
    VERIFIER = "verifier"
    """The scorer raised, timed out or returned something that is not a verdict."""
    DATA = "data"
    """A task's data is missing or malformed."""
    POLICY = "policy"
    """The model did it: over-long answer, malformed call, a limit hit. Never trips a breaker."""


class DropReason(StrEnum):
    """Why a dispatched rollout was not trained. Every drop has exactly one."""

    ZERO_VARIANCE = "zero_variance"
    """All scores in the group were equal: the advantage is zero everywhere."""
    STALE = "stale"
    """Older than the admitted lag when its turn came."""
    INVALID = "invalid"
    """Its outcome is not `scored`."""
    QUARANTINED = "quarantined"
    """Its environment was quarantined after dispatch."""
    SURPLUS = "surplus"
    """Finished or in flight when the run had already reached its last step."""


class CreditSource(StrEnum):
    """Where a part of the reward comes from."""

    OUTCOME = "outcome"
    """Is the final result right?"""
    PROCESS = "process"
    """Were the steps toward it right?"""
    COMPLIANCE = "compliance"
    """Was the demanded form kept?"""
