"""Utility, layer: what the global best entries give each layer, shared equally by its heads."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from wakesight.budget.base import Body, BudgetRequest
from wakesight.budget.pooled import Global
from wakesight.budget.rounding import apportion
from wakesight.budget.utility_global import scaled


@dataclass(frozen=True)
class UtilityLayer:
    """K_l = the mean count per head of layer l in `utility_global`'s top B, by largest remainder.

    All heads of a layer keep the same count, so a block table serves them together. The total is B exactly where
    layers have equal numbers of KV heads; where they differ it is at most B, and misses it by less than the
    largest number. A layer may keep nothing beyond the prefix. In a context whose heads hold different
    entries, a head that holds fewer than K_l keeps all of them, and the rest is not passed on.
    Source: ours. Raises RequestError as `utility_global` does.
    """

    needs_table: ClassVar[str] = "utility_peak"
    needs_normalised: ClassVar[bool] = True

    def per_head(self, request: BudgetRequest, body: Body) -> tuple[tuple[int, ...], ...]:
        best = Global().per_head(request, scaled(request, body, "utility_layer"))
        heads = [len(layer) for layer in best]
        means = [Fraction(sum(layer), len(layer)) for layer in best]
        most = [max(layer) for layer in body.counts]
        counts = apportion(means, sum(map(sum, best)), cap=most, sizes=heads)
        layers = zip(counts, body.counts, strict=True)
        return tuple(tuple(min(count, have) for have in held) for count, held in layers)
