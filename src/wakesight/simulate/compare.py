"""Reactive against every other policy: at equal memory where the other holds what it holds, at equal budget else.

Source: WakeKV, section on comparisons; intervals are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from wakesight.errors import RequestError
from wakesight.simulate.specs import policy_of
from wakesight.simulate.sweep import Cell

OURS = "reactive"
DRAWS = 1000


@dataclass(frozen=True)
class Match:
    """One comparison point. memory: the other's mean resident pages; reactive, other: miss rates.

    low, high: 95% interval of reactive - other (runs drawn with replacement); None with a single run, or where no draw
    can be matched.
    """

    combo: str
    budget: int
    memory: float
    reactive: float
    other: float
    low: float | None
    high: float | None

    @property
    def won(self) -> bool:
        """Ties count as won. Source: WakeKV, section on comparisons."""
        return self.reactive <= self.other


@dataclass(frozen=True)
class Comparison:
    """match: "memory" = reactive's curve interpolated at the other's memory, "budget" = the same pages per unit.

    points: what could be matched. dropped: (combo, budget) of points whose memory no budget of reactive reaches.
    difference, low, high: mean of reactive - other over points, with its interval over runs.
    """

    other: str
    match: Literal["memory", "budget"]
    points: tuple[Match, ...]
    dropped: tuple[tuple[str, int], ...]
    difference: float | None
    low: float | None
    high: float | None

    @property
    def wins(self) -> int:
        return sum(point.won for point in self.points)

    @property
    def losses(self) -> tuple[Match, ...]:
        return tuple(point for point in self.points if not point.won)

    @property
    def combos(self) -> int:
        return len({point.combo for point in self.points})


def compare(cells: Sequence[Cell], curve: Sequence[Cell] = (), seed: int = 0) -> list[Comparison]:
    """Reactive against every other policy with a budget, in order of appearance.

    curve: further cells of reactive (a finer grid of budgets) to interpolate on. Raises RequestError without reactive
    or without anything to compare it with.
    """
    others = list(dict.fromkeys(cell.policy for cell in cells if cell.policy != OURS and cell.budget is not None))
    if not any(cell.policy == OURS for cell in cells):
        raise RequestError("a comparison is with reactive; add it to --policies")
    if not others:
        raise RequestError("there is nothing to compare reactive with; add a policy with a budget, for example evict")
    return [_against(other, cells, [*cells, *curve], seed) for other in others]


def interpolated(curve: Sequence[tuple[float, float]], memory: float) -> float | None:
    """Miss rate at `memory` on straight lines between points (memory, miss rate); None outside their range."""
    points = sorted(curve)
    if not points or not points[0][0] <= memory <= points[-1][0]:
        return None
    return float(np.interp(memory, [x for x, _ in points], [y for _, y in points]))


def _against(other: str, cells: Sequence[Cell], all_cells: Sequence[Cell], seed: int) -> Comparison:
    by_budget = policy_of(other).bounded
    points, dropped, drawn = [], [], []
    for place, combo in enumerate(dict.fromkeys(cell.combo for cell in cells)):
        ours = [cell for cell in all_cells if cell.policy == OURS and cell.combo == combo]
        for cell in [cell for cell in cells if cell.policy == other and cell.combo == combo]:
            assert cell.budget is not None
            same = [one for one in ours if one.budget == cell.budget][:1] if by_budget else ours
            memory, miss = _point(cell, np.ones(len(cell.runs)))
            reached = _matched(same, memory, np.ones(len(cell.runs)), by_budget)
            if reached is None:
                dropped.append((combo, cell.budget))
                continue
            draws = _draws(same, cell, by_budget, [seed, place])
            low, high = _interval(draws)
            points.append(Match(combo, cell.budget, memory, reached, miss, low, high))
            drawn.append(draws)
    difference = float(np.mean([point.reactive - point.other for point in points])) if points else None
    low, high = _interval(_mean(drawn)) if points else (None, None)
    how: Literal["memory", "budget"] = "budget" if by_budget else "memory"
    return Comparison(other, how, tuple(points), tuple(dropped), difference, low, high)


def _point(cell: Cell, weights: np.ndarray) -> tuple[float, float]:
    """(mean resident pages, miss rate) of runs that count `weights` times each."""
    misses, accesses, memory = _per_run(cell)
    return float(weights @ memory / weights.sum()), float(weights @ misses / max(weights @ accesses, 1))


def _per_run(cell: Cell) -> np.ndarray:
    """[misses, accesses, mean resident pages] x [run]"""
    return np.array([[t.misses.sum(), t.accesses.sum(), t.resident.mean()] for t in cell.tallies], float).T


def _matched(ours: Sequence[Cell], memory: float, weights: np.ndarray, by_budget: bool) -> float | None:
    curve = [_point(cell, weights) for cell in ours]
    return curve[0][1] if by_budget else interpolated(curve, memory)


def _draws(ours: Sequence[Cell], cell: Cell, by_budget: bool, seed: Sequence[int]) -> np.ndarray:
    """reactive - other for every draw of runs, float64 [draw]; NaN where memory is out of range.

    The seed makes all points of one combo draw the same runs.
    """
    runs = len(cell.runs)
    if runs < 2:
        return np.full(DRAWS, np.nan)
    weights = np.random.default_rng(list(seed)).multinomial(runs, np.full(runs, 1 / runs), size=DRAWS).astype(float)
    memory, miss = _drawn_points(cell, weights)
    curve = [_drawn_points(one, weights) for one in ours]
    if by_budget:
        return np.asarray(curve[0][1] - miss)
    found = np.full(DRAWS, np.nan)
    for draw in range(DRAWS):
        reached = interpolated([(held[draw], missed[draw]) for held, missed in curve], memory[draw])
        if reached is not None:
            found[draw] = reached - miss[draw]
    return found


def _drawn_points(cell: Cell, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    misses, accesses, memory = _per_run(cell)
    return weights @ memory / weights.sum(axis=1), weights @ misses / np.maximum(weights @ accesses, 1)


def _mean(drawn: Sequence[np.ndarray]) -> np.ndarray:
    """[draw]: mean over the points that could be matched in it."""
    table = np.array(drawn)
    there = np.isfinite(table)
    count = there.sum(axis=0)
    return np.asarray(np.where(count > 0, np.where(there, table, 0).sum(axis=0) / np.maximum(count, 1), np.nan))


def _interval(draws: np.ndarray) -> tuple[float | None, float | None]:
    there = draws[np.isfinite(draws)]
    if not len(there):
        return None, None
    low, high = np.quantile(there, [0.025, 0.975])
    return float(low), float(high)


def described(found: Sequence[Comparison]) -> Iterator[str]:
    """Lines for people: wins over points, coverage, the mean difference, every loss."""
    for one in found:
        kept, all_points = len(one.points), len(one.points) + len(one.dropped)
        yield (
            f"reactive against {one.other} at equal {one.match}: {one.wins} of {kept} points won, "
            f"{kept} of {all_points} points matched, {one.combos} combos"
        )
        if one.difference is not None:
            yield f"  miss rate, reactive - {one.other}: {one.difference:+.4f}{_brackets(one.low, one.high)}"
        for combo, budget in one.dropped:
            yield f"  outside reactive's range, left out: {combo}, B={budget}"
        for loss in one.losses:
            yield (
                f"  lost: {loss.combo}, B={loss.budget}, {loss.reactive:.4f} against {loss.other:.4f} at "
                f"{loss.memory:.1f} pages{_brackets(loss.low, loss.high)}"
            )


def _brackets(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" [{low:+.4f}, {high:+.4f}]"
