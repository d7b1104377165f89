"""A trace as page wants: which pages every unit wanted at every step, and how much.

Source: WakeKV, section on the attention log (wanted set, page weight) and section on SnapKV in the simulator (prompt
page scores); the KV-head union is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from wakesight.errors import RequestError
from wakesight.registry import did_you_mean
from wakesight.traces.schema import PAGE, Trace

Unit = Literal["query_head", "kv_head"]
KERNEL = 7  # positions of the max-pool that SnapKV smooths prompt attention with
BLOCK = 64  # steps that are in memory at once


@dataclass(frozen=True, eq=False)
class PageWants:
    """Wants of U units over S steps, by unit, then step.

    offsets: int64 [U * S + 1]; unit u wanted pages[offsets[u * S + s] : offsets[u * S + s + 1]] at step s.
    pages: int32, each at most once per unit and step. weights: float32, attention to the page's positions.
    Within a step by rising weight, then by rising page id: the last is the step's most recent.
    pages_in_context: int32 [S]. layer_of: int32 [U]. prompt_pages: ceil(prompt_len / page_size).
    prompt_scores: float32 [U, prompt_pages], what the end of the prompt says of each prompt page.
    starts: by scorer, float32 [U, prompt_pages], how each prompt page ranks in its unit: 0 for the least.
    """

    offsets: NDArray[np.int64]
    pages: NDArray[np.int32]
    weights: NDArray[np.float32]
    units: int
    steps: int
    pages_in_context: NDArray[np.int32]
    layer_of: NDArray[np.int32]
    prompt_pages: int
    prompt_scores: NDArray[np.float32]
    page_size: int = PAGE
    unit: Unit = "query_head"
    name: str = ""
    step_numbers: NDArray[np.int32] | None = field(default=None, repr=False)
    starts: Mapping[str, NDArray[np.float32]] = field(default_factory=dict, repr=False)

    def at(self, unit: int, step: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(pages, weights) that `unit` wanted at `step`."""
        here = slice(*self.offsets[unit * self.steps + step : unit * self.steps + step + 2])
        return self.pages[here], self.weights[here]


