"""H2O: heavy hitters, the entries that the context itself attended to most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from wakesight.core import Scores, Signals
from wakesight.scores.base import (
    Group,
    at_least,
    by_kv_head,
    held_layers,
    one_of,
    only_held,
    over_group,
    trailing,
    widened,
)


@dataclass(frozen=True)
class H2O:
    """s_i = reduce over the group of sum_t softmax(q_t K^T / sqrt(d))_i, over all context queries t >= i.

    The last `window` tokens are always kept, inside the budget. normalise: divide by the number of queries
    that can see i, n - i, as NVIDIA/kvpress `observed_attention_press.py` does; otherwise early tokens,
    seen by more queries, score higher. Source: arXiv 2306.14048, FMInference/H2O `modify_llama.py`, in the
    prefill form of Zefan-Cai/PyramidKV `pyramidkv_utils.py`; the group mean is ours (`group="max"` the variant).
    """

    window: int = 32
    normalise: bool = False
    group: Group = "mean"
    reads: ClassVar[tuple[str, ...]] = ("keys", "attention_sums")

    def __post_init__(self) -> None:
        at_least("h2o window", self.window, 0, "it counts the last tokens that are always kept")
        one_of("h2o group", self.group, get_args(Group))

    def score(self, signals: Signals) -> Scores:
        layers = []
        for keys, sums, held in zip(signals["keys"], signals["attention_sums"], held_layers(signals), strict=True):
            layers.append(only_held(self._layer(*widened(keys, sums)), held))
        return Scores(tuple(layers), must_keep=trailing(signals.tokens, self.window, layers[0].device))

    def _layer(self, keys: Tensor, sums: Tensor) -> Tensor:
        received = over_group(by_kv_head(sums, keys.shape[0]), self.group)
        if not self.normalise:
            return received
        tokens = keys.shape[1]
        return received / torch.arange(tokens, 0, -1, device=keys.device)  # n - i queries see token i
