"""Budgets from measured utility and scores, against one sorted list of every entry of the cache."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import flags, kept, rows
from wakesight.budget.base import Body, BudgetRequest
from wakesight.budget.pooled import Global
from wakesight.budget.resolve import make_budget
from wakesight.budget.table import allocation, allocation_spec
from wakesight.budget.utility_global import UtilityGlobal
from wakesight.budget.utility_layer import UtilityLayer
from wakesight.core import LayerIndex, ModelGeometry, Scores, Tables
from wakesight.errors import RequestError

LAWS = settings(deadline=None, derandomize=True, max_examples=150)
VALUES = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1, width=16))
PEAKS = st.sampled_from([0.0, 0.125, 0.5, 1.0, 2.0, 8.0])  # times a half-width float: exact in float32
RULES = [UtilityGlobal(), UtilityLayer()]


@st.composite
def contexts(draw, ragged=True, uneven=True):
    """Scores of a small model, its prefix, which entries exist, and a request with the peaks of its heads."""
    tokens = draw(st.integers(1, 20))
    prefix = draw(st.integers(0, tokens))
    layers = draw(st.integers(1, 3))
    heads = [draw(st.integers(1, 3)) for _ in range(layers)] if uneven else [draw(st.integers(1, 3))] * layers
    scores = Scores(
        tuple(rows(draw, VALUES, n, tokens) for n in heads), flags(draw, tokens) if draw(st.booleans()) else None
    )
    held = tuple(flags(draw, n, tokens) for n in heads) if ragged and draw(st.booleans()) else None
    peaks = [[draw(PEAKS) for _ in range(n)] for n in heads]
    request = BudgetRequest(draw(st.integers(0, tokens - prefix)), tokens - prefix, layers, Tables(utility_peak=peaks))
    return scores, prefix, held, request


def best(scores: Scores, prefix: int, held, request: BudgetRequest) -> set[tuple[int, int, int]]:
    """The top B of score times peak, must_keep entries (most recent first) before all others."""
    forced, free = [], []
    for layer, values in enumerate(scores.layers):
        for head, row in enumerate(values.tolist()):
            for i in range(prefix, len(row)):
                if held is not None and not held[layer][head, i]:
                    continue
                weight = row[i] * request.tables.utility_peak[layer][head]
                if scores.must_keep is not None and bool(scores.must_keep[i]):
                    forced.append((-i, layer, head))
                else:
                    free.append((-weight, layer, head, -row[i], i))  # of one head the higher plain score
    forced, free = sorted(forced), sorted(free)
    order = [(layer, head, -i) for i, layer, head in forced] + [(layer, head, i) for _, layer, head, _, i in free]
    return set(order[: request.per_head * sum(layer.shape[0] for layer in scores.layers)])


@given(contexts())
@LAWS
def test_global_keeps_exactly_the_best_entries_of_the_whole_cache(case):
    scores, prefix, held, request = case

    counts = UtilityGlobal().per_head(request, Body.of(scores, prefix, held))

    assert kept(scores, prefix, held, counts) == best(scores, prefix, held, request)


@given(contexts())
@LAWS
def test_global_is_exact_and_no_head_gets_more_than_it_holds(case):
    scores, prefix, held, request = case
    body = Body.of(scores, prefix, held)

    counts = UtilityGlobal().per_head(request, body)

    pairs = [pair for layer in zip(counts, body.counts, strict=True) for pair in zip(*layer, strict=True)]
    assert sum(count for count, _ in pairs) == min(request.per_head * len(pairs), sum(have for _, have in pairs))
    assert all(0 <= count <= have for count, have in pairs)


@given(contexts(ragged=False, uneven=False))
@LAWS
def test_layers_get_the_mean_count_of_the_global_best(case):
    """Largest remainder in words: the floor of every mean, then one more to the largest remainders."""
    scores, prefix, held, request = case
    winners = best(scores, prefix, held, request)
    heads = scores.layers[0].shape[0]
    means = [Fraction(sum(e[0] == layer for e in winners), heads) for layer in range(request.layers)]
    expected = [math.floor(mean) for mean in means]
    left = request.layers * request.per_head - sum(expected)
    for layer in sorted(range(request.layers), key=lambda i: (math.floor(means[i]) - means[i], i))[:left]:
        expected[layer] += 1

    counts = UtilityLayer().per_head(request, Body.of(scores, prefix))

    assert counts == tuple((count,) * heads for count in expected)
    assert sum(map(sum, counts)) == request.per_head * heads * request.layers


@given(contexts(ragged=False))
@LAWS
def test_layers_with_different_numbers_of_heads_never_pass_the_total(case):
    scores, prefix, _, request = case
    heads = [layer.shape[0] for layer in scores.layers]

    counts = UtilityLayer().per_head(request, Body.of(scores, prefix))

    assert all(len(set(layer)) == 1 and layer[0] <= request.n_body for layer in counts)
    assert 0 <= request.per_head * sum(heads) - sum(map(sum, counts)) < max(heads)


@given(contexts())
@LAWS
def test_in_a_ragged_context_heads_of_a_layer_share_a_count_up_to_what_they_hold(case):
    scores, prefix, held, request = case
    body = Body.of(scores, prefix, held)

    counts = UtilityLayer().per_head(request, body)

    for layer, have in zip(counts, body.counts, strict=True):
        assert layer == tuple(min(max(layer), h) for h in have)
    assert sum(map(sum, counts)) <= request.per_head * sum(len(layer) for layer in counts)


@given(contexts(), st.sampled_from([0.25, 1.0, 4.0]))
@LAWS
def test_equal_peaks_are_the_global_allocation(case, peak):
    scores, prefix, held, request = case
    body = Body.of(scores, prefix, held)
    peaks = Tables(utility_peak=[[peak] * layer.shape[0] for layer in scores.layers])

    equal = BudgetRequest(request.per_head, request.n_body, request.layers, peaks)

    assert UtilityGlobal().per_head(equal, body) == Global().per_head(request, body)


@given(contexts(ragged=False), st.data())
@LAWS
def test_a_head_whose_peak_rises_never_loses(case, data):
    scores, prefix, _, request = case
    body, peaks = Body.of(scores, prefix), [list(row) for row in request.tables.utility_peak]
    layer = data.draw(st.integers(0, len(peaks) - 1))
    head = data.draw(st.integers(0, len(peaks[layer]) - 1))
    before = UtilityGlobal().per_head(request, body)[layer][head]
    peaks[layer][head] = 2 * peaks[layer][head]

    raised = BudgetRequest(request.per_head, request.n_body, request.layers, Tables(utility_peak=peaks))

    assert UtilityGlobal().per_head(raised, body)[layer][head] >= before


@given(contexts())
@LAWS
def test_a_larger_global_budget_never_loses_an_entry(case):
    scores, prefix, held, request = case
    body = Body.of(scores, prefix, held)

    chain = [
        kept(scores, prefix, held, UtilityGlobal().per_head(one, body))
        for one in (BudgetRequest(mean, body.n_body, request.layers, request.tables) for mean in range(body.n_body + 1))
    ]

    assert all(small <= large for small, large in itertools.pairwise(chain))


@pytest.mark.parametrize("rule", RULES)
def test_the_scores_stay_as_they_are(rule):
    scores = Scores((torch.rand(2, 9),))
    before = scores.layers[0].clone()

    rule.per_head(BudgetRequest(4, 9, 1, Tables(utility_peak=[[0.1, 3.0]])), Body.of(scores, 0))

    assert torch.equal(scores.layers[0], before)


def test_worked_example():
    """Equal scores 1 to 4 in each of two layers; the second is worth ten times the first."""
    scores = Scores((torch.tensor([[1.0, 2, 3, 4]] * 2), torch.tensor([[1.0, 2, 3, 4], [0, 0, 0, 4]])))
    tables = Tables(utility_peak=[[1, 1], [10, 10]])
    request, body = BudgetRequest(2, 4, 2, tables), Body.of(scores, 0)

    # 40 30 20 10 and 40 first, then 4 4 3 of the first layer
    assert UtilityGlobal().per_head(request, body) == ((2, 1), (4, 1))
    assert UtilityLayer().per_head(request, body) == ((2, 2), (2, 2))  # means 1.5 and 2.5: the tie to the lower layer
    model = ModelGeometry("llama", 2, (LayerIndex(0), LayerIndex(1)), (), 2, (2, 2), (8, 8), (8, 8), 2, 99)
    assert make_budget(UtilityGlobal(), 2, body, model, tables=tables).counts == ((2, 1), (4, 1))


@pytest.mark.parametrize("rule", RULES)
def test_scores_below_zero_are_refused(rule):
    request = BudgetRequest(1, 2, 1, Tables(utility_peak=[[1.0]]))

    with pytest.raises(RequestError, match="only scores of at least 0 allow; use --scorer gatesight, or --allocation"):
        rule.per_head(request, Body.of(Scores((torch.tensor([[0.5, -0.1]]),)), 0))
    assert rule.per_head(request, Body.of(Scores((torch.tensor([[0.5, -0.0]]),)), 0)) == ((1,),)


@pytest.mark.parametrize("rule", RULES)
def test_without_peaks_of_this_model_it_is_refused(rule):
    body, name = Body.of(Scores((torch.rand(2, 5),)), 0), allocation_spec(rule)

    with pytest.raises(RequestError, match=f"{name}' needs the largest utility of every KV head.*: wakesight fit, or"):
        rule.per_head(BudgetRequest(1, 5, 1, Tables(gate=[[1, 1]])), body)
    with pytest.raises(RequestError, match=f"{name}' has a table of 1 attention layers with 3 KV heads, but"):
        rule.per_head(BudgetRequest(1, 5, 1, Tables(utility_peak=[[1, 1, 1]])), body)


@pytest.mark.parametrize("rule", RULES)
def test_a_context_without_a_body_keeps_nothing_more(rule):
    request = BudgetRequest(0, 0, 1, Tables(utility_peak=[[1.0, 1.0]]))

    assert rule.per_head(request, Body.of(Scores((torch.rand(2, 4),)), 4)) == ((0, 0),)


@pytest.mark.parametrize("name", ["utility_global", "utility_layer"])
def test_they_are_found_by_name(name):
    assert allocation_spec(allocation(name)) == name
