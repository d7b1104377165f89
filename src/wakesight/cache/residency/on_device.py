"""The rules of `step.py` for torch, on any device: every unit at once, and no step waits for the device.

Shapes never depend on values: moves come padded, one row per thing that could move. Integer sizes (`slots`, `budget`,
`step`) are the host's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wakesight.cache.residency.base import (
    B1,
    B2,
    NEVER,
    NOWHERE,
    PADDING,
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


def lru(state: SlotState, wants: Wants, step: int, first_touch: FirstTouch = "free", destroy: bool = False) -> Step:
    there, match, hit, known = _look(state, wants)
    wanted_slot = match.any(1)  # [unit, slot]
    weight_here = torch.where(match, wants.weights[:, :, None], 0).sum(1)  # one match at most
    use = torch.where(wanted_slot, step, state.last_use)
    mass = torch.where(wanted_slot, weight_here, state.last_weight)
    counts, fetch = _enter(there, hit, known, first_touch, destroy)
    comes = there & ~hit & ~(known & destroy)
    new_use = torch.where(comes, step, PADDING).to(use.dtype)
    placed, moves = _exchange(state.slot_page, (use, mass), wants.pages, (new_use, wants.weights), comes, fetch)
    return Step(SlotState(*placed, seen=_mark(state.seen, wants)), moves, counts)


def belady(state: SlotState, wants: Wants, next_use: Tensor, first_touch: FirstTouch = "free") -> Step:
    there, match, hit, known = _look(state, wants)
    use_here = torch.where(match, next_use[:, :, None], 0).sum(1)
    use = torch.where(match.any(1), use_here, state.last_use).to(torch.int64)
    counts, fetch = _enter(there, hit, known, first_touch, False)
    comes = there & ~hit
    lowest = -NEVER - 2  # below an empty slot's: padding never takes one
    key = torch.where(state.slot_page >= 0, -use, -NEVER - 1)
    new_key = torch.where(comes, -next_use.to(torch.int64), lowest)
    (slot_page, key, mass), moves = _exchange(
        state.slot_page, (key, state.last_weight), wants.pages, (new_key, wants.weights), comes, fetch, by_weight=False
    )
    last_use = torch.where(slot_page >= 0, -key, state.last_use).to(state.last_use.dtype)
    return Step(SlotState(slot_page, last_use, mass, _mark(state.seen, wants)), moves, counts)


def serve(state: TableState, wants: Wants, admit_from: Tensor, count: bool = False) -> Step:
    there, index = _there(wants)
    held, known = state.held.gather(1, index) & there, state.seen.gather(1, index) & there
    let_in = there & ~held & ~known & (wants.pages >= admit_from[:, None])
    gain = torch.where(there, torch.ones_like(wants.weights) if count else wants.weights, 0)
    new = TableState(
        state.held | _marked(state.held, index, let_in), state.seen | _marked(state.seen, index, there),
        state.worth + torch.zeros_like(state.worth).scatter_add(1, index, gain), state.tail,
    )  # fmt: skip
    misses = there & ~held & ~let_in
    page = torch.where(let_in, wants.pages, -1)
    moves = _padded(page, page, torch.full_like(page, -1), torch.zeros_like(let_in))
    return Step(new, moves, Counts(_sum(held), _sum(misses), _sum(let_in), torch.zeros_like(_sum(held))))


def refresh(state: TableState, budget: int, exempt: Tensor, tail: int) -> Step:
    best = _worthiest(state.worth, state.worth > 0, torch.full_like(state.tail, budget))
    best = torch.where(exempt[:, None], state.held, best)
    comes = best & ~state.held
    none = torch.zeros_like(_sum(comes))
    new = TableState(best, state.seen, state.worth, torch.full_like(state.tail, tail))
    return Step(new, _table_moves(state.held, best), Counts(none, none, none, _sum(comes)))


def prune(state: TableState, budgets: Tensor) -> Step:
    best = _worthiest(state.worth, state.held, budgets)
    none = torch.zeros_like(budgets)
    moves = _table_moves(state.held, best)
    return Step(TableState(best, state.seen, state.worth, state.tail), moves, Counts(none, none, none, none))


def head_budgets(state: TableState, budget: int, layers: Sequence[Sequence[int]], least: int) -> Tensor:
    budgets = torch.zeros_like(state.tail)
    for units in layers:
        rows = torch.as_tensor(units, device=state.held.device)  # nothing to copy if `to` has put it there
        worth = torch.where(state.held[rows], state.worth[rows], -torch.inf)
        total = budget * len(units)
        # with fewer pages than that the bar is -inf or absent: every resident page reaches it
        bar = worth.flatten().sort(descending=True).values[total - 1] if total <= worth.numel() else -torch.inf
        demand = (state.held[rows] & (worth >= bar)).sum(1)
        budgets = budgets.index_copy(0, rows, _share(demand, total, least).to(budgets.dtype))
    return budgets


def arc(state: ArcState, wants: Wants, slots: int, first_touch: FirstTouch = "free") -> Step:
    there, index = _there(wants)
    known = state.seen.gather(1, index) & there
    before = (state.place == T1) | (state.place == T2)
    hit = before.gather(1, index) & there
    counts, fetch = _enter(there, hit, known, first_touch, False)
    lists = _Lists(state)
    turn = _ascending(wants.pages, wants.weights, torch.where(there, torch.where(hit, 0, 1), 2))
    for column in range(turn.shape[1]):
        at = turn[:, column : column + 1]
        lists.request(index.gather(1, at), there.gather(1, at), slots)
    new = ArcState(lists.place, lists.order, lists.target, lists.clock, _mark(state.seen, wants))
    after = (new.place == T1) | (new.place == T2)
    comes = there & ~hit
    page = torch.where(comes, wants.pages, -1)
    stays = torch.where(after.gather(1, index), page, -1)
    entered = _padded(stays, page, torch.full_like(page, -1), fetch)
    left = _table_moves(before, before & after)
    moves = Moves(*(torch.cat([getattr(entered, name), getattr(left, name)]) for name in vars(entered)))
    return Step(new, moves, counts)


def _there(wants: Wants) -> tuple[Tensor, Tensor]:
    """(is it a want, an index that is safe to gather with), [unit, column]."""
    return wants.pages >= 0, wants.pages.clamp(min=0).to(torch.int64)


def _look(state: SlotState, wants: Wants) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(is a want, [unit, column, slot] it lies there, resident, seen before)."""
    there, index = _there(wants)
    match = (wants.pages[:, :, None] == state.slot_page[:, None, :]) & there[:, :, None]
    return there, match, match.any(2), state.seen.gather(1, index) & there


