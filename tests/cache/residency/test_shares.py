"""Sessions share one limit: nobody below what it needs, nothing above the limit, nothing left that would fit."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.cache.residency.shares import LayerNeed, SessionNeed, shares
from wakesight.errors import WorkError

LAWS = settings(deadline=None, derandomize=True, max_examples=200)


@st.composite
def needs(draw):
    layers = draw(
        st.lists(
            st.builds(
                lambda size, least, more, weight: LayerNeed(size, least, least + more, weight),
                st.integers(1, 50), st.integers(0, 5), st.integers(0, 40), st.sampled_from([0.0, 0.25, 1.0, 3.0]),
            ),
            min_size=1, max_size=4,
        )
    )  # fmt: skip
    return SessionNeed(draw(st.integers(0, 500)), tuple(layers))


def taken(sessions, slots) -> int:
    return sum(
        s.fixed_bytes + sum(n.slot_bytes * k for n, k in zip(s.layers, own, strict=True))
        for s, own in zip(sessions, slots, strict=True)
    )


@given(st.lists(needs(), min_size=1, max_size=4), st.integers(0, 4000))
@LAWS
def test_shares_fit_and_give_everybody_what_it_needs(sessions, spare):
    limit = sum(s.least_bytes for s in sessions) + spare

    given_ = shares(limit, sessions)

    assert taken(sessions, given_) <= limit
    for session, own in zip(sessions, given_, strict=True):
        for need, slots in zip(session.layers, own, strict=True):
            assert need.least <= slots <= need.most


@given(st.lists(needs(), min_size=1, max_size=4), st.integers(0, 4000))
@LAWS
def test_the_common_height_is_the_largest_that_fits(sessions, spare):
    """One more slot for every layer of the smallest share that can still grow would pass the limit."""
    limit = sum(s.least_bytes for s in sessions) + spare
    given_ = shares(limit, sessions)
    growing = [
        (n, k) for s, own in zip(sessions, given_, strict=True) for n, k in zip(s.layers, own, strict=True)
        if k < n.most and n.weight > 0
    ]  # fmt: skip

    if growing:
        height = min((k + 1) / n.weight for n, k in growing) * (1 + 1e-12)
        higher = [
            tuple(max(n.least, min(n.most, int(n.weight * height))) for n in session.layers) for session in sessions
        ]
        assert taken(sessions, higher) > limit


def test_equal_weights_are_equal_shares_and_weights_are_proportions():
    layer = LayerNeed(slot_bytes=10, least=2, most=100)

    assert shares(500, [SessionNeed(20, (layer, layer)), SessionNeed(20, (layer,))]) == [(15, 15), (15,)]
    double = LayerNeed(slot_bytes=10, least=2, most=100, weight=2.0)
    assert shares(300, [SessionNeed(0, (layer, double))]) == [(10, 20)]


def test_a_newcomer_takes_from_the_others_but_never_what_they_read():
    one = SessionNeed(0, (LayerNeed(10, least=4, most=100),))
    assert shares(100, [one]) == [(10,)]
    assert shares(100, [one, one]) == [(5,), (5,)]

    with pytest.raises(WorkError) as caught:
        shares(100, [one, one, one])

    assert re.search(r"needs at least 40 bytes .* beside the 2 others 20 of 100 .*; close a session", str(caught.value))


def test_no_session_and_no_layer_are_fine():
    assert shares(0, []) == []
    assert shares(5, [SessionNeed(5, ())]) == [()]
