"""How much heads change their minds while a model writes: who is active, what each looks at, how far that drifts.

Pure functions of runs; `churn` puts the numbers of one combo (a model and a regime) together. Source: WakeKV, churn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from wakesight.traces.bootstrap import DRAWS, divide, estimate, ratio
from wakesight.traces.events import DriftRule, drift
from wakesight.traces.overlap import Counts, Flags, Floats, Words, jaccard, rco, shared, size
from wakesight.traces.page_sets import Run


@dataclass(frozen=True)
class ChurnRule:
    """active: a head is in the continuous active set above this needle share (in the binary one: it copied).

    chunk: steps behind a chunk's start over which its page set is followed; only whole chunks count. unstable: heads of
    a lower mean stability. drift: when a head has changed. draws, seed: of the bootstrap over runs.
    """

    active: float = 0.1
    chunk: int = 16
    unstable: float = 0.5
    drift: DriftRule = field(default_factory=DriftRule)
    draws: int = DRAWS
    seed: int = 0


def active_sets(run: Run, rule: ChurnRule) -> dict[str, Flags]:
    """bool [step, head] by the copy-paste score ("binary") and by the needle share ("continuous")."""
    return {"binary": run.copied, "continuous": run.needle > rule.active}


def active_jaccard(active: Flags) -> Floats:
    """J(A_t, A_t+1) for every step but the last, float64 [step - 1]; NaN where both sets are empty."""
    both = (active[1:] & active[:-1]).sum(axis=1, dtype=np.int64)
    count = active.sum(axis=1, dtype=np.int64)
    return jaccard(both, count[:-1], count[1:])


def adjacent_rco(words: Words, pages: Counts) -> Floats:
    """RCO of a head's page sets at a step and the one before, float64 [step - 1, head]. pages: in context, [step]."""
    sizes = size(words)
    return rco(shared(words[1:], words[:-1]), sizes[:-1], sizes[1:], pages[1:, None])


def stability(words: Words, pages: Counts, chunk: int = 16) -> Floats:
    """Mean RCO of the page set at a chunk's start with those of its later steps, float64 [chunk, head].

    A last chunk that is not whole is left out. Source: WakeKV, churn; FlexiCache's stability analysis.
    """
    whole = len(words) // chunk
    heads = words.shape[1]
    cut = words[: whole * chunk].reshape(whole, chunk, heads, words.shape[2])
    sizes = size(cut)
    both = shared(cut[:, 1:], cut[:, :1])
    later = pages[: whole * chunk].reshape(whole, chunk)[:, 1:, None]
    found: Floats = rco(both, np.broadcast_to(sizes[:, :1], both.shape), sizes[:, 1:], later).mean(axis=1)
    return found


def churn(runs: Sequence[Run], rule: ChurnRule | None = None) -> dict[str, Any]:
    """Churn of one combo: plain numbers, every estimate with an interval over runs, and a table of its heads.

    jaccard: of the active sets of adjacent steps, a mean over steps. rco: of adjacent page sets, over steps and heads.
    unstable: share of heads whose mean stability over all runs is below the rule's. drifting: share of heads with a
    drift event, a mean over runs; drifting_in_any_run: with one in any of them.
    """
    rule = rule or ChurnRule()
    measured = [_measure(run, rule) for run in runs]
    sets = {
        kind: {
            "jaccard": _pooled([one["jaccard"][kind] for one in measured], rule),
            "steps_counted": sum(int(one["jaccard"][kind][1]) for one in measured),
            "steps_both_empty": sum(one["skipped"][kind] for one in measured),
            "heads_per_step": _pooled([one["active_total"][kind] for one in measured], rule),
        }
        for kind in ("binary", "continuous")
    }
    stable = np.stack([one["stability"] for one in measured])  # [run, head, 2]
    drifted = np.stack([one["drift"] for one in measured])  # [run, head]
    steps = np.array([run.steps for run in runs])

    def unstable(counts: Floats) -> Floats:
        mean = ratio(counts)
        return divide((mean < rule.unstable).sum(axis=-1), np.isfinite(mean).sum(axis=-1))

    return {
        "runs": len(runs),
        "steps": int(steps.sum()),
        "steps_left_out": sum(run.left_out for run in runs),
        "layers": runs[0].layers,
        "heads": runs[0].heads,
        "chunks": int(stable[..., 1].sum(axis=0).max()),
        "active": sets,
        "rco": _pooled([one["rco"].sum(axis=0) for one in measured], rule),
        "unstable": estimate(stable, unstable, rule.draws, rule.seed),
        "drifting": _pooled([np.array([(one > 0).mean(), 1.0]) for one in drifted], rule),
        "drifting_in_any_run": float((drifted > 0).any(axis=0).mean()),
        "drift_events": int(drifted.sum()),
        "by_run": [_one_run(run, one) for run, one in zip(runs, measured, strict=True)],
        "by_head": _by_head(measured, steps, runs[0]),
    }


