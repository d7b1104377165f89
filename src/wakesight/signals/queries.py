"""The last queries of the context, for scorers that look through an observation window."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from wakesight.signals.chunk import Chunk


class QueryWindow:
    """Keeps the last `window` query rows that pass by: float [query_head, <= window, dim] after RoPE.

    Memory is window rows per layer whatever the context length; `watch` clones at most `window` rows
    per chunk. A tensor once given out as `rows` never changes.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.rows: Tensor | None = None

    def watch(self, chunk: Chunk) -> None:
        fresh = chunk.queries[:, -self.window :]
        short = self.window - fresh.shape[1]
        if self.rows is not None and short > 0:
            self.rows = torch.cat([self.rows[:, -short:], fresh], dim=1)
        else:
            self.rows = fresh.clone()

    def copy(self) -> QueryWindow:
        """A window of its own with the same rows, for a child that reads on."""
        return copy.copy(self)
