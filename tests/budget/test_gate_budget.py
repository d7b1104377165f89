"""Budgets in proportion to output gates: per layer and per head, against the rule written as loops."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wakesight.budget.base import Body, BudgetRequest
from wakesight.budget.flat import Flat
from wakesight.budget.gate import Gate
from wakesight.budget.gate_per_head import GatePerHead
from wakesight.budget.resolve import check_allocation, make_budget
from wakesight.budget.rounding import apportion, keep_to_count
from wakesight.budget.table import allocation, allocation_spec
from wakesight.budget.utility import Utility
from wakesight.core import LayerIndex, ModelGeometry, Tables
from wakesight.errors import RequestError

LAWS = settings(deadline=None, derandomize=True, max_examples=150)
GATES = st.one_of(st.floats(0.022, 0.459), st.integers(1, 4).map(lambda i: i / 8), st.just(0.0))
CLOSE = 1 + Fraction(1, 10**9)  # gates this close may have equal powers
UNIFORM = [Gate, Utility]  # one rule over two tables: the mean of a layer's gates, the sum of its masses


def tabled(rows) -> Tables:
    return Tables(gate=rows, utility_mass=rows)


@st.composite
def cases(draw, uneven=False):
    """A table, and a request that reads it."""
    layers, n_body = draw(st.integers(1, 8)), draw(st.integers(0, 300))
    heads = [draw(st.integers(1, 4)) for _ in range(layers)] if uneven else [draw(st.integers(1, 4))] * layers
    rows = tuple(tuple(draw(GATES) for _ in range(n)) for n in heads)
    return rows, BudgetRequest(draw(st.integers(0, n_body)), n_body, layers, tabled(rows))


def body(rows, n_body: int) -> Body:
    return Body(tuple(torch.zeros(len(row), n_body) for row in rows))


def largest_remainder(weights: list[Fraction], total: int, cap: int, floor: int) -> list[int]:
    """Rounds of the rule in words: proportional shares; whoever leaves the bounds is fixed there, the rest go again.

    Of the two bounds the one with more excess is fixed first, as water-filling finds them. Equal weights if all are 0.
    """
    if not any(weights):
        weights = [Fraction(1)] * len(weights)
    fixed: dict[int, int] = {}
    while True:
        free = [i for i in range(len(weights)) if i not in fixed]
        rest, mass = total - sum(fixed.values()), sum((weights[i] for i in free), Fraction(0))
        ideal = {i: weights[i] * rest / mass if mass else Fraction(rest, len(free)) for i in free}
        over = sum(max(ideal[i] - cap, Fraction(0)) for i in free)
        under = sum(max(floor - ideal[i], Fraction(0)) for i in free)
        if not over and not under:
            break
        fixed |= {i: cap for i in free if ideal[i] > cap} if over >= under else {}
        fixed |= {i: floor for i in free if ideal[i] < floor} if under >= over else {}
    counts = [fixed.get(i, math.floor(ideal.get(i, 0))) for i in range(len(weights))]
    for i in sorted(free, key=lambda i: (math.floor(ideal[i]) - ideal[i], i))[: total - sum(counts)]:
        counts[i] += 1
    return counts


@pytest.mark.parametrize("rule", UNIFORM)
@given(case=cases())
@LAWS
def test_layers_share_by_largest_remainder(rule, case):
    rows, request = case
    sums = [sum(map(Fraction, row), Fraction(0)) for row in rows]

    found = rule().per_layer(request)

    floor = min(request.per_head, 1)
    assert list(found) == largest_remainder(sums, request.layers * request.per_head, request.n_body, floor)


@given(cases(uneven=True))
@LAWS
def test_heads_share_by_largest_remainder(case):
    rows, request = case
    gates = [Fraction(gate) for row in rows for gate in row]

    found = GatePerHead().per_head(request, body(rows, request.n_body))

    floor = min(request.per_head, 1)
    expected = largest_remainder(gates, len(gates) * request.per_head, request.n_body, floor)
    assert [count for layer in found for count in layer] == expected
    assert [len(layer) for layer in found] == [len(row) for row in rows]


def test_ten_thousand_random_gates_lengths_and_fractions_have_exact_totals():
    draw = random.Random(0)
    for _ in range(10_000):
        layers, heads = draw.randint(1, 6), draw.randint(1, 4)
        gates = [[math.exp(draw.uniform(-3.8, -0.8)) for _ in range(heads)] for _ in range(layers)]
        n_body, keep = draw.randint(1, 262_144), draw.uniform(0.001, 1)
        mean = keep_to_count(keep, n_body) if round(keep * n_body) else 0
        request = BudgetRequest(mean, n_body, layers, tabled(gates))

        counts = Gate().per_layer(request)

        assert sum(counts) == layers * mean
        assert all(min(mean, 1) <= count <= n_body for count in counts)
        wide = sorted(zip([sum(row) / heads for row in gates], counts, strict=True))
        assert all(low[1] <= high[1] for low, high in itertools.pairwise(wide))


@pytest.mark.parametrize("rule", UNIFORM)
@given(case=cases(), exponent=st.sampled_from([0.0, 0.5, 1.0, 2.0, 8.0]))
@LAWS
def test_totals_bounds_and_order_hold_for_every_exponent(rule, case, exponent):
    rows, request = case

    counts = rule(exponent).per_layer(request)

    assert sum(counts) == request.layers * request.per_head
    assert all(min(request.per_head, 1) <= count <= request.n_body for count in counts)
    sums = [sum(map(Fraction, row), Fraction(0)) for row in rows]
    for (a, one), (b, other) in itertools.permutations(zip(sums, counts, strict=True), 2):
        assert a <= b * CLOSE or one >= other


@given(cases(uneven=True), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
@LAWS
def test_per_head_totals_bounds_and_order(case, exponent):
    rows, request = case

    found = GatePerHead(exponent).per_head(request, body(rows, request.n_body))

    gates, counts = [g for row in rows for g in row], [c for layer in found for c in layer]
    assert sum(counts) == len(gates) * request.per_head
    assert all(min(request.per_head, 1) <= count <= request.n_body for count in counts)
    for (a, one), (b, other) in itertools.permutations(zip(gates, counts, strict=True), 2):
        assert a <= b * CLOSE or one >= other


@given(st.integers(1, 16), st.integers(1, 4), st.integers(0, 500), st.floats(0, 1), st.data())
@LAWS
def test_equal_gates_are_flat(layers, heads, n_body, gate, data):
    rows = ((gate,) * heads,) * layers
    request = BudgetRequest(data.draw(st.integers(0, n_body)), n_body, layers, tabled(rows))
    exponent = data.draw(st.sampled_from([0.5, 1.0, 3.0]))

    for rule in UNIFORM:
        assert rule(exponent).per_layer(request) == Flat().per_layer(request)
    assert GatePerHead(exponent).per_head(request, body(rows, n_body)) == ((request.per_head,) * heads,) * layers


@given(cases(uneven=True))
@LAWS
def test_exponent_zero_is_flat(case):
    rows, request = case

    assert Gate(0.0).per_layer(request) == (request.per_head,) * request.layers
    assert {c for row in GatePerHead(0.0).per_head(request, body(rows, request.n_body)) for c in row} == {
        request.per_head
    }


@pytest.mark.parametrize("rule", UNIFORM)
@given(case=cases(uneven=True))
@LAWS
def test_layers_with_different_numbers_of_heads_share_entries(rule, case):
    rows, request = case
    heads = [len(row) for row in rows]

    counts = rule().per_layer(request)

    entries = sum(n * count for n, count in zip(heads, counts, strict=True))
    assert 0 <= request.per_head * sum(heads) - entries < max(heads)
    assert all(min(request.per_head, 1) <= count <= request.n_body for count in counts)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(0, 50), st.data())
@LAWS
def test_equal_sizes_change_nothing(weights, cap, data):
    total, size = data.draw(st.integers(0, cap * len(weights))), data.draw(st.integers(1, 5))

    assert apportion(weights, total * size, cap, sizes=[size] * len(weights)) == apportion(weights, total, cap)


def test_worked_gates():
    """Means 0.1, 0.2, 0.3: 60 entries as 10, 20, 30; at a cap of 25 the last overflows and 35 fall as 1 : 2."""
    rows = ((0.05, 0.15), (0.2, 0.2), (0.25, 0.35))

    assert Gate().per_layer(BudgetRequest(20, 100, 3, tabled(rows))) == (10, 20, 30)
    assert Gate().per_layer(BudgetRequest(20, 25, 3, tabled(rows))) == (12, 23, 25)
    assert Gate(2.0).per_layer(BudgetRequest(14, 100, 3, tabled(rows))) == (3, 12, 27)  # 1 : 4 : 9 of 42
    assert GatePerHead().per_head(BudgetRequest(20, 100, 3, tabled(rows)), body(rows, 100)) == (
        (5, 15),
        (20, 20),
        (25, 35),
    )


def test_a_tie_goes_to_the_lower_layer():
    assert Gate().per_layer(BudgetRequest(5, 100, 4, tabled(((0.375,), (0.125,), (0.375,), (0.125,))))) == (8, 3, 7, 2)


@given(cases(uneven=True), st.data())
@LAWS
def test_no_head_gets_more_than_it_holds_and_the_rest_goes_to_others(case, data):
    rows, request = case
    torch.manual_seed(data.draw(st.integers(0, 99)))
    held = tuple(torch.rand(len(row), request.n_body) < data.draw(st.sampled_from([0.1, 0.5])) for row in rows)
    ragged = Body(body(rows, request.n_body).scores, None, held)

    found = GatePerHead().per_head(request, ragged)

    flat = [pair for layer in zip(found, ragged.counts, strict=True) for pair in zip(*layer, strict=True)]
    assert sum(count for count, _ in flat) == min(request.per_head * len(flat), sum(have for _, have in flat))
    assert all(min(have, request.per_head, 1) <= count <= have for count, have in flat)


def geometry(heads=(2, 2, 2)) -> ModelGeometry:
    layers = tuple(LayerIndex(i) for i in range(len(heads)))
    return ModelGeometry("llama", len(heads), layers, (), 4, tuple(heads), (8,) * len(heads), (8,) * len(heads), 2, 999)


def test_a_budget_is_made_from_the_tables():
    rows = ((0.1, 0.1), (0.2, 0.2), (0.3, 0.3))

    for rule in (Gate(), GatePerHead(), Utility()):
        budget = make_budget(rule, 20, body(rows, 100), geometry(), tables=tabled(rows))
        assert budget.counts == ((10, 10), (20, 20), (30, 30))


NEEDS = [
    (Gate(), "gate", "the mean output gate of every KV head", "wakesight calibrate"),
    (GatePerHead(), "gate_per_head", "the mean output gate of every KV head", "wakesight calibrate"),
    (Utility(2.0), "utility:exponent=2.0", "the utility that the best entries of every KV head hold", "wakesight fit"),
]


@pytest.mark.parametrize(("rule", "name", "content", "command"), NEEDS)
@pytest.mark.parametrize("tables", [None, Tables()])
def test_without_its_table_a_rule_is_refused_before_and_at_work(rule, name, content, command, tables):
    needs = rf"allocation '{name.split(':')[0]}.*' needs {content}, which was not measured.*: {command}, or use .* flat"
    with pytest.raises(RequestError, match=needs):
        check_allocation(rule, limit_bytes=None, n_body=10, geometry=geometry(), tables=tables)
    with pytest.raises(RequestError, match=needs):
        make_budget(rule, 5, body(((0, 0),) * 3, 10), geometry(), tables=tables)


def test_a_model_without_gates_is_pointed_to_the_utility_it_has():
    utility = Tables(utility_mass=((0.1, 0.1),) * 3)
    with pytest.raises(RequestError, match=r"one without output gates has none.*, or use --allocation utility$"):
        check_allocation(Gate(), limit_bytes=None, n_body=10, geometry=geometry(), tables=utility)


@pytest.mark.parametrize("heads", [(2, 2), (2, 2, 2, 2), (2, 1, 2)])
@pytest.mark.parametrize("rule", [Gate(), GatePerHead(), Utility()])
def test_a_table_of_another_model_is_refused(rule, heads):
    tables = tabled([[0.1] * n for n in heads])

    message = rf"a table of {len(heads)} attention layers with .* KV heads, but this model has 3 .* with 2 KV heads"
    with pytest.raises(RequestError, match=message):
        check_allocation(rule, limit_bytes=None, n_body=10, geometry=geometry(), tables=tables)


def test_bytes_are_not_shared_among_layers_that_cost_differently():
    with pytest.raises(RequestError, match="bytes=999 cannot be combined with the allocation 'gate'"):
        check_allocation(
            Gate(), limit_bytes=999, n_body=10, geometry=geometry((2, 1)), tables=tabled([[0.1, 0.1], [0.2]])
        )


@pytest.mark.parametrize("exponent", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("rule", [Gate, GatePerHead, Utility])
def test_exponents_that_turn_the_order_around_are_refused(rule, exponent):
    with pytest.raises(RequestError, match=r"exponent=.* must be a finite number of at least 0: .*exponent=1.0"):
        rule(exponent)


@pytest.mark.parametrize("name", ["gate", "gate_per_head", "utility"])
def test_they_are_found_by_name(name):
    assert allocation_spec(allocation(name)) == name
    assert allocation(f"{name}:exponent=0.5").exponent == 0.5


@pytest.mark.parametrize("rows", [(), ((),), ((0.1, -0.1),), ((math.nan,),), ((math.inf,),), (("x",),), 3, (0.1, 0.2)])
def test_tables_hold_finite_numbers_of_at_least_zero(rows):
    with pytest.raises(RequestError, match="the table 'gate' must hold one finite number of at least 0"):
        Tables(gate=rows)


def test_tables_take_lists():
    assert Tables(gate=[[1, 2], [3]]) == Tables(gate=((1.0, 2.0), (3.0,)))
    assert hash(Tables(gate=[[1]]))


@given(cases(), st.integers(1, 5))
@LAWS
def test_a_layer_whose_gate_opens_never_loses(case, times):
    rows, request = case
    assume(request.layers > 1)
    opened = (tuple(gate * (1 + times) for gate in rows[0]), *rows[1:])

    before = Gate().per_layer(request)[0]

    assert (
        Gate().per_layer(BudgetRequest(request.per_head, request.n_body, request.layers, tabled(opened)))[0] >= before
    )