def wants_of(
    trace: Trace, page_size: int = PAGE, unit: Unit = "query_head", layers: Sequence[int] | None = None
) -> PageWants:
    """The pages that hold each unit's logged positions; weights of one page are summed in float64, then rounded.

    unit: "query_head", or "kv_head" for the union over its query heads, weights summed. Units are numbered layer by
    layer, head by head. layers: which attention layers, in order; None takes all. The log is read in blocks of steps.
    Raises RequestError for another unit, a page size below 1, or a layer that is not there.
    """
    if unit not in get_args(Unit):
        raise RequestError(f"unknown unit {unit!r}{did_you_mean(unit, get_args(Unit))}; type query_head or kv_head")
    if page_size < 1:
        raise RequestError(f"page_size={page_size} must be at least 1; {PAGE} is the default")
    chosen = list(range(trace.layers)) if layers is None else list(layers)
    if missing := [layer for layer in chosen if not 0 <= layer < trace.layers]:
        raise RequestError(f"the trace {trace.name} has {trace.layers} layers and no layer {missing[0]}; count from 0")
    heads = [trace.query_heads if unit == "query_head" else trace.kv_heads[layer] for layer in chosen]
    offsets, pages, weights = _lists(trace, chosen, heads, page_size)
    wants = PageWants(
        offsets=offsets,
        pages=pages,
        weights=weights,
        units=sum(heads),
        steps=trace.steps,
        pages_in_context=(-(-trace.ctx_len // page_size)).astype(np.int32),
        layer_of=np.repeat(np.array(chosen, dtype=np.int32), heads),
        prompt_pages=-(-trace.prompt_len // page_size),
        prompt_scores=_prompt_scores(trace, chosen, heads, page_size),
        page_size=page_size,
        unit=unit,
        name=trace.name,
        step_numbers=trace.step,
        starts={name: _start(trace, name, chosen, heads, page_size) for name in trace.prompt_scores},
    )
    return wants if trace.prompt_mass is not None else replace(wants, prompt_scores=_first_step_scores(wants))


def _lists(
    trace: Trace, chosen: Sequence[int], heads: Sequence[int], page_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """(offsets, pages, weights): blocks of steps are worked out one by one, then put in the order of units."""
    counts = np.zeros((sum(heads), trace.steps), dtype=np.int64)
    found = []
    for first in range(0, trace.steps, BLOCK):
        steps = slice(first, min(first + BLOCK, trace.steps))
        idx, val = np.asarray(trace.topk_idx[steps]), np.asarray(trace.topk_val[steps])
        top = 0
        for layer, units in zip(chosen, heads, strict=True):
            here = slice(top, top + units), steps
            counts[here], pages, weights = _pages_of(idx[:, layer], val[:, layer], units, page_size)
            found.append((here, pages, weights))
            top += units
    offsets = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    starts = offsets[:-1].reshape(counts.shape)
    all_pages, all_weights = np.empty(offsets[-1], np.int32), np.empty(offsets[-1], np.float32)
    for here, pages, weights in found:
        places = _places(starts[here].ravel(), counts[here].ravel())
        all_pages[places], all_weights[places] = pages, weights
    return offsets, all_pages, all_weights


def _pages_of(
    idx: NDArray[np.int32], val: NDArray[np.floating], units: int, page_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """idx, val: [step, query_head, K] of one layer -> counts [unit, step], and all pages and weights in that order."""
    steps, heads, top = idx.shape
    by_unit = (steps, units, heads // units, top)
    rows = (units * steps, heads // units * top)
    idx = idx.reshape(by_unit).transpose(1, 0, 2, 3).reshape(rows)
    weights = np.where(idx >= 0, val.reshape(by_unit).transpose(1, 0, 2, 3).reshape(rows).astype(np.float64), 0.0)
    none = np.iinfo(np.int32).max
    page = np.where(idx >= 0, idx // page_size, none)
    order = np.argsort(page, axis=1, kind="stable")
    page = np.take_along_axis(page, order, axis=1)
    weights = np.take_along_axis(weights, order, axis=1)
    new = np.ones(rows, dtype=bool)
    new[:, 1:] = page[:, 1:] != page[:, :-1]
    new &= page != none
    starts = np.flatnonzero(new)
    summed = np.add.reduceat(weights.ravel(), starts) if len(starts) else np.zeros(0)  # pads behind a page weigh 0
    pages, rounded = page.ravel()[starts].astype(np.int32), summed.astype(np.float32)
    counts = new.sum(axis=1)
    order = np.lexsort((pages, rounded, np.repeat(np.arange(len(counts)), counts)))
    return counts.reshape(units, steps), pages[order], rounded[order]


def _places(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, ... for each of the runs, `count` long, one after the other."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def _prompt_scores(trace: Trace, chosen: Sequence[int], heads: Sequence[int], page_size: int) -> NDArray[np.float32]:
    """[unit, prompt page]: the unit's prompt attention, max-pooled over positions, summed per page."""
    pages = -(-trace.prompt_len // page_size)
    if trace.prompt_mass is None:
        return np.zeros((sum(heads), pages), np.float32)
    mass = np.asarray(trace.prompt_mass, dtype=np.float64)
    by_unit = [
        mass[layer].reshape(units, -1, trace.prompt_len).sum(axis=1) for layer, units in zip(chosen, heads, strict=True)
    ]
    pooled = _max_pooled(np.concatenate(by_unit))
    padded = np.pad(pooled, ((0, 0), (0, pages * page_size - trace.prompt_len)))
    scores: NDArray[np.float32] = padded.reshape(len(padded), pages, page_size).sum(axis=2).astype(np.float32)
    return scores


def _start(
    trace: Trace, scorer: str, chosen: Sequence[int], heads: Sequence[int], page_size: int
) -> NDArray[np.float32]:
    """[unit, prompt page]: a page is worth its best entry, as in a compacted child; a page without a score comes last.

    Ranks stand for scores: a first resident set needs no more, and numbers below 0 mean "no candidate" there.
    """
    pages = -(-trace.prompt_len // page_size)
    scores = trace.prompt_scores[scorer]
    padded = np.pad(scores, ((0, 0), (0, 0), (0, pages * page_size - scores.shape[2])), constant_values=-np.inf)
    best = padded.reshape(*padded.shape[:2], pages, page_size).max(axis=-1)  # [layer, KV head, page]
    by_unit = [
        np.repeat(best[layer, : trace.kv_heads[layer]], units // trace.kv_heads[layer], axis=0)
        for layer, units in zip(chosen, heads, strict=True)
    ]
    return _ranks(np.concatenate(by_unit))


def _ranks(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """How many other values of the row are lower; equal ones rank alike."""
    ordered = np.sort(values, axis=1)
    ranks = [np.searchsorted(row, found) for row, found in zip(ordered, values, strict=True)]
    return np.array(ranks, np.float32).reshape(values.shape)


def _max_pooled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[row, position] -> the largest of the KERNEL positions around each, as far as there are so many."""
    around = np.pad(values, ((0, 0), (KERNEL // 2, KERNEL // 2)), constant_values=-np.inf)
    return np.asarray(np.lib.stride_tricks.sliding_window_view(around, KERNEL, axis=1).max(axis=-1))


def _first_step_scores(wants: PageWants) -> NDArray[np.float32]:
    """Without prompt attention in the log: the first step's weights of the prompt's pages."""
    scores = np.zeros((wants.units, wants.prompt_pages), np.float32)
    if wants.steps == 0:
        return scores
    counts = np.diff(wants.offsets).reshape(wants.units, wants.steps)[:, 0]
    places = _places(wants.offsets[:-1].reshape(wants.units, wants.steps)[:, 0], counts)
    unit, page = np.repeat(np.arange(wants.units), counts), wants.pages[places]
    inside = page < wants.prompt_pages
    scores[unit[inside], page[inside]] = wants.weights[places][inside]
    return scores
