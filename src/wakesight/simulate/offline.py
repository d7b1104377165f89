"""What only a whole trace knows: next uses (for belady), the profile of units (for frozen), padded wants."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np

from wakesight.cache.residency.base import NEVER, Wants
from wakesight.traces.pages import PageWants


def page_count(wants: PageWants) -> int:
    """Page ids are below this."""
    return int(max(wants.pages.max(initial=-1) + 1, wants.prompt_pages, wants.pages_in_context.max(initial=1)))


def padded(wants: PageWants) -> Iterator[Wants]:
    """The wants of every step, [unit, column] with -1 where a unit wants less than the most."""
    for columns, there in _columns(wants):
        pages = np.where(there, wants.pages[columns], np.int32(-1))
        yield Wants(pages, np.where(there, wants.weights[columns], np.float32(0)))


def padded_next_uses(wants: PageWants, next_use: np.ndarray) -> Iterator[np.ndarray]:
    """`next_use` [want] in the shape of `padded`."""
    for columns, there in _columns(wants):
        yield np.where(there, next_use[columns], np.int32(NEVER))


def _columns(wants: PageWants) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For every step: places [unit, column] in the flat arrays, and which of them are real."""
    starts = wants.offsets[:-1].reshape(wants.units, wants.steps)
    counts = np.diff(wants.offsets).reshape(wants.units, wants.steps)
    last = max(len(wants.pages) - 1, 0)
    for step in range(wants.steps):
        there = np.arange(counts[:, step].max(initial=0)) < counts[:, step, None]
        yield np.where(there, starts[:, step, None] + np.arange(there.shape[1]), last), there


def step_of(wants: PageWants) -> np.ndarray:
    """int32 [want]: the step each want belongs to."""
    counts = np.diff(wants.offsets)
    return np.repeat(np.tile(np.arange(wants.steps, dtype=np.int32), wants.units), counts)


def unit_of(wants: PageWants) -> np.ndarray:
    """int32 [want]"""
    per_unit = np.diff(wants.offsets[:: wants.steps]) if wants.steps else np.zeros(wants.units, int)
    return np.repeat(np.arange(wants.units, dtype=np.int32), per_unit)


@functools.lru_cache(maxsize=1)  # all budgets of a run are played one after the other
def next_uses(wants: PageWants) -> np.ndarray:
    """int32 [want]: the step at which the same unit wants the same page next, NEVER if it does not. Read only."""
    unit, step = unit_of(wants), step_of(wants)
    order = np.lexsort((step, wants.pages, unit))
    same = (unit[order][1:] == unit[order][:-1]) & (wants.pages[order][1:] == wants.pages[order][:-1])
    upcoming = np.full(len(order), NEVER, np.int32)
    upcoming[order[:-1]] = np.where(same, step[order][1:], np.int32(NEVER))
    return upcoming


def first_uses(wants: PageWants) -> np.ndarray:
    """int32 [unit, page]: the step at which the unit wants the page first, NEVER if it does not."""
    first = np.full((wants.units, page_count(wants)), NEVER, np.int32)
    np.minimum.at(first, (unit_of(wants), wants.pages), step_of(wants))
    return first


@functools.lru_cache(maxsize=1)
def stability(wants: PageWants) -> np.ndarray:
    """float64 [unit]: mean Jaccard index of the wants of adjacent steps; pairs of two empty steps are left out.

    A unit without any pair counts as stable (1). Source: WakeKV, residency simulator, "frozen".
    """
    unit, step = unit_of(wants), step_of(wants)
    # a page wanted at t and t + 1 is a want whose next use is the step after
    shared = np.zeros((wants.units, max(wants.steps - 1, 0)))
    again = next_uses(wants) == step + 1
    np.add.at(shared, (unit[again], step[again]), 1)
    counts = np.diff(wants.offsets).reshape(wants.units, wants.steps)
    union = counts[:, 1:] + counts[:, :-1] - shared
    index = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    pairs = (union > 0).sum(axis=1)
    return np.where(pairs > 0, index.sum(axis=1) / np.maximum(pairs, 1), 1.0)


def unstable_units(wants: PageWants, share: float) -> np.ndarray:
    """bool [unit]: the floor(share * units) units with the lowest stability, ties to the lower unit."""
    count = math.floor(share * wants.units)
    order = np.argsort(stability(wants), kind="stable")
    chosen = np.zeros(wants.units, bool)
    chosen[order[:count]] = True
    return chosen
