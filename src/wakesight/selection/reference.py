"""The selection rule as a plain loop over one head's entries; tests hold `topk` to it."""

from __future__ import annotations

from collections.abc import Sequence


def take_reference(scores: Sequence[float], must_keep: Sequence[bool], prefix: int, count: int) -> list[int]:
    """Positions that one head keeps: prefix, then must_keep (most recent first), then by score."""
    body = range(prefix, len(scores))
    forced = sorted((i for i in body if must_keep[i]), reverse=True)
    free = sorted((i for i in body if not must_keep[i]), key=lambda i: (-scores[i], i))
    return sorted([*range(prefix), *(forced + free)[:count]])
