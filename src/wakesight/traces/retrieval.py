"""Two scores of a head at a decode step: does it copy from the needle, and what share of its attention is there.

Source: "Retrieval Heads are Dynamic" (arXiv 2602.11162), Eq. 1 and 2; sizes of sink and local set, and that a needle
position is never left out, as WakeKV's section on the attention log has them; the floor is ours.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Retrieval:
    """sinks: first positions, local: positions before the query, which both count in a denominator only where the
    needle is. floor: the least denominator. own: whether the query's own position is local too; read literally, "the
    last 32 positions before the query" do not hold it."""

    sinks: int = 4
    local: int = 32
    floor: float = 1e-6
    own: bool = False

    def needle_share(self, rows: Tensor, needle: Tensor) -> Tensor:
        """Eq. 2. rows: [..., position], attention of the newest position's query. needle: bool [position] -> [...]."""
        position = torch.arange(rows.shape[-1], device=rows.device)
        query = rows.shape[-1] - 1
        local = (position >= query - self.local) & ((position < query) | self.own)
        counted = needle | ~((position < self.sinks) | local)
        sums = rows @ torch.stack([needle, counted], dim=1).to(rows.dtype)
        return sums[..., 0] / sums[..., 1].clamp_min(self.floor)

    def settings(self) -> dict[str, float]:
        return asdict(self)


def copied(rows: Tensor, needle: Tensor, ids: Tensor, token: int) -> Tensor:
    """Eq. 1: whether the most attended position (the first of equals) is in the needle and holds `token`.

    rows: [..., position]. needle: bool [position]. ids: [position], of the text. -> bool [...].
    """
    best = rows.argmax(dim=-1)
    return needle[best] & (ids[best] == token)
