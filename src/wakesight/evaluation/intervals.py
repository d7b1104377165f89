"""Means with intervals that respect which rows share a context, and paired differences between arms.

Questions of one context share its text, its prefill and its kept set, so they are no independent samples:
the bootstrap draws whole contexts. All functions are seeded and give the same numbers for the same rows.

Which interval a mean has is decided in `_interval` alone: the bootstrap's; where every context gave the same, what
that many equal contexts leave open; none where a task has one context.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 2000
FLIPS = 20_000  # sign assignments, where not all are counted: the smallest p is one over this
EXACT = 12  # contexts up to which every assignment of signs is counted
Z = 1.959964  # of a normal distribution's middle 95 %
SAME = 1e-9  # means that differ by less agree: sums of floats need not come out alike
Grades = Mapping[str, Sequence[float]]  # context id -> grades of its questions
Limits = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """mean: over all questions. low, high: 95% interval over contexts, both None if a task has one context only."""

    mean: float
    low: float | None
    high: float | None
    questions: int
    contexts: int


@dataclass(frozen=True)
class Difference(Estimate):
    """Of two arms on the same questions. p_value: two-sided, sign flips of whole contexts."""

    p_value: float = 1.0


def estimate(grades: Grades, seed: int = 0, limits: Limits | None = (0.0, 1.0)) -> Estimate:
    """Mean of all grades with its interval. limits: what a grade lies between; None for what has no bounds."""
    return estimate_over_tasks({"": grades}, seed, limits)


def estimate_over_tasks(
    tasks: Mapping[str, Grades], seed: int = 0, limits: Limits | None = (0.0, 1.0)
) -> Estimate:  # fmt: skip
    """Mean over tasks of their means, every task weighing the same; the bootstrap draws contexts within each task."""
    point, means = 0.0, np.zeros(DRAWS)
    for place, name in enumerate(sorted(tasks)):
        sums, counts = _clusters(tasks[name])
        drawn = _drawn(seed, place, len(sums))
        means += (drawn @ sums) / (drawn @ counts) / len(tasks)
        point += float(sums.sum() / counts.sum()) / len(tasks)
    low, high = _interval(tasks, point, means, limits) or (None, None)
    questions = sum(len(grades) for task in tasks.values() for grades in task.values())
    return Estimate(point, low, high, questions, sum(map(len, tasks.values())))


def _interval(
    tasks: Mapping[str, Grades], point: float, drawn_means: np.ndarray, limits: Limits | None
) -> Limits | None:  # fmt: skip
    """The 95% interval of a mean over tasks, by the one rule of three that applies.

    A task with one context shows nothing of how contexts differ: no interval. Where the contexts of every task gave
    the same, the bootstrap has nothing to draw from, yet n equal contexts do not prove that the next one is equal
    too: up to a share of z2 / (n + z2) of all contexts (Wilson's bound for none of n) may be unlike them, and theirs
    may be any grade within `limits`. For grades that are all 0 or all 1 this is Wilson's interval. Otherwise, and for
    what has no limits, it is the percentile bootstrap.
    """
    if any(len(task) < 2 for task in tasks.values()):
        return None
    if limits is None or not all(map(_agree, tasks.values())):
        low, high = np.quantile(drawn_means, [0.025, 0.975])
        return float(low), float(high)
    # Every task weighs the same: as many contexts count as one mean of equal weights would have.
    contexts = len(tasks) ** 2 / sum(1 / len(task) for task in tasks.values())
    unlike = Z**2 / (contexts + Z**2)
    return point - unlike * (point - limits[0]), point + unlike * (limits[1] - point)


def _agree(grades: Grades) -> bool:
    """Whether every context has the same mean."""
    sums, counts = _clusters(grades)
    return float(np.ptp(sums / counts)) < SAME


def difference(
    first: Grades, second: Grades, seed: int = 0, limits: Limits | None = (0.0, 1.0)
) -> Difference:  # fmt: skip
    """first - second, question by question. Both must hold the same contexts with the same questions.

    limits: what a grade of either lies between, as for `estimate`.
    """
    return difference_over_tasks({"": first}, {"": second}, seed, limits)


def difference_over_tasks(
    first: Mapping[str, Grades], second: Mapping[str, Grades], seed: int = 0, limits: Limits | None = (0.0, 1.0)
) -> Difference:  # fmt: skip
    """Mean over tasks of first - second, every task weighing the same. Both must hold the same questions."""
    if first.keys() != second.keys():
        raise ValueError("the two arms were not run on the same questions")
    apart = {task: _apart(first[task], second[task]) for task in first}
    shares = []  # what each context adds to the mean
    for task in sorted(apart):
        sums, counts = _clusters(apart[task])
        shares.append(sums / counts.sum() / len(apart))
    between = None if limits is None else (limits[0] - limits[1], limits[1] - limits[0])
    found = estimate_over_tasks(apart, seed, between)
    return Difference(**vars(found), p_value=_sign_flip(np.concatenate(shares), seed))


def _apart(first: Grades, second: Grades) -> dict[str, list[float]]:
    if first.keys() != second.keys() or any(len(first[c]) != len(second[c]) for c in first):
        raise ValueError("the two arms were not run on the same questions")
    return {c: [a - b for a, b in zip(first[c], second[c], strict=True)] for c in first}


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


@functools.lru_cache(maxsize=64)
def _drawn(seed: int, place: int, contexts: int) -> np.ndarray:
    """[draw, context]: how often a bootstrap draw holds each context. The same for every arm, and worked out once."""
    noise = np.random.default_rng([seed, place])
    return noise.multinomial(contexts, np.full(contexts, 1 / contexts), size=DRAWS).astype(float)


@functools.lru_cache(maxsize=16)
def _all_signs(contexts: int) -> np.ndarray:
    """[assignment, context]: every assignment of signs."""
    return 1.0 - 2 * ((np.arange(2**contexts)[:, None] >> np.arange(contexts)) & 1)


@functools.lru_cache(maxsize=4)
def _random_signs(seed: int, contexts: int) -> np.ndarray:
    """[assignment, context]"""
    return np.random.default_rng(seed).choice(np.array([-1.0, 1.0], np.float32), size=(FLIPS, contexts))


def _sign_flip(shares: np.ndarray, seed: int) -> float:
    """Share of sign assignments at least as extreme as what was seen; all of them if few contexts differ."""
    apart = shares[shares != 0]
    if not len(apart):
        return 1.0
    exact = len(apart) <= EXACT
    sums = _all_signs(len(apart)) @ apart if exact else _random_signs(seed, len(shares)) @ shares
    extreme = np.abs(sums) >= abs(shares.sum()) - 1e-12 * np.abs(shares).sum()
    return float(extreme.mean()) if exact else float((extreme.sum() + 1) / (FLIPS + 1))
