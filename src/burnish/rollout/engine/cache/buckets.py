"""Rows of like length are gathered together."""

from collections.abc import Sequence as Seq

# Rows much shorter than the longest are attended apart, so that one long row does not pad them
# all. A bucket costs about ten small operators per layer, which this many pages pay for.
_BUCKET_RATIO = 0.6
_BUCKET_MIN_PAGES = 64


def bucket_rows(page_counts: Seq[int]) -> list[list[int]]:
    """Group rows by page count, longest first, where that saves enough padding."""
    if not page_counts:
        return []
    order = sorted(range(len(page_counts)), key=lambda i: -page_counts[i])
    buckets, start = [], 0
    while start < len(order):
        widest = page_counts[order[start]]
        cut = start
        while cut < len(order) and page_counts[order[cut]] >= _BUCKET_RATIO * widest:
            cut += 1
        saved = sum(widest - page_counts[i] for i in order[cut:])
        if saved < _BUCKET_MIN_PAGES:
            cut = len(order)
        buckets.append(sorted(order[start:cut]))
        start = cut
    return buckets
