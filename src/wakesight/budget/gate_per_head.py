"""Gate per head: single KV heads whose output gate stands wider open keep more."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from wakesight.budget.base import Body, BudgetRequest
from wakesight.budget.measured import check_exponent, measured, powered
from wakesight.budget.rounding import apportion


@dataclass(frozen=True)
class GatePerHead:
    """K_{l,h} in proportion to the head's own gate ** exponent, shared among all heads of all layers at once.

    It reads no score, but its counts are per head, as those of the rules that do. The total is exact (largest
    remainder, ties to the lower layer and head); no head gets more than it holds, and what overflows is shared
    again; a head that holds anything keeps at least 1 if R >= 1.
    Source: GateSight, the comparison of budgets per KV head; exponent 1; cap, floor and rounding as in `gate`.
    Raises RequestError without a gate table.
    """

    exponent: float = 1.0
    needs_table: ClassVar[str] = "gate"

    def __post_init__(self) -> None:
        check_exponent("gate_per_head", self.exponent)

    def per_head(self, request: BudgetRequest, body: Body) -> tuple[tuple[int, ...], ...]:
        heads = [len(layer) for layer in body.counts]
        table = measured(request.tables, self.needs_table, "gate_per_head", request.layers, heads)
        weights = powered([Fraction(gate) for row in table for gate in row], self.exponent)
        held = [count for layer in body.counts for count in layer]
        some = [i for i, count in enumerate(held) if count]  # an empty head could not be given its floor
        total = min(request.per_head * len(held), sum(held))
        caps = [held[i] for i in some]
        shares = apportion([weights[i] for i in some], total, cap=caps, floor=min(request.per_head, 1))
        counts = dict(zip(some, shares, strict=True))
        each = iter(counts.get(i, 0) for i in range(len(held)))
        return tuple(tuple(itertools.islice(each, n)) for n in heads)
