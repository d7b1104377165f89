"""The rules of residency in plain Python, one page at a time: the body to read. Nothing here is fast.

Every function takes numpy arrays and leaves them unchanged. `compiled.py` and `on_device.py` hold the same functions
under the same names; tests hold all three to equal results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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

Row = tuple[int, int, int, int, bool]  # unit, slot, page_in, page_out, fetch
Wanted = tuple[float, int]  # weight, page: ascending, so that the last is the most recent
Key = tuple[int, float, int]


class Incoming(NamedTuple):
    """A page that wants a slot; `key` says how much it deserves one."""

    key: Key
    page: int
    weight: float
    fetch: bool


def lru(state: SlotState, wants: Wants, step: int, first_touch: FirstTouch = "free", destroy: bool = False) -> Step:
    """One step of reactive, or of evict (`destroy`).

    Of what was resident and what is wanted, the most recent stay: by stamp, then last weight, then id. A wanted page
    that is not resident is a first touch (never seen), or a miss; reactive fetches misses. Under evict a page that was
    seen and is not resident is gone: it misses, and comes back never. What comes in takes the slots of what leaves,
    the least recent for the least recent, empty slots first. `first_touch="miss"` counts first touches as misses (and
    as fetches, under reactive). Source: WakeKV, residency simulator, "reactive" and "evict"; ties and slots ours.
    """
    new, rows, tally = _copy(state), [], _Tally(len(wants.pages))
    for unit, wanted in _wanted(wants):
        incoming = []
        for weight, page in wanted:
            slot = _slot_of(new, unit, page)
            if slot is not None:
                new.last_use[unit, slot], new.last_weight[unit, slot] = step, weight
                tally.hits[unit] += 1
                continue
            fetch = _enters(tally, unit, bool(new.seen[unit, page]), first_touch, destroy)
            if not (destroy and new.seen[unit, page]):
                incoming.append(Incoming((step, weight, page), page, weight, fetch))
            new.seen[unit, page] = True
        rows += _exchange(new, unit, incoming)
    return Step(new, _moves(rows), tally.counts())


def belady(state: SlotState, wants: Wants, next_use: np.ndarray, first_touch: FirstTouch = "free") -> Step:
    """One step of the offline bound: of what was resident and what is wanted, the soonest needed again stay.

    next_use: int32 [unit, column], the step at which that page is wanted next, NEVER if it is not. Ties: the higher id
    stays. No rule that holds as many pages after each step and brings in wanted pages only has fewer misses.
    Source: Belady's MIN with bypass; its use as a bound is ours.
    """
    new, rows, tally = _copy(state), [], _Tally(len(wants.pages))
    upcoming = {(u, int(p)): int(n) for u, row in enumerate(wants.pages) for p, n in zip(row, next_use[u], strict=True)}
    for unit, wanted in _wanted(wants):
        incoming = []
        for weight, page in wanted:
            slot = _slot_of(new, unit, page)
            if slot is not None:
                new.last_use[unit, slot] = upcoming[unit, page]
                tally.hits[unit] += 1
                continue
            fetch = _enters(tally, unit, bool(new.seen[unit, page]), first_touch, destroy=False)
            incoming.append(Incoming((-upcoming[unit, page], 0.0, page), page, weight, fetch))
            new.seen[unit, page] = True
        rows += _exchange(new, unit, sorted(incoming), sooner=True)
    return Step(new, _moves(rows), tally.counts())


def serve(state: TableState, wants: Wants, admit_from: np.ndarray, count: bool = False) -> Step:
    """One step of the policies that do not react: hits, misses, and new pages let in.

    admit_from: int32 [unit]; a page of that id or above is written to fast memory and let in when first wanted (a free
    first touch). Every other wanted page that is not resident is a miss and stays out. count: `worth` counts wants
    instead of adding up their weights. Source: WakeKV, residency simulator.
    """
    new, rows, tally = _copy_table(state), [], _Tally(len(wants.pages))
    for unit, wanted in _wanted(wants):
        for weight, page in wanted:
            if new.held[unit, page]:
                tally.hits[unit] += 1
            elif page >= admit_from[unit] and not new.seen[unit, page]:
                new.held[unit, page] = True
                tally.first_touches[unit] += 1
                rows.append((unit, page, page, -1, False))
            else:
                tally.misses[unit] += 1
            new.seen[unit, page] = True
            new.worth[unit, page] += np.float32(1 if count else weight)
    return Step(new, _moves(rows), tally.counts())


def refresh(state: TableState, budget: int, exempt: np.ndarray, tail: int) -> Step:
    """Frozen's ranking: the `budget` pages wanted most often are resident, and nothing else. Ties to the lower id.

    exempt: bool [unit], units that keep everything they hold. tail: pages in context now; later ones are written after
    this ranking. Source: WakeKV, residency simulator, "frozen".
    """
    new, rows, tally = _copy_table(state), [], _Tally(len(state.held))
    for unit in np.flatnonzero(~exempt).tolist():
        wanted = [int(page) for page in np.flatnonzero(new.worth[unit] > 0)]
        best = set(sorted(wanted, key=lambda page: (-new.worth[unit, page], page))[:budget])
        before = {int(page) for page in np.flatnonzero(new.held[unit])}
        new.held[unit] = False
        new.held[unit, sorted(best)] = True
        tally.fetches[unit] = len(best - before)
        rows += [(unit, page, page, -1, True) for page in best - before]
        rows += [(unit, page, -1, page, False) for page in before - best]
    new.tail[:] = tail
    return Step(new, _moves(rows), tally.counts())


def prune(state: TableState, budgets: np.ndarray) -> Step:
    """Destroy all but the worthiest resident pages. budgets: int32 [unit]. Ties to the lower id.

    Source: WakeKV, residency simulator, "uniform R-KV" and "ReasonAlloc".
    """
    new, rows = _copy_table(state), []
    for unit, budget in enumerate(budgets.tolist()):
        before = [int(page) for page in np.flatnonzero(new.held[unit])]
        leave = sorted(before, key=lambda page: (-new.worth[unit, page], page))[budget:]
        new.held[unit, leave] = False
        rows += [(unit, page, -1, page, False) for page in leave]
    return Step(new, _moves(rows), _Tally(len(state.held)).counts())


def head_budgets(state: TableState, budget: int, layers: Sequence[Sequence[int]], least: int) -> np.ndarray:
    """ReasonAlloc's budgets, int32 [unit]: in each layer `budget` pages per unit on average, shared by demand.

    layers: the units of each layer. All resident pages of a layer are pooled by worth; the demand of a unit is how many
    of its pages are worth at least as much as the b-th of them, b = budget * units. Shares are in proportion to demand,
    `least` at least, and sum to b: who would fall below `least` is fixed there and the rest is shared again, then
    largest remainder, ties to the lower unit. Source: WakeKV, residency simulator, "ReasonAlloc"; how the floor binds
    is ours.
    """
    budgets = np.zeros(len(state.held), np.int32)
    for layer in layers:
        units = [int(unit) for unit in layer]
        total = budget * len(units)
        pooled = sorted((float(state.worth[u, p]) for u in units for p in np.flatnonzero(state.held[u])), reverse=True)
        bar = pooled[total - 1] if len(pooled) >= total else -np.inf
        demand = [sum(bool(state.worth[u, p] >= bar) for p in np.flatnonzero(state.held[u])) for u in units]
        budgets[units] = _share(demand, total, least)
    return budgets


def arc(state: ArcState, wants: Wants, slots: int, first_touch: FirstTouch = "free") -> Step:
    """One step of ARC, a cache of its own per unit, which balances recent pages (T1) against repeated ones (T2).

    A step's wants are requests one after the other: first the resident ones, then the others, each group in ascending
    order of weight, then id. A page hits if it was resident before the step, however the lists move within it.
    The target is a whole number: ARC's ratio of ghost lists is rounded down, at least 1.
    Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", figure 4; steps of several wants
    are ours.
    """
    new, rows, tally = _copy_lists(state), [], _Tally(len(wants.pages))
    for unit, wanted in _wanted(wants):
        before = {int(page) for page in np.flatnonzero((new.place[unit] == T1) | (new.place[unit] == T2))}
        fetched = {}
        for _, page in sorted(wanted, key=lambda want: want[1] not in before):
            if page in before:
                tally.hits[unit] += 1
            else:
                fetched[page] = _enters(tally, unit, bool(new.seen[unit, page]), first_touch, False)
            new.seen[unit, page] = True
            _request(new, unit, page, slots)
        after = {int(page) for page in np.flatnonzero((new.place[unit] == T1) | (new.place[unit] == T2))}
        rows += [(unit, page if page in after else -1, page, -1, fetch) for page, fetch in fetched.items()]
        rows += [(unit, page, -1, page, False) for page in before - after]
    return Step(new, _moves(rows), tally.counts())


class _Tally:
    """Counts while a step runs."""

    def __init__(self, units: int) -> None:
        self.hits, self.misses, self.first_touches, self.fetches = np.zeros((4, units), np.int32)

    def counts(self) -> Counts:
        return Counts(self.hits, self.misses, self.first_touches, self.fetches)


def _wanted(wants: Wants) -> Iterator[tuple[int, list[Wanted]]]:
    for unit, (pages, weights) in enumerate(zip(wants.pages.tolist(), wants.weights.tolist(), strict=True)):
        yield unit, sorted((weight, page) for page, weight in zip(pages, weights, strict=True) if page >= 0)


def _enters(tally: _Tally, unit: int, seen: bool, first_touch: FirstTouch, destroy: bool) -> bool:
    """Count a wanted page that is not resident; is it fetched?"""
    if not seen and first_touch == "free":
        tally.first_touches[unit] += 1
        return False
    tally.misses[unit] += 1
    tally.fetches[unit] += not destroy
    return not destroy


def _slot_of(state: SlotState, unit: int, page: int) -> int | None:
    found = np.flatnonzero(state.slot_page[unit] == page)
    return int(found[0]) if len(found) else None


def _exchange(state: SlotState, unit: int, incoming: list[Incoming], sooner: bool = False) -> list[Row]:
    """Of the slots and `incoming` (ascending) drop the smallest keys, as many as come in; pair leavers with stayers.

    sooner: keys are belady's (minus the next use), else stamps.
    """
    slots = range(state.slot_page.shape[1])
    everyone = [(_key(state, unit, slot, sooner), False, slot) for slot in slots]
    everyone += [(one.key, True, place) for place, one in enumerate(incoming)]
    dropped = sorted(everyone)[: len(incoming)]
    leaving = iter([slot for _, is_new, slot in dropped if not is_new])
    refused = {place for _, is_new, place in dropped if is_new}
    rows: list[Row] = []
    for place, one in enumerate(incoming):
        if place in refused:
            rows.append((unit, -1, one.page, -1, one.fetch))
            continue
        slot = next(leaving)
        rows.append((unit, slot, one.page, int(state.slot_page[unit, slot]), one.fetch))
        state.slot_page[unit, slot], state.last_weight[unit, slot] = one.page, one.weight
        state.last_use[unit, slot] = -one.key[0] if sooner else one.key[0]
    return rows


def _key(state: SlotState, unit: int, slot: int, sooner: bool) -> Key:
    """The smallest key leaves first; an empty slot's is below every page's."""
    page, use = int(state.slot_page[unit, slot]), int(state.last_use[unit, slot])
    if sooner:
        return (-use if page >= 0 else -NEVER - 1, 0.0, page)
    return (use, float(state.last_weight[unit, slot]), page)


def _share(demand: list[int], total: int, least: int) -> list[int]:
    fixed: set[int] = set()
    while True:
        rest = [i for i in range(len(demand)) if i not in fixed]
        left, weight = total - least * len(fixed), sum(demand[i] for i in rest)
        weights = {i: demand[i] if weight else 1 for i in rest}
        whole = sum(weights.values())
        low = {i for i in rest if left * weights[i] < least * whole}
        if not low:
            break
        fixed |= low
    shares = {i: left * weights[i] // whole for i in rest}
    over = left - sum(shares.values())
    for i in sorted(rest, key=lambda i: (-(left * weights[i] % whole), i))[:over]:
        shares[i] += 1
    return [shares.get(i, least) for i in range(len(demand))]


def _request(state: ArcState, unit: int, page: int, slots: int) -> None:
    """One request of ARC; the four cases of its figure 4."""
    place = state.place[unit]
    sizes = {name: int((place == name).sum()) for name in (T1, T2, B1, B2)}
    before, goal = int(place[page]), int(state.target[unit])
    if before == B1:
        goal = min(slots, goal + max(1, sizes[B2] // sizes[B1]))
        _replace(state, unit, sizes, goal, False)
    elif before == B2:
        goal = max(0, goal - max(1, sizes[B1] // sizes[B2]))
        _replace(state, unit, sizes, goal, True)
    elif before == NOWHERE and sizes[T1] + sizes[B1] == slots:
        if sizes[T1] < slots:
            _forget(state, unit, B1)
            _replace(state, unit, sizes, goal, False)
        else:
            _forget(state, unit, T1)
    elif before == NOWHERE and sum(sizes.values()) >= slots:
        if sum(sizes.values()) == 2 * slots:
            _forget(state, unit, B2)
        _replace(state, unit, sizes, goal, False)
    state.target[unit] = goal
    _append(state, unit, page, T1 if before == NOWHERE else T2)


def _replace(state: ArcState, unit: int, sizes: dict[int, int], goal: int, from_b2: bool) -> None:
    """ARC's REPLACE: the oldest page of T1 or T2 becomes a ghost."""
    recent = sizes[T1] >= 1 and (sizes[T1] > goal or (from_b2 and sizes[T1] == goal))
    _append(state, unit, _oldest(state, unit, T1 if recent else T2), B1 if recent else B2)


