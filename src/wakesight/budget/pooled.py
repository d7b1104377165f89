"""Global: the best entries of the whole cache, wherever they lie."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from wakesight.budget.base import Body, BudgetRequest
from wakesight.budget.best import concatenated, count_best, count_recent


@dataclass(frozen=True)
class Global:
    """The top B over all (layer, KV head, position), B = R for every head; a head may keep 0 beyond the prefix.

    must_keep entries come first, the most recent ones when B is smaller than the mask; ties go to the lower
    (layer, head, position). The count is exact, or everything if fewer entries are held. Scores of different
    layers are compared as they are, so this suits scorers with one scale (attention weights).
    Source: KVzip (NeurIPS 2025; `attention/score.py`, `pair`: one threshold over all scores and no floor per
    head); the exact count in place of a strict threshold is ours.
    """

    def per_head(self, request: BudgetRequest, body: Body) -> tuple[tuple[int, ...], ...]:
        heads = [len(layer) for layer in body.counts]
        held = sum(map(sum, body.counts))
        total = min(request.per_head * sum(heads), held)
        recent = concatenated(body.recent)
        must = int(recent.sum())
        if total <= must:
            counts = count_recent(recent, total)
        else:
            best = count_best(concatenated(body.free), total - must)
            counts = [m + c for m, c in zip(recent.sum(dim=1).tolist(), best, strict=True)]
        each = iter(counts)
        return tuple(tuple(itertools.islice(each, n)) for n in heads)
