"""Which pages a step wants: the K best of every KV head, by a bound or by true attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wakesight.cache.residency.waves import logits_of

Wave = Callable[[int, int], Tensor]  # pages start .. stop - 1 -> keys [kv_head, stop - start, page_size, dim]


def best_pages(worth: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(int64 [kv_head, count] page ids, their worth), the best first; equal worth: the lower id.

    worth: float32 [kv_head, page].
    """
    weights, pages = worth.sort(dim=1, descending=True, stable=True)
    return pages[:, :count], weights[:, :count].contiguous()


def true_attention(
    query: Tensor, scaling: float, rest: Tensor, pages: int, wave: Wave, at_a_time: int
) -> Tensor:  # fmt: skip
    """float32 [kv_head, page]: softmax weight of each page, summed over the group, the largest over the queries.

    query: [kv_head, group, q, dim]. rest: keys [kv_head, token, dim] that are read in any case, the q newest last.
    The pages stream past `at_a_time` at once.
    """
    heads, group, new, dim = query.shape
    flat = query.reshape(heads, group * new, dim)
    always = logits_of(flat, rest, scaling, new).logsumexp(dim=-1)
    found = []
    for start in range(0, pages, at_a_time):
        keys = wave(start, min(start + at_a_time, pages))
        logits = logits_of(flat, keys.flatten(1, 2), scaling)
        found.append(logits.view(heads, group * new, keys.shape[1], -1).logsumexp(dim=-1))
    by_page = torch.cat(found, dim=-1)  # [kv_head, group * q, page]
    total = torch.logaddexp(by_page.logsumexp(dim=-1), always)
    mass = (by_page - total[..., None]).exp().view(heads, group, new, pages)
    return mass.sum(dim=1).amax(dim=1).float()
