"""Tensors for property tests, drawn cheaply, and what a budget keeps of them."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from wakesight.core import Budget, Scores
from wakesight.selection.topk import rank, take


def flags(draw, *shape: int) -> torch.Tensor:
    """A bool tensor, drawn as the bits of one number (much cheaper than one draw per entry)."""
    size = math.prod(shape)
    bits = draw(st.integers(0, 2**size - 1))
    return torch.tensor([bool(bits >> i & 1) for i in range(size)], dtype=torch.bool).view(shape)


def rows(draw, values, heads: int, tokens: int) -> torch.Tensor:
    """float32 [head, token]."""
    return torch.tensor(draw(st.lists(values, min_size=heads * tokens, max_size=heads * tokens))).view(heads, tokens)


def kept(scores: Scores, prefix: int, held, counts) -> set[tuple[int, int, int]]:
    """(layer, head, position) of everything beyond the prefix that stays under these counts."""
    chosen = take(rank(scores, prefix, held), Budget(counts)).positions
    return {
        (layer, head, position)
        for layer, heads in enumerate(chosen)
        for head, positions in enumerate(heads)
        for position in positions.tolist()
        if position >= prefix
    }
