"""How far a gated attention layer opens its output gate, over the whole context."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from wakesight.errors import WorkError


class OutputGate:
    """Running float64 sums of sigmoid(gate); a few numbers per layer, whatever the context length.

    mean: [query_head], over tokens and head dims. peak: [kv_head], the largest query head of the group at each
    token and dim, then the mean over tokens and dims. They are the two orders of reduction that a gate table
    may be made in: mean, then maximum of the group; or the maximum first.
    """

    def __init__(self, kv_heads: int) -> None:
        self.kv_heads = kv_heads
        self.count = 0  # tokens
        self._dim = 0
        self._sums: Tensor | None = None  # float64 [query_head]
        self._peaks: Tensor | None = None  # float64 [kv_head]

    def add(self, gate: Tensor) -> None:
        """gate: [token, query_head, dim] before the sigmoid."""
        opened = gate.float().sigmoid()
        tokens, query_heads, dim = opened.shape
        peak = opened.view(tokens, self.kv_heads, query_heads // self.kv_heads, dim).amax(dim=2)
        sums = opened.sum(dim=(0, 2), dtype=torch.float64)
        peaks = peak.sum(dim=(0, 2), dtype=torch.float64)
        self._sums = sums if self._sums is None else self._sums + sums
        self._peaks = peaks if self._peaks is None else self._peaks + peaks
        self.count, self._dim = self.count + tokens, dim

    @property
    def mean(self) -> Tensor:
        """float32 [query_head]. Raises WorkError before the first `add`."""
        return self._mean(self._sums)

    @property
    def peak(self) -> Tensor:
        """float32 [kv_head]. Raises WorkError before the first `add`."""
        return self._mean(self._peaks)

    def _mean(self, sums: Tensor | None) -> Tensor:
        if sums is None:
            raise WorkError("no output gate was seen yet; prefill a context before reading output_gate")
        return (sums / (self.count * self._dim)).float()

    def tensors(self) -> dict[str, Tensor]:
        """Its content for a file; {} before the first `add`."""
        if self._sums is None or self._peaks is None:
            return {}
        sizes = torch.tensor([self.count, self._dim])
        return {"gate.sizes": sizes, "gate.sums": self._sums, "gate.peaks": self._peaks}

    @classmethod
    def restored(cls, tensors: dict[str, Tensor]) -> OutputGate:
        """Inverse of `tensors`."""
        tap = cls(len(tensors["gate.peaks"]))
        tap.count, tap._dim = (int(size) for size in tensors["gate.sizes"])
        tap._sums, tap._peaks = tensors["gate.sums"], tensors["gate.peaks"]
        return tap

    def copy(self) -> OutputGate:
        """Sums of their own with the same content, for a child that reads on."""
        return copy.copy(self)
