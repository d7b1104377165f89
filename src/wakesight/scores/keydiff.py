"""KeyDiff: a key that differs from the average key of its head is a distinctive one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from wakesight.core import Scores, Signals
from wakesight.scores.base import held_layers, one_of, only_held, widened

Anchor = Literal["mean", "normalised_mean"]


@dataclass(frozen=True)
class KeyDiff:
    """s_i = -cos(k_i, kbar), on stored (post-RoPE) keys, kbar over the held context, its prefix included.

    anchor: "mean" takes the unnormalised mean key (GateSight's setting), "normalised_mean" the mean of
    unit keys (NVIDIA/kvpress `keydiff_press.py`). Source: arXiv 2504.15364; one pass over the context
    instead of the method's block-wise streaming, as GateSight runs it.
    """

    anchor: Anchor = "mean"
    reads: ClassVar[tuple[str, ...]] = ("keys",)

    def __post_init__(self) -> None:
        one_of("keydiff anchor", self.anchor, get_args(Anchor))

    def score(self, signals: Signals) -> Scores:
        layers = []
        for keys, held in zip(signals["keys"], held_layers(signals), strict=True):
            (keys,) = widened(keys)
            layers.append(self._layer(keys, held))
        return Scores(tuple(layers))

    def _layer(self, keys: Tensor, held: Tensor | None) -> Tensor:
        keys = only_held(keys, held)
        anchored = F.normalize(keys, dim=-1) if self.anchor == "normalised_mean" else keys
        # zeros where nothing is held only shorten the mean, and the cosine does not see lengths
        mean = anchored.mean(dim=1, keepdim=True)  # [kv_head, 1, dim]
        return only_held(-F.cosine_similarity(keys, mean, dim=-1), held)
