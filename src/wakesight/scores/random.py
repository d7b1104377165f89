"""Random: the floor that every method must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from wakesight.core import Scores, Signals


@dataclass(frozen=True)
class Random:
    """s = uniform noise, drawn anew for every (layer, KV head) from `seed`; the same for equal n and seed."""

    seed: int = 0
    reads: ClassVar[tuple[str, ...]] = ("keys",)

    def score(self, signals: Signals) -> Scores:
        noise = torch.Generator().manual_seed(self.seed)
        return Scores(tuple(torch.rand(keys.shape[:2], generator=noise).to(keys.device) for keys in signals["keys"]))
