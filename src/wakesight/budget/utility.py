"""Utility: attention layers in which more of the cache mattered keep more."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from wakesight.budget.base import BudgetRequest
from wakesight.budget.measured import check_exponent, measured, powered
from wakesight.budget.rounding import apportion


@dataclass(frozen=True)
class Utility:
    """K_l in proportion to m_l ** exponent, m_l the sum over the layer's KV heads of the table `utility_mass`.

    The table holds, per head, the utility in its best entries, meaned over the documents that the estimator was
    fitted on. Total, cap, floor, rounding and layers with different numbers of KV heads as in `gate`. It reads no
    score, and all heads of a layer keep the same count.
    Source: ours. Raises RequestError without the table.
    """

    exponent: float = 1.0
    needs_table: ClassVar[str] = "utility_mass"

    def __post_init__(self) -> None:
        check_exponent("utility", self.exponent)

    def per_layer(self, request: BudgetRequest) -> tuple[int, ...]:
        table = measured(request.tables, self.needs_table, "utility", request.layers)
        heads = [len(row) for row in table]
        sums = [sum(map(Fraction, row), Fraction(0)) for row in table]
        weights, total = powered(sums, self.exponent), request.per_head * sum(heads)
        return apportion(weights, total, cap=request.n_body, floor=min(request.per_head, 1), sizes=heads)
