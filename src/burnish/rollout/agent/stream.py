"""The token stream of one episode while it grows."""

from collections.abc import Sequence

from burnish.core.protocols import Environment
from burnish.core.records import CreditSpan, Generation, Message, Rollout, Turn, Verdict


class TokenStream:
    """Prompt, sampled and environment tokens in order, with what is known of each."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        """Start with the opening prompt."""
        self.token_ids = list(prompt_ids)
        self.turns: list[Turn] = []
        self._num_prompt_tokens = len(prompt_ids)
        self._mask = [False] * len(prompt_ids)
        self._logprobs = [0.0] * len(prompt_ids)
        self._versions = [-1] * len(prompt_ids)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy produced so far."""
        return sum(turn.end - turn.start for turn in self.turns)

    def sampled(self, generation: Generation) -> None:
        """Append an assistant turn exactly as it was sampled."""
        start = len(self.token_ids)
        count = len(generation.token_ids)
        self.token_ids += generation.token_ids
        self._mask += [True] * count
        self._logprobs += generation.logprobs
        self._versions += generation.weight_versions
        turn = Turn(start=start, end=start + count, stop_reason=generation.stop_reason)
        self.turns.append(turn)

    def environment(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the environment contributed."""
        self.token_ids += token_ids
        self._mask += [False] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)
        self._versions += [-1] * len(token_ids)

    def rollout(
        self,
        rollout_id: str,
        *,
        group_id: str,
        environment: Environment,
        messages: Sequence[Message],
        verdict: Verdict,
        spans: tuple[CreditSpan, ...],
        seed: int,
    ) -> Rollout:
        """Close the stream into a record. Wall time is added by whoever measured it."""
        return Rollout(
            rollout_id=rollout_id,
            group_id=group_id,
            domain=environment.name,
            environment_digest=environment.digest,
            token_ids=tuple(self.token_ids),
            num_prompt_tokens=self._num_prompt_tokens,
            sampled_mask=tuple(self._mask),
            logprobs=tuple(self._logprobs),
            weight_versions=tuple(self._versions),
            turns=tuple(self.turns),
            messages=tuple(messages),
            verdict=verdict,
            spans=spans,
            seed=seed,
            duration_s=0.0,
        )
