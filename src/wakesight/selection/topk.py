"""Scores + budget -> kept set.

The rules: the protected prefix always stays and costs no budget; `must_keep` entries come next, the
most recent first when the budget cannot hold them all; then the highest scores, ties to the lower
position. Kept entries are listed in position order. Source: GateSight, serving section; ties ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wakesight.budget.base import Body
from wakesight.core import Budget, KeptSet, Scores
from wakesight.errors import RequestError


@dataclass(frozen=True, eq=False)
class Ranking:
    """The entries of one context, best first.

    order: per attention layer int64 positions [kv_head, n - prefix]; what a head does not hold comes last.
    body: what was ranked, for allocations that read scores.
    prefix_held: per layer bool [kv_head, prefix], which prefix entries exist; None when all do.
    """

    order: tuple[Tensor, ...]
    prefix: int
    body: Body
    prefix_held: tuple[Tensor, ...] | None = None

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Entries beyond the prefix that each head holds: [layer][kv_head]."""
        return self.body.counts


def rank(scores: Scores, prefix: int, held: Sequence[Tensor] | None = None) -> Ranking:
    """Order every head's entries beyond the prefix once; each later `take` is a mask.

    held: per attention layer bool [kv_head, token], which entries exist; None when all do.
    """
    body = Body.of(scores, prefix, held)
    order = tuple(
        _rank_layer(layer, body.must, None if body.held is None else body.held[i]) + prefix
        for i, layer in enumerate(body.scores)
    )
    return Ranking(order, prefix, body, None if held is None else tuple(layer[:, :prefix] for layer in held))


def _rank_layer(scores: Tensor, must: Tensor | None, held: Tensor | None) -> Tensor:
    if held is not None:
        held = held.to(scores.device)
        scores = scores.masked_fill(~held, -torch.inf)
    if must is None:
        return torch.sort(scores, dim=-1, descending=True, stable=True).indices
    must = must.to(scores.device).expand_as(scores)
    first = must if held is None else must & held
    order = torch.sort(scores.masked_fill(first, torch.inf), dim=-1, descending=True, stable=True).indices
    for row, count in zip(order, first.sum(dim=1).tolist(), strict=True):
        row[:count] = row[:count].flip(0)  # equal scores came lowest position first
    return order


def take(ranking: Ranking, budget: Budget) -> KeptSet:
    """The best `budget` entries of each head and the prefix entries it holds, in position order.

    Heads of a layer may differ. Raises RequestError for a budget above what a head holds.
    """
    _check_held(ranking, budget)
    kept = []
    for layer, (order, counts) in enumerate(zip(ranking.order, budget.counts, strict=True)):
        prefix = None if ranking.prefix_held is None else ranking.prefix_held[layer]
        kept.append(_ascending(order, counts, ranking.prefix, prefix))
    return KeptSet(tuple(kept))


def _check_held(ranking: Ranking, budget: Budget) -> None:
    for layer, (counts, holds) in enumerate(zip(budget.counts, ranking.held, strict=True)):
        for head, (count, held) in enumerate(zip(counts, holds, strict=True)):
            if count > held:
                raise RequestError(
                    f"attention layer {layer}, KV head {head} holds {held} entries beyond its protected prefix, "
                    f"not {count}; ask for at most {held}"
                )


def _ascending(order: Tensor, counts: Sequence[int], prefix: int, prefix_held: Tensor | None) -> tuple[Tensor, ...]:
    """The prefix and the first `counts` of each row, sorted; a mask is cheaper than a sort."""
    rows, body = order.shape
    inside = torch.zeros(rows, prefix + body, dtype=torch.bool, device=order.device)
    inside[:, :prefix] = True if prefix_held is None else prefix_held.to(order.device)
    most = max(counts, default=0)
    taken = torch.ones(rows, most, dtype=torch.bool, device=order.device)
    if min(counts, default=0) < most:
        taken &= torch.arange(most, device=order.device) < torch.tensor(counts, device=order.device)[:, None]
    inside.scatter_(1, order[:, :most], taken)
    lengths = [prefix] * rows if prefix_held is None else prefix_held.sum(dim=1).tolist()
    where = inside.nonzero()[:, 1].contiguous()
    return tuple(where.split_with_sizes([n + count for n, count in zip(lengths, counts, strict=True)]))
