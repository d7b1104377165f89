"""SnapKV: what the last tokens of the prompt attend to, the answer will need too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from wakesight.core import Scores, Signals
from wakesight.errors import RequestError
from wakesight.scores.base import by_kv_head, trailing


@dataclass(frozen=True)
class SnapKV:
    """s_i = pool_i( reduce over the group of mean_t softmax(q_t K^T / sqrt(d))_i ), t in the window.

    The window is the last `window` context tokens, causal inside itself; its own tokens are always
    kept, inside the budget. Pooling runs over the earlier positions, stride 1, same length.
    Source: FasterDecoding/SnapKV `snapkv_utils.py`; window 32 and max pooling are GateSight's setting,
    kernel 7 that of SnapKV's LongBench configs, the group mean ours (`group="max"` is the variant).
    """

    window: int = 32
    kernel: int = 7
    pooling: Literal["max", "avg", "none"] = "max"
    group: Literal["mean", "max"] = "mean"
    reads: ClassVar[tuple[str, ...]] = ("keys", "queries")

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise RequestError(
                f"snapkv needs window >= 1 and an odd kernel, got window={self.window}, kernel={self.kernel}"
            )

    def score(self, signals: Signals) -> Scores:
        window = min(self.window, signals.tokens)
        layers = []
        for keys, queries, scale in zip(signals["keys"], signals["queries"], signals.scaling, strict=True):
            if queries.shape[1] < window:
                raise RequestError(
                    f"snapkv window={self.window} needs the last {window} queries, but {queries.shape[1]} were "
                    f"recorded; prefill with query_window={window} or use a smaller window"
                )
            layers.append(self._layer(keys.float(), queries[:, -window:].float(), scale))
        return Scores(tuple(layers), must_keep=trailing(signals.tokens, window, layers[0].device))

    def _layer(self, keys: Tensor, queries: Tensor, scale: float) -> Tensor:
        tokens, window = keys.shape[1], queries.shape[1]
        grouped = by_kv_head(queries, keys.shape[0])  # [kv_head, group, window, dim]
        logits = torch.einsum("hgwd,htd->hgwt", grouped * scale, keys)
        future = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu(1)
        logits[..., tokens - window :].masked_fill_(future, float("-inf"))
        weights = logits.softmax(dim=-1).mean(dim=2)[..., : tokens - window]  # [kv_head, group, earlier]
        reduced = weights.mean(dim=1) if self.group == "mean" else weights.amax(dim=1)
        return F.pad(self._pool(reduced), (0, window))  # [kv_head, token]; the window itself is must_keep

    def _pool(self, weights: Tensor) -> Tensor:
        if self.pooling == "none" or weights.shape[-1] == 0:
            return weights
        pool = F.max_pool1d if self.pooling == "max" else F.avg_pool1d
        return pool(weights, kernel_size=self.kernel, stride=1, padding=self.kernel // 2)
