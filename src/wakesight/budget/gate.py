"""Gate: attention layers whose output gate stands wider open keep more."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from wakesight.budget.base import BudgetRequest
from wakesight.budget.measured import check_exponent, measured, powered
from wakesight.budget.rounding import apportion


@dataclass(frozen=True)
class Gate:
    """K_l in proportion to w_l ** exponent, w_l the mean over the layer's KV heads of the gate table.

    The total is exact (largest remainder, ties to the lower layer), no layer gets more than n_body (what overflows
    is shared again) or less than 1 if R >= 1. Equal gates give the flat allocation. Layers with different numbers
    of KV heads share entries: the sum of heads * K_l is at most R for every head, and misses it by less than the
    largest number of heads.
    Source: GateSight `layer_power_budget`, exponent 1; cap and floor are ours.
    Raises RequestError without a gate table.
    """

    exponent: float = 1.0
    needs_table: ClassVar[str] = "gate"

    def __post_init__(self) -> None:
        check_exponent("gate", self.exponent)

    def per_layer(self, request: BudgetRequest) -> tuple[int, ...]:
        table = measured(request.tables, self.needs_table, "gate", request.layers)
        heads = [len(row) for row in table]
        means = [sum(map(Fraction, row), Fraction(0)) / len(row) for row in table]
        weights, total = powered(means, self.exponent), request.per_head * sum(heads)
        return apportion(weights, total, cap=request.n_body, floor=min(request.per_head, 1), sizes=heads)
