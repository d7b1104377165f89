"""KNorm: keys of small norm draw attention, so they stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wakesight.core import Scores, Signals


@dataclass(frozen=True)
class KNorm:
    """s_i = -||k_i||_2. Source: arXiv 2406.11430, as in NVIDIA/kvpress `knorm_press.py`."""

    reads: ClassVar[tuple[str, ...]] = ("keys",)

    def score(self, signals: Signals) -> Scores:
        return Scores(tuple(-keys.float().norm(dim=-1) for keys in signals["keys"]))
