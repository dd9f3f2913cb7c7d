"""What the engine of this package can do, as data."""

from burnish.core.engines import EngineCapabilities
from burnish.core.vocabulary import EngineFeature, GrammarKind, Speculation
from burnish.model.config import ModelConfig
from burnish.rollout.engine.limits import CoreLimits
from burnish.rollout.engine.validation import MAX_TOP_LOGPROBS

# What needs something that not every engine was given.
_CONDITIONAL = frozenset(
    {
        EngineFeature.STOP_STRINGS,
        EngineFeature.GRAMMAR,
        EngineFeature.UNMASKED_LOGPROBS,
        EngineFeature.SPECULATION,
        EngineFeature.EXACT,
    }
)


def local_capabilities(
    config: ModelConfig, limits: CoreLimits, *, can_decode: bool, has_grammars: bool
) -> EngineCapabilities:
    """Of an engine for `config`; `can_decode` and `has_grammars` if it was given a tokenizer."""
    given = {
        EngineFeature.STOP_STRINGS: can_decode,
        EngineFeature.GRAMMAR: has_grammars,
        EngineFeature.UNMASKED_LOGPROBS: has_grammars,
        EngineFeature.SPECULATION: limits.speculation.kind is not Speculation.OFF,
        EngineFeature.EXACT: limits.exact,
    }
    features = frozenset(EngineFeature) - _CONDITIONAL
    features |= {feature for feature, is_given in given.items() if is_given}
    return EngineCapabilities(
        name="local",
        features=features,
        max_context_tokens=config.max_position_embeddings,
        max_top_logprobs=MAX_TOP_LOGPROBS,
        grammars=frozenset(GrammarKind) if has_grammars else frozenset(),
    )