def _forget(state: ArcState, unit: int, place: int) -> None:
    state.place[unit, _oldest(state, unit, place)] = NOWHERE


def _append(state: ArcState, unit: int, page: int, place: int) -> None:
    state.place[unit, page], state.order[unit, page] = place, state.clock[unit]
    state.clock[unit] += 1


def _oldest(state: ArcState, unit: int, place: int) -> int:
    there = np.flatnonzero(state.place[unit] == place)
    return int(there[np.argmin(state.order[unit, there])])


def _copy(state: SlotState) -> SlotState:
    return SlotState(state.slot_page.copy(), state.last_use.copy(), state.last_weight.copy(), state.seen.copy())


def _copy_table(state: TableState) -> TableState:
    return TableState(state.held.copy(), state.seen.copy(), state.worth.copy(), state.tail.copy())


def _copy_lists(state: ArcState) -> ArcState:
    return ArcState(state.place.copy(), state.order.copy(), state.target.copy(), state.clock.copy(), state.seen.copy())


def _moves(rows: Sequence[Row]) -> Moves:
    columns = np.array(rows, np.int32).reshape(-1, 5).T
    return Moves(columns[0], columns[1], columns[2], columns[3], columns[4].astype(bool))


def joined(first: Moves, then: Moves) -> Moves:
    """The moves of a step that serves, then ranks, in this order."""
    return Moves(*(np.concatenate(pair) for pair in zip(vars(first).values(), vars(then).values(), strict=True)))
