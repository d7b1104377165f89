"""What is known from the whole trace, against plain loops and by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.cache.residency.base import NEVER
from wakesight.simulate import offline
from wakesight.testing.wants import random_wants
from wakesight.traces.pages import PageWants


def wants_of_lists(units, prompt_pages=4):
    """units: per unit, per step, pages; weights 1."""
    counts = [len(step) for unit in units for step in unit]
    return PageWants(
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        pages=np.array([page for unit in units for step in unit for page in step], np.int32),
        weights=np.ones(sum(counts), np.float32),
        units=len(units),
        steps=len(units[0]),
        pages_in_context=np.full(len(units[0]), 8, np.int32),
        layer_of=np.zeros(len(units), np.int32),
        prompt_pages=prompt_pages,
        prompt_scores=np.zeros((len(units), prompt_pages), np.float32),
    )


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), units=st.integers(1, 4), steps=st.integers(1, 12), per_step=st.integers(0, 5))
def test_padded_wants_and_next_uses_are_those_of_the_trace(seed, units, steps, per_step):
    trace = random_wants(seed, units=units, steps=steps, pages=9, per_step=per_step)
    padded = list(offline.padded(trace))
    uses = list(offline.padded_next_uses(trace, offline.next_uses(trace)))
    first = offline.first_uses(trace)
    assert len(padded) == len(uses) == steps
    for unit in range(units):
        lists = [trace.at(unit, step)[0].tolist() for step in range(steps)]
        for step in range(steps):
            row = padded[step].pages[unit]
            assert row[row >= 0].tolist() == lists[step]
            assert padded[step].weights[unit][row >= 0].tolist() == trace.at(unit, step)[1].tolist()
            for page, use in zip(row.tolist(), uses[step][unit].tolist(), strict=True):
                later = [s for s in range(step + 1, steps) if page in lists[s]]
                assert page < 0 or use == min(later, default=NEVER)
        for page in range(offline.page_count(trace)):
            assert first[unit, page] == min((s for s in range(steps) if page in lists[s]), default=NEVER)


def test_stability_by_hand():
    """Jaccard of adjacent steps: 1/3 and 1; a pair of empty steps is left out; no pair at all counts as 1."""
    trace = wants_of_lists([[[0, 1], [1, 2], [1, 2]], [[], [], [3]], [[], [], []], [[0], [0], [0]]])
    np.testing.assert_allclose(offline.stability(trace), [(1 / 3 + 1) / 2, 0.0, 1.0, 1.0])
    assert offline.unstable_units(trace, 0.5).tolist() == [True, True, False, False]
    assert offline.unstable_units(trace, 0.49).tolist() == [False, True, False, False]
    assert offline.unstable_units(trace, 0.75).tolist() == [True, True, True, False]  # ties to the lower unit
    assert not offline.unstable_units(trace, 0).any()


def test_the_page_count_covers_prompt_context_and_wants():
    assert offline.page_count(wants_of_lists([[[11]]])) == 12
    assert offline.page_count(wants_of_lists([[[0]]])) == 8
    assert offline.page_count(wants_of_lists([[[0]]], prompt_pages=20)) == 20
