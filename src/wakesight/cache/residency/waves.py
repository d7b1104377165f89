"""Attention over parts of a cache, one after the other: each part's output and log-sum-exp, and how two are merged.

Everything in float32 at least, whatever the cache is stored in: a long context is many parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """Attention over some of the entries. output: [kv_head, row, dim], normed. weight: log-sum-exp [kv_head, row]."""

    output: Tensor
    weight: Tensor


def logits_of(query: Tensor, key: Tensor, scaling: float, newest: int = 0) -> Tensor:
    """[kv_head, row, token]. query: [kv_head, group * q, dim], key: [kv_head, token, dim].

    newest: the last so many tokens of key are the queries' own, and each sees itself and what is before it.
    """
    working = torch.promote_types(query.dtype, torch.float32)
    logits = query.to(working) @ key.to(working).transpose(1, 2) * scaling
    if newest > 1:
        heads, rows, tokens = logits.shape
        hidden = torch.ones(newest, newest, dtype=torch.bool, device=logits.device).triu(1)
        tail = logits.view(heads, rows // newest, newest, tokens)[..., tokens - newest :]
        tail.masked_fill_(hidden, float("-inf"))
    return logits


def part(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, newest: int = 0, hidden: Tensor | None = None
) -> Part:  # fmt: skip
    """Attention of the rows over these entries. hidden: bool [kv_head, token], entries that are not there."""
    logits = logits_of(query, key, scaling, newest)
    if hidden is not None:  # what is not there may hold NaN
        logits = logits.masked_fill(hidden[:, None], float("-inf"))
        value = value.masked_fill(hidden[..., None], 0)
    weight = logits.logsumexp(dim=-1)
    return Part((logits - weight[..., None]).exp() @ value.to(logits.dtype), weight)


def merged(one: Part, other: Part) -> Part:
    """Attention over the entries of both."""
    share = torch.sigmoid(one.weight - other.weight)[..., None]
    return Part(torch.lerp(other.output, one.output, share), torch.logaddexp(one.weight, other.weight))
