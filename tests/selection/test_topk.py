"""Selection against its plain-loop reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import flags, rows
from wakesight.core import Budget, Scores
from wakesight.errors import RequestError
from wakesight.selection.reference import order_reference, take_reference
from wakesight.selection.topk import rank, take

LAWS = settings(deadline=None, derandomize=True, max_examples=150)
TIED = st.sampled_from([-1.5, -0.0, 0.0, 0.25, 3.0])  # few values, so most entries tie


@st.composite
def contexts(draw):
    """Scores of a small model, its prefix, which entries exist, and one budget per head."""
    tokens = draw(st.integers(1, 24))
    prefix = draw(st.integers(0, tokens))
    heads = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    values = draw(st.sampled_from([TIED, st.floats(-1, 1, width=32)]))
    scores = Scores(
        tuple(rows(draw, values, n, tokens) for n in heads),
        flags(draw, tokens) if draw(st.booleans()) else None,
    )
    held = tuple(flags(draw, n, tokens) for n in heads) if draw(st.booleans()) else None
    body = [[int(row[prefix:].sum()) for row in exists(layer, held, i)] for i, layer in enumerate(scores.layers)]
    counts = tuple(tuple(draw(st.one_of(st.just(0), st.just(n), st.integers(0, n))) for n in row) for row in body)
    return scores, prefix, held, Budget(counts)


def exists(layer, held, i) -> torch.Tensor:
    return torch.ones_like(layer, dtype=torch.bool) if held is None else held[i]


def must_list(scores: Scores) -> list[bool]:
    return [False] * scores.layers[0].shape[1] if scores.must_keep is None else scores.must_keep.tolist()


def kept_lists(scores: Scores, prefix: int, budget: Budget, held=None) -> list[list[list[int]]]:
    kept = take(rank(scores, prefix, held), budget)
    return [[head.tolist() for head in layer] for layer in kept.positions]


@given(contexts())
@LAWS
def test_rank_then_take_is_the_reference(case):
    scores, prefix, held, budget = case
    must = must_list(scores)

    found = kept_lists(scores, prefix, budget, held)

    assert found == [
        [
            take_reference(row, must, prefix, have, count)
            for row, have, count in zip(layer.tolist(), exists(layer, held, i).tolist(), counts, strict=True)
        ]
        for i, (layer, counts) in enumerate(zip(scores.layers, budget.counts, strict=True))
    ]


@given(contexts())
@LAWS
def test_an_order_starts_with_what_is_held_best_first_and_names_every_position_once(case):
    scores, prefix, held, _ = case
    must = must_list(scores)

    ranking = rank(scores, prefix, held)

    for i, layer in enumerate(scores.layers):
        assert ranking.order[i].dtype == torch.int64
        for head, row in enumerate(layer.tolist()):
            order, have = ranking.order[i][head].tolist(), exists(layer, held, i)[head].tolist()
            assert order[: ranking.held[i][head]] == order_reference(row, must, prefix, have)
            assert sorted(order) == list(range(prefix, len(row)))


@given(contexts())
@LAWS
def test_what_is_kept_fills_the_budget_and_is_listed_in_order(case):
    scores, prefix, held, budget = case

    kept = take(rank(scores, prefix, held), budget)

    for i, (layer, counts) in enumerate(zip(scores.layers, budget.counts, strict=True)):
        for head, positions in enumerate(kept.positions[i]):
            have = exists(layer, held, i)[head]
            assert positions.dtype == torch.int64
            assert positions.is_contiguous()
            assert bool((positions.diff() > 0).all())
            assert positions[positions < prefix].tolist() == have[:prefix].nonzero().flatten().tolist()
            assert int((positions >= prefix).sum()) == counts[head]
            assert bool(have[positions].all())


@given(contexts())
@LAWS
def test_a_larger_budget_keeps_everything_a_smaller_one_does(case):
    scores, prefix, held, _ = case
    ranking = rank(scores, prefix, held)
    sizes = range(scores.layers[0].shape[1] - prefix + 1)

    kept = [
        take(ranking, Budget(tuple(tuple(min(size, n) for n in heads) for heads in ranking.held))) for size in sizes
    ]

    for small, large in itertools.pairwise(kept):
        for a, b in zip(small.positions, large.positions, strict=True):
            assert all(set(x.tolist()) <= set(y.tolist()) for x, y in zip(a, b, strict=True))


@given(contexts())
@LAWS
def test_heads_do_not_see_each_other(case):
    scores, prefix, held, budget = case
    found = kept_lists(scores, prefix, budget, held)

    for i, layer in enumerate(scores.layers):
        for head in range(layer.shape[0]):
            alone = Scores((layer[head : head + 1],), scores.must_keep)
            only = None if held is None else (held[i][head : head + 1],)
            assert kept_lists(alone, prefix, Budget(((budget.counts[i][head],),)), only) == [[found[i][head]]]


@given(contexts())
@LAWS
def test_ranking_leaves_the_scores_alone(case):
    scores, prefix, held, budget = case
    before = [layer.clone() for layer in scores.layers]

    take(rank(scores, prefix, held), budget)

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


def test_heads_of_a_layer_may_keep_different_counts():
    scores = Scores((torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]]),))

    assert kept_lists(scores, 1, Budget(((0, 3),))) == [[[0], [0, 1, 2, 3]]]
    assert kept_lists(scores, 1, Budget(((2, 1),))) == [[[0, 2, 3], [0, 1]]]


def test_what_a_child_no_longer_holds_is_never_kept():
    scores = Scores((torch.tensor([[9.0, 8.0, 7.0, 6.0], [9.0, 8.0, 7.0, 6.0]]),), torch.tensor([1, 1, 0, 0]).bool())
    held = (torch.tensor([[True, False, True, True], [False, True, False, False]]),)

    assert rank(scores, 1, held).held == ((2, 1),)
    assert kept_lists(scores, 1, Budget(((1, 1),)), held) == [[[0, 2], [1]]]
    assert kept_lists(scores, 1, Budget(((2, 0),)), held) == [[[0, 2, 3], []]]


@pytest.mark.parametrize(
    ("held", "has"),
    [(None, 5), ((torch.tensor([[True] * 8, [True, False, False, True, True, False, True, True]]),), 4)],
)
def test_more_than_a_head_holds_is_refused(held, has):
    ranking = rank(Scores((torch.zeros(2, 8),)), 3, held)

    with pytest.raises(
        RequestError, match=f"attention layer 0, KV head 1 holds {has} entries .*, not {has + 1}; ask for at most {has}"
    ):
        take(ranking, Budget(((0, has + 1),)))
