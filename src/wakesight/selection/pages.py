"""Eviction by page: `page_size` consecutive positions of one head stay or go together.

Pages lie at absolute multiples of the page size, so the first one beyond the protected prefix and the last
may be partial. `lift` gives the entries of a page one score, so any ranking keeps the page together; `snap`
turns a budget of entries into whole pages. Source: our residency rules, section 1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from wakesight.core import Budget, Scores
from wakesight.selection.topk import Ranking

Reduce = Literal["max", "mean", "sum"]


def lift(scores: Scores, page_size: int, reduce: Reduce, prefix: int, held: Sequence[Tensor] | None = None) -> Scores:
    """Scores [kv_head, token] in which every entry beyond the prefix has the score of its page.

    A page's score is the max, mean or sum over those of its entries that lie beyond the prefix and are held
    (per layer bool [kv_head, token], None when all are); 0 where a head holds none. One must_keep entry
    beyond the prefix makes its whole page must_keep, in every head.
    """
    layers = []
    for layer, values in enumerate(scores.layers):
        exists = None if held is None else held[layer][:, prefix:].to(values.device)
        body = _per_page(values[:, prefix:], exists, page_size, reduce, prefix)
        layers.append(torch.cat([values[:, :prefix], body], dim=1))
    must = scores.must_keep
    if must is not None:
        pages = _paged(must[None, prefix:], page_size, prefix, False).any(dim=-1)
        must = torch.cat([must[:prefix], _spread(pages, page_size, prefix, len(must) - prefix)[0]])
    return Scores(tuple(layers), must)


def _per_page(body: Tensor, exists: Tensor | None, page_size: int, reduce: Reduce, prefix: int) -> Tensor:
    exists = torch.ones_like(body, dtype=torch.bool) if exists is None else exists
    counts = _paged(exists, page_size, prefix, False).sum(dim=-1)
    if reduce == "max":
        pages = _paged(body.masked_fill(~exists, -torch.inf), page_size, prefix, -torch.inf).amax(dim=-1)
    else:
        pages = _paged(body.double().masked_fill(~exists, 0), page_size, prefix, 0).sum(dim=-1)
        if reduce == "mean":
            pages = pages / counts
    finite = torch.finfo(body.dtype)  # a sum of finite scores may leave their range
    pages = pages.masked_fill(counts == 0, 0).clamp(finite.min, finite.max).to(body.dtype)
    return _spread(pages, page_size, prefix, body.shape[1])


def _paged(body: Tensor, page_size: int, prefix: int, fill: float) -> Tensor:
    """[head, n_body] -> [head, page, page_size], padded with `fill` before the prefix ends and after the last."""
    before = prefix % page_size
    after = -(before + body.shape[1]) % page_size
    padded = torch.nn.functional.pad(body, (before, after), value=fill)
    return padded.view(body.shape[0], padded.shape[1] // page_size, page_size)


def _spread(pages: Tensor, page_size: int, prefix: int, n_body: int) -> Tensor:
    """[head, page] -> [head, n_body]: the inverse of `_paged` for values of whole pages."""
    before = prefix % page_size
    return pages.repeat_interleave(page_size, dim=1)[:, before : before + n_body]


def snap(budget: Budget, ranking: Ranking, page_size: int) -> Budget:
    """The same budget in whole pages of a ranking of lifted scores; the total never rises.

    Every head takes its best pages while they fit into its count. The entries that are left over in all heads
    together buy one more page each for the heads with the largest remainder (ties to the lower layer, then
    head); a head whose next page is larger than what is left is passed over, one without remainder has no
    claim. So a head ends at most page_size - 1 entries below its count, and a full budget keeps everything.
    """
    steps = [_steps(order, held, page_size) for order, held in zip(ranking.order, ranking.held, strict=True)]
    counts = [
        [ends[bisect_right(ends, count) - 1] for ends, count in zip(heads, asked, strict=True)]
        for heads, asked in zip(steps, budget.counts, strict=True)
    ]
    remainders = {
        (layer, head): asked - counts[layer][head]
        for layer, heads in enumerate(budget.counts)
        for head, asked in enumerate(heads)
    }
    left = sum(remainders.values())
    for (layer, head), remainder in sorted(remainders.items(), key=lambda item: (-item[1], item[0])):
        if remainder == 0 or left == 0:
            break
        ends = steps[layer][head]
        following = ends[bisect_right(ends, counts[layer][head])]
        size = following - counts[layer][head]
        if size <= left:
            counts[layer][head] = following
            left -= size
    return Budget(tuple(tuple(heads) for heads in counts))


def whole_pages(budget: Budget, page_size: int) -> list[int]:
    """Pages per layer, the same for all its heads and at least one, for a session that demotes.

    A layer gets its mean entries per head in whole pages. The entries that are left over in all layers together buy one
    more page for every head of the layers with the largest remainder (ties to the lower layer) while they last. What a
    layer without a page gets is taken from the one with most (ties to the higher layer); so the total of entries never
    rises, unless not even one page for each fits.
    """
    totals = [sum(heads) for heads in budget.counts]
    costs = [len(heads) * page_size for heads in budget.counts]
    pages = [total // cost for total, cost in zip(totals, costs, strict=True)]
    remainders = [total - count * cost for total, count, cost in zip(totals, pages, costs, strict=True)]
    left = sum(remainders)
    for layer in sorted(range(len(pages)), key=lambda layer: (-remainders[layer] / costs[layer], layer)):
        if remainders[layer] and costs[layer] <= left:
            pages[layer] += 1
            left -= costs[layer]
    for layer in (layer for layer, count in enumerate(pages) if not count):
        pages[layer], left = 1, left - costs[layer]
        while left < 0 and max(pages) > 1:
            most = max(range(len(pages)), key=lambda at: (pages[at], at))
            pages[most] -= 1
            left += costs[most]
    return pages


def _steps(order: Tensor, held: Sequence[int], page_size: int) -> list[list[int]]:
    """Per head the counts that are whole pages of its ranking, from 0 to all that it holds, ascending."""
    pages = order // page_size
    changes = pages[:, 1:] != pages[:, :-1]
    return [
        sorted({0, count, *(row[: max(count - 1, 0)].nonzero().flatten() + 1).tolist()})
        for row, count in zip(changes, held, strict=True)
    ]
