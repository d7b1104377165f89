"""How the best entries of several heads fall to the heads, counted without sorting them."""

from __future__ import annotations

import torch
from torch import Tensor


def count_best(scores: Tensor, count: int) -> list[int]:
    """How many of the `count` highest scores lie in each row of [head, entry]; ties to the lower (head, entry).

    The count-th highest score splits the entries into those above it, which are in, and those equal to it,
    which fill what is left from the first head on. count: 0 to the number of entries.
    """
    if count == 0:
        return [0] * scores.shape[0]
    least = scores.flatten().kthvalue(scores.numel() - count + 1).values
    counts: list[int] = (scores > least).sum(dim=1).tolist()
    equal: list[int] = (scores == least).sum(dim=1).tolist()
    left = count - sum(counts)
    for head, ties in enumerate(equal):
        taken = min(ties, left)
        counts[head] += taken
        left -= taken
    return counts


def count_recent(recent: Tensor, count: int) -> list[int]:
    """How many of the `count` most recent entries lie in each row; of one position the lower heads come first.

    recent: bool [head, position], the most recent position first, which entries exist.
    """
    by_age = recent.T.flatten()
    taken = by_age & (by_age.cumsum(dim=0) <= count)
    counts: list[int] = taken.view(-1, recent.shape[0]).sum(dim=0).tolist() if recent.numel() else [0] * len(recent)
    return counts


def concatenated(layers: tuple[Tensor, ...]) -> Tensor:
    """[kv_head, entry] of every layer below each other, on the first layer's device."""
    return torch.cat([layer.to(layers[0].device) for layer in layers])
