"""The tables of a run, declared once; SQLite DDL, Arrow schemas and JSON Schema are rendered.

Changing a table changes its rendering, which a test compares with a frozen copy: raise the version
of the table in the same commit, and keep reading the old one.
"""

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from burnish.core.records import Record
from burnish.core.vocabulary import DropReason, Outcome

if TYPE_CHECKING:
    import pyarrow as pa


class Kind(StrEnum):
    """What a field holds."""

    TEXT = "text"
    """UTF-8 text."""
    JSON = "json"
    """JSON as text."""
    INTEGER = "integer"
    """Signed, 64 bits."""
    REAL = "real"
    """Float, 64 bits."""
    BOOLEAN = "boolean"
    """True or false."""
    INTEGERS = "integers"
    """Array of signed 32-bit integers: token ids and weight versions."""
    REALS = "reals"
    """Array of 64-bit floats."""
    BOOLEANS = "booleans"
    """Array of true or false."""


class Field(Record, frozen=True, kw_only=True):
    """One column."""

    name: str
    """Column name."""
    kind: Kind
    """What it holds."""
    meaning: str
    """One sentence."""
    nullable: bool = False
    """Whether it may be absent."""
    choices: tuple[str, ...] = ()
    """Closed vocabulary, if any."""


class Table(Record, frozen=True, kw_only=True):
    """One table."""

    name: str
    """Table name."""
    version: int
    """Version of its format."""
    fields: tuple[Field, ...]
    """Columns in order."""
    key: tuple[str, ...] = ()
    """Primary key."""
    checks: tuple[str, ...] = ()
    """Conditions that every row satisfies; enforced where the table lives in SQLite."""

    @property
    def names(self) -> tuple[str, ...]:
        """Column names in order."""
        return tuple(field.name for field in self.fields)


class GroupState(StrEnum):
    """Where a dispatched group is."""

    IN_FLIGHT = "in_flight"
    """Being sampled."""
    COMPLETE = "complete"
    """Judged, its rollouts stored, waiting to be trained."""
    TRAINED = "trained"
    """All rollouts that were not dropped entered a loss. Final."""
    DROPPED = "dropped"
    """No rollout was trained. Final."""


def _field(
    name: str,
    kind: Kind,
    meaning: str,
    *,
    nullable: bool = False,
    choices: type[StrEnum] | None = None,
) -> Field:
    values = tuple(choices) if choices else ()
    return Field(name=name, kind=kind, meaning=meaning, nullable=nullable, choices=values)


GROUPS = Table(
    name="groups",
    version=1,
    key=("group_id",),
    fields=(
        _field("group_id", Kind.TEXT, "{domain}/{index}."),
        _field("domain", Kind.TEXT, "Environment name."),
        _field("task_index", Kind.INTEGER, "Index of the task in the training pool."),
        _field("num_rollouts", Kind.INTEGER, "Rollouts dispatched."),
        _field("dispatched_step", Kind.INTEGER, "Step during which it was dispatched."),
        _field("dispatched_version", Kind.INTEGER, "Weight version at that moment."),
        _field("completed_step", Kind.INTEGER, "Step of completion.", nullable=True),
        _field("resolved_step", Kind.INTEGER, "Step of training or drop.", nullable=True),
        _field("state", Kind.TEXT, "Where it is.", choices=GroupState),
        _field("open_rollouts", Kind.INTEGER, "Neither trained nor dropped yet."),
        _field("trained_rollouts", Kind.INTEGER, "Entered a loss."),
        _field("dropped_rollouts", Kind.INTEGER, "Sum over reasons in `drops`."),
    ),
    checks=(
        "num_rollouts > 0",
        "open_rollouts >= 0 AND trained_rollouts >= 0 AND dropped_rollouts >= 0",
        "num_rollouts = open_rollouts + trained_rollouts + dropped_rollouts",
        "(state IN ('in_flight', 'complete')) = (open_rollouts > 0)",
        "(state = 'trained') = (trained_rollouts > 0)",
        "(state IN ('in_flight', 'complete')) = (resolved_step IS NULL)",
        "state NOT IN ('complete', 'trained') OR completed_step IS NOT NULL",
    ),
)

DROPS = Table(
    name="drops",
    version=1,
    key=("group_id", "reason", "step"),
    fields=(
        _field("group_id", Kind.TEXT, "The group."),
        _field("reason", Kind.TEXT, "Why.", choices=DropReason),
        _field("step", Kind.INTEGER, "Step during which they were dropped."),
        _field("num_rollouts", Kind.INTEGER, "How many of the group."),
    ),
    checks=("num_rollouts > 0",),
)

