"""What has come of one request so far, and how the rest of it is asked for elsewhere."""

from collections.abc import Sequence

import msgspec

from burnish.core.records import GenerateRequest, Generation, GenerationDelta
from burnish.core.seeds import derive_seed
from burnish.core.vocabulary import StopReason
from burnish.rollout.remote.dialect import Chunk, TopLogprobs


class Tally:
    """Tokens of an answer that may come from several replicas, one after the other."""

    def __init__(self, request: GenerateRequest, arrived_s: float) -> None:
        """Nothing has come yet."""
        self.request, self.arrived_s = request, arrived_s
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.prompt_logprobs: tuple[float, ...] = ()
        self.cached_tokens = 0
        self.queued_s = 0.0
        self.first_token_s = 0.0
        self.last_s = arrived_s

    @property
    def num_tokens(self) -> int:
        """Sampled so far."""
        return len(self.token_ids)

    @property
    def can_move(self) -> bool:
        """Whether another replica can go on.

        Not where a stop string may lie across the seam, or a grammar would begin anew.
        """
        params = self.request.params
        return not self.token_ids or not (params.stop or params.grammar is not None)

    def remainder(self) -> GenerateRequest:
        """The rest of the request: what was sampled is kept and becomes part of the prompt.

        To sample all of it again would favour short answers: they are seldom hit by a failure.
        The seed is another one, or the same random numbers would be drawn twice.
        """
        done = self.num_tokens
        if not done:
            return self.request
        params = self.request.params
        return msgspec.structs.replace(
            self.request,
            prompt_ids=(*self.request.prompt_ids, *self.token_ids),
            params=msgspec.structs.replace(
                params,
                max_tokens=params.max_tokens - done,
                min_tokens=max(0, params.min_tokens - done),
                seed=derive_seed(params.seed, "moved", str(done)),
            ),
        )

    def add(self, chunk: Chunk, version: int, now_s: float) -> GenerationDelta:
        """Take tokens in."""
        if chunk.token_ids and not self.token_ids:
            self.first_token_s = now_s - self.arrived_s
        self.last_s = now_s
        versions = (version,) * len(chunk.token_ids)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += versions
        self.top_logprobs += chunk.top_logprobs
        return GenerationDelta(
            request_id=self.request.request_id,
            token_ids=chunk.token_ids,
            logprobs=chunk.logprobs,
            weight_versions=versions,
            top_logprobs=chunk.top_logprobs,
        )

    def relabel(self, start: int, versions: Sequence[int]) -> None:
        """What the server itself says about the tokens from `start` on."""
        assert start + len(versions) == self.num_tokens
        self.versions[start:] = versions

    def final(self, reason: StopReason, num_new: int = 0) -> GenerationDelta:
        """The end of a stream: the last `num_new` tokens and the whole answer."""
        start = self.num_tokens - num_new
        return GenerationDelta(
            request_id=self.request.request_id,
            token_ids=tuple(self.token_ids[start:]),
            logprobs=tuple(self.logprobs[start:]),
            weight_versions=tuple(self.versions[start:]),
            top_logprobs=tuple(self.top_logprobs[start:]),
            generation=self.result(reason),
        )

    def result(self, reason: StopReason) -> Generation:
        """The whole answer."""
        return Generation(
            request_id=self.request.request_id,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            weight_versions=tuple(self.versions),
            stop_reason=reason,
            cached_tokens=self.cached_tokens,
            top_logprobs=tuple(self.top_logprobs),
            prompt_logprobs=self.prompt_logprobs,
            queued_s=self.queued_s,
            first_token_s=self.first_token_s,
        )
