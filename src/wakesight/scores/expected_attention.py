"""Expected Attention: the weight an entry will get if future queries look like past ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wakesight.core import Scores, Signals
from wakesight.errors import RequestError
from wakesight.scores.base import at_least, by_kv_head, held_layers, leading, only_held, softmax_over, widened
from wakesight.signals.rope import rotate

BLOCK = 1024  # tokens whose quadratic form is in memory at a time


@dataclass(frozen=True)
class ExpectedAttention:
    """s_i = (a_i + epsilon) ||v_i||, a_i = mean over the group of softmax_i(c k_i.m + c^2 k_i^T S k_i / 2).

    m and S are mean and covariance of the context's queries before RoPE, turned by the mean RoPE matrix of
    the next `horizon` positions (its identity on dims without RoPE); c is the layer's softmax scale. The
    exponent is the log of a Gaussian query's expected exp(c q.k). The first `sinks` tokens are always kept
    and, as in the source, take no part in the softmax. use_covariance=false drops the S term,
    use_values=false the ||v_i||.
    Source: NVIDIA/kvpress `expected_attention_press.py`, which leaves the scale at 1/sqrt(d).
    """

    horizon: int = 512
    sinks: int = 4
    epsilon: float = 0.0
    use_covariance: bool = True
    use_values: bool = True
    reads: ClassVar[tuple[str, ...]] = ("keys", "values", "query_mean", "query_covariance", "future_rotation")

    def __post_init__(self) -> None:
        at_least("expected_attention horizon", self.horizon, 1, "it counts the positions that questions will take")
        at_least("expected_attention sinks", self.sinks, 0, "it counts the first tokens that are always kept")
        if not 0 <= self.epsilon < math.inf:
            raise RequestError(
                f"expected_attention epsilon={self.epsilon} is added to attention weights and must be a finite number, "
                "not below 0; use epsilon=0.0"
            )

    def score(self, signals: Signals) -> Scores:
        sinks = leading(signals.tokens, self.sinks, torch.device("cpu"))
        layers = []
        for keys, values, mean, covariance, rotation, scale, held in zip(
            *(signals[name] for name in self.reads), signals.scaling, held_layers(signals), strict=True
        ):
            keys, values, mean, covariance, rotation = widened(keys, values, mean, covariance, rotation)
            cos, sin = self._mean_rotation(rotation)
            ahead = rotate(mean, cos, sin) * scale
            spread = rotate(rotate(covariance, cos, sin).mT, cos, sin) * (scale**2 / 2)  # R S R^T, for symmetric S
            after_sinks = ~sinks.to(keys.device).expand(keys.shape[:2])
            counted = after_sinks if held is None else after_sinks & held
            weights = softmax_over(self._logits(keys, ahead, spread), counted).mean(dim=1)
            if self.use_values:
                weights = (weights + self.epsilon) * values.norm(dim=-1)
            layers.append(only_held(weights, counted))
        return Scores(tuple(layers), must_keep=sinks.to(layers[0].device))

    def _mean_rotation(self, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """[2, position, rotary_dim] -> mean cosine and mean sine, [rotary_dim] each, of the next `horizon`."""
        if rotation.shape[-1] and rotation.shape[1] < self.horizon:
            raise RequestError(
                f"expected_attention horizon={self.horizon} looks further ahead than the {rotation.shape[1]} positions "
                f"whose rotation was recorded; use horizon={rotation.shape[1]} or less"
            )
        cos, sin = rotation[:, : self.horizon].mean(dim=1)
        return cos, sin

    def _logits(self, keys: Tensor, ahead: Tensor, spread: Tensor) -> Tensor:
        """keys [kv_head, token, dim], scaled moments [query_head, dim (, dim)] -> [kv_head, group, token]."""
        ahead, spread = by_kv_head(ahead, keys.shape[0]), by_kv_head(spread, keys.shape[0])
        blocks = []
        for first in range(0, keys.shape[1], BLOCK):
            block = keys[:, first : first + BLOCK]
            logits = torch.einsum("hgd,hbd->hgb", ahead, block)
            if self.use_covariance:
                turned = torch.einsum("hbd,hgde->hgbe", block, spread)
                logits += (turned * block.unsqueeze(1)).sum(dim=-1)
            blocks.append(logits)
        return torch.cat(blocks, dim=-1)
