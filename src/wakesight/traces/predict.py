"""Can a head's wake-up be seen coming? Four signals, alarms that know the past only, and what they are worth.

Pure functions of runs; `predict` puts the numbers of one combo (a model and a regime) together, with the marker test
(markers.py) and the burstiness of events (burstiness.py). Source: WakeKV, prediction study.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from wakesight.traces import burstiness, markers
from wakesight.traces.bootstrap import DRAWS, estimate
from wakesight.traces.churn import adjacent_rco
from wakesight.traces.events import LEAD, DriftRule, Grader, WakeRule, drift, f1, precision, recall, wake_events
from wakesight.traces.overlap import Counts, Flags, Floats
from wakesight.traces.page_sets import Run
from wakesight.traces.thresholds import CANDIDATES, hindsight

SIGNALS = ("page_change", "drift", "entropy_trend", "needle_delta")
TALLY = ("alarms", "true_alarms", "events", "recalled")
HEADS = 64  # whose windows are laid out at a time


@dataclass(frozen=True)
class AlarmRule:
    """An alarm: a signal whose z-score over the head's `past` steps before this one exceeds `z`.

    window: steps that the two trends look back. least_std: floor of the standard deviation (of the population). votes:
    signals that must alarm at one step for the ensemble. lead: steps within which an alarm must come true.
    """

    window: int = 8
    past: int = 32
    z: float = 2.0
    least_std: float = 1e-6
    votes: int = 2
    lead: int = LEAD


@dataclass(frozen=True)
class PredictRule:
    """Everything the study depends on. candidates: thresholds tried in hindsight. draws, seed: of the bootstrap."""

    wake: WakeRule = field(default_factory=WakeRule)
    drift: DriftRule = field(default_factory=DriftRule)
    alarm: AlarmRule = field(default_factory=AlarmRule)
    markers: markers.MarkerRule = field(default_factory=markers.MarkerRule)
    bursts: burstiness.BurstRule = field(default_factory=burstiness.BurstRule)
    candidates: int = CANDIDATES
    draws: int = DRAWS
    seed: int = 0


def signals(run: Run, rule: PredictRule) -> dict[str, Floats]:
    """The four signals, float64 [step, head]; NaN at the first steps, where one does not exist yet.

    page_change: 1 - RCO of the pages with those of the step before. drift: 1 - median overlap with the baseline.
    entropy_trend, needle_delta: the value less its mean over the `window` steps before. No step sees a later one.
    """
    change = 1 - adjacent_rco(run.words, run.pages)
    nothing = np.full((1, run.heads), np.nan)
    return {
        "page_change": np.concatenate([nothing, change]),
        "drift": drift(run.words, rule.drift)[0],
        "entropy_trend": trend(run.entropy, rule.alarm.window),
        "needle_delta": trend(run.needle, rule.alarm.window),
    }


def trend(values: Floats, window: int) -> Floats:
    """x_t less the mean of the `window` values before it, [step, head]; NaN where there are fewer."""
    mean, _ = _past(values, window)
    found: Floats = values - mean
    return found


def z_scores(values: Floats, past: int = 32, least_std: float = 1e-6) -> Floats:
    """(x_t - mean) / std over the `past` values before step t, which does not count itself; [step, head].

    NaN where one of them is missing.
    """
    mean, std = _past(values, past)
    found: Floats = (values - mean) / np.maximum(std, least_std)
    return found


def alarms(found: Mapping[str, Floats], rule: AlarmRule) -> dict[str, Flags]:
    """bool [step, head] per signal, and of the "ensemble", from the signals of one run."""
    raised = {name: z_scores(one, rule.past, rule.least_std) > rule.z for name, one in found.items()}
    votes = np.sum(list(raised.values()), axis=0)
    return raised | {"ensemble": votes >= rule.votes}


def predict(runs: Sequence[Run], rule: PredictRule | None = None) -> dict[str, Any]:
    """The prediction study of one combo: plain numbers, every estimate with an interval over runs.

    detectors: the four signals and their ensemble at the causal z-score, and "chance", an alarm at every step.
    hindsight: per signal, what its best thresholds would have reached. silent_steps: share of steps at which no z-score
    exists yet. best_signal: of the four, by F1; None without an event.
    """
    rule = rule or PredictRule()
    woken = [wake_events(run.needle, rule.wake) for run in runs]
    graders = [Grader(one, rule.alarm.lead) for one in woken]
    found = [signals(run, rule) for run in runs]
    raised = [alarms(one, rule.alarm) for one in found]
    detectors = {
        name: summary([grader.tally(one[name]).sum(axis=0) for grader, one in zip(graders, raised, strict=True)], rule)
        for name in (*SIGNALS, "ensemble")
    }
    detectors["chance"] = summary([grader.chance().sum(axis=0) for grader in graders], rule)
    reached = {
        name: {
            kind: summary(tally, rule)
            for kind, tally in hindsight([one[name] for one in found], graders, rule.candidates).items()
        }
        for name in SIGNALS
    }
    events = sum(int(one.sum()) for one in woken)
    steps = sum(run.steps for run in runs)
    silent = sum(min(run.steps, rule.alarm.past) for run in runs)
    return {
        "runs": len(runs),
        "steps": steps,
        "steps_left_out": sum(run.left_out for run in runs),
        "layers": runs[0].layers,
        "heads": runs[0].heads,
        "events": events,
        "heads_with_events": int(np.any([one.any(axis=0) for one in woken], axis=0).sum()),
        "silent_steps": silent / steps,
        "detectors": detectors,
        "best_signal": max(SIGNALS, key=lambda name: detectors[name]["f1"]["value"]) if events else None,
        "hindsight": reached,
        "markers": markers.marker_test([run.tokens for run in runs], woken, rule.markers, rule.alarm.lead),
        "bursts": burstiness.bursts(woken, rule.bursts, rule.draws, rule.seed),
        "by_run": [
            {"name": run.name, "steps": run.steps, "events_at": one.sum(axis=1).tolist()}
            for run, one in zip(runs, woken, strict=True)
        ],
    }


def study(combos: Mapping[str, Sequence[Run]], rule: PredictRule | None = None) -> dict[str, Any]:
    """{"rule", "combos": name -> prediction study}."""
    rule = rule or PredictRule()
    return {"rule": asdict(rule), "combos": {name: predict(runs, rule) for name, runs in combos.items()}}


def summary(tallies: Sequence[Counts] | Counts, rule: PredictRule) -> dict[str, Any]:
    """Tallies int64 [run, 4] -> the pooled counts, and precision, recall and F1 with their intervals over runs."""
    table = np.stack(list(tallies))
    counts = dict(zip(TALLY, table.sum(axis=0).tolist(), strict=True))
    marks = {"precision": precision, "recall": recall, "f1": f1}
    return counts | {name: estimate(table, mark, rule.draws, rule.seed) for name, mark in marks.items()}


def _past(values: Floats, window: int) -> tuple[Floats, Floats]:
    """Mean and standard deviation of the `window` values before each step, [step, head]; NaN where there are fewer."""
    mean, std = np.full(values.shape, np.nan), np.full(values.shape, np.nan)
    if len(values) > window:
        for first in range(0, values.shape[1], HEADS):
            here = slice(first, first + HEADS)
            before = np.lib.stride_tricks.sliding_window_view(values[:-1, here], window, axis=0)
            mean[window:, here], std[window:, here] = before.mean(axis=-1), before.std(axis=-1)
    return mean, std
