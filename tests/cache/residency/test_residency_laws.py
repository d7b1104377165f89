"""What holds for every trace: partitions, bounds, belady, the stack property, and moves that storage can execute."""

from __future__ import annotations

import sys

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
from wakesight.errors import RequestError
from wakesight.simulate import offline
from wakesight.simulate.stepping import begin, play, setting_for
from wakesight.testing.wants import random_wants

SLOTTED = [
    Reactive(),
    Reactive(start="snapkv"),
    Reactive(first_touch="miss"),
    Evict(),
    Belady(),
    Belady(start="snapkv"),
]
TABLED = [Full(), Frozen(interval=3), FrozenTail(interval=3), SnapKV(), RKV(buffer=3), ReasonAlloc(interval=3), Arc()]


@st.composite
def wants(draw, per_step=8):
    return random_wants(
        draw(st.integers(0, 10**6)), units=draw(st.integers(1, 4)), steps=draw(st.integers(1, 24)),
        pages=draw(st.integers(2, 20)), per_step=draw(st.integers(1, per_step)), locality=draw(st.floats(0, 1)),
    )  # fmt: skip


def played(policy, trace, budget, body="plain"):
    """(state before, wants, what the step returned) for every step."""
    setting, rules = setting_for(policy, trace, budget), policies.body(body)
    state, uses = begin(policy, trace, setting), offline.padded_next_uses(trace, offline.next_uses(trace))
    for step, (wanted, upcoming) in enumerate(zip(offline.padded(trace), uses, strict=True)):
        at = At(step, int(trace.pages_in_context[step]), upcoming)
        done = policy.step(rules, state, wanted, at, setting)
        yield state, wanted, done
        state = done.state


@settings(max_examples=30, deadline=None)
@given(trace=wants(), budget=st.integers(1, 6))
@pytest.mark.parametrize("policy", [*SLOTTED, Arc(), Arc(start="snapkv")], ids=str)
def test_resident_and_reservoir_partition_what_was_seen(policy, trace, budget):
    """No page twice, none resident that was not seen, at most `budget`; the reservoir is all the rest."""
    for _, wanted, done in played(policy, trace, budget):
        for unit in range(trace.units):
            if hasattr(done.state, "slot_page"):
                resident = [page for page in done.state.slot_page[unit].tolist() if page >= 0]
            else:
                resident = np.flatnonzero(np.isin(done.state.place[unit], (1, 2))).tolist()
            assert len(resident) == len(set(resident)) <= budget
            assert done.state.seen[unit, resident].all()
            assert done.state.seen[unit, wanted.pages[unit][wanted.pages[unit] >= 0]].all()


@settings(max_examples=30, deadline=None)
@given(trace=wants(), budget=st.integers(1, 6))
@pytest.mark.parametrize("policy", SLOTTED, ids=str)
def test_executing_the_moves_gives_the_slots(policy, trace, budget):
    """Storage that only sees moves holds, in every slot, the page the state says; fetches are counted rows."""
    storage = None
    for before, _, done in played(policy, trace, budget):
        storage = before.slot_page.copy() if storage is None else storage
        touched = set()
        for unit, slot, page_in, page_out, _ in done.moves.rows().tolist():
            if slot >= 0:
                assert storage[unit, slot] == page_out
                assert (unit, slot) not in touched
                touched.add((unit, slot))
                storage[unit, slot] = page_in
        np.testing.assert_array_equal(storage, done.state.slot_page)
        assert done.moves.fetch.sum() == done.counts.fetches.sum()


@settings(max_examples=30, deadline=None)
@given(trace=wants(), budget=st.integers(1, 6))
@pytest.mark.parametrize("policy", TABLED, ids=str)
def test_executing_the_moves_gives_the_table(policy, trace, budget):
    def table(state):
        return state.held if hasattr(state, "held") else np.isin(state.place, (1, 2))

    storage = None
    for before, _, done in played(policy, trace, budget):
        storage = table(before).copy() if storage is None else storage
        for unit, slot, page_in, page_out in zip(*list(vars(done.moves).values())[:4], strict=True):
            if page_out >= 0:
                assert storage[unit, page_out]
                storage[unit, page_out] = False
            if page_in >= 0 and slot >= 0:
                storage[unit, page_in] = True
        np.testing.assert_array_equal(storage, table(done.state))
        assert done.moves.fetch.sum() == done.counts.fetches.sum()


@settings(max_examples=60, deadline=None)
@given(
    trace=wants(),
    budget=st.integers(1, 6),
    first=st.sampled_from(["free", "miss"]),
    start=st.sampled_from(["", "snapkv"]),
)
def test_belady_misses_no_more_than_reactive_and_arc(trace, budget, first, start):
    bound = play(Belady(start, first), trace, budget).misses.sum()
    assert bound <= play(Reactive(start, first), trace, budget).misses.sum()
    assert bound <= play(Arc(start, first), trace, budget).misses.sum()


@settings(max_examples=60, deadline=None)
@given(trace=wants(per_step=4), start=st.sampled_from(["", "snapkv"]))
def test_lru_misses_never_rise_with_the_budget(trace, start):
    misses = [play(Reactive(start), trace, budget).misses.sum() for budget in range(4, 12)]
    assert misses == sorted(misses, reverse=True)


@settings(max_examples=20, deadline=None)
@given(trace=wants(), budget=st.integers(1, 6))
@pytest.mark.parametrize("policy", [*SLOTTED, *TABLED], ids=str)
def test_every_want_is_a_hit_a_miss_or_a_first_touch(policy, trace, budget):
    for before, wanted, done in played(policy, trace, budget):
        counts = done.counts
        assert (counts.hits + counts.misses + counts.first_touches == (wanted.pages >= 0).sum(axis=1)).all()
        assert (counts.first_touches <= (done.state.seen.sum(axis=1) - before.seen.sum(axis=1))).all()


@settings(max_examples=30, deadline=None)
@given(trace=wants())
def test_with_room_for_all_only_full_remains(trace):
    everything = play(Full(), trace, 1)
    for policy in (Reactive(), Evict(), Belady(), Arc(), RKV(buffer=2), ReasonAlloc(interval=2)):
        roomy = play(policy, trace, 20)
        assert roomy.misses.sum() == 0
        np.testing.assert_array_equal(roomy.resident, everything.resident)


def test_numba_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "wakesight.cache.residency.compiled", raising=False)
    with pytest.raises(RequestError, match=r"needs the package numba; type: pip install 'wakesight\[traces\]'"):
        policies.body("numba")
