"""What a scorer is, and the few tensor steps that several of them share."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from wakesight.core import Scores, Signals


class Scorer(Protocol):
    """A frozen dataclass: fields are its settings, `reads` names the signals it needs.

    `score` must not look beyond `signals` and must return finite float32 scores for every token.
    """

    reads: ClassVar[tuple[str, ...]]

    def score(self, signals: Signals) -> Scores: ...


def trailing(tokens: int, count: int, device: torch.device) -> Tensor:
    """bool [token], true for the last `count` tokens."""
    return torch.arange(tokens, device=device) >= tokens - count


def by_kv_head(per_query_head: Tensor, kv_heads: int) -> Tensor:
    """[query_head, ...] -> [kv_head, group, ...]: the query heads that share a KV head."""
    return per_query_head.reshape(kv_heads, -1, *per_query_head.shape[1:])
