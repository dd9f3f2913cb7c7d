"""What an engine declares about itself, so that callers ask before they try."""

from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.core.vocabulary import EngineFeature


class EngineCapabilities(Record, frozen=True, kw_only=True):
    """What one engine can do."""

    name: str
    """Of the engine, for messages."""
    features: frozenset[EngineFeature]
    """Everything that works."""
    max_context_tokens: int
    """Prompt and sampled tokens together."""
    max_top_logprobs: int = 0
    """Most alternatives per token."""

    def require(self, *features: EngineFeature) -> None:
        """Refuse what this engine cannot do.

        Raises:
            UserError: naming every missing feature.
        """
        missing = sorted(set(features) - self.features)
        if missing:
            raise UserError(
                f"the engine {self.name} cannot do {', '.join(missing)}.",
                fix="leave that out of the request or use an engine that lists it.",
            )
