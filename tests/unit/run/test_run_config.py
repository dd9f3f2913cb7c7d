import pytest

from burnish.core.config import Config, flatten, load_config
from burnish.core.errors import UserError
from burnish.core.toml_text import dotted
from burnish.run.config import RunConfig
from burnish.schedule.breakers.base import BreakerConfig
from burnish.schedule.length_audit import LengthAuditConfig
from burnish.schedule.picks import DomainShare

SECTIONS = (RunConfig, DomainShare, BreakerConfig, LengthAuditConfig)
FLOATS = [
    (kind, dotted(path))
    for kind in SECTIONS
    for path, value in flatten(kind())
    if isinstance(value, float)
]


def leaves(kind: type[Config]) -> list[str]:
    return [dotted(path) for path, _ in flatten(kind())]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize(("kind", "key"), FLOATS)
def test_no_number_may_be_infinite_or_nan(kind, key, value):
    with pytest.raises(UserError, match=key.rsplit(".", 1)[-1]):
        load_config(kind, overrides=[f"{key}={value}"])


def test_the_walk_finds_the_numbers():
    assert len(FLOATS) > 20
    assert (RunConfig, "quality.probe_timeout_s") in FLOATS


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("run.steps", 10**7),
        ("rollout.group_size", 1024),
        ("rollout.groups_per_step", 10**4),
        ("engine.num_pages", 10**7),
        ("quality.num_tasks", 10**4),
        ("quality.num_split_items", 10**6),
    ],
)
def test_sizes_beyond_any_machine_are_refused(key, most):
    load_config(RunConfig, overrides=[f"{key}={most}"])
    with pytest.raises(UserError, match=str(most)):
        load_config(RunConfig, overrides=[f"{key}={most + 1}"])


def test_a_micro_batch_holds_at_least_one_short_rollout():
    load_config(RunConfig, overrides=["train.micro_batch_tokens=64"])
    with pytest.raises(UserError, match="at least 64"):
        load_config(RunConfig, overrides=["train.micro_batch_tokens=63"])


@pytest.mark.parametrize("key", leaves(RunConfig))
def test_every_key_has_a_meaning(key):
    assert "  meaning  " in load_config(RunConfig).explain(key)
