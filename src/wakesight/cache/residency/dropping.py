"""Methods that drop while they decode, for comparison: every 128 tokens the cache is cut back to its budget, for good.

`DecodeSnapKV` keeps what the last queries attend to. `RKV` keeps that too, and drops what repeats itself: of entries
with like keys only the most recent is spared. Both always keep the last `window` entries, whose queries they judge by.
`kept` cuts by entry, as published; `kept_pages` by page, for comparison with demotion at equal pages. Pure functions of
one layer's keys and last queries; `reference` says the scores entry by entry.

Source: R-KV (https://arxiv.org/abs/2505.24133), `rkv/compression/r1_kv.py`, `snapkv.py` and `rkv/utils.py`; cutting by
page is ours.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wakesight.errors import RequestError

ROWS = 256  # of the matrix of likenesses at a time: a long context's does not fit into memory as a whole
EPSILON = 1e-8


@dataclass(frozen=True)
class DecodeDrop(ABC):
    """budget: entries per KV head after a cut. every: generated tokens from one cut to the next. window: last queries
    that judge, and last entries that stay. kernel: positions over which importance is pooled, odd.
    """

    budget: int
    every: int = 128
    window: int = 8
    kernel: int = 7

    def __post_init__(self) -> None:
        if self.every < 1 or self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise RequestError(
                f"decode-time dropping needs every >= 1, window >= 1 and an odd kernel, got every={self.every}, "
                f"window={self.window}, kernel={self.kernel}; use every=128,window=8,kernel=7"
            )
        if self.budget < self.window:
            raise RequestError(f"budget={self.budget} cannot hold the last {self.window} entries; raise it")

    def due(self, generated: int) -> bool:
        """Whether a cut follows the `generated`-th new token, from 1."""
        return generated > 0 and generated % self.every == 0

    @abstractmethod
    def scores(self, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """float32 [kv_head, n - window]: the worth of every entry before the window.

        query: [kv_head, group, window, dim], the last ones. key: [kv_head, n, dim], their own last; n > window.
        """

    def kept(self, query: Tensor, key: Tensor, scaling: float) -> Tensor | None:
        """int64 [kv_head, budget]: positions that stay, ascending; None if there is nothing to cut."""
        heads, entries = key.shape[:2]
        if entries <= self.budget:
            return None
        best = _best(self.scores(query, key, scaling), self.budget - self.window)
        own = torch.arange(entries - self.window, entries, device=key.device).expand(heads, -1)
        return torch.cat([best, own], dim=1)

    def kept_pages(self, query: Tensor, key: Tensor, scaling: float, page_size: int) -> Tensor | None:
        """int64 [kv_head, budget // page_size]: whole pages that stay, ascending; None if there is nothing to cut.

        key: as above; its pages start at 0, and what follows the last whole one always stays, as do the pages that the
        window touches, which count in the budget. A page is worth its best entry.
        """
        budget, pages = max(1, self.budget // page_size), key.shape[1] // page_size
        if pages <= budget:
            return None
        older = (key.shape[1] - self.window) // page_size  # the first page that the window touches
        lacking = pages * page_size - (key.shape[1] - self.window)
        worth = self.scores(query, key, scaling)[:, : pages * page_size]
        padded = F.pad(worth, (0, max(0, lacking)), value=math.inf)
        worth = padded.view(len(padded), pages, page_size).amax(dim=2)
        worth[:, older:] = math.inf
        return _best(worth, budget)


@dataclass(frozen=True)
class DecodeSnapKV(DecodeDrop):
    """s_i = max-pool_i( mean over the window of softmax( max over the group of q.k_i ) ), over entries before it."""

    def scores(self, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        return importance(query, key, scaling, self.kernel)


@dataclass(frozen=True)
class RKV(DecodeDrop):
    """s_i = mix * importance_i - (1 - mix) * redundancy_i. mix: 0.1 in R-KV's README, 0.07 in its code.

    like: cosine above which two keys repeat each other.
    """

    mix: float = 0.1
    like: float = 0.5

    def scores(self, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        older = key.shape[1] - self.window
        repeated = redundancy(key, self.like)[:, :older]
        return self.mix * importance(query, key, scaling, self.kernel) - (1 - self.mix) * repeated


def importance(query: Tensor, key: Tensor, scaling: float, kernel: int) -> Tensor:
    """float32 [kv_head, n - window]: pooled attention of the window's queries, which are the last ones, to the rest.

    query: [kv_head, group, window, dim], key: [kv_head, n, dim]. The group's heads are joined by their largest logit,
    before the softmax, which runs over the entries before the window.
    """
    older = key.shape[1] - query.shape[2]
    logits = query.float() @ key[:, None, :older].float().transpose(2, 3) * scaling
    weights = logits.amax(dim=1).softmax(dim=-1).mean(dim=1)
    return F.max_pool1d(weights, kernel, stride=1, padding=kernel // 2)


def redundancy(key: Tensor, like: float = 0.5) -> Tensor:
    """float32 [kv_head, n], sums to 1: how much a key repeats others, by cosine. key: [kv_head, n, dim].

    Of every key's look-alikes the most recent is not held against: its entry in that key's row counts 0 (a key without
    any has its entry for position 0 set to 0).
    """
    heads, entries = key.shape[:2]
    unit = key.float() / (key.float().norm(dim=-1, keepdim=True) + EPSILON)
    position = torch.arange(entries, device=key.device)
    total = torch.zeros(heads, entries, device=key.device)
    for start in range(0, entries, ROWS):
        rows = position[start : start + ROWS]
        cosine = unit[:, rows] @ unit.transpose(1, 2)  # [kv_head, row, n]
        cosine[:, rows - start, rows] = 0
        latest = torch.where(cosine > like, position, 0).amax(dim=-1, keepdim=True)
        total += cosine.scatter_(2, latest, 0.0).sum(dim=1)
    return (total / entries).softmax(dim=-1)


def reference(query: Tensor, key: Tensor, scaling: float, method: DecodeDrop) -> Tensor:
    """`method.scores`, entry by entry, in float64."""
    heads, entries, _ = key.shape
    older, reach = entries - method.window, method.kernel // 2
    found = torch.zeros(heads, older, dtype=torch.float64)
    for head in range(heads):
        keys = key[head].double()
        seen = torch.zeros(older, dtype=torch.float64)
        for step in range(method.window):
            logits = torch.stack([keys[:older] @ q.double() * scaling for q in query[head, :, step]])
            seen += logits.amax(0).softmax(0) / method.window
        pooled = torch.stack([seen[max(0, i - reach) : i + reach + 1].max() for i in range(older)])
        found[head] = pooled
        if isinstance(method, RKV):
            likeness = torch.zeros(entries, entries, dtype=torch.float64)
            for i in range(entries):
                for j in range(entries):
                    norms = (keys[i].norm() + EPSILON) * (keys[j].norm() + EPSILON)
                    likeness[i, j] = 0 if i == j else keys[i] @ keys[j] / norms
                alike = [j for j in range(entries) if likeness[i, j] > method.like]
                likeness[i, alike[-1] if alike else 0] = 0
            repeated = likeness.mean(0).softmax(0)[:older]
            found[head] = method.mix * pooled - (1 - method.mix) * repeated
    return found


def _best(worth: Tensor, count: int) -> Tensor:
    """int64 [kv_head, count], ascending: the positions worth most; ties to the lower."""
    order = worth.sort(dim=1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=1).values
