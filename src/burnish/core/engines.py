"""What an engine declares about itself, so that callers ask before they try."""

from burnish.core.errors import UserError
from burnish.core.records import Record
from burnish.core.vocabulary import EngineFeature, GrammarKind


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
    grammars: frozenset[GrammarKind] = frozenset()
    """Languages that a grammar may be written in."""
    max_adapter_rank: int | None = None
    """Largest rank of a LoRA adapter; None if any fits."""

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

    def require_grammar(self, kind: GrammarKind) -> None:
        """Refuse a grammar that this engine cannot read.

        Raises:
            UserError: naming the kinds that it can.
        """
        self.require(EngineFeature.GRAMMAR)
        if kind not in self.grammars:
            known = ", ".join(sorted(self.grammars)) or "none"
            raise UserError(
                f"the engine {self.name} cannot do grammars of kind {kind} (it does {known}).",
                fix="write the grammar in one of these, or use an engine that lists it.",
            )
