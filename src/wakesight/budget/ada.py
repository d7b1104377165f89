"""Ada-KV: inside a layer, heads whose entries score higher keep more of them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from wakesight.budget.base import Body, BudgetRequest
from wakesight.budget.best import count_best
from wakesight.budget.rounding import apportion
from wakesight.errors import RequestError


@dataclass(frozen=True)
class Ada:
    """K_h = m + (1 - alpha) c_h + alpha (R - m): the H heads of a layer share H R entries by their pooled scores.

    m: must_keep entries, each head's own first. c_h: how many of the layer's best H (R - m) other entries lie
    in head h, ties to the lower (head, position). Shares are exact rationals, rounded by largest remainder, so
    the layer's total is exactly H R; what a head does not hold goes to the others in proportion. With alpha = 0
    a head may keep nothing beyond the prefix and must_keep; alpha = 1 is flat.
    Source: Ada-KV (NeurIPS 2025; `adaptive_snapkv/monkeypatch/snapkv_utils.py`); alpha is 0.20 in kvpress
    (`adakv_press.py`, our default) and 0.5 in Ada-KV's README example. The exact total is ours.
    """

    alpha: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise RequestError(
                f"ada alpha={self.alpha} is no share: it must be 0 (pooled scores alone) to 1 (flat); 0.2 is usual"
            )

    def per_head(self, request: BudgetRequest, body: Body) -> tuple[tuple[int, ...], ...]:
        layers = zip(body.free, body.recent, body.counts, strict=True)
        return tuple(self._layer(request.per_head, *layer) for layer in layers)

    def _layer(self, mean: int, free: Tensor, recent: Tensor, held: tuple[int, ...]) -> tuple[int, ...]:
        must = recent.sum(dim=1).tolist()
        forced = [min(count, mean) for count in must]
        base = [mean - count for count in forced]
        room = [have - count for have, count in zip(held, forced, strict=True)]
        total = min(sum(base), sum(room))
        best = count_best(free, min(total, sum(held) - sum(must)))
        alpha = Fraction(str(self.alpha))  # as it is written: 0.2 is one fifth
        ideal = [(1 - alpha) * c + alpha * b for c, b in zip(best, base, strict=True)]
        shares = apportion(ideal, total, cap=room)
        return tuple(count + share for count, share in zip(forced, shares, strict=True))
