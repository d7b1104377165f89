"""Pages against their plain-loop reference, and the laws of a page budget."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import flags
from strategies import rows as drawn
from wakesight.budget.ada import Ada
from wakesight.budget.base import BudgetRequest
from wakesight.budget.pooled import Global
from wakesight.core import Budget, Scores
from wakesight.selection.pages import lift, snap, whole_pages
from wakesight.selection.reference import lift_reference, order_reference, snap_reference
from wakesight.selection.topk import rank, take

LAWS = settings(deadline=None, derandomize=True, max_examples=150)
REDUCES = ["max", "mean", "sum"]
DYADIC = st.integers(-64, 64).map(lambda i: i / 8)  # sums of a few are exact in float32


@st.composite
def contexts(draw):
    """Scores, prefix, held masks and a page size; a third of the pages tie in most draws."""
    tokens = draw(st.integers(1, 30))
    prefix = draw(st.integers(0, tokens))
    heads = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    values = draw(st.sampled_from([DYADIC, st.sampled_from([0.0, 1.0])]))
    scores = Scores(
        tuple(drawn(draw, values, n, tokens) for n in heads),
        flags(draw, tokens) if draw(st.booleans()) else None,
    )
    held = tuple(flags(draw, n, tokens) for n in heads) if draw(st.booleans()) else None
    return scores, prefix, held, draw(st.sampled_from([1, 2, 3, 4, 7, 16, 64]))


@st.composite
def budgets(draw):
    scores, prefix, held, page_size = draw(contexts())
    lifted = lift(scores, page_size, draw(st.sampled_from(REDUCES)), prefix, held)
    ranking = rank(lifted, prefix, held)
    counts = tuple(tuple(draw(st.one_of(st.just(n), st.integers(0, n))) for n in heads) for heads in ranking.held)
    return lifted, prefix, held, page_size, ranking, Budget(counts)


def held_rows(scores: Scores, held) -> list[list[list[bool]]]:
    return [(torch.ones_like(x) if held is None else held[i]).bool().tolist() for i, x in enumerate(scores.layers)]


def flat(budget: Budget) -> list[int]:
    return [count for heads in budget.counts for count in heads]


@pytest.mark.parametrize("reduce", REDUCES)
def test_lifted_scores_are_the_reference(reduce):
    @given(contexts())
    @LAWS
    def law(case):
        scores, prefix, held, page_size = case

        lifted = lift(scores, page_size, reduce, prefix, held)

        for found, layer, rows in zip(lifted.layers, scores.layers, held_rows(scores, held), strict=True):
            assert found.dtype == layer.dtype
            for lifted_row, row, have in zip(found, layer.tolist(), rows, strict=True):
                expected = torch.tensor(lift_reference(row, prefix, have, page_size, reduce))
                assert torch.equal(lifted_row, expected)

    law()


@given(contexts())
@LAWS
def test_one_must_keep_entry_makes_its_whole_page_must_keep(case):
    scores, prefix, held, page_size = case
    lifted = lift(scores, page_size, "max", prefix, held)
    if scores.must_keep is None:
        assert lifted.must_keep is None
        return
    must = scores.must_keep.tolist()
    pages = {i // page_size for i in range(prefix, len(must)) if must[i]}

    assert lifted.must_keep.tolist() == must[:prefix] + [i // page_size in pages for i in range(prefix, len(must))]


@given(contexts(), st.sampled_from(REDUCES))
@LAWS
def test_lifting_leaves_the_scores_alone_and_pages_of_one_change_nothing(case, reduce):
    scores, prefix, held, _ = case
    before = [layer.clone() for layer in scores.layers]

    lifted = lift(scores, 1, reduce, prefix, held)

    assert all(torch.equal(old, new) for old, new in zip(before, scores.layers, strict=True))
    assert [x.tolist() for x in rank(lifted, prefix, held).order] == [
        x.tolist() for x in rank(scores, prefix, held).order
    ]


@given(budgets())
@LAWS
def test_a_ranking_of_lifted_scores_keeps_every_page_together(case):
    lifted, prefix, held, page_size, _, _ = case
    must = [False] * lifted.layers[0].shape[1] if lifted.must_keep is None else lifted.must_keep.tolist()

    for layer, rows in zip(lifted.layers, held_rows(lifted, held), strict=True):
        for row, have in zip(layer.tolist(), rows, strict=True):
            pages = [i // page_size for i in order_reference(row, must, prefix, have)]
            assert len([page for page, _ in itertools.groupby(pages)]) == len(set(pages))


@given(budgets())
@LAWS
def test_snapped_budgets_are_the_reference(case):
    lifted, prefix, held, page_size, ranking, budget = case
    must = [False] * lifted.layers[0].shape[1] if lifted.must_keep is None else lifted.must_keep.tolist()
    orders = [
        order_reference(row, must, prefix, have)
        for layer, rows in zip(lifted.layers, held_rows(lifted, held), strict=True)
        for row, have in zip(layer.tolist(), rows, strict=True)
    ]

    snapped = snap(budget, ranking, page_size)

    assert flat(snapped) == snap_reference(flat(budget), orders, page_size)
    assert [len(heads) for heads in snapped.counts] == [len(heads) for heads in budget.counts]


@given(budgets())
@LAWS
def test_a_page_budget_stays_within_the_entry_budget_and_close_to_it(case):
    _, _, _, page_size, ranking, budget = case

    snapped = snap(budget, ranking, page_size)

    assert snapped.total <= budget.total
    assert all(low > want - page_size for low, want in zip(flat(snapped), flat(budget), strict=True))
    assert all(high < want + page_size for high, want in zip(flat(snapped), flat(budget), strict=True))
    assert snap(Budget(ranking.held), ranking, page_size).counts == ranking.held
    if page_size == 1:
        assert snapped == budget


@given(budgets())
@LAWS
def test_every_page_beyond_the_prefix_is_kept_whole_or_not_at_all(case):
    lifted, prefix, held, page_size, ranking, budget = case

    kept = take(ranking, snap(budget, ranking, page_size))

    for positions, rows in zip(kept.positions, held_rows(lifted, held), strict=True):
        for head, have in zip(positions, rows, strict=True):
            body = {i for i in head.tolist() if i >= prefix}
            pages = {i // page_size for i in body}
            assert body == {i for i in range(prefix, len(have)) if have[i] and i // page_size in pages}


@given(budgets(), st.sampled_from([Ada(0.2), Ada(0), Global()]))
@LAWS
def test_score_based_budgets_snap_too(case, rule):
    _, _, _, page_size, ranking, _ = case
    body = ranking.body
    request = BudgetRequest(body.n_body // 2, body.n_body, len(body.scores))
    budget = Budget(rule.per_head(request, body))

    snapped = snap(budget, ranking, page_size)

    assert snapped.total <= budget.total
    assert all(low > want - page_size for low, want in zip(flat(snapped), flat(budget), strict=True))
    take(ranking, snapped)


def test_the_first_and_the_last_page_may_be_partial():
    scores = Scores((torch.tensor([[0.0, 9, 1, 2, 5, 3, 0, 0, 7, 0]]),))  # prefix 2; pages 2-3, 4-7, 8-9

    lifted = lift(scores, 4, "max", 2)

    assert lifted.layers[0].tolist() == [[0, 9, 2, 2, 5, 5, 5, 5, 7, 7]]
    assert lift(scores, 4, "mean", 2).layers[0].tolist() == [[0, 9, 1.5, 1.5, 2, 2, 2, 2, 3.5, 3.5]]
    assert lift(scores, 4, "sum", 2).layers[0].tolist() == [[0, 9, 3, 3, 8, 8, 8, 8, 7, 7]]
    ranking = rank(lifted, 2)
    assert ranking.order[0].tolist() == [[8, 9, 4, 5, 6, 7, 2, 3]]
    assert [snap(Budget(((k,),)), ranking, 4).total for k in range(9)] == [0, 0, 2, 2, 2, 2, 6, 6, 8]


def test_left_over_entries_buy_pages_for_the_largest_remainders():
    ranking = rank(lift(Scores((torch.arange(16.0).expand(2, -1), torch.arange(16.0).expand(1, -1))), 4, "max", 0), 0)

    assert snap(Budget(((5, 7), (6,))), ranking, 4).counts == ((4, 8), (4,))  # 1 + 3 + 2 left: one page, to the 3
    assert snap(Budget(((6, 6), (6,))), ranking, 4).counts == ((8, 4), (4,))  # equal: the lower layer and head
    assert snap(Budget(((4, 7), (7,))), ranking, 4).counts == ((4, 8), (4,))
    assert snap(Budget(((7, 7), (7,))), ranking, 4).counts == ((8, 8), (4,))
    assert snap(Budget(((0, 3), (0,))), ranking, 4).counts == ((0, 0), (0,))


def test_a_head_without_remainder_buys_nothing_and_one_whose_page_does_not_fit_is_passed_over():
    partial = torch.tensor([[1.0, 2, 3, 4, 5], [1.0, 2, 3, 4, 9]])  # pages of 4: 0-3 and the single entry 4
    ranking = rank(lift(Scores((partial,)), 4, "max", 0), 0)

    assert snap(Budget(((2, 0),)), ranking, 4).counts == ((1, 0),)  # 1 is left and would buy head 1 its page
    held = (torch.tensor([[True] * 5, [True, False, False, False, True]]),)
    ragged = rank(lift(Scores((partial,)), 4, "sum", 0, held), 0, held)  # head 0: 4 then 1 entries; head 1: 1 then 1
    assert snap(Budget(((2, 1),)), ragged, 4).counts == ((0, 1),)
    assert snap(Budget(((3, 2),)), ragged, 4).counts == ((0, 2),)


def test_a_sum_beyond_float32_stays_finite():
    huge = torch.full((1, 8), 3e38)

    assert bool(torch.isfinite(lift(Scores((huge,)), 4, "sum", 0).layers[0]).all())
    assert bool(torch.isfinite(lift(Scores((-huge,)), 4, "sum", 0).layers[0]).all())


LAYERS = st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5).map(tuple)


@given(LAYERS, st.sampled_from([1, 3, 8, 16]))
@LAWS
def test_pages_of_layers_never_pass_the_entries_and_every_layer_has_one(counts, page_size):
    pages = whole_pages(Budget(counts), page_size)

    cost = sum(n * len(heads) * page_size for n, heads in zip(pages, counts, strict=True))
    total = sum(map(sum, counts))
    assert min(pages) >= 1
    assert cost <= total or pages == [1] * len(counts)
    most = max(len(heads) for heads in counts) * page_size
    assert cost > total - most or cost >= total - sum(len(heads) * page_size for heads in counts)
    for n, heads in zip(pages, counts, strict=True):
        assert n <= sum(heads) // (len(heads) * page_size) + 1


def test_pages_of_layers_by_the_largest_remainder():
    assert whole_pages(Budget(((20, 20), (20, 20), (30, 34))), 16) == [1, 1, 2]
    assert whole_pages(Budget(((20, 20), (30, 30), (28, 28))), 16) == [1, 2, 1]
    assert whole_pages(Budget(((3, 3), (64, 64))), 16) == [1, 3]  # the first layer's page comes out of the second
    assert whole_pages(Budget(((0,), (0,))), 16) == [1, 1]
