"""Scores + budget -> kept set.

The rules: the protected prefix always stays and costs no budget; `must_keep` entries come next, the
most recent first when the budget cannot hold them all; then the highest scores, ties to the lower
position. Kept entries are listed in position order. Source: GateSight, serving section; ties ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wakesight.core import Budget, KeptSet, Scores
from wakesight.errors import RequestError


@dataclass(frozen=True)
class Ranking:
    """Body positions per attention layer, best first: int64 [kv_head, n - prefix]."""

    order: tuple[Tensor, ...]
    prefix: int


def rank(scores: Scores, prefix: int) -> Ranking:
    """Order every head's entries beyond the prefix once; each later `take` is a slice and a sort."""
    must = None if scores.must_keep is None else scores.must_keep[prefix:]
    return Ranking(tuple(_rank_layer(layer[:, prefix:], must) + prefix for layer in scores.layers), prefix)


def _rank_layer(scores: Tensor, must: Tensor | None) -> Tensor:
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    if must is None or not must.any():
        return order
    must = must.to(order.device)
    recent_first = must.nonzero().flatten().flip(0).expand(order.shape[0], -1)
    others = order[~must[order]].view(order.shape[0], -1)
    return torch.cat([recent_first, others], dim=-1)


def take(ranking: Ranking, budget: Budget) -> KeptSet:
    """The best `budget` entries of each head and the prefix, in position order.

    Raises RequestError for a budget above what a head holds, or for heads of one layer that differ
    (per-head budgets need ragged storage, which is not built yet).
    """
    kept = []
    for layer, (order, counts) in enumerate(zip(ranking.order, budget.counts, strict=True)):
        count = counts[0]
        if len(set(counts)) > 1:
            raise RequestError(f"attention layer {layer} got uneven budgets per KV head; use a per-layer allocation")
        if count > order.shape[1]:
            raise RequestError(f"attention layer {layer} has {order.shape[1]} entries per KV head, not {count}")
        kept.append(_ascending(order[:, :count], ranking.prefix, ranking.prefix + order.shape[1]))
    return KeptSet(tuple(kept))


def _ascending(body: Tensor, prefix: int, tokens: int) -> Tensor:
    """The prefix and `body`, sorted, as int64 [kv_head, prefix + count]; a mask is cheaper than a sort."""
    inside = torch.zeros(body.shape[0], tokens, dtype=torch.bool, device=body.device)
    inside[:, :prefix] = True
    inside.scatter_(1, body, True)
    return inside.nonzero()[:, 1].view(body.shape[0], -1)
