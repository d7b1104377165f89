"""The same gather, one entry at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_reference(payload: Tensor, positions: Tensor) -> Tensor:
    """payload [batch, kv_head, slot, dim], positions [kv_head, kept] -> [batch, kv_head, kept, dim]."""
    batch, heads, _, dim = payload.shape
    result = torch.zeros(batch, heads, positions.shape[1], dim, dtype=payload.dtype)
    for b in range(batch):
        for head in range(heads):
            for slot, position in enumerate(positions[head].tolist()):
                result[b, head, slot] = payload[b, head, position]
    return result
