"""Random: the floor that every method must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from wakesight.core import Scores, Signals
from wakesight.errors import RequestError
from wakesight.scores.base import held_layers, only_held
from wakesight.signals.precision import working_dtype


@dataclass(frozen=True)
class Random:
    """s = uniform noise, drawn anew for every (layer, KV head) from `seed`; the same for equal n and seed."""

    seed: int = 0
    reads: ClassVar[tuple[str, ...]] = ("keys",)
    normalised: ClassVar[bool] = True  # so that it can be the floor of `utility_global` too

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**64:
            raise RequestError(f"random seed={self.seed} must fit into 64 bits; use a seed from -2**63 to 2**64 - 1")

    def score(self, signals: Signals) -> Scores:
        generator = torch.Generator().manual_seed(self.seed)
        layers = []
        for keys, held in zip(signals["keys"], held_layers(signals), strict=True):
            noise = torch.rand(keys.shape[:2], generator=generator)
            layers.append(only_held(noise.to(keys.device, working_dtype(keys.dtype)), held))
        return Scores(tuple(layers))