ROLLOUTS = Table(
    name="rollouts",
    version=1,
    key=("rollout_id",),
    fields=(
        _field("rollout_id", Kind.TEXT, "{domain}/{index}/{sample}."),
        _field("group_id", Kind.TEXT, "{domain}/{index}."),
        _field("domain", Kind.TEXT, "Environment name."),
        _field("task_index", Kind.INTEGER, "Index of the task in its pool."),
        _field("dispatched_version", Kind.INTEGER, "Weight version when it was dispatched."),
        _field("environment_digest", Kind.TEXT, "Digest of the environment that judged it."),
        _field("outcome", Kind.TEXT, "Whether there is a score.", choices=Outcome),
        _field("score", Kind.REAL, "Weighted credits.", nullable=True),
        _field("passed", Kind.BOOLEAN, "Whether it counts as passed.", nullable=True),
        _field("token_ids", Kind.INTEGERS, "Prompt, sampled and environment tokens, length L."),
        _field("num_prompt_tokens", Kind.INTEGER, "Length of the opening prompt."),
        _field("sampled_mask", Kind.BOOLEANS, "True for sampled tokens, length L."),
        _field("logprobs", Kind.REALS, "Log-prob of sampled tokens, 0 elsewhere, length L."),
        _field("weight_versions", Kind.INTEGERS, "Version of sampled tokens, else -1, length L."),
        _field("turns", Kind.JSON, "Assistant turns."),
        _field("messages", Kind.JSON, "The transcript as text."),
        _field("verdict", Kind.JSON, "The judgement with its evidence."),
        _field("spans", Kind.JSON, "Credits mapped to tokens."),
        _field("seed", Kind.INTEGER, "Root seed of the episode."),
        _field("duration_s", Kind.REAL, "Wall time of the episode."),
    ),
)

ADVANTAGES = Table(
    name="advantages",
    version=1,
    key=("rollout_id",),
    fields=(
        _field("rollout_id", Kind.TEXT, "The rollout: joins `rollouts`."),
        _field("step", Kind.INTEGER, "Step that trained it."),
        _field("advantages", Kind.REALS, "Per token, length L."),
    ),
)

METRICS = Table(
    name="metrics",
    version=1,
    key=("step", "name", "label"),
    fields=(
        _field("step", Kind.INTEGER, "Optimizer step."),
        _field("name", Kind.TEXT, "Declared name."),
        _field("label", Kind.TEXT, "Domain, reason, ...; empty if the metric has none."),
        _field("value", Kind.REAL, "Reduced over the step; may be nan."),
    ),
)

TABLES = (GROUPS, DROPS, ROLLOUTS, ADVANTAGES, METRICS)


_SQL_TYPES = {Kind.TEXT: "TEXT", Kind.JSON: "TEXT", Kind.INTEGER: "INTEGER", Kind.REAL: "REAL"}
_JSON_TYPES: dict[Kind, dict[str, Any]] = {
    Kind.TEXT: {"type": "string"},
    Kind.JSON: {"type": "string", "contentMediaType": "application/json"},
    Kind.INTEGER: {"type": "integer"},
    Kind.REAL: {"type": "number"},
    Kind.BOOLEAN: {"type": "boolean"},
    Kind.INTEGERS: {"type": "array", "items": {"type": "integer"}},
    Kind.REALS: {"type": "array", "items": {"type": "number"}},
    Kind.BOOLEANS: {"type": "array", "items": {"type": "boolean"}},
}


def sqlite_ddl(table: Table) -> str:
    """`CREATE TABLE` for a table without arrays."""
    lines = [_sqlite_column(field) for field in table.fields]
    if table.key:
        lines.append(f"PRIMARY KEY ({', '.join(table.key)})")
    lines += [f"CHECK ({check})" for check in table.checks]
    body = ",\n  ".join(lines)
    return f"CREATE TABLE {table.name} (\n  {body}\n) STRICT"


def arrow_schema(table: Table) -> "pa.Schema":
    """Arrow schema, with the table's name and version in its metadata."""
    import pyarrow as pa

    types = {
        Kind.TEXT: pa.string(),
        Kind.JSON: pa.string(),
        Kind.INTEGER: pa.int64(),
        Kind.REAL: pa.float64(),
        Kind.BOOLEAN: pa.bool_(),
        Kind.INTEGERS: pa.list_(pa.int32()),
        Kind.REALS: pa.list_(pa.float64()),
        Kind.BOOLEANS: pa.list_(pa.bool_()),
    }
    return pa.schema(
        [pa.field(f.name, types[f.kind], nullable=f.nullable) for f in table.fields],
        metadata={"burnish.table": table.name, "burnish.version": str(table.version)},
    )


def json_schema(table: Table) -> dict[str, Any]:
    """JSON Schema of one row."""
    properties = {}
    for field in table.fields:
        rendered = dict(_JSON_TYPES[field.kind], description=field.meaning)
        if field.choices:
            rendered["enum"] = list(field.choices)
        if field.nullable:
            rendered["type"] = [rendered["type"], "null"]
        properties[field.name] = rendered
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": table.name,
        "x-version": table.version,
        "type": "object",
        "properties": properties,
        "required": [f.name for f in table.fields if not f.nullable],
        "additionalProperties": False,
    }


def _sqlite_column(field: Field) -> str:
    column = f"{field.name} {_SQL_TYPES[field.kind]}"
    if not field.nullable:
        column += " NOT NULL"
    if field.choices:
        choices = ", ".join(f"'{choice}'" for choice in field.choices)
        column += f" CHECK ({field.name} IN ({choices}))"
    return column
