"""The rules of both studies as loops over sets and numbers: slow, plain, and what the fast bodies must equal.

Source: WakeKV, churn and prediction. One head at a time; a page set is a Python set.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from wakesight.traces.events import DriftRule, WakeRule

Pages = frozenset[int]


def page_set(positions: Sequence[int], page_size: int) -> Pages:
    """Pages of the positions, padding (negative) dropped, duplicates merged."""
    return frozenset(position // page_size for position in positions if position >= 0)


def jaccard(first: Pages, second: Pages) -> float | None:
    """None where both are empty: such a step is skipped."""
    return len(first & second) / len(first | second) if first | second else None


def overlap(first: Pages, second: Pages) -> float:
    least = min(len(first), len(second))
    return len(first & second) / least if least else float(first == second)


def rco(first: Pages, second: Pages, pages: int) -> float:
    """pages: in context at the later step."""
    least = min(len(first), len(second))
    if least == 0 or least >= pages:
        return float(first == second)
    chance = least / pages
    return max(0.0, (len(first & second) / least - chance) / (1 - chance))


def stability(sets: Sequence[Pages], pages: Sequence[int], chunk: int) -> list[float]:
    """One number per whole chunk."""
    found = []
    for start in range(0, len(sets) - chunk + 1, chunk):
        later = range(start + 1, start + chunk)
        found.append(math.fsum(rco(sets[start], sets[step], pages[step]) for step in later) / (chunk - 1))
    return found


def drift(sets: Sequence[Pages], rule: DriftRule) -> tuple[list[float], list[bool]]:
    """(level, event) of every step."""
    baseline, recent = sets[0], list[float]()
    levels, events = [], []
    for pages in sets:
        recent = [*recent, overlap(pages, baseline)][-rule.window :]
        middle = statistics.median(recent)
        levels.append(1 - middle)
        events.append(len(recent) == rule.window and middle < rule.least)
        if events[-1]:
            baseline, recent = pages, []
    return levels, events


def wake_events(needle: Sequence[float], rule: WakeRule) -> list[bool]:
    events, quiet = [], 0
    for share in needle:
        events.append(share > rule.high and quiet >= rule.quiet)
        quiet = quiet + 1 if share < rule.low else 0
    return events


def entropy(weights: Sequence[float]) -> float:
    """In nats, of the weights scaled to sum 1."""
    total = math.fsum(weights)
    return -math.fsum(w / total * math.log(w / total) for w in weights if w > 0) if total > 0 else 0.0


def trend(values: Sequence[float], window: int) -> list[float]:
    """NaN where there are fewer than `window` values before."""
    return [
        value - math.fsum(values[at - window : at]) / window if at >= window else math.nan
        for at, value in enumerate(values)
    ]


def z_scores(values: Sequence[float], past: int, least_std: float) -> list[float]:
    """NaN where a value of the past is missing."""
    found = []
    for at, value in enumerate(values):
        before = values[at - past : at] if at >= past else [math.nan]
        if any(math.isnan(one) for one in before):
            found.append(math.nan)
            continue
        mean = math.fsum(before) / past
        std = math.sqrt(math.fsum((one - mean) ** 2 for one in before) / past)
        found.append((value - mean) / max(std, least_std))
    return found


def tally(alarms: Sequence[bool], events: Sequence[bool], lead: int) -> list[int]:
    """[alarms, true alarms, events, recalled events]."""
    alarmed = [step for step, one in enumerate(alarms) if one]
    woken = [step for step, one in enumerate(events) if one]
    true = sum(any(s < t <= s + lead for t in woken) for s in alarmed)
    recalled = sum(any(t - lead <= s < t for s in alarmed) for t in woken)
    return [len(alarmed), true, len(woken), recalled]
