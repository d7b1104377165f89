"""What a step wants, what it holds, what it moves. Arrays are numpy's, or torch's in the torch body.

A *unit* is what has a resident set of its own: a (layer, KV head) in live caches, a (layer, query head) in the paper's
tables. Axes: `unit`, `column` (of the wants), `slot`, `page` (ids from 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from wakesight.errors import RequestError

Array = Any  # numpy.ndarray or torch.Tensor: the three bodies share these nouns
FirstTouch = Literal["free", "miss"]

# Stamps below every step. They sort: padding of a wants row, then empty slots, then the first resident set.
PADDING, EMPTY, START = -3, -2, -1
NEVER = 2**31 - 1  # the next use of a page that is not wanted again


@dataclass(frozen=True)
class Wants:
    """What one step reads. pages: int32 [unit, column], -1 = none, a page at most once per unit.

    weights: float32 [unit, column], the attention mass inside the page; anything where pages is -1.
    """

    pages: Array
    weights: Array


@dataclass(frozen=True)
class Moves:
    """What storage must do, int32 [move] each, `fetch` bool [move].

    The order means nothing, except that a ranking's rows come last: it may send away what has just come in.

    page_in goes to `slot`; slot -1 = used in this step and not retained. page_out leaves it; -1 = nothing was there.
    page_in -1 = the slot becomes empty. Policies without a fixed number of slots use the page's id as its slot.
    fetch: page_in is copied from the reservoir (False: it has just been written, a free first touch).
    Rows with page_in = page_out = -1 say nothing: the torch body pads, so that no step waits for the device.
    """

    unit: Array
    slot: Array
    page_in: Array
    page_out: Array
    fetch: Array

    def rows(self) -> np.ndarray:
        """int64 [move, 5] without padding, sorted: equal for equal moves, whichever body made them."""
        columns = [np.asarray(column) for column in (self.unit, self.slot, self.page_in, self.page_out, self.fetch)]
        table = np.stack([column.astype(np.int64) for column in columns], axis=1)
        table = table[(table[:, 2] >= 0) | (table[:, 3] >= 0)]
        return table[np.lexsort(table.T[::-1])]


@dataclass(frozen=True)
class Counts:
    """Pages per unit, int32 [unit]. wants = hits + misses + first_touches.

    first_touches: the free ones. misses include first touches where those are no longer free (`first_touch="miss"`).
    """

    hits: Array
    misses: Array
    first_touches: Array
    fetches: Array


@dataclass(frozen=True)
class SlotState:
    """A fixed number of slots per unit (reactive, evict, belady).

    slot_page: int32 [unit, slot], -1 = empty. last_use: int32 [unit, slot], the step of the last want (belady: of the
    next one); EMPTY and START stand for none. last_weight: float32 [unit, slot]. seen: bool [unit, page].
    """

    slot_page: Array
    last_use: Array
    last_weight: Array
    seen: Array

    def resident(self) -> Array:
        """int [unit]"""
        return (self.slot_page >= 0).sum(1)


@dataclass(frozen=True)
class TableState:
    """As many pages as the policy lets in (full, frozen, snapkv, rkv, reasonalloc).

    held: bool [unit, page], resident. seen: bool [unit, page], wanted before. worth: float32 [unit, page], wants
    counted (frozen) or weights added up (the others). tail: int32 [unit], the first page id after the last ranking.
    """

    held: Array
    seen: Array
    worth: Array
    tail: Array

    def resident(self) -> Array:
        """int [unit]"""
        return self.held.sum(1)


NOWHERE, T1, T2, B1, B2 = range(5)


@dataclass(frozen=True)
class ArcState:
    """ARC's four lists per unit. place: int8 [unit, page], one of NOWHERE, T1, T2 (resident), B1, B2 (ghosts).

    order: int32 [unit, page], larger = more recent in its list. target: int32 [unit], the size ARC aims at for T1.
    clock: int32 [unit], the next order to give. seen: bool [unit, page].
    """

    place: Array
    order: Array
    target: Array
    clock: Array
    seen: Array

    def resident(self) -> Array:
        """int [unit]"""
        return ((self.place == T1) | (self.place == T2)).sum(1)


State = SlotState | TableState | ArcState


class Step(NamedTuple):
    """What a step function returns; the state it was given is unchanged."""

    state: Any
    moves: Moves
    counts: Counts


def make_wants(pages: Any, weights: Any, known_pages: int) -> Wants:
    """Checked numpy wants. Raises RequestError for shapes that differ, ids out of range, a page twice, a NaN weight."""
    ids, mass = np.asarray(pages, np.int32), np.asarray(weights, np.float32)
    if ids.ndim != 2 or ids.shape != mass.shape:
        shapes = f"{list(ids.shape)} and {list(mass.shape)}"
        raise RequestError(f"wants need pages and weights of one shape [unit, column], got {shapes}")
    if len(wrong := ids[(ids < -1) | (ids >= known_pages)]):
        raise RequestError(f"wants name page {wrong[0]}; give ids from 0 to {known_pages - 1}, or -1 for none")
    ordered = np.sort(ids, axis=1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        raise RequestError("wants name a page twice for one unit; merge its weights first")
    if np.isnan(mass[ids >= 0]).any():
        raise RequestError("wants hold a weight that is NaN; give the attention mass of each page")
    return Wants(ids, mass)


def top_pages(scores: np.ndarray, count: int) -> np.ndarray:
    """The best pages of each unit, best first; ties to the lower id. scores: [unit, page], below 0 = no candidate.

    int32 [unit, min(count, page)], -1 where there are fewer candidates. The rule of every ranking here.
    Source: WakeKV, residency simulator (tie order ours).
    """
    order = np.argsort(-scores, axis=1, kind="stable")[:, :count].astype(np.int32)
    return np.where(np.take_along_axis(scores, order, 1) >= 0, order, np.int32(-1))


def first_slots(first: np.ndarray | None, units: int, slots: int, pages: int, seen_pages: int) -> SlotState:
    """Slots before the first step, numpy.

    first: int32 [unit, any] page ids, the most valuable first, -1 = none; the first `slots` of each row are resident.
    Of these the last leaves first. With a first set, the `seen_pages` prompt pages count as seen (their copies are in
    the reservoir); without, nothing has been seen. Source: ours.
    """
    state = SlotState(
        np.full((units, slots), -1, np.int32), np.full((units, slots), EMPTY, np.int32),
        np.zeros((units, slots), np.float32), np.zeros((units, pages), bool),
    )  # fmt: skip
    if first is not None:
        there = first[:, :slots] >= 0
        width = there.shape[1]
        state.slot_page[:, :width] = first[:, :slots]
        state.last_use[:, :width] = np.where(there, START, EMPTY)
        state.last_weight[:, :width] = np.where(there, -np.arange(width, dtype=np.float32), 0)
        state.seen[:, :seen_pages] = True
    return state


def first_table(first: np.ndarray | None, units: int, pages: int, prompt_pages: int) -> TableState:
    """A table before the first step, numpy. first: int32 [unit, any] pages that are resident, -1 = none."""
    held = np.zeros((units, pages), bool)
    if first is not None:
        rows, columns = np.nonzero(first >= 0)
        held[rows, first[rows, columns]] = True
    tail = np.full(units, prompt_pages, np.int32)
    return TableState(held, np.zeros((units, pages), bool), np.zeros((units, pages), np.float32), tail)


def first_lists(first: np.ndarray | None, units: int, slots: int, pages: int, seen_pages: int) -> ArcState:
    """ARC's lists before the first step, numpy: the first set, as in `first_slots`, is in T1."""
    place, order = np.zeros((units, pages), np.int8), np.zeros((units, pages), np.int32)
    seen, clock = np.zeros((units, pages), bool), np.zeros(units, np.int32)
    if first is not None:
        rows, columns = np.nonzero(first[:, :slots] >= 0)
        ids = first[rows, columns]
        place[rows, ids], order[rows, ids] = T1, slots - columns
        clock[:] = slots + 1
        seen[:, :seen_pages] = True
    return ArcState(place, order, np.zeros(units, np.int32), clock, seen)
