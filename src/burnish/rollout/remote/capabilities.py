"""What several servers can do together, as data."""

from collections.abc import Sequence

from burnish.core.engines import EngineCapabilities
from burnish.core.vocabulary import EngineFeature
from burnish.rollout.remote.dialect import LogprobScope, ServerFacts


def shared_capabilities(
    name: str, facts: Sequence[ServerFacts], scope: LogprobScope, max_context_tokens: int
) -> EngineCapabilities:
    """What all of them can do; `max_context_tokens` is the model's, where a server does not say."""
    features = frozenset.intersection(*(fact.features for fact in facts))
    if scope is LogprobScope.SAMPLED:
        features |= {EngineFeature.SAMPLED_LOGPROBS}
    ranks = [fact.max_adapter_rank for fact in facts if fact.max_adapter_rank is not None]
    return EngineCapabilities(
        name=name,
        features=features,
        max_context_tokens=min(fact.max_context_tokens or max_context_tokens for fact in facts),
        max_top_logprobs=min(fact.max_top_logprobs for fact in facts),
        grammars=frozenset.intersection(*(fact.grammars for fact in facts)),
        max_adapter_rank=min(ranks, default=None),
    )
