"""Intervals over runs. Steps and heads of one run share a prompt and an answer, so whole runs are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from wakesight.traces.overlap import Floats

DRAWS = 1000
Statistic = Callable[[Floats], Floats]  # summed counts [..., field] -> values [...]; NaN where undefined


def estimate(counts: Any, statistic: Statistic, draws: int = DRAWS, seed: int = 0) -> dict[str, float | None]:
    """{"value", "low", "high"}: a statistic of counts [run, ...] pooled over runs, and its 95% interval.

    Percentile bootstrap over runs, seeded. Draws in which the statistic is undefined are left out. None where it is
    undefined; one run alone has no spread to draw from, so its interval is None, too.
    """
    table = np.asarray(counts, dtype=np.float64)
    value = float(statistic(table.sum(axis=0)))
    found: dict[str, float | None] = {"value": value if np.isfinite(value) else None, "low": None, "high": None}
    runs = len(table)
    if runs < 2 or found["value"] is None:
        return found
    drawn = np.random.default_rng(seed).multinomial(runs, np.full(runs, 1 / runs), size=draws)
    values = statistic(np.tensordot(drawn, table, axes=1))
    values = values[np.isfinite(values)]
    if len(values):
        low, high = np.quantile(values, [0.025, 0.975])
        found |= {"low": float(low), "high": float(high)}
    return found


def ratio(counts: Floats) -> Floats:
    """Field 0 over field 1 of counts [..., 2]; NaN over zero."""
    return divide(counts[..., 0], counts[..., 1])


def divide(over: Any, under: Any) -> Floats:
    """over / under, NaN where under is 0."""
    over, under = np.asarray(over, np.float64), np.asarray(under, np.float64)
    found: Floats = np.divide(over, under, out=np.full(np.shape(under), np.nan), where=under != 0)
    return found
