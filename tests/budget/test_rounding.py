"""Laws of the one place where fractions become integers."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wakesight.budget.rounding import apportion, check_keep, keep_to_count
from wakesight.errors import RequestError

LAWS = settings(deadline=None, derandomize=True, max_examples=250)
WEIGHTS = st.one_of(
    st.just(0.0),
    st.integers(1, 9).map(float),  # many equal weights and many equal remainders
    st.floats(1e-6, 1e6),
    st.floats(0, 1),
)


@st.composite
def shares(draw, floor=None):
    """weights, total, cap and floor that can be met."""
    weights = draw(st.lists(WEIGHTS, min_size=1, max_size=8))
    cap = draw(st.integers(0, 60))
    low = draw(st.integers(0, cap)) if floor is None else floor
    total = draw(st.integers(len(weights) * low, len(weights) * cap))
    return weights, total, cap, low


@given(shares())
@LAWS
def test_the_total_is_exact_and_every_share_is_within_its_bounds(case):
    weights, total, cap, floor = case

    counts = apportion(weights, total, cap, floor)

    assert len(counts) == len(weights)
    assert sum(counts) == total
    assert all(type(count) is int and floor <= count <= cap for count in counts)


@given(shares())
@LAWS
def test_a_larger_weight_never_gets_less(case):
    weights, total, cap, floor = case

    counts = apportion(weights, total, cap, floor)

    for i, j in ((i, j) for i in range(len(weights)) for j in range(len(weights))):
        if weights[i] > weights[j]:
            assert counts[i] >= counts[j]
        if weights[i] == weights[j] and i < j:
            assert counts[j] <= counts[i] <= counts[j] + 1


@given(st.integers(1, 80), st.integers(0, 500), WEIGHTS, st.integers(0, 100), st.integers(0, 100))
@LAWS
def test_equal_weights_give_the_flat_allocation(layers, per_layer, weight, above, below):
    cap, floor = per_layer + above, max(per_layer - below, 0)

    counts = apportion([weight] * layers, layers * per_layer, cap, floor)

    assert counts == (per_layer,) * layers


@given(shares(), st.integers(-20, 20))
@LAWS
def test_only_the_ratios_of_the_weights_matter(case, power):
    weights, total, cap, floor = case
    exact = [Fraction(w) for w in weights]

    counts = apportion([w * Fraction(3) ** power for w in exact], total, cap, floor)

    assert counts == apportion(weights, total, cap, floor)


@given(shares(floor=0))
@LAWS
def test_shares_that_hit_no_bound_are_within_one_of_the_exact_quota(case):
    weights, total, cap, _ = case
    assume(sum(weights) > 0)
    mass = sum(Fraction(w) for w in weights)
    quotas = [Fraction(w) * total / mass for w in weights]
    assume(max(quotas) <= cap)

    counts = apportion(weights, total, cap)

    assert all(math.floor(quota) <= count <= math.ceil(quota) for quota, count in zip(quotas, counts, strict=True))


def poured(weights: list[float], total: int, cap: int) -> tuple[int, ...]:
    """The rule in its own words: fix what overflows at the cap, share the rest again, repeat, then round."""
    full: set[int] = set()
    while True:
        free = [i for i in range(len(weights)) if i not in full]
        rest = total - cap * len(full)
        mass = sum((Fraction(weights[i]) for i in free), Fraction(0))
        ideal = {i: Fraction(weights[i]) * rest / mass if mass else Fraction(rest, len(free)) for i in free}
        over = {i for i in free if ideal[i] > cap}
        if not over:
            break
        full |= over
    counts = [cap if i in full else math.floor(ideal[i]) for i in range(len(weights))]
    missing = total - sum(counts)
    for i in sorted(free, key=lambda i: (math.floor(ideal[i]) - ideal[i], i))[:missing]:
        counts[i] += 1
    return tuple(counts)


@given(shares(floor=0))
@settings(LAWS, max_examples=600)
def test_without_a_floor_it_is_the_repeated_water_filling(case):
    weights, total, cap, _ = case

    counts = apportion(weights, total, cap)

    assert counts == poured(weights, total, cap)


@given(st.lists(st.tuples(WEIGHTS, st.integers(0, 30)), min_size=1, max_size=6), st.data())
@LAWS
def test_every_share_may_have_a_cap_of_its_own(pairs, data):
    weights, caps = [w for w, _ in pairs], [cap for _, cap in pairs]
    floor = data.draw(st.integers(0, min(caps)))
    total = data.draw(st.integers(floor * len(caps), sum(caps)))

    counts = apportion(weights, total, caps, floor)

    assert sum(counts) == total
    assert all(floor <= count <= cap for count, cap in zip(counts, caps, strict=True))
    for i, j in ((i, j) for i in range(len(caps)) for j in range(len(caps))):
        if weights[i] > weights[j] and counts[i] < caps[i]:
            assert counts[i] >= counts[j]


@given(shares())
@LAWS
def test_equal_caps_are_one_cap(case):
    weights, total, cap, floor = case

    assert apportion(weights, total, [cap] * len(weights), floor) == apportion(weights, total, cap, floor)


def test_gates_that_span_twenty_fold_overflow_and_still_meet_the_total():
    gates = [0.022 * (0.459 / 0.022) ** (i / 15) for i in range(16)]
    for percent in range(1, 101):
        kept = round(percent / 100 * 1000)

        counts = apportion(gates, 16 * kept, cap=1000, floor=1)

        assert sum(counts) == 16 * kept
        assert list(counts) == sorted(counts)
        assert counts[-1] <= 1000


@pytest.mark.parametrize(
    ("weights", "total", "cap", "floor", "expected"),
    [
        ([1, 1, 1], 4, 9, 0, (2, 1, 1)),  # equal remainders: the lower index
        ([1, 1, 1], 5, 9, 0, (2, 2, 1)),
        ([1, 2, 1], 6, 9, 0, (2, 3, 1)),  # 1.5, 3, 1.5
        ([10, 1, 1], 8, 5, 0, (5, 2, 1)),  # the capped layer gets no remainder unit, 1.5 and 1.5 do
        ([100, 10, 1, 1], 14, 5, 0, (5, 5, 2, 2)),  # the second overflows only after the first
        ([0.9, 0.1, 0.0], 10, 10, 1, (8, 1, 1)),  # 0.9 and 0 are lifted to the floor
        ([1, 0, 0], 4, 9, 0, (4, 0, 0)),
        ([1, 0, 0], 5, 2, 0, (2, 2, 1)),  # the weightless take what no one else can
        ([0, 0, 0], 4, 9, 0, (2, 1, 1)),
        ([0, 0], 0, 0, 0, (0, 0)),
        ([5, 1], 6, 3, 3, (3, 3)),  # cap = floor
        ([3.0], 7, 7, 0, (7,)),
        ([], 0, 9, 0, ()),
        ([1, 1, 1], 9, [1, 9, 9], 0, (1, 4, 4)),  # what the first cannot take goes to the others
        ([8, 1, 0], 9, [4, 3, 9], 0, (4, 3, 2)),
        ([0, 0, 0], 7, [1, 9, 9], 0, (1, 3, 3)),
    ],
)
def test_worked_examples(weights, total, cap, floor, expected):
    assert apportion(weights, total, cap, floor) == expected


@pytest.mark.parametrize(
    ("weights", "total", "cap", "floor"), [([1, 1], 11, 5, 0), ([1, 1], 1, 5, 1), ([1, 1], -1, 5, 0), ([0, 0], 1, 0, 0)]
)
def test_totals_that_no_shares_can_reach_are_refused(weights, total, cap, floor):
    with pytest.raises(RequestError, match=f"^{total} entries cannot be shared among 2 layers with {floor} to {cap}"):
        apportion(weights, total, cap, floor)


def test_nobody_can_take_nothing_but_nothing():
    with pytest.raises(RequestError, match="1 entries cannot be shared among 0 layers"):
        apportion([], 1, 9)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, -1e-9, Fraction(-1, 3)])
def test_weights_that_are_no_weights_are_refused(weight):
    with pytest.raises(RequestError, match="must be finite and not negative"):
        apportion([1.0, weight, 2.0], 6, cap=9)


@pytest.mark.parametrize(
    ("keep", "n_body", "count"),
    [
        (0.5, 5, 2),
        (0.5, 7, 4),
        (0.25, 10, 2),
        (0.75, 10, 8),
        (0.1, 1000, 100),
        (0.9, 10, 9),
        (1.0, 37, 37),
        (1, 37, 37),
    ],
)
def test_halves_round_to_even(keep, n_body, count):
    assert keep_to_count(keep, n_body) == count


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_min=True), st.floats(0, 1, exclude_min=True))
@LAWS
def test_keeping_a_larger_fraction_never_keeps_less(n_body, keep, other):
    keep, other = sorted((keep, other))
    assume(round(keep * n_body) > 0)

    fewer, more = keep_to_count(keep, n_body), keep_to_count(other, n_body)

    assert 1 <= fewer <= more <= keep_to_count(1.0, n_body) == n_body


@pytest.mark.parametrize("keep", [1e-9, 0.5, 1.0])
def test_of_an_empty_body_any_fraction_is_nothing(keep):
    assert keep_to_count(keep, 0) == 0


@pytest.mark.parametrize("keep", [math.nan, math.inf, -math.inf, 0, 0.0, -0.1, 1.0000001, 30, "0.3", None])
@pytest.mark.parametrize("check", [check_keep, lambda keep: keep_to_count(keep, 100)])
def test_what_is_no_kept_fraction_is_refused_with_an_example(check, keep):
    with pytest.raises(RequestError) as refused:
        check(keep)

    assert f"keep={keep} " in str(refused.value)
    assert "--keep 0.3" in str(refused.value)


def test_a_fraction_that_keeps_nothing_says_what_would():
    with pytest.raises(RequestError) as refused:
        keep_to_count(0.01, 37)

    assert str(refused.value) == (
        "keep=0.01 keeps 0 of 37 entries per KV head; raise --keep to at least 0.02703, "
        "or give the count itself with --entries"
    )


@given(st.integers(1, 10**6))
@LAWS
def test_following_the_advice_keeps_one(n_body):
    with pytest.raises(RequestError) as refused:
        keep_to_count(0.4 / n_body, n_body)
    advice = float(str(refused.value).split("at least ")[1].split(",")[0])

    assert keep_to_count(advice, n_body) == 1