def study(combos: Mapping[str, Sequence[Run]], rule: ChurnRule | None = None) -> dict[str, Any]:
    """{"rule", "combos": name -> churn}."""
    rule = rule or ChurnRule()
    return {"rule": asdict(rule), "combos": {name: churn(runs, rule) for name, runs in combos.items()}}


def _measure(run: Run, rule: ChurnRule) -> dict[str, Any]:
    """What one run adds: (sum, count) pairs, per head where the name says so below."""
    active = active_sets(run, rule)
    series = {kind: active_jaccard(one) for kind, one in active.items()}
    overlap = adjacent_rco(run.words, run.pages)
    steady = stability(run.words, run.pages, rule.chunk)
    _, events = drift(run.words, rule.drift)
    return {
        "jaccard": {kind: _sum_and_count(one) for kind, one in series.items()},
        "skipped": {kind: int(np.isnan(one).sum()) for kind, one in series.items()},
        "active": {kind: one.sum(axis=0) for kind, one in active.items()},  # per head
        "active_total": {kind: np.array([one.sum(), run.steps]) for kind, one in active.items()},
        "rco": np.stack([overlap.sum(axis=0), np.full(run.heads, len(overlap))], axis=-1),  # per head
        "stability": np.stack([steady.sum(axis=0), np.full(run.heads, len(steady))], axis=-1),  # per head
        "drift": events.sum(axis=0),  # per head
    }


def _sum_and_count(series: Floats) -> Floats:
    there = series[np.isfinite(series)]
    return np.array([there.sum(), len(there)])


def _pooled(pairs: Sequence[Any], rule: ChurnRule) -> dict[str, float | None]:
    return estimate(np.stack(pairs), ratio, rule.draws, rule.seed)


def _one_run(run: Run, measured: Mapping[str, Any]) -> dict[str, Any]:
    mean = {kind: _number(ratio(pair)) for kind, pair in measured["jaccard"].items()}
    return {"name": run.name, "steps": run.steps, "jaccard": mean, "drifting": float((measured["drift"] > 0).mean())}


def _by_head(measured: Sequence[Mapping[str, Any]], steps: Counts, run: Run) -> list[dict[str, Any]]:
    """One row per head, layer by layer, pooled over runs. stability: None where no run has a whole chunk."""
    steady = ratio(sum(one["stability"] for one in measured))
    overlap = ratio(sum(one["rco"] for one in measured))
    drifted = sum(one["drift"] for one in measured)
    active = {kind: sum(one["active"][kind] for one in measured) for kind in ("binary", "continuous")}
    per_layer = run.heads // run.layers
    return [
        {
            "layer": head // per_layer,
            "head": head % per_layer,
            "stability": _number(steady[head]),
            "rco": _number(overlap[head]),
            "drift_events": int(drifted[head]),
            "active_binary": int(active["binary"][head]) / int(steps.sum()),
            "active_continuous": int(active["continuous"][head]) / int(steps.sum()),
        }
        for head in range(run.heads)
    ]


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
