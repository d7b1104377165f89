"""Does the token just written announce a wake-up? Found on the first half of every run, tried on the second.

Source: WakeKV, prediction study (token markers); one-sided test, step-level grading and the edges of the halves: ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wakesight.traces.events import LEAD, Grader, f1, precision, recall
from wakesight.traces.overlap import Counts, Flags


@dataclass(frozen=True)
class MarkerRule:
    """least_count: of a token in the discovery halves, to be tested. ahead: steps behind a token in which any head may
    wake. alpha: of the whole family of tests; each of m tokens is tested one-sided at alpha / m (Bonferroni)."""

    least_count: int = 5
    ahead: int = 8
    alpha: float = 0.05


def marker_test(
    tokens: Sequence[Counts], events: Sequence[Flags], rule: MarkerRule | None = None, lead: int = LEAD
) -> dict[str, Any]:
    """Markers found on first halves, and what alarms at them are worth on second halves.

    tokens: int64 [step] per run. events: bool [step, head] per run. A step is an event when any head wakes at it.
    held_out: alarms, true alarms, events and recalled ones counted in steps; base_precision: that of an alarm at every
    step. Nothing of a second half is seen before: a discovery step counts if its `ahead` steps end within its half.
    """
    rule = rule or MarkerRule()
    waking: list[Flags] = [np.logical_or.reduce(one, axis=1, keepdims=True) for one in events]  # [step, 1]
    halves = [len(one) // 2 for one in tokens]
    written, followed = [], []
    for ids, wake, half in zip(tokens, waking, halves, strict=True):
        usable = max(0, half - rule.ahead)
        written.append(ids[:usable])
        followed.append(Grader(wake[:half], rule.ahead).soon[:usable, 0])
    tested, found = discover(np.concatenate(written), np.concatenate(followed), rule)
    tally, chance = np.zeros(4), np.zeros(4)
    for ids, wake, half in zip(tokens, waking, halves, strict=True):
        grader = Grader(wake[half:], lead)
        tally += grader.tally(np.isin(ids[half:], [one["token"] for one in found])[:, None])[0]
        chance += grader.chance()[0]
    names = ("alarms", "true_alarms", "events", "recalled")
    marks = {"precision": precision, "recall": recall, "f1": f1}
    return {
        "tested": tested,
        "found": found,
        "base_rate": _number(np.concatenate(followed).mean()) if any(map(len, followed)) else None,
        "held_out": dict(zip(names, map(int, tally), strict=True))
        | {name: _number(mark(tally)) for name, mark in marks.items()},
        "base_precision": _number(precision(chance)),
    }


def discover(tokens: Counts, followed: Flags, rule: MarkerRule) -> tuple[int, list[dict[str, Any]]]:
    """(how many tokens were tested, the markers among them, by falling z) from pooled steps [step].

    followed: whether a head wakes in the steps ahead. A marker: {"token", "count", "followed", "z", "p"}.
    """
    ids, place, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    hits = np.bincount(place, weights=followed, minlength=len(ids)).astype(np.int64)
    testable = np.flatnonzero(counts >= rule.least_count).tolist()
    found = []
    for at in testable:
        z = two_proportions(int(hits[at]), int(counts[at]), int(followed.sum()), len(tokens))
        p = math.erfc(z / math.sqrt(2)) / 2  # of a standard normal above z
        if p < rule.alpha / len(testable):
            found.append({"token": int(ids[at]), "count": int(counts[at]), "followed": int(hits[at]), "z": z, "p": p})
    return len(testable), sorted(found, key=lambda one: (-one["z"], one["token"]))


def two_proportions(hits: int, count: int, all_hits: int, total: int) -> float:
    """Pooled-variance z of a token's share hits / count against that of all other steps; 0 if nothing varies."""
    others = total - count
    pooled = all_hits / total
    if others == 0 or pooled in (0.0, 1.0):
        return 0.0
    apart = hits / count - (all_hits - hits) / others
    return apart / math.sqrt(pooled * (1 - pooled) * (1 / count + 1 / others))


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
