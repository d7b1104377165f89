"""The same gather, one entry at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gather_reference(strips: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
    """strips: per KV head [slot, dim]; kept: per KV head int64 [count] -> per KV head [count, dim]."""
    result = []
    for strip, slots in zip(strips, kept, strict=True):
        rows = torch.zeros(len(slots), strip.shape[1], dtype=strip.dtype)
        for i, slot in enumerate(slots.tolist()):
            rows[i] = strip[slot]
        result.append(rows)
    return result
