"""How well a prediction orders entries by utility: rank correlation, overlap and coverage of the best k.

All take [row, entry] tensors (a row is a KV head), work in float64 and give one number per row. Ties go to the lower
index wherever a best k is taken.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST_K = 4


def best_count(entries: int, k_frac: float) -> int:
    """k = max(4, floor(k_frac * entries)), and never more than there are."""
    # 0.29 * 100 is 28.999999999999996, which means 29
    return min(entries, max(LEAST_K, math.floor(k_frac * entries + 1e-9)))


def top(values: Tensor, count: int) -> Tensor:
    """int64 [row, count]: where the largest values are, best first, equal ones by index."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def top_mask(values: Tensor, count: int) -> Tensor:
    """bool [row, entry], true for the `count` largest."""
    return torch.zeros_like(values, dtype=torch.bool).scatter_(-1, top(values, count), True)


def average_ranks(values: Tensor) -> Tensor:
    """float64 ranks [row, entry] from 1; equal values share the mean of their ranks."""
    ordered, order = values.sort(dim=-1, stable=True)
    entries = values.shape[-1]
    places = torch.arange(entries, device=values.device).expand(values.shape)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    last = torch.ones_like(new)
    last[..., :-1] = new[..., 1:]
    first_of = torch.where(new, places, 0).cummax(dim=-1).values
    last_of = torch.where(last, places, entries).flip(-1).cummin(dim=-1).values.flip(-1)
    shared = (first_of + last_of).double() / 2 + 1
    return torch.empty_like(shared).scatter_(-1, order, shared)


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Pearson correlation of two [..., entry] tensors along the last axis; 0 where one of them is constant."""
    a, b = (x.double() - x.double().mean(dim=-1, keepdim=True) for x in (a, b))
    scale = a.square().sum(dim=-1).sqrt() * b.square().sum(dim=-1).sqrt()
    return torch.where(scale > 0, (a * b).sum(dim=-1) / scale.clamp_min(1e-300), 0.0)


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Rank correlation rho, average ranks for ties: float64 [row]; 0 where one side is constant (it orders nothing)."""
    return correlation(average_ranks(a), average_ranks(b))


def overlap(predicted: Tensor, utility: Tensor, k_frac: float = 0.1) -> Tensor:
    """|best k predicted and best k true| / k: float64 [row]."""
    k = best_count(utility.shape[-1], k_frac)
    return (top_mask(predicted, k) & top_mask(utility, k)).sum(dim=-1).double() / k


def coverage(predicted: Tensor, utility: Tensor, k_frac: float = 0.1) -> Tensor:
    """Utility of the best k predicted over that of the best k true: float64 [row]; 1 where there is no utility."""
    k = best_count(utility.shape[-1], k_frac)
    utility = utility.double()
    found, most = (utility.gather(-1, top(x, k)).sum(dim=-1) for x in (predicted, utility))
    return torch.where(most > 0, found / most.clamp_min(1e-300), 1.0)


def measures(predicted: Tensor, utility: Tensor, k_frac: float = 0.1) -> Tensor:
    """rho, overlap and coverage as float64 [row, 3], with one sort of each side."""
    k = best_count(utility.shape[-1], k_frac)
    guess, truth = top(predicted, k), top(utility, k)
    mask = torch.zeros_like(utility, dtype=torch.bool).scatter_(-1, truth, True)
    utility64 = utility.double()
    found, most = (utility64.gather(-1, where).sum(dim=-1) for where in (guess, truth))
    covered = torch.where(most > 0, found / most.clamp_min(1e-300), 1.0)
    return torch.stack([spearman(predicted, utility), mask.gather(-1, guess).sum(dim=-1).double() / k, covered], dim=-1)
