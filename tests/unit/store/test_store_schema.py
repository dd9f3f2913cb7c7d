import sqlite3

import pytest

from burnish.core.records import Rollout
from burnish.store.ledger import GroupRow
from burnish.store.schema import (
    GROUPS,
    ROLLOUTS,
    TABLES,
    Field,
    Kind,
    Table,
    arrow_schema,
    json_schema,
    sqlite_ddl,
)

# A change here is a change of a persisted format: raise the version of the table, keep reading the
# old one, and only then update its line.
FROZEN = {
    "groups 1": """
        group_id text
        domain text
        task_index integer
        num_rollouts integer
        dispatched_step integer
        dispatched_version integer
        completed_step integer?
        resolved_step integer?
        state text in_flight|complete|trained|dropped
        open_rollouts integer
        trained_rollouts integer
        dropped_rollouts integer
        key group_id
        check num_rollouts > 0
        check open_rollouts >= 0 AND trained_rollouts >= 0 AND dropped_rollouts >= 0
        check num_rollouts = open_rollouts + trained_rollouts + dropped_rollouts
        check (state IN ('in_flight', 'complete')) = (open_rollouts > 0)
        check (state = 'trained') = (trained_rollouts > 0)
        check (state IN ('in_flight', 'complete')) = (resolved_step IS NULL)
        check state NOT IN ('complete', 'trained') OR completed_step IS NOT NULL
        """,
    "drops 1": """
        group_id text
        reason text zero_variance|stale|invalid|quarantined|surplus
        step integer
        num_rollouts integer
        key group_id reason step
        check num_rollouts > 0
        """,
    "rollouts 1": """
        rollout_id text
        group_id text
        domain text
        task_index integer
        dispatched_version integer
        environment_digest text
        outcome text scored|invalid_infra|invalid_environment
        score real?
        passed boolean?
        token_ids integers
        num_prompt_tokens integer
        sampled_mask booleans
        logprobs reals
        weight_versions integers
        turns json
        messages json
        verdict json
        spans json
        seed integer
        duration_s real
        key rollout_id
        """,
    "advantages 1": """
        rollout_id text
        step integer
        advantages reals
        key rollout_id
        """,
    "metrics 1": """
        step integer
        name text
        label text
        value real
        key step name label
        """,
}


def described(table: Table) -> list[str]:
    fields = [
        f"{f.name} {f.kind}{'?' * f.nullable} {'|'.join(f.choices)}".rstrip() for f in table.fields
    ]
    return [*fields, "key " + " ".join(table.key), *(f"check {check}" for check in table.checks)]


def test_no_table_drifts_from_its_frozen_form() -> None:
    found = {f"{table.name} {table.version}": described(table) for table in TABLES}
    assert found == {
        name: [line.strip() for line in text.strip().splitlines()] for name, text in FROZEN.items()
    }


def test_kinds_keep_their_types() -> None:
    fields = tuple(Field(name=kind.value, kind=kind, meaning="") for kind in Kind)
    arrow = arrow_schema(Table(name="t", version=1, fields=fields))
    assert {field.name: str(field.type) for field in arrow} == {
        "text": "string",
        "json": "string",
        "integer": "int64",
        "real": "double",
        "boolean": "bool",
        "integers": "list<item: int32>",
        "reals": "list<item: double>",
        "booleans": "list<item: bool>",
    }
    plain = Table(name="t", version=1, fields=fields[:4], key=("text",))
    assert " ".join(sqlite_ddl(plain).split()) == (
        "CREATE TABLE t ( text TEXT NOT NULL, json TEXT NOT NULL, integer INTEGER NOT NULL,"
        " real REAL NOT NULL, PRIMARY KEY (text) ) STRICT"
    )


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_all_renderings_have_the_same_columns(table: Table) -> None:
    names = list(table.names)
    arrow = arrow_schema(table)
    assert arrow.names == names
    assert list(json_schema(table)["properties"]) == names
    required = json_schema(table)["required"]
    assert [f.name for f in arrow if not f.nullable] == required
    if not {f.kind for f in table.fields} & {Kind.BOOLEAN, Kind.BOOLEANS, Kind.REALS}:
        db = sqlite3.connect(":memory:")
        db.execute(sqlite_ddl(table))
        columns = db.execute(f"PRAGMA table_info({table.name})").fetchall()
        db.close()
        assert [column[1] for column in columns] == names
        assert [column[1] for column in columns if column[3]] == required


def test_an_arrow_table_knows_what_it_is() -> None:
    metadata = arrow_schema(ROLLOUTS).metadata
    assert metadata == {b"burnish.table": b"rollouts", b"burnish.version": b"1"}


def test_every_field_of_a_rollout_has_a_column() -> None:
    assert set(Rollout.__struct_fields__) <= set(ROLLOUTS.names)


def test_a_ledger_row_has_the_columns_in_order() -> None:
    assert GroupRow._fields == GROUPS.names
