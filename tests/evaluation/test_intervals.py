"""Intervals, paired tests, Holm and areas against numbers worked out another way."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wakesight.evaluation.intervals import area, difference, estimate, estimate_over_tasks, holm


def test_the_mean_weighs_questions_and_the_interval_draws_contexts():
    grades = {"a": [1.0] * 30, "b": [0.0] * 10}
    found = estimate(grades)
    assert found.mean == 0.75
    assert (found.questions, found.contexts) == (40, 2)
    assert (found.low, found.high) == (0.0, 1.0)  # a whole context comes or stays away


def test_questions_of_one_context_do_not_narrow_the_interval():
    noise = np.random.default_rng(0)
    values = noise.random(30)
    alone = estimate({str(i): [v] for i, v in enumerate(values)})
    repeated = estimate({str(i): [v] * 50 for i, v in enumerate(values)})
    assert (alone.low, alone.high) == pytest.approx((repeated.low, repeated.high))


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    noise = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        levels = noise.random(40)  # a context's own difficulty
        grades = {str(i): list(map(float, noise.random(5) < level)) for i, level in enumerate(levels)}
        found = estimate(grades, seed=trial)
        hits += found.low <= 0.5 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_equal_rows_give_equal_numbers_whatever_their_order():
    grades = {"b": [0.0, 1.0], "a": [1.0]}
    assert estimate(grades) == estimate(dict(reversed(grades.items())))
    assert estimate(grades, seed=1) != estimate({**grades, "c": [0.5]}, seed=1)


def test_a_paired_difference_counts_what_differs():
    first = {str(i): [1.0, 1.0] for i in range(8)}
    second = {str(i): [1.0, 0.0] for i in range(8)}
    found = difference(first, second)
    assert found.mean == 0.5
    assert 0 < found.low < 0.5 < found.high < 1  # eight equal contexts do not settle it
    assert found.p_value == pytest.approx(2 / 2**8)  # only all-plus and all-minus are as extreme


@pytest.mark.parametrize("right", [0.0, 1.0])
@pytest.mark.parametrize("contexts", [2, 10, 130])
def test_contexts_that_are_all_right_or_all_wrong_have_wilsons_interval(right, contexts):
    from scipy import stats

    found = estimate({str(i): [right] * 3 for i in range(contexts)})
    wilson = stats.binomtest(int(right * contexts), contexts).proportion_ci(method="wilson")
    assert (found.mean, found.low, found.high) == pytest.approx((right, wilson.low, wilson.high), abs=1e-6)


def test_an_interval_of_equal_contexts_is_that_of_as_many_contexts_over_tasks():
    one = {str(i): [1.0] for i in range(12)}
    split = {name: {str(i): [1.0] for i in range(4)} for name in "abc"}
    assert estimate_over_tasks(split).low == pytest.approx(estimate(one).low)
    mixed = estimate_over_tasks({"a": split["a"], "b": {str(i): [0.0] for i in range(4)}})
    assert 0 < mixed.low < mixed.mean == 0.5 < mixed.high < 1
    small = estimate_over_tasks({"a": one, "b": {"x": [1.0], "y": [1.0]}})  # b alone moves the mean by its half
    assert small.low < estimate_over_tasks({"a": one, "b": one}).low


def test_equal_differences_are_open_on_both_sides_of_nothing():
    right, wrong = ({str(i): [value] for i in range(10)} for value in (1.0, 0.0))
    same = difference(right, right)
    assert (same.mean, same.low, same.high) == pytest.approx((0, -0.2775, 0.2775), abs=1e-4)
    worse = difference(wrong, right)
    assert (worse.mean, worse.low) == (-1, -1)
    assert worse.high == pytest.approx(-1 + 2 * 0.2775, abs=1e-4)


def test_what_has_no_limits_keeps_the_bootstraps_interval():
    found = estimate({str(i): [0.0] for i in range(10)}, limits=None)
    assert (found.low, found.high) == (0, 0)


@pytest.mark.parametrize("other", [{}, {"b": {str(i): [1.0] for i in range(5)}}])
def test_one_context_of_a_task_has_no_interval(other):
    found = estimate_over_tasks({"a": {"x": [1.0, 0.0]}, **other})
    assert (found.low, found.high) == (None, None)
    apart = difference({"x": [0.0]}, {"x": [1.0]})
    assert (apart.mean, apart.low, apart.high, apart.p_value) == (-1, None, None, 1)


def test_the_interval_of_an_easy_task_covers_its_mean():
    """Most runs of ten contexts see no mistake at all; a bootstrap of those alone would be sure of 1."""
    noise = np.random.default_rng(4)
    hits = 0
    for trial in range(200):
        found = estimate({str(i): [float(noise.random() < 0.95)] for i in range(10)}, seed=trial)
        hits += found.low <= 0.95 <= found.high
    assert hits / 200 > 0.9


def test_no_difference_has_p_one_and_unpaired_arms_are_refused():
    same = {"a": [1.0], "b": [0.0]}
    assert difference(same, same).p_value == 1.0
    with pytest.raises(ValueError, match="same questions"):
        difference(same, {"a": [1.0]})
    with pytest.raises(ValueError, match="same questions"):
        difference(same, {"a": [1.0, 1.0], "b": [0.0]})


def test_many_contexts_are_sampled_and_agree_with_the_normal_test():
    noise = np.random.default_rng(2)
    first = {str(i): [float(x)] for i, x in enumerate(noise.normal(0.3, 1, 60))}
    zero = {str(i): [0.0] for i in range(60)}
    values = np.array([first[str(i)][0] for i in range(60)])
    from scipy import stats

    expected = stats.ttest_1samp(values, 0).pvalue
    assert difference(first, zero).p_value == pytest.approx(expected, abs=0.03)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_never_lowers_a_p_value_and_keeps_their_order(values):
    adjusted = holm(values)
    assert all(a >= p - 1e-12 for a, p in zip(adjusted, values, strict=True))
    order = np.argsort(values, kind="stable")
    assert all(adjusted[i] <= adjusted[j] + 1e-12 for i, j in itertools.pairwise(order))


def test_area_is_the_mean_height():
    assert area([0.1, 0.5, 0.9], [0.0, 0.5, 1.0]) == pytest.approx(0.5)
    assert area([0.9, 0.1], [1.0, 0.0]) == pytest.approx(0.5)
    assert area([0.3], [0.7]) == 0.7


def test_the_mean_over_tasks_weighs_every_task_the_same():
    tasks = {"a": {str(i): [1.0] * 9 for i in range(5)}, "b": {"x": [0.0], "y": [0.5]}}
    found = estimate_over_tasks(tasks)
    assert found.mean == pytest.approx((1.0 + 0.25) / 2)
    assert (found.questions, found.contexts) == (47, 7)
    assert (found.low, found.high) == pytest.approx((0.5, 0.75))  # all of a; x twice, or y twice
    alone = estimate_over_tasks({"a": tasks["b"]})
    assert (alone.mean, alone.low, alone.high) == pytest.approx((0.25, 0.0, 0.5))
