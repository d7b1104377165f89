"""What one attention layer does with one chunk of tokens: the value that every tap watches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Tensors as the attention function has them, of one sequence (no batch axis).

    queries: [query_head, q, dim] after RoPE, of the q newest tokens.
    keys: per KV head [held, dim] after RoPE; the chunk's own q keys are the last q of each.
    positions: per KV head int64 [held], the logical position of each key; None when slot i holds position i.
    start: logical position of the first query. scaling: softmax scale.
    rotation: [2, q, rotary_dim], cosine and sine of RoPE at the chunk's positions, as the layer multiplied
        them in (front and back half alike; `signals/rope.py`); dims beyond rotary_dim are not rotated.
        None unless a tap asked for it or the layer has no RoPE.
    """

    queries: Tensor
    keys: tuple[Tensor, ...]
    positions: tuple[Tensor, ...] | None
    start: int
    scaling: float
    rotation: Tensor | None = None


class Tap(Protocol):
    """Listens to one attention layer during a normal forward pass; must not change what it sees."""

    def watch(self, chunk: Chunk) -> None: ...
