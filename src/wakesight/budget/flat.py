"""Flat: every layer and head keeps the same R entries."""

from __future__ import annotations

from dataclasses import dataclass

from wakesight.budget.base import BudgetRequest


@dataclass(frozen=True)
class Flat:
    """K_l = R. Source: GateSight, the flat arm of its comparisons."""

    def per_layer(self, request: BudgetRequest) -> tuple[int, ...]:
        return (request.per_head,) * request.layers
