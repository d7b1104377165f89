"""Whole runs of LRU in compiled code: linked lists instead of slots, and one pass for all budgets. Needs numba.

Wants come flat (`PageWants`): by unit, then step, each step in ascending order of weight, then id. Pages are unique per
step, so a step served in that order, one page after the other, and trimmed at its end is the rule of `step.lru`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])
UNSEEN, HELD, AWAY = np.uint8(0), np.uint8(1), np.uint8(2)
WORD = 64  # bits


def njit(function: Function) -> Function:
    """Compile. The cache only notices a change of this file, so compiled functions call none of another file."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))


@njit
def lru_run(
    offsets: Any, pages: Any, units: int, steps: int, page_count: int, budget: int, first: Any, seen_pages: int,
    first_is_miss: bool, destroy: bool, tally: Any, resident: Any,
) -> None:  # fmt: skip
    """reactive or evict (`destroy`). first: int32 [unit, any], the most valuable first, -1 = none.

    tally: int64 [3, step], rows misses, first touches, fetches. resident: int64 [step]. Both are added to.
    """
    # a ring per unit: newer[end] is the least recent page, older[end] the most recent
    end = page_count
    newer, older = np.empty(page_count + 1, np.int32), np.empty(page_count + 1, np.int32)
    status = np.empty(page_count, np.uint8)
    for unit in range(units):
        newer[end], older[end] = end, end
        status[:seen_pages], status[seen_pages:] = AWAY, UNSEEN
        held = 0
        for column in range(min(first.shape[1], budget) - 1, -1, -1):
            page = first[unit, column]
            if page >= 0:
                last = older[end]
                newer[last], older[page], newer[page], older[end] = page, last, end, page
                status[page] = HELD
                held += 1
        for step in range(steps):
            for i in range(offsets[unit * steps + step], offsets[unit * steps + step + 1]):
                page = pages[i]
                if status[page] == HELD:
                    newer[older[page]], older[newer[page]] = newer[page], older[page]
                else:
                    if status[page] == UNSEEN and not first_is_miss:
                        tally[1, step] += 1
                    else:
                        tally[0, step] += 1
                        if destroy:
                            if status[page] == AWAY:
                                continue
                        else:
                            tally[2, step] += 1
                    status[page] = HELD
                    held += 1
                last = older[end]
                newer[last], older[page], newer[page], older[end] = page, last, end, page
            while held > budget:
                page = newer[end]
                newer[end], older[newer[page]] = newer[page], end
                status[page] = AWAY
                held -= 1
            resident[step] += held


