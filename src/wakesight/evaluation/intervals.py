"""Means with intervals that respect which rows share a context, and paired differences between arms.

Questions of one context share its text, its prefill and its kept set, so they are no independent samples:
the bootstrap draws whole contexts. All functions are seeded and give the same numbers for the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 2000
Grades = Mapping[str, Sequence[float]]  # context id -> grades of its questions


@dataclass(frozen=True)
class Estimate:
    """mean: over all questions. low, high: 95% interval (percentile bootstrap over contexts)."""

    mean: float
    low: float
    high: float
    questions: int
    contexts: int


@dataclass(frozen=True)
class Difference(Estimate):
    """Of two arms on the same questions. p_value: two-sided, sign flips of whole contexts."""

    p_value: float = 1.0


def estimate(grades: Grades, seed: int = 0) -> Estimate:
    """Mean of all grades with its interval. One context alone has no spread to draw from: the interval is its mean."""
    sums, counts = _clusters(grades)
    draws = np.random.default_rng(seed).integers(len(sums), size=(DRAWS, len(sums)))
    means = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(sums.sum() / counts.sum()), float(low), float(high), int(counts.sum()), len(sums))


def estimate_over_tasks(tasks: Mapping[str, Grades], seed: int = 0) -> Estimate:
    """Mean over tasks of their means, every task weighing the same; the bootstrap draws contexts within each task."""
    noise = np.random.default_rng(seed)
    point, means = 0.0, np.zeros(DRAWS)
    for name in sorted(tasks):
        sums, counts = _clusters(tasks[name])
        draws = noise.integers(len(sums), size=(DRAWS, len(sums)))
        means += sums[draws].sum(axis=1) / counts[draws].sum(axis=1) / len(tasks)
        point += float(sums.sum() / counts.sum()) / len(tasks)
    low, high = np.quantile(means, [0.025, 0.975])
    questions = sum(len(grades) for task in tasks.values() for grades in task.values())
    return Estimate(point, float(low), float(high), questions, sum(map(len, tasks.values())))


def difference(first: Grades, second: Grades, seed: int = 0) -> Difference:
    """first - second, question by question. Both must hold the same contexts with the same questions."""
    if first.keys() != second.keys() or any(len(first[c]) != len(second[c]) for c in first):
        raise ValueError("the two arms were not run on the same questions")
    apart = {c: [a - b for a, b in zip(first[c], second[c], strict=True)] for c in first}
    about = estimate(apart, seed)
    return Difference(**vars(about), p_value=_sign_flip(apart, seed))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment for as many comparisons as there are values."""
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(len(p_values))
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return [float(p) for p in adjusted]


def area(fractions: Sequence[float], means: Sequence[float]) -> float:
    """Mean height of the curve over its fractions (trapezoids over the range they span)."""
    order = np.argsort(fractions)
    x, y = np.asarray(fractions, float)[order], np.asarray(means, float)[order]
    if len(x) == 1:
        return float(y[0])
    return float(np.trapezoid(y, x) / (x[-1] - x[0]))


def _clusters(grades: Grades) -> tuple[np.ndarray, np.ndarray]:
    if not grades:
        raise ValueError("there are no grades")
    ordered = [grades[context] for context in sorted(grades)]
    return np.array([sum(g) for g in ordered], float), np.array([len(g) for g in ordered], float)


def _sign_flip(apart: Grades, seed: int) -> float:
    """Share of sign assignments at least as extreme as what was seen; all of them if there are few contexts."""
    sums, _ = _clusters(apart)
    sums = sums[sums != 0]
    if not len(sums):
        return 1.0
    if len(sums) <= 12:
        signs = 1 - 2 * ((np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums))) & 1)
        extreme = np.abs(signs @ sums) >= abs(sums.sum()) - 1e-12
        return float(extreme.mean())
    signs = np.random.default_rng(seed).choice([-1, 1], size=(DRAWS, len(sums)))
    extreme = np.abs(signs @ sums) >= abs(sums.sum()) - 1e-12
    return float((extreme.sum() + 1) / (DRAWS + 1))
