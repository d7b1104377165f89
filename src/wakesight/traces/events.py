"""Two kinds of events in a head's life, and how alarms about them are graded.

A wake event: a head that paid the needle no attention for a while pays it a lot. A drift event: the pages a head looks
at have little left in common with those it started from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wakesight.traces.bootstrap import divide
from wakesight.traces.overlap import Counts, Flags, Floats, Words, overlap, shared, size

ALARMS, TRUE_ALARMS, EVENTS, RECALLED = range(4)  # fields of a tally
LEAD = 32  # steps


@dataclass(frozen=True)
class WakeRule:
    """A head wakes when its needle share exceeds `high` after at least `quiet` steps in a row below `low`.

    Any other step ends the quiet: a share between the two thresholds, and the event itself. Source: WakeKV, prediction.
    """

    high: float = 0.2
    low: float = 0.05
    quiet: int = 8


@dataclass(frozen=True)
class DriftRule:
    """A head has drifted when the median overlap of its last `window` page sets with its baseline is below `least`.

    The baseline is the head's first page set, then the set at its last drift event. Ours: the window starts anew behind
    an event, so that overlaps with an old baseline do not count against a new one, and an event needs a full window.
    Source: WakeKV, churn (HeteroCache's style).
    """

    window: int = 8
    least: float = 0.5


def wake_events(needle: Floats, rule: WakeRule | None = None) -> Flags:
    """bool [step, head] from needle shares [step, head]: the steps at which a head wakes."""
    rule = rule or WakeRule()
    quiet = needle < rule.low
    # in a row so far, this step included: steps since the last one that was not quiet
    place = np.arange(1, len(needle) + 1)[:, None]
    row = place - np.maximum.accumulate(np.where(quiet, 0, place), axis=0)
    before = np.concatenate([np.zeros_like(row[:1]), row[:-1]])
    woken: Flags = (needle > rule.high) & (before >= rule.quiet)
    return woken


def drift(words: Words, rule: DriftRule | None = None) -> tuple[Floats, Flags]:
    """(level float64, event bool), both [step, head], from page sets [step, head, word].

    level: 1 - median overlap with the baseline over the last `window` steps since the last event (fewer right behind
    one), before an event at this step moves the baseline. Steps follow each other; heads run side by side.
    """
    rule = rule or DriftRule()
    steps, heads = words.shape[:2]
    sizes = size(words)
    level, event = np.zeros((steps, heads)), np.zeros((steps, heads), bool)
    baseline, baseline_size = words[0].copy(), sizes[0].copy()
    recent = np.full((rule.window, heads), np.nan)  # a ring; NaN: nothing yet since the last event
    for step in range(steps):
        recent[step % rule.window] = overlap(shared(words[step], baseline), sizes[step], baseline_size)
        middle, filled = _median(recent)
        level[step] = 1 - middle
        fired = (filled == rule.window) & (middle < rule.least)
        event[step] = fired
        baseline[fired], baseline_size[fired] = words[step, fired], sizes[step, fired]
        recent[:, fired] = np.nan
    return level, event


def _median(recent: Floats) -> tuple[Floats, Counts]:
    """Median of the numbers in every column of [window, head], and how many there are (at least one)."""
    filled = np.isfinite(recent).sum(axis=0)
    ordered = np.sort(recent, axis=0)  # NaN last
    columns = np.arange(recent.shape[1])
    return (ordered[(filled - 1) // 2, columns] + ordered[filled // 2, columns]) / 2, filled


class Grader:
    """Marks alarms about the events of one run, head by head.

    An event at t is recalled by an alarm s of the same head with t - lead <= s < t. An alarm at s is true if an event t
    has s < t <= s + lead. Source: WakeKV, prediction study (grading at lead 32).
    """

    def __init__(self, events: Flags, lead: int = LEAD) -> None:
        self.lead = min(lead, len(events))
        self.events = events
        self.soon = _within_next(events, lead)
        self._steps, self._heads = np.nonzero(events)

    def tally(self, alarms: Flags) -> Counts:
        """int64 [head, 4] from alarms [step, head]: alarms, true alarms, events, recalled events."""
        heads = self.events.shape[1]
        padded = np.concatenate([np.zeros((self.lead, heads), bool), alarms])  # row t + k is step t - lead + k
        earlier = padded[self._steps[:, None] + np.arange(self.lead), self._heads[:, None]]  # [event, lead]
        recalled = np.bincount(self._heads, weights=earlier.any(axis=1), minlength=heads)
        counts = [alarms.sum(axis=0), (alarms & self.soon).sum(axis=0), self.events.sum(axis=0), recalled]
        return np.stack(counts, axis=-1).astype(np.int64)

    def chance(self) -> Counts:
        """int64 [head, 4]: the tally of an alarm at every step, whose precision is that of alarms at random."""
        return self.tally(np.ones_like(self.events))


def _within_next(events: Flags, lead: int) -> Flags:
    """bool [step, head]: an event in the `lead` steps after this one."""
    steps = len(events)
    so_far = np.concatenate([np.zeros((1, events.shape[1]), np.int64), np.cumsum(events, axis=0)])  # before step t
    after = np.arange(1, steps + 1)
    until = np.minimum(after + lead, steps)
    found: Flags = so_far[until] > so_far[after]
    return found


def precision(tally: Floats) -> Floats:
    """True alarms / alarms; NaN without an alarm."""
    return divide(tally[..., TRUE_ALARMS], tally[..., ALARMS])


def recall(tally: Floats) -> Floats:
    """Recalled events / events; NaN without an event."""
    return divide(tally[..., RECALLED], tally[..., EVENTS])


def f1(tally: Floats) -> Floats:
    """2 P R / (P + R). 0 without an alarm, or with none that is true; NaN without an event."""
    right, found = precision(tally), recall(tally)
    score = divide(2 * right * found, right + found)
    return np.where(np.isnan(found), np.nan, np.where(np.isnan(score), 0.0, score))
