"""What chunks of a replica add to a request: tokens, their versions, and counts."""

from burnish.core.records import GenerationDelta
from burnish.rollout.remote.counters import Counters
from burnish.rollout.remote.dialect import Chunk
from burnish.rollout.remote.failures import RemoteFailure, RemoteProblem
from burnish.rollout.remote.replica import Replica
from burnish.rollout.remote.tally import Tally


class Intake:
    """Reads the answer of one replica to (the rest of) one request."""

    def __init__(
        self, replica: Replica, tally: Tally, counters: Counters, least_version: int
    ) -> None:
        """Tokens carry `least_version` where the model's own version is older."""
        self._replica, self._tally, self._counters = replica, tally, counters
        self._least_version, self._start = least_version, tally.num_tokens

    def take(self, chunk: Chunk, now_s: float) -> GenerationDelta:
        """Tokens that were read while an update was under way were sampled before it.

        Raises:
            RemoteFailure: too many came, or of weights that were never sent.
        """
        tally, counters = self._tally, self._counters
        if tally.num_tokens + len(chunk.token_ids) > tally.request.params.max_tokens:
            what = f"more than the {tally.request.params.max_tokens} tokens asked for came"
            raise RemoteFailure(RemoteProblem.MALFORMED, self._replica.url, what)
        counters.sampled_tokens += len(chunk.token_ids)
        counters.adapted_tokens += len(chunk.token_ids) * (tally.request.adapter is not None)
        counters.held_tokens += len(chunk.token_ids) * (tally.request.params.grammar is not None)
        was_first, last_s = not tally.num_tokens, tally.last_s
        delta = tally.add(chunk, self._version_of(chunk.label), now_s)
        if chunk.token_ids:
            if was_first:
                counters.first_token.add(tally.first_token_s)
            else:
                number = len(chunk.token_ids)
                counters.inter_token.add((tally.last_s - last_s) / number, number)
        return delta

    def settle(self, chunk: Chunk) -> None:
        """What the end of an answer says about all of it.

        Raises:
            RemoteFailure: its account of versions does not fit its tokens.
        """
        assert chunk.end is not None
        tally, start = self._tally, self._start
        if chunk.end.spans:
            versions: list[int] = []
            for span in chunk.end.spans:
                versions += [self._version_of(span.label)] * (span.end - span.start)
            if len(versions) != tally.num_tokens - start:
                what = f"{tally.num_tokens - start} tokens have {len(versions)} versions"
                raise RemoteFailure(RemoteProblem.MALFORMED, self._replica.url, what)
            tally.relabel(start, versions)
        cached = chunk.end.cached_tokens
        if cached is not None:
            self._counters.tells_cached = True
        cached = cached or 0
        self._counters.cached_tokens += cached
        self._counters.prompt_tokens += len(tally.request.prompt_ids) + start - cached
        if not start:
            tally.cached_tokens = cached

    def _version_of(self, label: str | None) -> int:
        return max(self._replica.version_of(label), self._least_version)
