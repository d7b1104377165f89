"""TOVA: what the last token attends to stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wakesight.core import Scores, Signals
from wakesight.scores.base import (
    by_kv_head,
    held_layers,
    last_queries,
    only_held,
    softmax_over,
    trailing,
    widened,
)


@dataclass(frozen=True)
class TOVA:
    """s_i = mean over all query heads of the layer of softmax(q_last K^T / sqrt(d))_i, one list for all KV heads.

    The last token is always kept. Where heads hold different entries, each query head's softmax runs over
    its own KV head's. Source: arXiv 2401.06104, in the prefill form of NVIDIA/kvpress `tova_press.py`.
    """

    reads: ClassVar[tuple[str, ...]] = ("keys", "queries")

    def score(self, signals: Signals) -> Scores:
        layers = []
        for keys, queries, scale, held in zip(
            signals["keys"], signals["queries"], signals.scaling, held_layers(signals), strict=True
        ):
            keys, last = widened(keys, last_queries(queries, 1, "tova"))
            layers.append(self._layer(keys, last.squeeze(1), scale, held))
        return Scores(tuple(layers), must_keep=trailing(signals.tokens, 1, layers[0].device))

    def _layer(self, keys: Tensor, query: Tensor, scale: float, held: Tensor | None) -> Tensor:
        logits = torch.einsum("hgd,htd->hgt", by_kv_head(query, keys.shape[0]) * scale, keys)
        weights = softmax_over(logits, held).mean(dim=(0, 1))  # [token]
        return only_held(weights.expand(keys.shape[0], -1), held)
