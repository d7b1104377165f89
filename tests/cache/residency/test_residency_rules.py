"""The rules on examples worked by hand, and on references written another way."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.cache.residency import policies, step
from wakesight.cache.residency.base import NEVER, T1, T2, TableState, Wants, first_slots, make_wants, top_pages
from wakesight.cache.residency.policies import (
    RKV,
    Arc,
    At,
    Belady,
    Evict,
    Frozen,
    FrozenTail,
    Full,
    Reactive,
    ReasonAlloc,
    Setting,
    SnapKV,
)  # fmt: skip
from wakesight.errors import RequestError

A, B = 0, 1


def play(policy, steps, budget, pages=12, prompt_pages=4, context=None, **known):
    """One unit; steps: lists of pages, or of (page, weight). Returns [(held pages, hits, misses, first, fetches)]."""
    unstable = np.zeros(1, bool)
    setting = Setting(1, pages, prompt_pages, budget, [[0]], **({"unstable": unstable} | known))
    pairs = [[want if isinstance(want, tuple) else (want, 1.0) for want in wanted] for wanted in steps]
    upcoming = [[next((t for t in range(s + 1, len(pairs)) if p in dict(pairs[t])), NEVER) for p, _ in wanted]
                for s, wanted in enumerate(pairs)]  # fmt: skip
    state, seen = policy.begin(setting), []
    for number, wanted in enumerate(pairs):
        wants = Wants(np.array([[p for p, _ in wanted]], np.int32), np.array([[w for _, w in wanted]], np.float32))
        at = At(number, prompt_pages if context is None else context[number], np.array([upcoming[number]], np.int32))
        state, _, counts = policy.step(step, state, wants, at, setting)
        seen.append((held(state), *(int(x[0]) for x in vars(counts).values())))
    return seen


def held(state):
    if hasattr(state, "slot_page"):
        return sorted(page for page in state.slot_page[0].tolist() if page >= 0)
    if hasattr(state, "held"):
        return np.flatnonzero(state.held[0]).tolist()
    return np.flatnonzero((state.place[0] == T1) | (state.place[0] == T2)).tolist()


def sums(seen):
    """hits, misses, first touches, fetches"""
    return tuple(np.array([one[1:] for one in seen]).sum(axis=0).tolist())


def test_reactive_can_lose_to_evict():
    """A dead page never displaces a living one, so destroying can win: A B A B A B in one slot."""
    steps = [[A], [B]] * 3
    assert sums(play(Reactive(), steps, 1)) == (0, 4, 2, 4)
    assert sums(play(Evict(), steps, 1)) == (2, 2, 2, 0)
    assert [one[0] for one in play(Evict(), steps, 1)] == [[A], [B], [B], [B], [B], [B]]


def test_reactive_brings_back_what_evict_lost():
    steps = [[0], [1], [2], [0], [0]]
    assert sums(play(Reactive(), steps, 2)) == (1, 1, 3, 1)
    assert sums(play(Evict(), steps, 2)) == (0, 2, 3, 0)  # a destroyed page misses on every later want
    assert sums(play(Full(), steps, 2)) == (2, 0, 3, 0)


def test_a_first_touch_may_count_as_a_miss():
    assert sums(play(Reactive(first_touch="miss"), [[0, 1], [0], [2]], 2)) == (1, 3, 0, 3)
    assert sums(play(Belady(first_touch="miss"), [[0, 1], [0], [2]], 2)) == (1, 3, 0, 3)


def test_of_a_step_the_heaviest_stay_then_the_higher_ids():
    assert play(Reactive(), [[(3, 0.5), (1, 0.9), (2, 0.5)]], 2)[0][0] == [1, 3]
    assert play(Reactive(), [[(3, 0.5), (1, 0.9), (2, 0.5)]], 1)[0][0] == [1]


def test_victims_go_by_stamp_then_last_weight_then_id():
    seen = play(Reactive(), [[(0, 0.9)], [(1, 0.2), (2, 0.1)], [5]], 3)
    assert seen[-1][0] == [1, 2, 5]
    seen = play(Reactive(), [[(0, 0.9), (1, 0.2), (2, 0.1)], [5], [6]], 3)
    assert [one[0] for one in seen[1:]] == [[0, 1, 5], [0, 5, 6]]
    assert play(Reactive(), [[(4, 0.5), (3, 0.5)], [5]], 2)[-1][0] == [4, 5]


def test_what_is_not_retained_was_fetched_all_the_same():
    setting = Setting(1, 8, 8, 1)
    state = Reactive().begin(setting)
    wants = make_wants([[0, 1, -1]], [[0.1, 0.2, 0]], 8)
    state, moves, _ = step.lru(state, wants, 0)
    assert moves.rows().tolist() == [[0, -1, 0, -1, 0], [0, 0, 1, -1, 0]]
    state, moves, counts = step.lru(state, wants, 1)
    assert moves.rows().tolist() == [[0, -1, 0, -1, 1]]
    assert (counts.hits[0], counts.misses[0]) == (1, 1)


def test_a_first_set_is_resident_seen_and_leaves_from_its_end():
    first = np.array([[2, 0, 3, 1]], np.int32)
    state = first_slots(first, 1, 3, 6, seen_pages=4)
    assert state.slot_page.tolist() == [[2, 0, 3]]
    assert state.seen.tolist() == [[True] * 4 + [False] * 2]
    seen = play(Reactive(), [[1], [4], [5]], 3, first=first)
    assert [one[0] for one in seen] == [[0, 1, 2], [1, 2, 4], [1, 4, 5]]
    assert [one[1:] for one in seen] == [(0, 1, 0, 1), (0, 0, 1, 0), (0, 0, 1, 0)]  # 1 is a prompt page, 4 and 5 not


def test_belady_keeps_what_is_needed_soonest():
    seen = play(Belady(), [[0], [1], [2], [1], [0]], 2)
    assert [one[0] for one in seen] == [[0], [0, 1], [0, 1], [0, 1], [0, 1]]
    assert sums(seen) == (2, 0, 3, 0)


def fewest_misses(steps, budget):
    """Every way to keep at most `budget` of what was held and wanted, first touches free."""
    best = {(frozenset(), frozenset()): 0}
    for wanted in steps:
        following = {}
        for (now, known), cost in best.items():
            cost += len((set(wanted) - now) & known)
            pool = now | set(wanted)
            for kept in itertools.combinations(sorted(pool), min(budget, len(pool))):
                key = (frozenset(kept), known | set(wanted))
                following[key] = min(cost, following.get(key, cost))
        best = following
    return min(best.values())


page_lists = st.lists(st.lists(st.integers(0, 4), max_size=3, unique=True), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(steps=page_lists, budget=st.integers(1, 3))
def test_belady_has_the_fewest_misses_possible(steps, budget):
    assert sums(play(Belady(), steps, budget))[1] == fewest_misses(steps, budget)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.1, 0.2])), max_size=5, unique_by=lambda want: want[0]),
        min_size=1, max_size=12,
    ),
    budget=st.integers(1, 4), destroy=st.booleans(),
)  # fmt: skip
def test_lru_is_an_ordered_dict(steps, budget, destroy):
    """Wants served one by one in ascending order, then the oldest out: how the paper's text says it."""
    held_pages, gone, misses, first = OrderedDict(), set(), 0, 0
    expected = []
    for wanted in steps:
        for page, _ in sorted(wanted, key=lambda want: (want[1], want[0])):
            if page in held_pages:
                held_pages.move_to_end(page)
                continue
            misses += page in gone
            first += page not in gone
            if not (destroy and page in gone):
                held_pages[page] = None
        while len(held_pages) > budget:
            gone.add(held_pages.popitem(last=False)[0])
        expected.append(sorted(held_pages))
    seen = play(Evict() if destroy else Reactive(), steps, budget)
    assert [one[0] for one in seen] == expected
    assert sums(seen)[1:3] == (misses, first)


