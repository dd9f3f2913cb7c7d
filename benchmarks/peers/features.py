"""Figures that wait for a feature of the engine: measured when it has it, "not built" until then.

The engine says what it can do (its capabilities); its limits say the rest.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from burnish.core.vocabulary import EngineFeature
from burnish.model.loading import load_model
from burnish.rollout.engine.capabilities import local_capabilities
from burnish.rollout.engine.limits import CoreLimits


class Missing(NamedTuple):
    """A figure of the table that cannot be measured yet."""

    name: str
    unit: str
    target: float
    is_built: Callable[[], bool]
    """Whether the engine has what it needs."""


def _lists(feature: EngineFeature) -> bool:
    config = load_model("smollm2-135m-instruct").config
    return feature in local_capabilities(config, can_decode=True).features


def _has_limit(name: str) -> bool:
    return name in CoreLimits._fields


MISSING = (
    Missing("exact mode: equal bits", "%", 100.0, lambda: _lists(EngineFeature.EXACT)),
    Missing("KV int8: bytes against bf16", "ratio", 0.53, lambda: _has_limit("kv_dtype")),
    Missing(
        "prompt-lookup speculation, batch 1",
        *("ratio", 2.0, lambda: _lists(EngineFeature.SPECULATION)),
    ),
    Missing("decode at 100k, sparse over dense", "ratio", 0.2, lambda: _has_limit("sparse")),
    Missing("1M tokens on the disk tier", "GiB", 4.0, lambda: _has_limit("disk_tier")),
)


def missing_row(feature: Missing) -> dict[str, Any]:
    """A row without a value; never ok."""
    note = "built, but this script does not measure it" if feature.is_built() else "not built"
    empty: dict[str, Any] = dict.fromkeys(("value", "peer", "peer_value", "ratio", "ok"))
    return {
        "name": f"engine: {feature.name}",
        **empty,
        "unit": feature.unit,
        "target": feature.target,
        "n": 0,
        "note": note,
    }
