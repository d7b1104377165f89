"""The last queries of the context, for scorers that look through an observation window."""

from __future__ import annotations

import torch
from torch import Tensor


class QueryWindow:
    """Keeps the last `window` query rows that pass by: float [query_head, <= window, dim] after RoPE.

    Memory is window rows per layer whatever the context length; `watch` clones at most `window` rows
    per chunk.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.rows: Tensor | None = None

    def watch(self, query: Tensor) -> None:
        """query: [1, query_head, token, dim], the chunk's queries in order."""
        fresh = query[0, :, -self.window :]
        short = self.window - fresh.shape[1]
        if self.rows is not None and short > 0:
            self.rows = torch.cat([self.rows[:, -short:], fresh], dim=1)
        else:
            self.rows = fresh.clone()
