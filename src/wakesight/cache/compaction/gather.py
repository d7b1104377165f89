"""Kept set -> new, smaller storage. Out of place: the source is only read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wakesight.cache.slots import Slots


def gather(source: Slots, kept: Sequence[Tensor], slack: int) -> Slots:
    """Copy slots `kept` (int64 [count] per KV head) of every payload, in that order.

    The new storage has room for `slack` further slots per head. A payload with one head for all KV
    heads (an index key) follows head 0's list.
    """
    target = Slots.like(source, [len(slots) for slots in kept], slack)
    for name in source.names:
        for old, new, slots in zip(source.strips(name), target.strips(name), kept, strict=False):
            torch.index_select(old, 0, slots.to(old.device), out=new)
    return target


def copy(source: Slots, slack: int) -> Slots:
    """The same entries in storage of their own."""
    target = Slots.like(source, source.lengths, slack)
    for name in source.names:
        for old, new in zip(source.strips(name), target.strips(name), strict=True):
            new.copy_(old)
    return target