def _enter(
    there: Tensor, hit: Tensor, known: Tensor, first_touch: FirstTouch, destroy: bool
) -> tuple[Counts, Tensor]:  # fmt: skip
    """Count, and say which wants are fetched."""
    outside = there & ~hit
    first = outside & ~known if first_touch == "free" else torch.zeros_like(outside)
    miss = outside & ~first
    fetch = torch.zeros_like(miss) if destroy else miss
    return Counts(_sum(hit), _sum(miss), _sum(first), _sum(fetch)), fetch


def _exchange(
    slot_page: Tensor, slot_keys: tuple[Tensor, Tensor], pages: Tensor, new_keys: tuple[Tensor, Tensor],
    comes: Tensor, fetch: Tensor, by_weight: bool = True,
) -> tuple[tuple[Tensor, Tensor, Tensor], Moves]:  # fmt: skip
    """Of slots and columns together as many smallest are dropped as there are columns; padding is smallest of all.

    Keys are (stamp, weight); the page id decides what is left. Returns (slot_page, stamp, weight) and the moves.
    """
    slots, columns = slot_page.shape[1], pages.shape[1]
    stamp, mass = (torch.cat(pair, 1) for pair in zip(slot_keys, new_keys, strict=True))
    page = torch.cat([slot_page, pages], 1)
    order = _ascending(page, mass if by_weight else torch.zeros_like(mass), stamp)  # [unit, slot + column]
    place = torch.arange(slots + columns, device=pages.device)
    is_slot, low = order < slots, place < columns
    leaving, staying = is_slot & low, ~is_slot & ~low
    # the i-th that leaves gives its slot to the i-th that stays; others are written to a column of their own
    nth_out = torch.where(leaving, leaving.cumsum(1) - 1, columns)
    freed = torch.zeros_like(order[:, : columns + 1]).scatter(1, nth_out, torch.where(leaving, order, 0))
    nth_in = torch.where(staying, staying.cumsum(1) - 1, columns)
    sorted_slot = torch.where(staying, freed.gather(1, nth_in), -1)
    slot = torch.full_like(order, -1).scatter(1, order, sorted_slot)[:, slots:]  # [unit, column]
    target = torch.where(slot >= 0, slot, slots)  # the last column is thrown away

    def write(old: Tensor, new: Tensor) -> Tensor:
        return torch.cat([old, old[:, :1]], 1).scatter(1, target, new)[:, :slots]

    out = torch.where(slot >= 0, slot_page.gather(1, slot.clamp(min=0)), -1)
    moves = _padded(slot.to(pages.dtype), torch.where(comes, pages, -1), out, fetch)
    return (write(slot_page, pages), write(slot_keys[0], new_keys[0]), write(slot_keys[1], new_keys[1])), moves


