"""What of vLLM's Prometheus page is of use here."""

import math

from burnish.rollout.remote.dialect import Drafts, ServerCounts

# The first is the name of recent versions, the second that of those before.
_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")


def counts_on(page: str) -> ServerCounts:
    """What the page says; sums over the engines of a server, of shares the mean."""
    drafted = _total(page, "vllm:spec_decode_num_draft_tokens_total")
    accepted = _total(page, "vllm:spec_decode_num_accepted_tokens_total")
    used = _values(page, _USED[0]) or _values(page, _USED[1])
    return ServerCounts(
        drafts=None if drafted is None or accepted is None else Drafts(drafted, accepted),
        num_running=_total(page, "vllm:num_requests_running"),
        num_waiting=_total(page, "vllm:num_requests_waiting"),
        num_preemptions=_total(page, "vllm:num_preemptions_total"),
        used_page_ratio=min(max(sum(used) / len(used), 0.0), 1.0) if used else None,
    )


def _total(page: str, name: str) -> int | None:
    values = _values(page, name)
    return int(sum(values)) if values else None


def _values(page: str, name: str) -> list[float]:
    """Of all engines of a server; none if the name is not there or a value is no number."""
    lines = (line for line in page.splitlines() if line.partition("{")[0] == name)
    try:
        values = [float(line.rpartition(" ")[2]) for line in lines]
    except ValueError:
        return []
    return values if all(map(math.isfinite, values)) else []
