"""What of vLLM's Prometheus page is of use here."""

from burnish.rollout.remote.dialect import Drafts


def drafts_on(page: str) -> Drafts | None:
    """How speculation does; None if the page does not say."""
    drafted = _total(page, "vllm:spec_decode_num_draft_tokens_total")
    accepted = _total(page, "vllm:spec_decode_num_accepted_tokens_total")
    return None if drafted is None or accepted is None else Drafts(drafted, accepted)


def _total(page: str, name: str) -> int | None:
    """Sum of a counter over all engines of a server; None if it is not there."""
    lines = (line for line in page.splitlines() if line.partition("{")[0] == name)
    try:
        values = [float(line.rpartition(" ")[2]) for line in lines]
        return int(sum(values)) if values else None
    except (ValueError, OverflowError):
        return None