def _ascending(third: Tensor, second: Tensor, first: Tensor) -> Tensor:
    """Order [unit, item] by rising first, then second, then third."""
    order = third.argsort(dim=1, stable=True)
    order = order.gather(1, second.gather(1, order).argsort(dim=1, stable=True))
    return order.gather(1, first.gather(1, order).argsort(dim=1, stable=True))


def _worthiest(worth: Tensor, candidates: Tensor, budgets: Tensor) -> Tensor:
    """bool [unit, page]: the best of the candidates, ties to the lower id."""
    order = torch.where(candidates, -worth, torch.inf).argsort(dim=1, stable=True)
    rank = order.argsort(dim=1)
    return candidates & (rank < budgets[:, None])


def _share(demand: Tensor, total: int, least: int) -> Tensor:
    """The rule of `step._share`; fixing goes on as often as there are units, which is always enough."""
    fixed = torch.zeros_like(demand, dtype=torch.bool)
    for _ in range(len(demand)):
        left, weights = _left(demand, fixed, total, least)
        fixed = fixed | (~fixed & (left * weights < least * weights.sum()))
    left, weights = _left(demand, fixed, total, least)
    whole = weights.sum()
    shares = torch.where(fixed, least, left * weights // whole)
    remainders = torch.where(fixed, -1, left * weights % whole)
    rank = (-remainders).argsort(stable=True).argsort()
    return shares + (rank < total - shares.sum())


def _left(demand: Tensor, fixed: Tensor, total: int, least: int) -> tuple[Tensor, Tensor]:
    weights = torch.where(fixed, 0, demand)
    return total - least * fixed.sum(), torch.where(weights.sum() == 0, (~fixed).to(demand.dtype), weights)


class _Lists:
    """ARC's lists of every unit while a step runs: one request of each unit at a time, the four cases as masks."""

    def __init__(self, state: ArcState) -> None:
        self.place, self.order, self.target, self.clock = state.place, state.order, state.target, state.clock

    def request(self, page: Tensor, real: Tensor, slots: int) -> None:
        """page, real: [unit, 1]; units without a real request change nothing."""
        t1, t2, b1, b2 = ((self.place == name).sum(1, keepdim=True) for name in (T1, T2, B1, B2))
        total = t1 + t2 + b1 + b2
        before = self.place.gather(1, page)
        goal = self.target[:, None]
        from_b1, from_b2, new = real & (before == B1), real & (before == B2), real & (before == NOWHERE)
        more = torch.clamp(b2 // b1.clamp(min=1), min=1)
        less = torch.clamp(b1 // b2.clamp(min=1), min=1)
        goal = torch.where(from_b1, (goal + more).clamp(max=slots), goal)
        goal = torch.where(from_b2, (goal - less).clamp(min=0), goal).to(self.target.dtype)
        full = new & (t1 + b1 == slots)
        roomy = new & (t1 + b1 < slots) & (total >= slots)
        self._forget(T1, full & (t1 == slots))
        self._forget(B1, full & (t1 < slots))
        self._forget(B2, roomy & (total == 2 * slots))
        replaces = from_b1 | from_b2 | (full & (t1 < slots)) | roomy
        recent = (t1 >= 1) & ((t1 > goal) | (from_b2 & (t1 == goal)))
        victim = torch.where(recent, self._oldest(T1), self._oldest(T2))
        self._append(victim, torch.where(recent, B1, B2), replaces)
        self.target = torch.where(real, goal, self.target[:, None])[:, 0]
        self._append(page, torch.where(before == NOWHERE, T1, T2), real)

    def _oldest(self, name: int) -> Tensor:
        order = torch.where(self.place == name, self.order, torch.iinfo(self.order.dtype).max)
        return order.argmin(1, keepdim=True)

    def _forget(self, name: int, where: Tensor) -> None:
        page = self._oldest(name)
        kept = self.place.gather(1, page)
        self.place = self.place.scatter(1, page, torch.where(where, NOWHERE, kept).to(self.place.dtype))

    def _append(self, page: Tensor, name: Tensor, where: Tensor) -> None:
        place, order = self.place.gather(1, page), self.order.gather(1, page)
        self.place = self.place.scatter(1, page, torch.where(where, name, place).to(self.place.dtype))
        self.order = self.order.scatter(1, page, torch.where(where, self.clock[:, None], order))
        self.clock = self.clock + where[:, 0].to(self.clock.dtype)


def _mark(seen: Tensor, wants: Wants) -> Tensor:
    there, index = _there(wants)
    return seen | _marked(seen, index, there)


def _marked(like: Tensor, index: Tensor, where: Tensor) -> Tensor:
    """bool [unit, page]: the pages of `index` [unit, column] where `where`. Padding adds 0 to page 0."""
    return torch.zeros_like(like, dtype=torch.int32).scatter_add(1, index, where.to(torch.int32)) > 0


def _table_moves(before: Tensor, after: Tensor) -> Moves:
    """One row per unit and page: fetched in, out, or nothing."""
    page = torch.arange(before.shape[1], device=before.device, dtype=torch.int32).expand(before.shape)
    comes, leaves = after & ~before, before & ~after
    return _padded(page, torch.where(comes, page, -1), torch.where(leaves, page, -1), comes)


def _padded(slot: Tensor, page_in: Tensor, page_out: Tensor, fetch: Tensor) -> Moves:
    """[unit, anything] each -> flat moves."""
    unit = torch.arange(len(slot), device=slot.device, dtype=torch.int32)[:, None].expand(slot.shape)
    return Moves(*(x.reshape(-1) for x in (unit, slot, page_in.to(slot.dtype), page_out.to(slot.dtype), fetch)))


def _sum(mask: Tensor) -> Tensor:
    return mask.sum(1).to(torch.int32)


def joined(first: Moves, then: Moves) -> Moves:
    """The moves of a step that serves, then ranks, in this order."""
    return Moves(*(torch.cat(pair) for pair in zip(vars(first).values(), vars(then).values(), strict=True)))


def to(value: Any, device: torch.device | str) -> Any:
    """A state, wants or setting (a frozen dataclass) with its numpy arrays, and tuples of them, as tensors there."""

    def moved(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(moved, x))
        return torch.as_tensor(x, device=device) if isinstance(x, np.ndarray) else x

    return dataclasses.replace(value, **{name: moved(x) for name, x in vars(value).items()})
