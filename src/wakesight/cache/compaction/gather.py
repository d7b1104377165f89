"""Kept set -> new, smaller storage. Out of place: the source is only read."""

from __future__ import annotations

import torch
from torch import Tensor

from wakesight.cache.pool import Pool
from wakesight.cache.slots import Slots


def gather(source: Slots, positions: Tensor, pool: Pool, slack: int) -> Slots:
    """Copy slots `positions` (int64 [kv_head, kept]) of every payload, in that order.

    The new storage has room for `slack` further slots. A payload with one head for all KV heads
    (an index key) follows head 0's list.
    """
    kept = positions.shape[1]
    target = Slots(pool, capacity=kept + slack)
    target.reserve(max(kept, 1), {name: source.read(name) for name in source.names})
    for name in source.names:
        old, new = source.read(name), target.storage(name)
        for batch in range(old.shape[0]):
            for head in range(old.shape[1]):
                torch.index_select(old[batch, head], 0, positions[head], out=new[batch, head, :kept])
    target.length = kept
    return target
