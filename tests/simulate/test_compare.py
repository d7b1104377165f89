"""Comparisons at equal memory and equal budget, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wakesight.errors import RequestError
from wakesight.simulate.compare import compare, described, interpolated
from wakesight.simulate.sweep import Cell
from wakesight.simulate.tally import Tally


def cell(policy, budget, *runs, combo="m / niah"):
    """runs: (misses, accesses, resident pages)"""
    tallies = [
        Tally(np.array([a]), np.array([m]), np.array([0]), np.array([m]), np.array([r]), 0, True) for m, a, r in runs
    ]
    return Cell(combo, policy, budget, tuple(f"r{i}" for i in range(len(runs))), tuple(tallies))


CURVE = [cell("reactive", 8, (40, 100, 10)), cell("reactive", 16, (20, 100, 20)), cell("reactive", 32, (0, 100, 40))]


def test_memory_is_matched_on_straight_lines():
    found = compare([*CURVE, cell("frozen", 8, (35, 100, 15)), cell("frozen", 16, (9, 100, 30))])
    (one,) = found
    assert (one.other, one.match, one.combos) == ("frozen", "memory", 1)
    assert [(p.budget, p.memory, p.reactive, p.other, p.won) for p in one.points] == [
        (8, 15.0, pytest.approx(0.30), 0.35, True),
        (16, 30.0, pytest.approx(0.10), 0.09, False),
    ]
    assert (one.wins, [loss.budget for loss in one.losses]) == (1, [16])
    assert one.difference == pytest.approx((0.30 - 0.35 + 0.10 - 0.09) / 2)


def test_points_outside_the_range_are_dropped_and_counted():
    (one,) = compare(
        [*CURVE, cell("rkv", 8, (1, 100, 9.9)), cell("rkv", 16, (1, 100, 10)), cell("rkv", 32, (1, 100, 41))]
    )
    assert [point.budget for point in one.points] == [16]
    assert one.dropped == (("m / niah", 8), ("m / niah", 32))
    lines = list(described([one]))
    assert lines[0] == "reactive against rkv at equal memory: 0 of 1 points won, 1 of 3 points matched, 1 combos"
    assert sum("left out" in line for line in lines) == 2
    assert any("lost: m / niah, B=16, 0.4000 against 0.0100 at 10.0 pages" in line for line in lines)


def test_bounded_policies_are_compared_at_equal_budget_and_ties_are_won():
    (one,) = compare([*CURVE, cell("evict", 8, (40, 100, 10)), cell("evict", 16, (19, 100, 99))])
    assert (one.match, one.wins, len(one.points)) == ("budget", 1, 2)
    assert [(p.budget, p.reactive, p.other) for p in one.points] == [(8, 0.4, 0.4), (16, 0.2, 0.19)]


def test_a_finer_curve_reaches_more_points():
    far = cell("snapkv", 8, (10, 100, 60))
    assert compare([*CURVE, far])[0].points == ()
    assert compare([*CURVE, far])[0].difference is None
    (one,) = compare([*CURVE, far], [cell("reactive", 64, (0, 100, 80))])
    assert one.points[0].reactive == 0.0


def test_combos_are_matched_within_themselves():
    other = [cell(c.policy, c.budget, (90, 100, c.tallies[0].resident[0]), combo="m / recall") for c in CURVE]
    frozen = [cell("frozen", 8, (50, 100, 20)), cell("frozen", 8, (50, 100, 20), combo="m / recall")]
    (one,) = compare([*CURVE, *other, *frozen])
    assert [(p.combo, p.reactive, p.won) for p in one.points] == [("m / niah", 0.2, True), ("m / recall", 0.9, False)]
    assert one.combos == 2


def test_intervals_come_from_runs():
    runs = [(10, 100, 10), (30, 100, 10), (20, 100, 10), (40, 100, 10)]
    worse = [(m + 5, a, r) for m, a, r in runs]
    same = compare([cell("reactive", 8, *runs), cell("evict", 8, *worse)])[0]
    assert same.points[0].low == pytest.approx(-0.05)  # every run loses 5 points: no draw says anything else
    assert same.points[0].high == pytest.approx(-0.05)
    mixed = [(15, 100, 10), (0, 100, 10), (25, 100, 10), (80, 100, 10)]
    one = compare([cell("reactive", 8, *runs), cell("evict", 8, *mixed)])[0]
    assert one.points[0].low < one.points[0].reactive - one.points[0].other < one.points[0].high
    assert (one.low, one.high) == pytest.approx((one.points[0].low, one.points[0].high))
    again = compare([cell("reactive", 8, *runs), cell("evict", 8, *mixed)])[0]
    assert again == one
    alone = compare([cell("reactive", 8, runs[0]), cell("evict", 8, worse[0])])[0]
    assert (alone.points[0].low, alone.points[0].high, alone.low) == (None, None, None)


def test_intervals_at_equal_memory_interpolate_in_every_draw():
    def shifted(runs, by):
        return [(m + by, a, r) for m, a, r in runs]

    low, high = [(50, 100, 10), (70, 100, 10)], [(30, 100, 30), (50, 100, 30)]
    middle = [(40, 100, 20), (60, 100, 20)]  # on the line in every draw of runs
    (one,) = compare([cell("reactive", 8, *low), cell("reactive", 16, *high), cell("rkv", 8, *shifted(middle, 3))])
    assert (one.points[0].low, one.points[0].high) == pytest.approx((-0.03, -0.03))


@given(st.lists(st.tuples(st.integers(0, 99), st.floats(0, 1)), min_size=1, max_size=6, unique_by=lambda p: p[0]))
def test_interpolation_goes_through_its_points_and_stays_between_them(curve):
    for memory, miss in curve:
        assert interpolated(curve, memory) == pytest.approx(miss)
    low, high = min(curve)[0], max(curve)[0]
    assert interpolated(curve, low - 1) is interpolated(curve, high + 1) is interpolated([], 1) is None
    assert min(m for _, m in curve) - 1e-9 <= interpolated(curve, (low + high) / 2) <= max(m for _, m in curve) + 1e-9


def test_there_must_be_something_to_compare():
    with pytest.raises(RequestError, match="with reactive"):
        compare([cell("evict", 8, (1, 2, 3))])
    with pytest.raises(RequestError, match="nothing to compare"):
        compare([*CURVE, cell("full", None, (0, 100, 99))])
