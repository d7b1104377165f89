"""Random: the floor that every method must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from wakesight.core import Scores, Signals
from wakesight.errors import RequestError


@dataclass(frozen=True)
class Random:
    """s = uniform noise, drawn anew for every (layer, KV head) from `seed`; the same for equal n and seed."""

    seed: int = 0
    reads: ClassVar[tuple[str, ...]] = ("keys",)

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**64:
            raise RequestError(f"random seed={self.seed} must fit into 64 bits")

    def score(self, signals: Signals) -> Scores:
        noise = torch.Generator().manual_seed(self.seed)
        return Scores(tuple(torch.rand(keys.shape[:2], generator=noise).to(keys.device) for keys in signals["keys"]))