@njit
def lru_curve(
    offsets: Any, pages: Any, units: int, steps: int, page_count: int, larger: Any, first: Any, seen_pages: int,
    first_is_miss: bool, missed: Any, first_touches: Any, held_units: Any, held_pages: Any,
) -> None:  # fmt: skip
    """reactive at every budget in one pass, by stack distance: a page hits at budgets above its place in the stack.

    larger: int64 [page_count + 1], how many of the sorted budgets are <= each number. Filled per step and k:
    missed[step, k], wants that miss at the k smallest budgets only; held_units[step, k] and held_pages[step, k], units
    whose stack has reached just the k smallest budgets, and the pages in these stacks. first_touches: [step].

    The stack of a unit is a row of bits over time, one for each page at its last use. A place is the number of bits
    after it: whole words are counted once (`ones`), and the row is closed up when it is full.
    Source: Mattson et al., "Evaluation techniques for storage hierarchies"; bits over time ours.
    """
    words = 4 * page_count // WORD + 2
    bits, ones = np.zeros(words, np.uint64), np.zeros(words, np.int32)
    page_at, place = np.empty(words * WORD, np.int32), np.empty(page_count, np.int32)
    everywhere = missed.shape[1] - 1
    known = np.empty(page_count, np.bool_)
    for unit in range(units):
        bits[:], ones[:], place[:] = 0, 0, -1
        known[:seen_pages], known[seen_pages:] = True, False
        top, live = 0, 0
        for column in range(first.shape[1] - 1, -1, -1):
            page = first[unit, column]
            if page >= 0:
                _set(bits, ones, page_at, place, page, top)
                top += 1
                live += 1
        for step in range(steps):
            begin, finish = offsets[unit * steps + step], offsets[unit * steps + step + 1]
            if top + (finish - begin) > words * WORD:
                top = _close_up(bits, ones, page_at, place, top)
            last_word = top // WORD
            for i in range(begin, finish):
                page = pages[i]
                if place[page] >= 0:
                    missed[step, larger[_after(bits, ones, place[page], last_word)]] += 1
                elif known[page] or first_is_miss:
                    missed[step, everywhere] += 1
                else:
                    first_touches[step] += 1
            for i in range(begin, finish):
                page = pages[i]
                at = place[page]
                if at >= 0:
                    bits[at // WORD] &= ~(np.uint64(1) << np.uint64(at % WORD))
                    ones[at // WORD] -= 1
                else:
                    known[page] = True
                    live += 1
                _set(bits, ones, page_at, place, page, top)
                top += 1
            held_units[step, larger[live]] += 1
            held_pages[step, larger[live]] += live


@njit
def _set(bits: Any, ones: Any, page_at: Any, place: Any, page: int, at: int) -> None:
    bits[at // WORD] |= np.uint64(1) << np.uint64(at % WORD)
    ones[at // WORD] += 1
    page_at[at], place[page] = page, at


@njit
def _after(bits: Any, ones: Any, at: int, last_word: int) -> Any:
    """How many bits are set behind `at`."""
    word = at // WORD
    rest = bits[word] >> np.uint64(at % WORD) >> np.uint64(1)
    rest = rest - ((rest >> np.uint64(1)) & np.uint64(0x5555555555555555))
    rest = (rest & np.uint64(0x3333333333333333)) + ((rest >> np.uint64(2)) & np.uint64(0x3333333333333333))
    rest = (rest + (rest >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    count = np.int64((rest * np.uint64(0x0101010101010101)) >> np.uint64(56))
    for later in range(word + 1, min(last_word + 1, len(ones))):
        count += ones[later]
    return count


@njit
def _close_up(bits: Any, ones: Any, page_at: Any, place: Any, top: int) -> int:
    """Move the live places to the front, in order; returns the first free one."""
    new = 0
    for at in range(top):
        page = page_at[at]
        if place[page] == at:
            page_at[new], place[page] = page, new
            new += 1
    bits[:], ones[:] = 0, 0
    for at in range(new):
        bits[at // WORD] |= np.uint64(1) << np.uint64(at % WORD)
        ones[at // WORD] += 1
    return new


@njit
def belady_run(
    offsets: Any, pages: Any, next_use: Any, units: int, steps: int, page_count: int, budget: int, first: Any,
    first_use: Any, seen_pages: int, first_is_miss: bool, tally: Any, resident: Any,
) -> None:  # fmt: skip
    """belady, arrays as for `lru_run`. next_use: int32 [want]; first_use: int32 [unit, page]."""
    status, use = np.empty(page_count, np.uint8), np.empty(page_count, np.int32)
    held = np.empty(2 * page_count, np.int32)
    for unit in range(units):
        status[:seen_pages], status[seen_pages:] = AWAY, UNSEEN
        count = 0
        for column in range(min(first.shape[1], budget)):
            page = first[unit, column]
            if page >= 0:
                status[page], use[page], held[count] = HELD, first_use[unit, page], page
                count += 1
        for step in range(steps):
            for i in range(offsets[unit * steps + step], offsets[unit * steps + step + 1]):
                page = pages[i]
                use[page] = next_use[i]
                if status[page] == HELD:
                    continue
                if status[page] == UNSEEN and not first_is_miss:
                    tally[1, step] += 1
                else:
                    tally[0, step] += 1
                    tally[2, step] += 1
                status[page], held[count] = HELD, page
                count += 1
            while count > budget:
                worst = 0
                for i in range(1, count):
                    one, other = held[i], held[worst]
                    if use[one] > use[other] or (use[one] == use[other] and one < other):
                        worst = i
                status[held[worst]] = AWAY
                count -= 1
                held[worst] = held[count]
            resident[step] += count
