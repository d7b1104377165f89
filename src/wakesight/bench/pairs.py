"""Alternate arms, take ratios inside each round, put an interval on them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of per-round ratios with a 95% interval (seeded bootstrap over rounds)."""

    mean: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}x [{self.low:.2f}, {self.high:.2f}] over {self.rounds} rounds"


def alternate(
    arms: Mapping[str, Callable[[], float | None]], rounds: int, on_round: Callable[[int, int], None] | None = None
) -> dict[str, list[float]]:
    """Seconds of every arm in every round. One round not counted, then A B C, C B A, A B C, ...

    An arm that returns seconds has timed itself: what it does besides its work is not counted.
    """
    names = list(arms)
    for name in names:
        arms[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        for name in names if index % 2 == 0 else reversed(names):
            start = time.perf_counter()
            own = arms[name]()
            seconds[name].append(time.perf_counter() - start if own is None else own)
        if on_round is not None:
            on_round(index + 1, rounds)
    return seconds


def ratio(numerator: list[float], denominator: list[float], seed: int = 0) -> Ratio:
    """How many times longer `numerator` took than `denominator`, round by round."""
    logs = np.log(np.asarray(numerator) / np.asarray(denominator))
    draws = np.random.default_rng(seed).choice(logs, size=(4000, len(logs))).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return Ratio(math.exp(logs.mean()), math.exp(low), math.exp(high), len(logs))


def median_ms(seconds: list[float], per: int = 1) -> float:
    """Median milliseconds of one of `per` equal steps."""
    return float(np.median(seconds)) / per * 1e3
