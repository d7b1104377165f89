"""What thresholds chosen in hindsight would have reached: the reference above and below a causal alarm.

Both look at the raw signal and at the events themselves, so neither can be used while a model runs. "Raw global" is
one threshold for all heads, "oracle" one for each head. Source: WakeKV, prediction study; how they are searched is
ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wakesight.traces.events import Grader, f1
from wakesight.traces.overlap import Counts, Floats

CANDIDATES = 64  # thresholds tried per head: quantiles of its own values, closer together towards the top
SWEEPS = 20  # at most; each goes over all heads once


def hindsight(signals: Sequence[Floats], graders: Sequence[Grader], candidates: int = CANDIDATES) -> dict[str, Counts]:
    """Tallies int64 [run, 4] of one signal ([step, head] per run) at its best thresholds, by pooled F1.

    "raw_global": the best of `candidates` quantiles of all values. "oracle": per head, from the head's own quantiles
    and the global threshold, so that it is never worse.
    """
    values = np.concatenate(signals)
    everywhere = np.append(_quantiles(values.reshape(-1, 1), candidates)[:, 0], np.inf)
    flat = np.repeat(everywhere[:, None], values.shape[1], axis=1)
    counts = _tallies(signals, graders, flat)  # [run, candidate, head, 4]
    best = int(np.argmax(_score(counts.sum(axis=(0, 2)))))
    silence = np.full((1, values.shape[1]), np.inf)
    own = np.concatenate([_quantiles(values, candidates), flat[best : best + 1], silence])
    per_head = _tallies(signals, graders, own)
    chosen = _best_together(per_head.sum(axis=0), start=candidates)
    columns = np.arange(values.shape[1])
    return {"raw_global": counts[:, best].sum(axis=1), "oracle": per_head[:, chosen, columns].sum(axis=1)}


def _quantiles(values: Floats, count: int) -> Floats:
    """`count` values of every column, [count, column], from the least to the second largest, closer together above.

    Wake-ups are rare, so the best thresholds are high. NaN (the steps at which a signal does not exist yet, the same
    for all heads) is ignored.
    """
    there = values[np.isfinite(values).all(axis=1)]
    if not len(there):
        return np.full((count, values.shape[1]), np.inf)
    levels = 1 - np.geomspace(1, 1 / len(there), count)
    found: Floats = np.quantile(there, levels, axis=0, method="lower")
    return found


def _tallies(signals: Sequence[Floats], graders: Sequence[Grader], thresholds: Floats) -> Counts:
    """int64 [run, candidate, head, 4] from thresholds [candidate, head]; an alarm is a value above the threshold."""
    return np.stack([
        np.stack([grader.tally(signal > one) for one in thresholds])
        for signal, grader in zip(signals, graders, strict=True)
    ])  # fmt: skip


def _best_together(counts: Counts, start: int) -> Counts:
    """A candidate per head, int64 [head], from counts [candidate, head, 4]: pooled F1 is climbed one head at a time.

    Starts from `start` for every head and never goes down, so the result is at least as good as that.
    """
    heads = counts.shape[1]
    chosen = np.full(heads, start)
    total = counts[start].sum(axis=0)
    reached = float(_score(total))
    for _ in range(SWEEPS):
        before = reached
        for head in range(heads):
            scores = _score(total - counts[chosen[head], head] + counts[:, head])
            best = int(np.argmax(scores))
            if scores[best] > reached:
                total = total - counts[chosen[head], head] + counts[best, head]
                chosen[head], reached = best, float(scores[best])
        if reached == before:
            break
    return chosen


def _score(tally: Counts) -> Floats:
    """F1, 0 where there is no event."""
    return np.nan_to_num(f1(tally.astype(np.float64)))
