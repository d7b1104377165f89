"""The selection rules as plain loops; tests hold `topk` and `pages` to them."""

from __future__ import annotations

from collections.abc import Sequence


def order_reference(scores: Sequence[float], must_keep: Sequence[bool], prefix: int, held: Sequence[bool]) -> list[int]:
    """What one head holds beyond the prefix, best first: must_keep (most recent first), then by score."""
    body = [i for i in range(prefix, len(scores)) if held[i]]
    forced = sorted((i for i in body if must_keep[i]), reverse=True)
    free = sorted((i for i in body if not must_keep[i]), key=lambda i: (-scores[i], i))
    return forced + free


def take_reference(
    scores: Sequence[float], must_keep: Sequence[bool], prefix: int, held: Sequence[bool], count: int
) -> list[int]:
    """Positions that one head keeps: the prefix entries it holds, then the first `count` of its order."""
    best = order_reference(scores, must_keep, prefix, held)[:count]
    return sorted([i for i in range(prefix) if held[i]] + best)


def lift_reference(
    scores: Sequence[float], prefix: int, held: Sequence[bool], page_size: int, reduce: str
) -> list[float]:
    """One head's scores with the score of its page at every entry beyond the prefix."""
    lifted = list(scores[:prefix])
    for i in range(prefix, len(scores)):
        start = i // page_size * page_size
        page = range(max(start, prefix), min(start + page_size, len(scores)))
        values = [scores[j] for j in page if held[j]]
        total = max(values, default=0.0) if reduce == "max" else sum(values)
        lifted.append(total / len(values) if reduce == "mean" and values else total)
    return lifted


def snap_reference(counts: Sequence[int], orders: Sequence[Sequence[int]], page_size: int) -> list[int]:
    """Entries that each head keeps in whole pages; orders: what each head holds, best first, pages together."""
    taken = [0] * len(counts)

    def next_page(head: int) -> int:
        rest = orders[head][taken[head] :]
        return sum(1 for i in rest if i // page_size == rest[0] // page_size)

    for head, count in enumerate(counts):
        while taken[head] < count and taken[head] + next_page(head) <= count:
            taken[head] += next_page(head)
    remainders = [count - have for count, have in zip(counts, taken, strict=True)]
    left = sum(remainders)
    for remainder, head in sorted((-remainder, head) for head, remainder in enumerate(remainders)):
        if remainder < 0 and next_page(head) <= left:
            left -= next_page(head)
            taken[head] += next_page(head)
    return taken
