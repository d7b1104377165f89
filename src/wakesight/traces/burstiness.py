"""Do heads wake together? Events per step against a null in which every head's events are scattered over the run.

Source: WakeKV, prediction study (burstiness and coarse trigger). The coarse trigger is chosen in hindsight: it says
what a perfect guess of the busiest moments would cover, not what a running model could know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wakesight.traces.bootstrap import estimate, ratio
from wakesight.traces.overlap import Counts, Flags


@dataclass(frozen=True)
class BurstRule:
    """fractions: of the steps that count as busiest, at least one step; z is about the first. shuffles: of the null.
    half_window: steps on either side of a trigger that it covers. seed: of the null."""

    fractions: tuple[float, ...] = (0.02, 0.05)
    shuffles: int = 200
    half_window: int = 4
    seed: int = 0


def bursts(events: Sequence[Flags], rule: BurstRule | None = None, draws: int = 1000, seed: int = 0) -> dict[str, Any]:
    """From events bool [step, head] per run: how concentrated they are, and what the coarse trigger covers.

    z: mean over runs with events of (concentration - null mean) / null sd at the first fraction. fano: Var(c) / E(c)
    over steps, a mean over runs. triggers: per fraction the pooled recall, and the share of steps that the windows
    cover. draws, seed: of the bootstrap over runs.
    """
    rule = rule or BurstRule()
    eventful = [one for one in events if one.any()]
    by_run = [_one_run(one, rule, place) for place, one in enumerate(eventful)]

    def mean(name: str) -> dict[str, float | None]:
        there = [[one[name], 1.0] for one in by_run if one[name] is not None]
        return estimate(there or [[0.0, 0.0]], ratio, draws, seed)

    def pooled(fraction: float, share: int) -> dict[str, float | None]:
        pairs = [coarse_trigger(one.sum(axis=1), fraction, rule.half_window)[share] for one in eventful]
        return estimate(pairs or [(0, 0)], ratio, draws, seed)

    return {
        "runs_with_events": len(eventful),
        "z": mean("z"),
        "fano": mean("fano"),
        "concentration": mean("concentration"),
        "triggers": [
            {"fraction": fraction, "recall": pooled(fraction, 0), "steps_covered": pooled(fraction, 1)}
            for fraction in rule.fractions
        ],
        "by_run": by_run,
    }


def concentration(counts: Counts, fraction: float) -> float:
    """Share of all events that fall in the busiest floor(fraction * steps) steps, at least one. counts: per step."""
    return float(np.sort(counts)[::-1][: busiest(len(counts), fraction)].sum() / counts.sum())


def busiest(steps: int, fraction: float) -> int:
    """How many steps a fraction is; 0.29 of 100 is 29, whatever floating point makes of the product."""
    return max(1, math.floor(round(fraction * steps, 9)))


def fano(counts: Counts) -> float:
    """Var(c) / E(c) over steps; 1 for events that fall independently."""
    return float(counts.var() / counts.mean())


def coarse_trigger(counts: Counts, fraction: float, half_window: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """((events covered, events), (steps covered, steps)) of windows around the busiest steps; ties: the first."""
    steps = len(counts)
    chosen = np.argsort(-counts, kind="stable")[: busiest(steps, fraction)]
    near = (chosen[:, None] + np.arange(-half_window, half_window + 1)).ravel()
    covered = np.unique(near[(near >= 0) & (near < steps)])
    return (int(counts[covered].sum()), int(counts.sum())), (len(covered), steps)


def scattered(per_head: Counts, steps: int, noise: np.random.Generator) -> Counts:
    """Events per step, int64 [step], with every head's events at distinct uniform steps. per_head: int64 [head]."""
    head = np.repeat(np.arange(len(per_head)), per_head)
    place = noise.integers(steps, size=len(head))
    while len(again := _second_ones(head * steps + place)):  # drawn anew until no head has two events at one step
        place[again] = noise.integers(steps, size=len(again))
    return np.bincount(place, minlength=steps)


def _second_ones(keys: Counts) -> Counts:
    """Places of every key that stands earlier, too."""
    _, first = np.unique(keys, return_index=True)
    return np.delete(np.arange(len(keys)), first)


def _one_run(events: Flags, rule: BurstRule, place: int) -> dict[str, float | None]:
    counts, per_head = events.sum(axis=1), events.sum(axis=0)
    noise = np.random.default_rng([rule.seed, place])
    seen = concentration(counts, rule.fractions[0])
    null = np.array([
        concentration(scattered(per_head, len(counts), noise), rule.fractions[0]) for _ in range(rule.shuffles)
    ])  # fmt: skip
    spread = float(null.std())
    return {
        "events": int(counts.sum()),
        "concentration": seen,
        "null": float(null.mean()),
        "z": (seen - float(null.mean())) / spread if spread > 0 else None,
        "fano": fano(counts),
    }
