"""Data-free allocations: exact totals, bounds, the shape of the schedule."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.budget.base import BudgetRequest, DataFree, ScoreBased
from wakesight.budget.flat import Flat
from wakesight.budget.pyramid import Pyramid
from wakesight.budget.table import ALLOCATIONS, allocation
from wakesight.core import Tables
from wakesight.errors import RequestError

LAWS = settings(deadline=None, derandomize=True, max_examples=200)
BLIND = [name for name in ALLOCATIONS if isinstance(allocation(name), DataFree)]


def tables(layers: int) -> Tables:
    """A model of two heads a layer whose layers differ, for the rules that read what was measured."""
    rows = [[(3 * layer + head) % 7 / 7 for head in (1, 2)] for layer in range(layers)]
    return Tables(gate=rows, utility_mass=rows, utility_peak=rows)


@st.composite
def requests(draw):
    n_body, layers = draw(st.integers(0, 5000)), draw(st.integers(1, 16))
    return BudgetRequest(draw(st.integers(0, n_body)), n_body, layers, tables(layers))


def keeps_its_promises(rule, request: BudgetRequest) -> bool:
    counts = rule.per_layer(request)
    least = min(request.per_head, 1)
    return (
        len(counts) == request.layers
        and sum(counts) == request.layers * request.per_head
        and all(type(count) is int and least <= count <= request.n_body for count in counts)
    )


def test_thousands_of_random_requests_get_their_exact_total():
    draw = random.Random(0)
    for _ in range(2500):
        n_body = draw.choice([0, 1, 2, 7, 64, 1000, 262_144])
        request = BudgetRequest(draw.randint(0, n_body), n_body, draw.randint(1, 12))
        beta = draw.choice([1, 1.5, 2, 20, 20.0, 100, draw.uniform(1, 50)])

        for rule in (Flat(), Pyramid(beta)):
            assert keeps_its_promises(rule, request), (rule, request)


@pytest.mark.parametrize("name", BLIND)
def test_every_listed_allocation_keeps_its_promises_by_default(name):
    @given(requests())
    @LAWS
    def law(request):
        assert keeps_its_promises(allocation(name), request)

    law()


@pytest.mark.parametrize("name", BLIND)
@pytest.mark.parametrize("layers", [1, 2, 16])
def test_keeping_everything_is_the_same_for_every_allocation(name, layers):
    assert allocation(name).per_layer(BudgetRequest(777, 777, layers, tables(layers))) == (777,) * layers


@given(requests())
@LAWS
def test_flat_gives_every_layer_the_mean(request):
    assert Flat().per_layer(request) == (request.per_head,) * request.layers


@given(requests(), st.floats(1, 1e4))
@LAWS
def test_a_pyramid_never_rises_with_depth(request, beta):
    counts = Pyramid(beta).per_layer(request)

    assert list(counts) == sorted(counts, reverse=True)


@given(requests(), st.floats(1, 1e4))
@LAWS
def test_a_pyramid_steps_down_evenly(request, beta):
    """Where no bound bites, neighbours differ by the same step, up to rounding."""
    counts = Pyramid(beta).per_layer(request)
    steps = [above - below for above, below in itertools.pairwise(counts)]

    if request.per_head >= beta and steps:  # then the last layer's ideal share is at least 1
        assert max(steps) - min(steps) <= 2


@pytest.mark.parametrize(
    ("mean", "n_body", "layers", "beta", "expected"),
    [
        (20, 100, 4, 20, (39, 26, 14, 1)),  # 39, 26 1/3, 13 2/3, 1
        (60, 100, 4, 20, (100, 73, 47, 20)),  # 117 is more than there is: 100, 73 1/3, 46 2/3, 20
        (2, 100, 4, 20, (4, 2, 1, 1)),  # 0.1 is lifted to 1, the others share 7 as 3.9 : 2.63 : 1.37
        (1, 100, 4, 20, (1, 1, 1, 1)),
        (0, 100, 4, 20, (0, 0, 0, 0)),
        (10, 100, 3, 1, (10, 10, 10)),  # beta 1 is flat
        (10, 100, 3, 2, (15, 10, 5)),
        (10, 100, 2, 20, (19, 1)),  # 19.5 and 0.5: the tie goes to the lower layer, the floor to the upper
        (10, 100, 1, 20, (10,)),
    ],
)
def test_worked_pyramids(mean, n_body, layers, beta, expected):
    assert Pyramid(beta).per_layer(BudgetRequest(mean, n_body, layers)) == expected


@pytest.mark.parametrize("beta", [0, 0.999, -1, math.nan, -math.inf])
def test_a_pyramid_that_would_stand_on_its_head_is_refused(beta):
    with pytest.raises(RequestError, match=r"must be at least 1; 20 is the usual value"):
        Pyramid(beta)


def test_an_infinite_beta_is_refused():
    with pytest.raises(RequestError):
        Pyramid(math.inf).per_layer(BudgetRequest(10, 100, 4))


def test_every_listed_allocation_is_of_one_kind():
    assert {"flat", "pyramid", "gate", "utility"} == set(BLIND)
    for name in ALLOCATIONS:
        assert isinstance(allocation(name), DataFree) != isinstance(allocation(name), ScoreBased)


def test_allocations_by_name():
    assert allocation("flat") == Flat()
    assert allocation("pyramid") == Pyramid(20.0)
    assert allocation("pyramid:beta=10") == Pyramid(10.0)
    with pytest.raises(RequestError, match="unknown allocation 'pyramids', did you mean 'pyramid'"):
        allocation("pyramids")
