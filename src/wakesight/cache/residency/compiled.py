"""The rules of `step.py` for numba: the simulator's and the CPU engines' body. Needs the package numba.

The functions of one unit (`*_row`) work in place and are what whole-run loops call; the step functions of the body
copy the state first, as the plain ones do. Compiled code is kept beside this file, so a later process starts fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numba
import numpy as np

from wakesight.cache.residency.base import (
    B1,
    B2,
    NEVER,
    NOWHERE,
    T1,
    T2,
    ArcState,
    Counts,
    FirstTouch,
    Moves,
    SlotState,
    Step,
    TableState,
    Wants,
)  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])


def njit(function: Function) -> Function:
    """Compile. The cache only notices a change of this file, so compiled functions call none of another file."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))


HITS, MISSES, FIRST, FETCHES = range(4)  # columns of a tally, int32 [unit, 4]


def lru(state: SlotState, wants: Wants, step: int, first_touch: FirstTouch = "free", destroy: bool = False) -> Step:
    new = _copied(state)
    tally, rows = _room(wants)
    made = _lru(
        new.slot_page, new.last_use, new.last_weight, new.seen, wants.pages, wants.weights, step,
        first_touch == "miss", destroy, tally, rows,
    )  # fmt: skip
    return Step(new, _moves(rows[:made]), _counts(tally))


def belady(state: SlotState, wants: Wants, next_use: np.ndarray, first_touch: FirstTouch = "free") -> Step:
    new = _copied(state)
    tally, rows = _room(wants)
    made = _belady(
        new.slot_page, new.last_use, new.last_weight, new.seen, wants.pages, wants.weights, next_use,
        first_touch == "miss", tally, rows,
    )  # fmt: skip
    return Step(new, _moves(rows[:made]), _counts(tally))


def serve(state: TableState, wants: Wants, admit_from: np.ndarray, count: bool = False) -> Step:
    new = _copied(state)
    tally, rows = _room(wants)
    made = _serve(new.held, new.seen, new.worth, wants.pages, wants.weights, admit_from, count, tally, rows)
    return Step(new, _moves(rows[:made]), _counts(tally))


def refresh(state: TableState, budget: int, exempt: np.ndarray, tail: int) -> Step:
    new = _copied(state)
    tally, rows = np.zeros((len(new.held), 4), np.int32), np.empty((new.held.size, 5), np.int32)
    made = _refresh(new.held, new.worth, budget, exempt, tally, rows)
    new.tail[:] = tail
    return Step(new, _moves(rows[:made]), _counts(tally))


def prune(state: TableState, budgets: np.ndarray) -> Step:
    new = _copied(state)
    rows = np.empty((new.held.size, 5), np.int32)
    made = _prune(new.held, new.worth, budgets, rows)
    return Step(new, _moves(rows[:made]), _counts(np.zeros((len(new.held), 4), np.int32)))


def head_budgets(state: TableState, budget: int, layers: Sequence[Sequence[int]], least: int) -> np.ndarray:
    budgets = np.zeros(len(state.held), np.int32)
    for units in layers:
        _layer_budgets(state.held, state.worth, np.asarray(units, np.int64), budget * len(units), least, budgets)
    return budgets


def arc(state: ArcState, wants: Wants, slots: int, first_touch: FirstTouch = "free") -> Step:
    new = _copied(state)
    tally = np.zeros((len(wants.pages), 4), np.int32)
    rows = np.empty((new.place.size + wants.pages.size, 5), np.int32)
    made = _arc(
        new.place, new.order, new.target, new.clock, new.seen, wants.pages, wants.weights, slots,
        first_touch == "miss", tally, rows,
    )  # fmt: skip
    return Step(new, _moves(rows[:made]), _counts(tally))


@njit
def sorted_columns(first: np.ndarray, second: np.ndarray, count: int) -> np.ndarray:
    """Places of the first `count` items by rising `first`, then rising `second`; insertion, for short lists."""
    order = np.arange(count)
    for i in range(1, count):
        here = order[i]
        j = i - 1
        while j >= 0 and (
            first[order[j]] > first[here] or (first[order[j]] == first[here] and second[order[j]] > second[here])
        ):
            order[j + 1] = order[j]
            j -= 1
        order[j + 1] = here
    return order


