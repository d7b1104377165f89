"""The plain, the numba and the torch body of every step function: equal states, moves and counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.cache.residency import policies
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
    SnapKV,
)  # fmt: skip
from wakesight.simulate import offline
from wakesight.simulate.stepping import begin, setting_for
from wakesight.testing.wants import random_wants

pytest.importorskip("numba")

POLICIES = [
    Full(), Reactive(), Reactive(first_touch="miss"), Reactive(start="snapkv"), Evict(), Evict(start="snapkv"),
    Belady(), Belady(start="snapkv", first_touch="miss"), Arc(), Arc(start="snapkv", first_touch="miss"),
    Frozen(interval=4), FrozenTail(interval=3), SnapKV(), RKV(buffer=4), ReasonAlloc(interval=4),
    ReasonAlloc(interval=2, floor=1.0), ReasonAlloc(interval=3, floor=0.0),
]  # fmt: skip


@st.composite
def wants(draw):
    units = draw(st.integers(1, 6))
    return random_wants(
        draw(st.integers(0, 10**6)), units=units, steps=draw(st.integers(1, 14)), pages=draw(st.integers(2, 20)),
        per_step=draw(st.integers(1, 8)), layers=draw(st.integers(1, min(units, 3))), locality=draw(st.floats(0, 1)),
    )  # fmt: skip


def in_numpy(value):
    return {name: np.asarray(array) for name, array in vars(value).items()}


def assert_equal(one, other):
    one, other = in_numpy(one), in_numpy(other)
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(max_examples=25, deadline=None)
@given(trace=wants(), budget=st.integers(1, 9))
def test_three_bodies_are_equal(policy, trace, budget):
    setting = setting_for(policy, trace, budget)
    rules = {name: policies.body(name) for name in ("plain", "numba", "torch")}
    states = dict.fromkeys(("plain", "numba"), begin(policy, trace, setting))
    states["torch"] = rules["torch"].to(states["plain"], "cpu")
    next_uses = offline.padded_next_uses(trace, offline.next_uses(trace))
    for step, (wanted, upcoming) in enumerate(zip(offline.padded(trace), next_uses, strict=True)):
        at = At(step, int(trace.pages_in_context[step]), upcoming)
        done = {name: policy.step(rules[name], states[name], wanted, at, setting) for name in ("plain", "numba")}
        there = [rules["torch"].to(value, "cpu") for value in (wanted, at, setting)]
        done["torch"] = policy.step(rules["torch"], states["torch"], *there)
        for name in ("numba", "torch"):
            assert_equal(done["plain"].state, done[name].state)
            assert_equal(done["plain"].counts, done[name].counts)
            np.testing.assert_array_equal(done["plain"].moves.rows(), done[name].moves.rows())
        states = {name: one.state for name, one in done.items()}


@pytest.mark.parametrize("body", ["plain", "numba", "torch"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_step_leaves_its_state_alone(policy, body):
    trace = random_wants(3, units=4, steps=12, layers=2)
    setting, rules = setting_for(policy, trace, 3), policies.body(body)
    state = begin(policy, trace, setting)
    steps = list(zip(offline.padded(trace), offline.padded_next_uses(trace, offline.next_uses(trace)), strict=True))
    if body == "torch":
        state, setting = rules.to(state, "cpu"), rules.to(setting, "cpu")
    changed = False
    for step, (wanted, upcoming) in enumerate(steps):
        at = At(step, int(trace.pages_in_context[step]), upcoming)
        if body == "torch":
            wanted, at = rules.to(wanted, "cpu"), rules.to(at, "cpu")
        before = {name: array.copy() for name, array in in_numpy(state).items()}
        after = policy.step(rules, state, wanted, at, setting).state
        for name, array in in_numpy(state).items():
            np.testing.assert_array_equal(array, before[name])
        changed |= any((array != before[name]).any() for name, array in in_numpy(after).items())
        state = after
    assert changed


def test_the_torch_body_never_asks_a_tensor_for_its_value(monkeypatch):
    """A value on the host would make a device wait; on the meta device there is none to be had."""
    trace = random_wants(5, units=4, steps=6, layers=2)
    rules = policies.body("torch")
    for policy in POLICIES:
        setting = setting_for(policy, trace, 3)
        state, meta = rules.to(begin(policy, trace, setting), "meta"), rules.to(setting, "meta")
        for step, wanted in enumerate(offline.padded(trace)):
            upcoming = np.zeros(wanted.pages.shape, np.int32)
            done = policy.step(
                rules, state, rules.to(wanted, "meta"), rules.to(At(step, 9, upcoming), "meta"), meta
            )  # fmt: skip
            state = done.state
        assert done.moves.page_in.device.type == "meta"
