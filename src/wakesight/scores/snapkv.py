"""SnapKV: what the last tokens of the prompt attend to, the answer will need too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from wakesight.core import Scores, Signals
from wakesight.errors import RequestError
from wakesight.scores.base import (
    Group,
    by_kv_head,
    held_layers,
    last_queries,
    one_of,
    only_held,
    over_group,
    softmax_over,
    trailing,
    widened,
)

Pooling = Literal["max", "avg", "none"]


@dataclass(frozen=True)
class SnapKV:
    """s_i = pool_i( reduce over the group of mean_t softmax(q_t K^T / sqrt(d))_i ), t in the window.

    The window is the last `window` context tokens, causal inside itself; its own tokens are always
    kept, inside the budget. Pooling runs over the earlier positions, stride 1, same length. Positions that
    are not held get no attention and enter the pooling as 0; a query that sees no held entry counts as 0.
    Source: FasterDecoding/SnapKV `snapkv_utils.py`; window 32 and max pooling are GateSight's setting,
    kernel 7 that of SnapKV's LongBench configs, the group mean ours (`group="max"` is the variant).
    """

    window: int = 32
    kernel: int = 7
    pooling: Pooling = "max"
    group: Group = "mean"
    reads: ClassVar[tuple[str, ...]] = ("keys", "queries")

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise RequestError(
                f"snapkv needs window >= 1 and an odd kernel, got window={self.window}, kernel={self.kernel}; "
                "use window=32,kernel=7"
            )
        one_of("snapkv pooling", self.pooling, get_args(Pooling))
        one_of("snapkv group", self.group, get_args(Group))

    def score(self, signals: Signals) -> Scores:
        window = min(self.window, signals.tokens)
        layers = []
        for keys, queries, scale, held in zip(
            signals["keys"], signals["queries"], signals.scaling, held_layers(signals), strict=True
        ):
            keys, queries = widened(keys, last_queries(queries, window, f"snapkv window={self.window}"))
            layers.append(self._layer(keys, queries, scale, held))
        return Scores(tuple(layers), must_keep=trailing(signals.tokens, window, layers[0].device))

    def _layer(self, keys: Tensor, queries: Tensor, scale: float, held: Tensor | None) -> Tensor:
        tokens, window = keys.shape[1], queries.shape[1]
        grouped = by_kv_head(queries, keys.shape[0])  # [kv_head, group, window, dim]
        logits = torch.einsum("hgwd,htd->hgwt", grouped * scale, keys)
        future = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu(1)
        logits[..., tokens - window :].masked_fill_(future, float("-inf"))
        # a query with no held entry up to itself leaves NaN in the window's columns only, which are cut off here
        weights = softmax_over(logits, held)[..., : tokens - window].mean(dim=2)  # [kv_head, group, earlier]
        scores = F.pad(self._pool(over_group(weights, self.group)), (0, window))  # the window itself is must_keep
        return only_held(scores, held)

    def _pool(self, weights: Tensor) -> Tensor:
        if self.pooling == "none" or weights.shape[-1] == 0:
            return weights
        pool = F.max_pool1d if self.pooling == "max" else F.avg_pool1d
        return pool(weights, kernel_size=self.kernel, stride=1, padding=self.kernel // 2)
