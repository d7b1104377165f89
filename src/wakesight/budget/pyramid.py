"""PyramidKV's schedule as an allocation: budgets fall arithmetically with depth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from wakesight.budget.base import BudgetRequest
from wakesight.budget.rounding import apportion
from wakesight.errors import RequestError


@dataclass(frozen=True)
class Pyramid:
    """K_l falls from 2R - R/beta in the first attention layer to R/beta in the last, total L * R exact.

    If the first layer would pass n_body it is set to n_body and the last to 2R - n_body.
    Source: PyramidKV (`pyramidkv_utils.py`, without its observation-window term), beta = 20 as GateSight
    compares it; the exact total by largest remainder is ours.
    """

    beta: float = 20.0

    def __post_init__(self) -> None:
        if not 1 <= self.beta < math.inf:
            raise RequestError(f"pyramid beta={self.beta} must be at least 1; 20 is the usual value")

    def per_layer(self, request: BudgetRequest) -> tuple[int, ...]:
        mean, layers = request.per_head, request.layers
        if layers == 1:
            return (mean,)
        last = Fraction(mean) / Fraction(self.beta)
        first = 2 * mean - last
        if first > request.n_body:
            first = Fraction(request.n_body)
            last = 2 * mean - first
        step = (first - last) / (layers - 1)
        ideal = [first - step * i for i in range(layers)]
        return apportion(ideal, layers * mean, cap=request.n_body, floor=min(mean, 1))
