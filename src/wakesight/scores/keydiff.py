"""KeyDiff: a key that differs from the average key of its head is a distinctive one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F

from wakesight.core import Scores, Signals


@dataclass(frozen=True)
class KeyDiff:
    """s_i = -cos(k_i, kbar), on stored (post-RoPE) keys, kbar over the whole context and its prefix.

    anchor: "mean" takes the unnormalised mean key (GateSight's setting), "normalised_mean" the mean of
    unit keys (NVIDIA/kvpress `keydiff_press.py`). Source: arXiv 2504.15364; one pass over the prefix
    instead of the method's block-wise streaming, as GateSight runs it.
    """

    anchor: Literal["mean", "normalised_mean"] = "mean"
    reads: ClassVar[tuple[str, ...]] = ("keys",)

    def score(self, signals: Signals) -> Scores:
        layers = []
        for keys in signals["keys"]:
            keys = keys.float()
            anchored = F.normalize(keys, dim=-1) if self.anchor == "normalised_mean" else keys
            mean = anchored.mean(dim=1, keepdim=True)  # [kv_head, 1, dim]
            layers.append(-F.cosine_similarity(keys, mean, dim=-1))
        return Scores(tuple(layers))
