"""One run as the studies read it: the pages every head looked at, packed as bits, beside its scores.

A trace is read once, in blocks of steps (the large arrays may lie compressed on disk). Everything after that is small:
a head is one (layer, query head), its wanted set at a step the pages of its top-64 positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wakesight.errors import RequestError
from wakesight.traces.overlap import Counts, Flags, Floats, Words, pack
from wakesight.traces.schema import Trace

BLOCK = 2**24  # (step, head, page) marks unpacked at a time: 16 MiB
UNKNOWN = "unknown"


@dataclass(frozen=True, eq=False)
class Run:
    """One generated answer. head: (layer, query head), layer by layer.

    words: uint64 [step, head, word], the wanted pages. entropy: float64 [step, head] in nats, of the renormalised
    top-64 weights. needle: float64 [step, head], the needle share. copied: bool [step, head], the copy-paste score.
    tokens: int64 [step], the token generated at the step. pages: int64 [step], pages in context.
    left_out: steps beside the longest stretch without a gap, where damaged chunks were skipped.
    """

    name: str
    words: Words
    entropy: Floats
    needle: Floats
    copied: Flags
    tokens: Counts
    pages: Counts
    layers: int
    model: str
    regime: str
    left_out: int = 0

    @property
    def steps(self) -> int:
        return len(self.words)

    @property
    def heads(self) -> int:
        """Of all layers together."""
        return int(self.words.shape[1])

    @property
    def combo(self) -> str:
        """What runs are pooled by, as the paper's combos: "model / regime"."""
        return f"{self.model} / {self.regime}"


def read_run(trace: Trace) -> Run:
    """The longest stretch of a trace without a gap (all of it, as a rule).

    Raises RequestError for a trace without a step, or with a position outside its own context.
    """
    if trace.steps == 0:
        raise RequestError(f"the trace {trace.name} holds no decode step yet; record some, then measure")
    start, stop = longest_stretch(trace.step)
    context = np.asarray(trace.ctx_len[start:stop], dtype=np.int64)
    pages = -(-context // trace.page_size)
    heads, count = trace.layers * trace.query_heads, int(pages.max())
    block = max(1, BLOCK // (heads * max(count, 1)))
    words, entropy = [], []
    for first in range(start, stop, block):
        last = min(first + block, stop)
        positions = np.asarray(trace.topk_idx[first:last]).reshape(last - first, heads, -1)
        weights = np.asarray(trace.topk_val[first:last], dtype=np.float64).reshape(positions.shape)
        _check(trace, positions, context[first - start : last - start], first)
        words.append(pack(positions // trace.page_size, count))
        entropy.append(entropies(np.where(positions < 0, 0.0, weights)))
    return Run(
        name=trace.name,
        words=np.concatenate(words),
        entropy=np.concatenate(entropy),
        needle=np.asarray(trace.needle[start:stop], dtype=np.float64).reshape(-1, heads),
        copied=np.asarray(trace.copy[start:stop], dtype=bool).reshape(-1, heads),
        tokens=np.asarray(trace.tokens[start:stop], dtype=np.int64),
        pages=pages,
        layers=trace.layers,
        model=str(trace.meta.get("model", UNKNOWN)),
        regime=str(trace.meta.get("regime", UNKNOWN)),
        left_out=trace.steps - (stop - start),
    )


def by_combo(traces: Iterable[Trace]) -> dict[str, list[Run]]:
    """Runs by "model / regime", in order of the name; a trace that has just begun, without a step, is left out.

    Raises RequestError where nothing is there to measure, or for a combo of traces with different heads.
    """
    found: dict[str, list[Run]] = {}
    for trace in traces:
        if trace.steps == 0:
            continue
        run = read_run(trace)
        before = found.setdefault(run.combo, [])
        if before and (before[0].layers, before[0].heads) != (run.layers, run.heads):
            raise RequestError(
                f"the traces {before[0].name} and {run.name} of {run.combo} have {before[0].heads} and {run.heads} "
                "heads, so they come from different models; measure them apart"
            )
        before.append(run)
    if not found:
        raise RequestError("there is no decode step to measure; record some with: wakesight trace record")
    return dict(sorted(found.items()))


def longest_stretch(step: NDArray[Any]) -> tuple[int, int]:
    """[start, stop) of the longest part of rising step numbers without a gap; of equal ones the first."""
    edges = [0, *(np.flatnonzero(np.diff(step) != 1) + 1).tolist(), len(step)]
    return max(itertools.pairwise(edges), key=lambda stretch: stretch[1] - stretch[0])


def entropies(weights: Floats) -> Floats:
    """Entropy in nats of weights [..., k] scaled to sum 1; 0 where all are zero. Source: WakeKV, prediction study."""
    total = weights.sum(axis=-1, keepdims=True)
    share = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    found: Floats = -(share * logs).sum(axis=-1)
    return found


def _check(trace: Trace, positions: NDArray[Any], context: Counts, first: int) -> None:
    beyond = positions.max(axis=(1, 2)) >= context
    if beyond.any():
        at = int(np.argmax(beyond))
        raise RequestError(
            f"step {trace.step[first + at]} of the trace {trace.name} names position {int(positions[at].max())}, but "
            f"its context holds {int(context[at])}; the trace is damaged, so record or import it again"
        )