@njit
def compact_row(pages: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(pages, weights, columns) of a padded wants row in ascending order of weight, then id."""
    there = np.flatnonzero(pages >= 0)
    ids, mass = pages[there], weights[there]
    order = sorted_columns(mass, ids, len(ids))
    return ids[order], mass[order], there[order]


@njit
def entering(seen: bool, first_is_miss: bool, destroy: bool, tally: np.ndarray) -> bool:
    """Count a wanted page that is not resident; is it fetched?"""
    if not seen and not first_is_miss:
        tally[FIRST] += 1
        return False
    tally[MISSES] += 1
    if destroy:
        return False
    tally[FETCHES] += 1
    return True


@njit
def exchange_row(
    unit: int, slot_page: np.ndarray, keys: np.ndarray, second: np.ndarray, new_keys: np.ndarray,
    new_second: np.ndarray, new_pages: np.ndarray, new_fetch: np.ndarray, taken: np.ndarray, rows: np.ndarray, at: int,
) -> int:  # fmt: skip
    """Drop as many smallest of slots and newcomers as come in. keys, then second, then page order both (ascending).

    taken: int64 [newcomer], filled with the slot of each, -1 = not retained. Returns the next free row.
    """
    count, slots = len(new_pages), len(slot_page)
    leaving, gone = np.empty(count, np.int64), np.zeros(slots, np.bool_)
    refused = 0
    for done in range(count):
        best = -1
        for slot in range(slots):
            if not gone[slot] and (best < 0 or _below(slot, best, keys, second, slot_page)):
                best = slot
        new_is_lower = best < 0 or (
            new_keys[refused] < keys[best]
            or (new_keys[refused] == keys[best] and new_second[refused] < second[best])
            or (new_keys[refused] == keys[best] and new_second[refused] == second[best]
                and new_pages[refused] < slot_page[best])
        )  # fmt: skip
        if new_is_lower:
            refused += 1
        else:
            leaving[done - refused] = best
            gone[best] = True
    for i in range(count):
        slot = -1 if i < refused else leaving[i - refused]
        taken[i] = slot
        _write(rows, at, unit, slot, new_pages[i], -1 if slot < 0 else slot_page[slot], new_fetch[i])
        at += 1
    for i in range(refused, count):
        slot_page[taken[i]] = new_pages[i]
    return at


@njit
def _write(rows: Any, at: int, unit: int, slot: int, page_in: int, page_out: int, fetch: bool) -> None:
    rows[at, 0], rows[at, 1], rows[at, 2], rows[at, 3], rows[at, 4] = unit, slot, page_in, page_out, fetch


@njit
def _below(a: int, b: int, keys: np.ndarray, second: np.ndarray, pages: np.ndarray) -> bool:
    if keys[a] != keys[b]:
        return bool(keys[a] < keys[b])
    if second[a] != second[b]:
        return bool(second[a] < second[b])
    return bool(pages[a] < pages[b])


@njit
def _lru(
    slot_page: Any, last_use: Any, last_weight: Any, seen: Any, pages: Any, weights: Any, step: Any,
    first_is_miss: Any, destroy: Any, tally: Any, rows: Any,
) -> Any:  # fmt: skip
    at = 0
    for unit in range(len(pages)):
        ids, mass, _ = compact_row(pages[unit], weights[unit])
        fetch, news = np.zeros(len(ids), np.bool_), 0
        for i in range(len(ids)):
            found = False
            for slot in range(slot_page.shape[1]):
                if slot_page[unit, slot] == ids[i]:
                    last_use[unit, slot], last_weight[unit, slot] = step, mass[i]
                    found = True
            if found:
                tally[unit, HITS] += 1
                continue
            known = seen[unit, ids[i]]
            fetched = entering(known, first_is_miss, destroy, tally[unit])
            seen[unit, ids[i]] = True
            if not (destroy and known):
                ids[news], mass[news], fetch[news] = ids[i], mass[i], fetched  # news <= i: read before written
                news += 1
        taken, keys = np.empty(news, np.int64), np.full(news, step, np.int32)
        at = exchange_row(
            unit, slot_page[unit], last_use[unit], last_weight[unit], keys, mass[:news], ids[:news], fetch[:news],
            taken, rows, at,
        )  # fmt: skip
        for i in range(news):
            if taken[i] >= 0:
                last_use[unit, taken[i]], last_weight[unit, taken[i]] = step, mass[i]
    return at


@njit
def _belady(
    slot_page: Any, last_use: Any, last_weight: Any, seen: Any, pages: Any, weights: Any, next_use: Any,
    first_is_miss: Any, tally: Any, rows: Any,
) -> Any:  # fmt: skip
    at = 0
    for unit in range(len(pages)):
        ids, mass, columns = compact_row(pages[unit], weights[unit])
        uses = next_use[unit][columns]
        fetch, news = np.zeros(len(ids), np.bool_), 0
        for i in range(len(ids)):
            found = False
            for slot in range(slot_page.shape[1]):
                if slot_page[unit, slot] == ids[i]:
                    last_use[unit, slot] = uses[i]
                    found = True
            if found:
                tally[unit, HITS] += 1
                continue
            fetched = entering(seen[unit, ids[i]], first_is_miss, False, tally[unit])
            seen[unit, ids[i]] = True
            ids[news], mass[news], uses[news], fetch[news] = ids[i], mass[i], uses[i], fetched
            news += 1
        order = sorted_columns(-uses[:news], ids[:news], news)
        ids, mass, uses, fetch = ids[:news][order], mass[:news][order], uses[:news][order], fetch[:news][order]
        keys = np.empty(slot_page.shape[1], np.int32)
        for slot in range(len(keys)):
            keys[slot] = -last_use[unit, slot] if slot_page[unit, slot] >= 0 else -NEVER - 1
        taken, nothing = np.empty(news, np.int64), np.zeros(max(news, len(keys)), np.float32)
        at = exchange_row(
            unit, slot_page[unit], keys, nothing, -uses, nothing, ids, fetch, taken, rows, at
        )  # fmt: skip
        for i in range(news):
            if taken[i] >= 0:
                last_use[unit, taken[i]], last_weight[unit, taken[i]] = uses[i], mass[i]
    return at


@njit
def _serve(
    held: Any, seen: Any, worth: Any, pages: Any, weights: Any, admit_from: Any, count: Any, tally: Any, rows: Any,
) -> Any:  # fmt: skip
    at = 0
    for unit in range(len(pages)):
        for i in range(pages.shape[1]):
            page = pages[unit, i]
            if page >= 0 and serve_page(
                held[unit], seen[unit], worth[unit], page, weights[unit, i], admit_from[unit], count, tally[unit]
            ):
                _write(rows, at, unit, page, page, -1, False)
                at += 1
    return at


@njit
def serve_page(
    held: Any, seen: Any, worth: Any, page: Any, weight: Any, admit_from: Any, count: Any, tally: Any,
) -> Any:  # fmt: skip
    """One want of one unit; True if the page is let in."""
    let_in = False
    if held[page]:
        tally[HITS] += 1
    elif page >= admit_from and not seen[page]:
        held[page] = True
        tally[FIRST] += 1
        let_in = True
    else:
        tally[MISSES] += 1
    seen[page] = True
    worth[page] += np.float32(1) if count else weight
    return let_in


@njit
def _refresh(
    held: Any, worth: Any, budget: Any, exempt: Any, tally: Any, rows: Any,
) -> Any:  # fmt: skip
    at = 0
    for unit in range(len(held)):
        if exempt[unit]:
            continue
        best = np.zeros(held.shape[1], np.bool_)
        best[_worthiest(worth[unit], np.flatnonzero(worth[unit] > 0), budget)] = True
        for page in range(held.shape[1]):
            if best[page] and not held[unit, page]:
                tally[unit, FETCHES] += 1
                _write(rows, at, unit, page, page, -1, True)
                at += 1
            elif held[unit, page] and not best[page]:
                _write(rows, at, unit, page, -1, page, False)
                at += 1
        held[unit] = best
    return at


@njit
def _prune(
    held: Any, worth: Any, budgets: Any, rows: Any,
) -> Any:  # fmt: skip
    at = 0
    for unit in range(len(held)):
        best = np.zeros(held.shape[1], np.bool_)
        best[_worthiest(worth[unit], np.flatnonzero(held[unit]), budgets[unit])] = True
        for page in range(held.shape[1]):
            if held[unit, page] and not best[page]:
                _write(rows, at, unit, page, -1, page, False)
                at += 1
        held[unit] = best
    return at


@njit
def _worthiest(
    worth: Any, pages: Any, count: Any,
) -> Any:  # fmt: skip
    """`pages` (ascending) without all but the `count` worthiest, ties to the lower id."""
    return pages[np.argsort(-worth[pages], kind="mergesort")[:count]]


@njit
def _layer_budgets(
    held: Any, worth: Any, units: Any, total: Any, least: Any, budgets: Any,
) -> Any:  # fmt: skip
    size = 0
    for unit in units:
        size += held[unit].sum()
    pooled, at = np.empty(size, np.float32), 0
    for unit in units:
        for page in range(held.shape[1]):
            if held[unit, page]:
                pooled[at] = worth[unit, page]
                at += 1
    bar = np.sort(pooled)[size - total] if size >= total else -np.inf
    demand = np.zeros(len(units), np.int64)
    for i in range(len(units)):
        for page in range(held.shape[1]):
            demand[i] += held[units[i], page] and worth[units[i], page] >= bar
    shares = _share(demand, total, least)
    for i in range(len(units)):
        budgets[units[i]] = shares[i]


@njit
def _share(
    demand: Any, total: Any, least: Any,
) -> Any:  # fmt: skip
    fixed = np.zeros(len(demand), np.bool_)
    while True:
        left = total - least * fixed.sum()
        weights = np.where(fixed, 0, demand)
        if weights.sum() == 0:
            weights = np.where(fixed, 0, 1)
        low = ~fixed & (left * weights < least * weights.sum())
        if not low.any():
            break
        fixed |= low
    whole = weights.sum()
    shares = np.where(fixed, least, left * weights // whole)
    remainders = np.where(fixed, -1, left * weights % whole)
    over = total - shares.sum()
    shares[np.argsort(-remainders, kind="mergesort")[:over]] += 1
    return shares


@njit
def _arc(
    place: Any, order: Any, target: Any, clock: Any, seen: Any, pages: Any, weights: Any, slots: Any,
    first_is_miss: Any, tally: Any, rows: Any,
) -> Any:  # fmt: skip
    at = 0
    for unit in range(len(pages)):
        ids, _, _ = compact_row(pages[unit], weights[unit])
        before = (place[unit] == T1) | (place[unit] == T2)
        fetch = arc_row(
            place[unit], order[unit], target, clock, unit, seen[unit], ids, slots, first_is_miss, tally[unit]
        )  # fmt: skip
        for i in range(len(ids)):
            if not before[ids[i]]:
                stays = place[unit, ids[i]] == T1 or place[unit, ids[i]] == T2
                _write(rows, at, unit, ids[i] if stays else -1, ids[i], -1, fetch[i])
                at += 1
        for page in range(place.shape[1]):
            if before[page] and place[unit, page] != T1 and place[unit, page] != T2:
                _write(rows, at, unit, page, -1, page, False)
                at += 1
    return at


@njit
def arc_row(
    place: Any, order: Any, target: Any, clock: Any, unit: Any, seen: Any, ids: Any, slots: Any, first_is_miss:
    Any, tally: Any,
) -> Any:  # fmt: skip
    """A step of one unit; ids ascending by weight, then id. Returns which of them are fetched."""
    count = len(ids)
    was_held, fetch = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    for i in range(count):
        was_held[i] = place[ids[i]] == T1 or place[ids[i]] == T2
    for i in range(count):
        if was_held[i]:
            tally[HITS] += 1
            _request(place, order, target, clock, unit, ids[i], slots)
    for i in range(count):
        if not was_held[i]:
            fetch[i] = entering(seen[ids[i]], first_is_miss, False, tally)
            seen[ids[i]] = True
            _request(place, order, target, clock, unit, ids[i], slots)
    return fetch


@njit
def _request(
    place: Any, order: Any, target: Any, clock: Any, unit: Any, page: Any, slots: Any,
) -> Any:  # fmt: skip
    sizes = np.zeros(5, np.int64)
    for other in place:
        sizes[other] += 1
    before, goal = place[page], target[unit]
    total = sizes[T1] + sizes[T2] + sizes[B1] + sizes[B2]
    if before == B1:
        goal = min(slots, goal + max(1, sizes[B2] // sizes[B1]))
        _replace(place, order, clock, unit, sizes, goal, False)
    elif before == B2:
        goal = max(0, goal - max(1, sizes[B1] // sizes[B2]))
        _replace(place, order, clock, unit, sizes, goal, True)
    elif before == NOWHERE and sizes[T1] + sizes[B1] == slots:
        if sizes[T1] < slots:
            place[_oldest(place, order, B1)] = NOWHERE
            _replace(place, order, clock, unit, sizes, goal, False)
        else:
            place[_oldest(place, order, T1)] = NOWHERE
    elif before == NOWHERE and total >= slots:
        if total == 2 * slots:
            place[_oldest(place, order, B2)] = NOWHERE
        _replace(place, order, clock, unit, sizes, goal, False)
    target[unit] = goal
    _append(place, order, clock, unit, page, T1 if before == NOWHERE else T2)


@njit
def _replace(
    place: Any, order: Any, clock: Any, unit: Any, sizes: Any, goal: Any, from_b2: Any,
) -> Any:  # fmt: skip
    recent = sizes[T1] >= 1 and (sizes[T1] > goal or (from_b2 and sizes[T1] == goal))
    _append(place, order, clock, unit, _oldest(place, order, T1 if recent else T2), B1 if recent else B2)


@njit
def _append(
    place: Any, order: Any, clock: Any, unit: Any, page: Any, where: Any,
) -> Any:  # fmt: skip
    place[page], order[page] = where, clock[unit]
    clock[unit] += 1


@njit
def _oldest(
    place: Any, order: Any, where: Any,
) -> Any:  # fmt: skip
    best = -1
    for page in range(len(place)):
        if place[page] == where and (best < 0 or order[page] < order[best]):
            best = page
    return best


@njit
def serve_span(
    held: Any, seen: Any, worth: Any, offsets: Any, pages: Any, weights: Any, steps: int, span: Any, admit_from: Any,
    count: bool, tally: Any, resident: Any,
) -> None:  # fmt: skip
    """The steps span[0] .. span[1] - 1 of every unit, by `serve_page`. Flat wants, by unit, then step.

    tally: int32 [step, 4], over units. resident: int64 [step], added to.
    """
    for unit in range(len(held)):
        here = held[unit].sum()
        for step in range(span[0], span[1]):
            for i in range(offsets[unit * steps + step], offsets[unit * steps + step + 1]):
                here += serve_page(
                    held[unit], seen[unit], worth[unit], pages[i], weights[i], admit_from[unit], count, tally[step]
                )
            resident[step] += here


@njit
def arc_run(
    place: Any, order: Any, target: Any, clock: Any, seen: Any, offsets: Any, pages: Any, steps: int, slots: int,
    first_is_miss: bool, tally: Any, resident: Any,
) -> None:  # fmt: skip
    """A whole run of every unit, by `arc_row`; arrays as for `serve_span`."""
    for unit in range(len(place)):
        for step in range(steps):
            ids = pages[offsets[unit * steps + step] : offsets[unit * steps + step + 1]]
            arc_row(place[unit], order[unit], target, clock, unit, seen[unit], ids, slots, first_is_miss, tally[step])
            for page in range(place.shape[1]):
                resident[step] += place[unit, page] == T1 or place[unit, page] == T2


def _room(wants: Wants) -> tuple[np.ndarray, np.ndarray]:
    """An empty tally, and rows for one move per want."""
    return np.zeros((len(wants.pages), 4), np.int32), np.empty((wants.pages.size, 5), np.int32)


def _copied(state: Any) -> Any:
    return type(state)(*(array.copy() for array in vars(state).values()))


def _moves(rows: np.ndarray) -> Moves:
    return Moves(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 4].astype(bool))


def _counts(tally: np.ndarray) -> Counts:
    return Counts(tally[:, HITS], tally[:, MISSES], tally[:, FIRST], tally[:, FETCHES])


def joined(first: Moves, then: Moves) -> Moves:
    return Moves(*(np.concatenate(pair) for pair in zip(vars(first).values(), vars(then).values(), strict=True)))