class TextbookArc:
    """ARC for one request at a time, with lists whose end is the most recent."""

    def __init__(self, size):
        self.size, self.goal = size, 0
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []

    def replace(self, from_b2):
        if self.t1 and (len(self.t1) > self.goal or (from_b2 and len(self.t1) == self.goal)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def request(self, page):
        if page in self.t1 or page in self.t2:
            (self.t1 if page in self.t1 else self.t2).remove(page)
        elif page in self.b1:
            self.goal = min(self.size, self.goal + max(1, len(self.b2) // len(self.b1)))
            self.replace(False)
            self.b1.remove(page)
        elif page in self.b2:
            self.goal = max(0, self.goal - max(1, len(self.b1) // len(self.b2)))
            self.replace(True)
            self.b2.remove(page)
        else:
            if len(self.t1) + len(self.b1) == self.size:
                if len(self.t1) < self.size:
                    self.b1.pop(0)
                    self.replace(False)
                else:
                    self.t1.pop(0)
            elif len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) >= self.size:
                if len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) == 2 * self.size:
                    self.b2.pop(0)
                self.replace(False)
            self.t1.append(page)
            return
        self.t2.append(page)


@settings(max_examples=80, deadline=None)
@given(requests=st.lists(st.integers(0, 9), min_size=1, max_size=60), size=st.integers(1, 4))
def test_arc_of_single_wants_is_the_textbooks(requests, size):
    cache, expected = TextbookArc(size), []
    for page in requests:
        cache.request(page)
        expected.append(sorted(cache.t1 + cache.t2))
    assert [one[0] for one in play(Arc(), [[page] for page in requests], size)] == expected


def test_arc_serves_resident_wants_before_others():
    """0 and 1 are resident; 2, though lighter, comes after 1, so that 1 is saved in T2 and 0 leaves."""
    seen = play(Arc(), [[0], [1], [(2, 0.1), (1, 0.9)]], 2)
    assert seen[-1] == ([1, 2], 1, 0, 1, 0)


def test_frozen_ranks_every_interval_and_misses_in_between():
    steps = [[5], [5], [6, 7], [7], [6], [7], [6, 5]]
    seen = play(Frozen(interval=2), steps, 1)
    assert [one[0] for one in seen] == [[], [5], [5], [5], [5], [7], [7]]
    assert [one[2] for one in seen] == [1, 1, 2, 1, 1, 1, 2]  # wants outside, first touches included
    assert [one[4] for one in seen] == [0, 1, 0, 0, 0, 1, 0]


def test_frozen_starts_from_the_prompts_best_pages():
    scores = np.array([[0.1, 0.7, 0.7, 0.2]], np.float32)
    assert play(Frozen(), [[1]], 1, prompt_scores=scores)[0] == ([1], 1, 0, 0, 0)  # ties to the lower id
    assert play(Frozen(), [[1]], 1)[0] == ([], 0, 1, 0, 0)


def test_frozen_may_keep_the_tail():
    steps, context = [[4], [4], [5], [4]], [5, 5, 6, 6]
    assert play(Frozen(interval=2), steps, 1, context=context)[0][1:4] == (0, 1, 0)
    seen = play(FrozenTail(interval=2), steps, 1, context=context)
    assert [one[0] for one in seen] == [[4], [4], [4, 5], [4]]
    assert [one[1:] for one in seen] == [(0, 0, 1, 0), (1, 0, 0, 0), (0, 0, 1, 0), (1, 0, 0, 0)]


def test_unstable_units_keep_everything():
    unstable = np.ones(1, bool)
    seen = play(Frozen(interval=1), [[0], [5], [0], [5]], 1, unstable=unstable, prompt_scores=np.ones((1, 4), "f4"))
    assert sums(seen) == (2, 0, 2, 0)
    assert seen[-1][0] == [0, 5]


def test_snapkv_keeps_the_best_prompt_pages_and_everything_generated():
    scores = np.array([[0.1, 0.9, 0.5, 0.2]], np.float32)
    seen = play(SnapKV(), [[0], [0], [1], [4], [4, 2]], 2, prompt_scores=scores)
    assert [one[1:4] for one in seen] == [(0, 1, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (2, 0, 0)]
    assert seen[-1][0] == [1, 2, 4]
    with pytest.raises(RequestError, match="needs their scores"):
        play(SnapKV(), [[0]], 2)


def test_rkv_destroys_the_least_important_every_buffer():
    steps = [[(0, 0.5), (1, 0.2)], [(2, 0.4), (1, 0.1)], [2, 1], [1]]
    seen = play(RKV(buffer=2), steps, 2)
    assert [one[0] for one in seen] == [[0, 1], [0, 2], [0, 2], [0, 2]]
    assert [one[1:4] for one in seen] == [(0, 0, 2), (1, 0, 1), (1, 1, 0), (0, 1, 0)]


def test_reasonalloc_on_its_worked_example():
    """B = 2, two heads, delta = 2: demand 1 and 3, budgets 1 and 3."""
    worth = np.zeros((2, 6), np.float32)
    worth[0], worth[1, :3] = [0.06, 0.05, 0.04, 0.03, 0.02, 0.01], [9, 8, 7]
    state = TableState(worth > 0, worth > 0, worth, np.zeros(2, np.int32))
    for name in ("plain", "numba", "torch"):
        rules = policies.body(name)
        there = rules.to(state, "cpu") if name == "torch" else state
        assert rules.head_budgets(there, 2, [[0, 1]], 1).tolist() == [1, 3], name

    setting = Setting(2, 6, 0, 2, [[0, 1]])
    state = ReasonAlloc(interval=2).begin(setting)
    halves = Wants(np.array([range(6), [0, 1, 2, -1, -1, -1]], np.int32), worth / 2)
    for number in range(2):
        state, moves, _ = ReasonAlloc(interval=2).step(step, state, halves, At(number, 6), setting)
    assert state.held.sum(axis=1).tolist() == [1, 3]
    assert state.held[0].tolist() == [True] + [False] * 5
    assert sorted(moves.page_out[moves.page_out >= 0].tolist()) == [1, 2, 3, 4, 5]


@settings(max_examples=100, deadline=None)
@given(demand=st.lists(st.integers(0, 40), min_size=1, max_size=7), budget=st.integers(1, 20), floor=st.floats(0, 1))
def test_shares_sum_to_the_budget_and_respect_the_floor(demand, budget, floor):
    least = max(1, int(floor * budget))
    worth = np.zeros((len(demand), 40), np.float32)
    for unit, count in enumerate(demand):
        worth[unit, :count] = 1
    state = TableState(worth > 0, worth > 0, worth, np.zeros(len(demand), np.int32))
    shares = step.head_budgets(state, budget, [range(len(demand))], least)
    assert shares.sum() == budget * len(demand)
    assert shares.min() >= least
    above = [(d, s) for d, s in zip(demand, shares.tolist(), strict=True) if s > least]
    assert all(s >= t - 1 for d, s in above for e, t in above if d >= e)  # more demand, not less but for rounding


def test_top_pages_take_the_lower_id_and_no_page_below_zero():
    assert top_pages(np.array([[1, 3, 3, -1]], np.float32), 3).tolist() == [[1, 2, 0]]
    assert top_pages(np.array([[-1, 0, -1]], np.float32), 3).tolist() == [[1, -1, -1]]


@pytest.mark.parametrize(
    ("pages", "weights", "says"),
    [
        ([[0, 0]], [[1, 1]], "a page twice"),
        ([[9]], [[1]], "page 9"),
        ([[-2]], [[1]], "page -2"),
        ([[0]], [[np.nan]], "NaN"),
        ([0], [0], "one shape"),
        ([[0, 1]], [[1]], "one shape"),
    ],
)
def test_bad_wants_are_refused(pages, weights, says):
    with pytest.raises(RequestError, match=says):
        make_wants(pages, weights, 4)


@pytest.mark.parametrize(
    "make",
    [lambda: RKV(buffer=0), lambda: Frozen(interval=0), lambda: Frozen(unstable=1.5), lambda: ReasonAlloc(floor=-1)],
)
def test_bad_settings_are_refused(make):
    with pytest.raises(RequestError):
        make()
