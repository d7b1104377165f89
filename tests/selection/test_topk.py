"""Selection against its plain-loop reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.core import Budget, Scores
from wakesight.errors import RequestError
from wakesight.selection.reference import take_reference
from wakesight.selection.topk import rank, take

LAWS = settings(deadline=None, derandomize=True, max_examples=250)
TIED = st.sampled_from([-1.5, -0.0, 0.0, 0.25, 3.0])  # few values, so most entries tie


@st.composite
def contexts(draw):
    """Scores of a small model, its prefix, and one budget per layer."""
    tokens = draw(st.integers(1, 24))
    prefix = draw(st.integers(0, tokens))
    heads = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    values = draw(st.sampled_from([TIED, st.floats(-1, 1, width=32)]))
    rows = [[[draw(values) for _ in range(tokens)] for _ in range(n)] for n in heads]
    must = draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    body = tokens - prefix
    counts = [draw(st.one_of(st.just(0), st.just(body), st.integers(0, body))) for _ in heads]
    scores = Scores(tuple(torch.tensor(row) for row in rows), None if must is None else torch.tensor(must))
    return scores, prefix, Budget(tuple((count,) * n for count, n in zip(counts, heads, strict=True)))


def kept_lists(scores: Scores, prefix: int, budget: Budget) -> list[list[list[int]]]:
    return [positions.tolist() for positions in take(rank(scores, prefix), budget).positions]


@given(contexts())
@LAWS
def test_rank_then_take_is_the_reference(case):
    scores, prefix, budget = case
    tokens = scores.layers[0].shape[1]
    must = [False] * tokens if scores.must_keep is None else scores.must_keep.tolist()

    found = kept_lists(scores, prefix, budget)

    assert found == [
        [take_reference(row, must, prefix, counts[0]) for row in layer.tolist()]
        for layer, counts in zip(scores.layers, budget.counts, strict=True)
    ]


@given(contexts())
@LAWS
def test_what_is_kept_fills_the_budget_and_is_listed_in_order(case):
    scores, prefix, budget = case

    kept = take(rank(scores, prefix), budget)

    assert kept.counts == [[prefix + count for count in heads] for heads in budget.counts]
    for positions in kept.positions:
        assert positions.dtype == torch.int64
        assert positions[:, :prefix].tolist() == [list(range(prefix))] * positions.shape[0]
        assert bool((positions.diff(dim=1) > 0).all())


@given(contexts())
@LAWS
def test_a_larger_budget_keeps_everything_a_smaller_one_does(case):
    scores, prefix, _ = case
    ranking, body = rank(scores, prefix), scores.layers[0].shape[1] - prefix
    heads = [layer.shape[0] for layer in scores.layers]

    kept = [take(ranking, Budget(tuple((count,) * n for n in heads))) for count in range(body + 1)]

    for small, large in itertools.pairwise(kept):
        for a, b in zip(small.positions, large.positions, strict=True):
            assert all(set(x) < set(y) for x, y in zip(a.tolist(), b.tolist(), strict=True))


@given(contexts())
@LAWS
def test_ranking_leaves_the_scores_alone(case):
    scores, prefix, budget = case
    before = [layer.clone() for layer in scores.layers]

    take(rank(scores, prefix), budget)

    assert all(torch.equal(old, new) for old, new in zip(before, scores.layers, strict=True))


def test_of_too_many_must_keep_entries_the_most_recent_stay():
    scores = Scores((torch.tensor([[9.0, 8.0, 7.0, 6.0, 5.0, 4.0]]),), torch.tensor([1, 1, 1, 0, 1, 0]).bool())

    assert kept_lists(scores, 1, Budget(((2,),))) == [[[0, 2, 4]]]
    assert kept_lists(scores, 1, Budget(((3,),))) == [[[0, 1, 2, 4]]]
    assert kept_lists(scores, 1, Budget(((4,),))) == [[[0, 1, 2, 3, 4]]]


def test_must_keep_inside_the_prefix_costs_no_budget():
    scores = Scores((torch.tensor([[0.0, 0.0, 1.0, 2.0]]),), torch.tensor([True, True, False, False]))

    assert kept_lists(scores, 2, Budget(((1,),))) == [[[0, 1, 3]]]


def test_ties_go_to_the_lower_position():
    scores = Scores((torch.tensor([[1.0, 2.0, 2.0, 2.0, 1.0], [0.0, -0.0, 0.0, -0.0, 0.0]]),))

    assert kept_lists(scores, 0, Budget(((2, 2),))) == [[[1, 2], [0, 1]]]


def test_uneven_budgets_within_a_layer_are_refused():
    ranking = rank(Scores((torch.zeros(2, 8), torch.zeros(2, 8))), 0)

    with pytest.raises(RequestError, match="attention layer 1 got uneven budgets per KV head"):
        take(ranking, Budget(((3, 3), (3, 4))))


def test_more_than_a_head_holds_is_refused():
    ranking = rank(Scores((torch.zeros(2, 8),)), 3)

    with pytest.raises(RequestError, match="attention layer 0 has 5 entries per KV head, not 6"):
        take(ranking, Budget(((6, 6),)))
