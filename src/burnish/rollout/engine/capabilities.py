"""What the engine of this package can do, as data."""

from burnish.core.engines import EngineCapabilities
from burnish.core.vocabulary import EngineFeature
from burnish.model.config import ModelConfig
from burnish.rollout.engine.validation import MAX_TOP_LOGPROBS

# What needs something that not every engine was given.
_CONDITIONAL = frozenset({EngineFeature.STOP_STRINGS})
_MISSING = frozenset(
    {
        EngineFeature.ADAPTERS,
        EngineFeature.GRAMMAR,
        EngineFeature.SPECULATION,
        EngineFeature.EXACT,
    }
)


def local_capabilities(config: ModelConfig, *, can_decode: bool) -> EngineCapabilities:
    """Of an engine for `config`; `can_decode` if it was given a tokenizer."""
    features = frozenset(EngineFeature) - _MISSING - _CONDITIONAL
    if can_decode:
        features |= {EngineFeature.STOP_STRINGS}
    return EngineCapabilities(
        name="local",
        features=features,
        max_context_tokens=config.max_position_embeddings,
        max_top_logprobs=MAX_TOP_LOGPROBS,
    )
