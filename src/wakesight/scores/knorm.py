"""KNorm: keys of small norm draw attention, so they stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wakesight.core import Scores, Signals
from wakesight.scores.base import held_layers, only_held, widened


@dataclass(frozen=True)
class KNorm:
    """s_i = -||k_i||_2. Source: arXiv 2406.11430, as in NVIDIA/kvpress `knorm_press.py`."""

    reads: ClassVar[tuple[str, ...]] = ("keys",)

    def score(self, signals: Signals) -> Scores:
        layers = []
        for keys, held in zip(signals["keys"], held_layers(signals), strict=True):
            (keys,) = widened(keys)
            layers.append(only_held(-keys.norm(dim=-1), held))
        return Scores(tuple(layers))
