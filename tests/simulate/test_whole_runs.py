"""Whole runs equal stepping, and one pass for all budgets equals separate runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wakesight.cache.residency.policies import (
    RKV,
    Arc,
    Belady,
    Evict,
    Frozen,
    FrozenTail,
    Full,
    Reactive,
    ReasonAlloc,
    SnapKV,
)  # fmt: skip
from wakesight.errors import RequestError
from wakesight.simulate import whole_runs
from wakesight.simulate.stepping import play
from wakesight.testing.wants import random_wants

pytest.importorskip("numba")

POLICIES = [
    Full(), Reactive(), Reactive(first_touch="miss"), Reactive(start="snapkv"), Evict(), Evict(start="snapkv"),
    Belady(), Belady(start="snapkv", first_touch="miss"), Arc(), Arc(start="snapkv", first_touch="miss"),
    Frozen(interval=4), FrozenTail(interval=3), SnapKV(), RKV(buffer=4), RKV(), ReasonAlloc(interval=4),
]  # fmt: skip
FIELDS = ("accesses", "misses", "first_touches", "fetches", "resident", "hits")


@st.composite
def wants(draw):
    units = draw(st.integers(1, 5))
    return random_wants(
        draw(st.integers(0, 10**6)), units=units, steps=draw(st.integers(1, 40)), pages=draw(st.integers(2, 40)),
        per_step=draw(st.integers(1, 9)), layers=draw(st.integers(1, min(units, 3))), locality=draw(st.floats(0, 1)),
    )  # fmt: skip


def assert_same(one, other):
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert (one.start, one.reversible, one.demotions) == (other.start, other.reversible, other.demotions)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(max_examples=40, deadline=None)
@given(trace=wants(), budget=st.integers(1, 12))
def test_a_whole_run_is_the_rule_step_by_step(policy, trace, budget):
    assert_same(whole_runs.run(policy, trace, budget), play(policy, trace, budget))


@pytest.mark.parametrize("policy", [Reactive(), Reactive(first_touch="miss"), Reactive(start="snapkv")], ids=str)
@settings(max_examples=60, deadline=None)
@given(trace=wants(), budgets=st.lists(st.integers(1, 45), min_size=1, max_size=6))
# long enough that the row of bits is closed up many times, with steps that want more than the smallest budget
@example(trace=random_wants(1, units=2, steps=900, pages=70, per_step=12), budgets=[1, 3, 16, 33, 64, 70, 71])
def test_one_pass_gives_every_budget(policy, trace, budgets):
    curve = whole_runs.reactive_curve(policy, trace, budgets)
    assert list(curve) == sorted(set(budgets))
    for budget in budgets:
        assert_same(curve[budget], whole_runs.run(policy, trace, budget))


def test_a_trace_where_a_unit_wants_nothing():
    trace = random_wants(0, units=3, steps=5, per_step=0)
    for policy in POLICIES:
        done = whole_runs.run(policy, trace, 2)
        assert done.accesses.sum() == done.misses.sum() == done.fetches.sum() == 0
    assert whole_runs.reactive_curve(Reactive(), trace, [2])[2].resident.tolist() == [0] * 5


def test_what_came_in_and_is_not_held_was_demoted():
    trace = random_wants(4, units=2, steps=30)
    done = whole_runs.run(Reactive(), trace, 3)
    assert done.demotions == done.first_touches.sum() + done.fetches.sum() - done.resident[-1] > 0
    assert whole_runs.run(Evict(), trace, 3).demotions == 0
    started = whole_runs.run(Reactive(start="snapkv"), trace, 3)
    assert started.start == 6
    assert started.demotions == 6 + started.first_touches.sum() + started.fetches.sum() - started.resident[-1]


@pytest.mark.parametrize(("budgets", "says"), [([], "no budget"), ([0], "holds nothing"), ([4, -1], "budget of -1")])
def test_bad_budgets_are_refused(budgets, says):
    with pytest.raises(RequestError, match=says):
        whole_runs.reactive_curve(Reactive(), random_wants(0), budgets)
