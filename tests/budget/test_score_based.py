"""Ada and global against plain loops over all entries, and the laws both keep."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import flags, kept, rows
from wakesight.budget.ada import Ada
from wakesight.budget.base import Body, BudgetRequest
from wakesight.budget.best import count_best, count_recent
from wakesight.budget.pooled import Global
from wakesight.budget.table import allocation
from wakesight.core import Scores
from wakesight.errors import RequestError

LAWS = settings(deadline=None, derandomize=True, max_examples=150)
ALPHAS = st.one_of(st.sampled_from([0, 0.2, 0.5, 1]), st.floats(0, 1))
TIED = st.sampled_from([-1.0, -0.0, 0.0, 2.5])


@st.composite
def contexts(draw, ragged=True, must=True):
    """Scores of a small model, its prefix, which entries exist, and R."""
    tokens = draw(st.integers(1, 20))
    prefix = draw(st.integers(0, tokens))
    heads = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    values = draw(st.sampled_from([TIED, st.floats(-1, 1, width=32)]))
    scores = Scores(
        tuple(rows(draw, values, n, tokens) for n in heads),
        flags(draw, tokens) if must and draw(st.booleans()) else None,
    )
    hold = ragged and draw(st.booleans())
    held = tuple(flags(draw, n, tokens) for n in heads) if hold else None
    mean = draw(st.integers(0, tokens - prefix))
    return scores, prefix, held, BudgetRequest(mean, tokens - prefix, len(heads))


def entries(scores: Scores, prefix: int, held) -> list[tuple[int, int, int, float, bool]]:
    """Every entry beyond the prefix that exists: (layer, head, position, score, must)."""
    found = []
    for layer, values in enumerate(scores.layers):
        for head, row in enumerate(values.tolist()):
            for position in range(prefix, len(row)):
                if held is None or held[layer][head, position]:
                    must = scores.must_keep is not None and bool(scores.must_keep[position])
                    found.append((layer, head, position, row[position], must))
    return found


def global_reference(scores: Scores, prefix: int, held, total: int) -> set[tuple[int, int, int]]:
    """The entries that stay, from one sorted list."""
    every = entries(scores, prefix, held)
    forced = sorted((e for e in every if e[4]), key=lambda e: (-e[2], e[0], e[1]))
    free = sorted((e for e in every if not e[4]), key=lambda e: (-e[3], e[0], e[1], e[2]))
    return {e[:3] for e in (forced + free)[:total]}


def ada_reference(alpha: float, scores: Scores, prefix: int, held, mean: int) -> list[list[int]]:
    """Ada-KV's rule in its own words, one layer after the other."""
    every = entries(scores, prefix, held)
    counts = []
    for layer, values in enumerate(scores.layers):
        heads = range(values.shape[0])
        have = [sum(e[:2] == (layer, head) for e in every) for head in heads]
        forced = [min(sum(e[:2] == (layer, head) and e[4] for e in every), mean) for head in heads]
        room = [have[head] - forced[head] for head in heads]
        total = min(len(heads) * mean, sum(have)) - sum(forced)
        free = sorted((e for e in every if e[0] == layer and not e[4]), key=lambda e: (-e[3], e[1], e[2]))
        best = [sum(e[1] == head for e in free[:total]) for head in heads]
        share = Fraction(str(alpha))
        ideal = [(1 - share) * best[head] + share * (mean - forced[head]) for head in heads]
        counts.append([a + b for a, b in zip(forced, poured(ideal, total, room), strict=True)])
    return counts


def poured(weights: list[Fraction], total: int, room: list[int]) -> list[int]:
    """What overflows is fixed at its cap and the rest shared again; then largest remainder."""
    full: set[int] = set()
    while True:
        free = [i for i in range(len(weights)) if i not in full]
        rest = total - sum(room[i] for i in full)
        mass = sum((weights[i] for i in free), Fraction(0))
        ideal = {i: weights[i] * rest / mass if mass else Fraction(rest, len(free)) for i in free}
        if not (over := {i for i in free if ideal[i] > room[i]}):
            break
        full |= over
    counts = [room[i] if i in full else math.floor(ideal[i]) for i in range(len(weights))]
    for i in sorted(free, key=lambda i: (math.floor(ideal[i]) - ideal[i], i))[: total - sum(counts)]:
        counts[i] += 1
    return counts


def as_lists(counts) -> list[list[int]]:
    return [list(heads) for heads in counts]


@given(contexts())
@LAWS
def test_global_keeps_exactly_the_best_entries_of_the_whole_cache(case):
    scores, prefix, held, request = case
    total = request.per_head * sum(layer.shape[0] for layer in scores.layers)

    counts = Global().per_head(request, Body.of(scores, prefix, held))

    assert kept(scores, prefix, held, counts) == global_reference(scores, prefix, held, total)


@given(contexts(), ALPHAS)
@LAWS
def test_ada_is_its_rule_in_words(case, alpha):
    scores, prefix, held, request = case

    counts = Ada(alpha).per_head(request, Body.of(scores, prefix, held))

    assert as_lists(counts) == ada_reference(alpha, scores, prefix, held, request.per_head)


@given(contexts(), st.one_of(st.just(Global()), ALPHAS.map(Ada)))
@LAWS
def test_totals_are_exact_and_no_head_gets_more_than_it_holds(case, rule):
    scores, prefix, held, request = case
    body = Body.of(scores, prefix, held)

    counts = rule.per_head(request, body)

    assert [len(heads) for heads in counts] == [layer.shape[0] for layer in scores.layers]
    pairs = [pair for heads in zip(counts, body.counts, strict=True) for pair in zip(*heads, strict=True)]
    assert all(type(count) is int and 0 <= count <= have for count, have in pairs)
    layers = [slice(None)] if isinstance(rule, Global) else [slice(i, i + 1) for i in range(len(counts))]
    for part in layers:
        heads = sum(len(layer) for layer in counts[part])
        assert sum(map(sum, counts[part])) == min(heads * request.per_head, sum(map(sum, body.counts[part])))


@given(contexts(ragged=False), ALPHAS)
@LAWS
def test_no_head_falls_below_its_share_of_alpha_and_its_must_keep(case, alpha):
    scores, prefix, _, request = case
    must = 0 if scores.must_keep is None else int(scores.must_keep[prefix:].sum())
    forced = min(must, request.per_head)

    counts = Ada(alpha).per_head(request, Body.of(scores, prefix))

    least = forced + math.floor(Fraction(str(alpha)) * (request.per_head - forced))
    assert all(count >= least for heads in counts for count in heads)


@given(contexts(ragged=False))
@LAWS
def test_ada_with_alpha_one_is_flat(case):
    scores, prefix, _, request = case

    counts = Ada(1).per_head(request, Body.of(scores, prefix))

    assert all(count == request.per_head for heads in counts for count in heads)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.data())
@LAWS
def test_heads_with_equal_and_distinct_scores_share_equally(layers, heads, n_body, data):
    row = torch.tensor(data.draw(st.permutations(range(n_body)))).float()
    scores = Scores((row.expand(heads, -1),) * layers)
    request = BudgetRequest(data.draw(st.integers(0, n_body)), n_body, layers)
    rule = data.draw(st.sampled_from([Global(), Ada(0), Ada(0.2), Ada(0.5)]))

    counts = rule.per_head(request, Body.of(scores, 0))

    assert counts == ((request.per_head,) * heads,) * layers


@given(contexts())
@LAWS
def test_a_larger_global_budget_never_loses_an_entry(case):
    scores, prefix, held, request = case
    body = Body.of(scores, prefix, held)

    chain = [
        kept(scores, prefix, held, Global().per_head(BudgetRequest(mean, body.n_body, request.layers), body))
        for mean in range(body.n_body + 1)
    ]

    assert all(small <= large for small, large in itertools.pairwise(chain))
    assert chain[-1] == {e[:3] for e in entries(scores, prefix, held)}


@given(contexts(), st.sampled_from([Global(), Ada(0), Ada(0.2)]))
@LAWS
def test_must_keep_entries_come_before_all_others(case, rule):
    scores, prefix, held, request = case
    every = entries(scores, prefix, held)
    forced = {e[:3] for e in every if e[4]}

    stays = kept(scores, prefix, held, rule.per_head(request, Body.of(scores, prefix, held)))

    if isinstance(rule, Global):
        assert forced <= stays or stays <= forced
    for layer, values in enumerate(scores.layers):
        for head in range(values.shape[0]):
            own = {e for e in forced if e[:2] == (layer, head)}
            mine = {e for e in stays if e[:2] == (layer, head)}
            assert own <= mine or mine <= own
            if isinstance(rule, Ada):
                assert len(own & mine) >= min(len(own), request.per_head)


@given(contexts(), st.sampled_from([Global(), Ada(0.2)]))
@LAWS
def test_allocating_leaves_the_scores_alone(case, rule):
    scores, prefix, held, request = case
    before = [layer.clone() for layer in scores.layers]

    rule.per_head(request, Body.of(scores, prefix, held))

    assert all(torch.equal(old, new) for old, new in zip(before, scores.layers, strict=True))


def test_a_head_may_keep_nothing_in_a_global_budget():
    scores = Scores((torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 0]]), torch.tensor([[0.0, 2, 0, 2]])))

    assert Global().per_head(BudgetRequest(2, 4, 2), Body.of(scores, 0)) == ((4, 0), (2,))
    assert Global().per_head(BudgetRequest(1, 4, 2), Body.of(scores, 0)) == ((1, 0), (2,))
    assert Global().per_head(BudgetRequest(3, 4, 2), Body.of(scores, 0)) == ((4, 3), (2,))  # ties: the lower layer


@pytest.mark.parametrize(
    ("alpha", "expected"), [(0, (6, 0)), (0.2, (5, 1)), (0.5, (5, 1)), (0.6, (4, 2)), (1, (3, 3))]
)  # c = (6, 0), R = 3: 6, 5.4, 4.5 (a tie, to the lower head), 4.2, 3
def test_worked_ada_shares(alpha, expected):
    scores = Scores((torch.tensor([[9.0] * 8, [1.0] * 8]),))

    assert Ada(alpha).per_head(BudgetRequest(3, 8, 1), Body.of(scores, 0)) == (expected,)


def test_alpha_is_read_as_it_is_written():
    """0.9 as a binary fraction is a little above nine tenths and would break the tie of 5.5 and 4.5."""
    scores = Scores((torch.tensor([[9.0] * 10 + [0.0] * 10, [0.0] * 20]),))

    assert Ada(0.9).per_head(BudgetRequest(5, 20, 1), Body.of(scores, 0)) == ((6, 4),)


@pytest.mark.parametrize("alpha", [-0.1, 1.01, math.nan, math.inf])
def test_alphas_that_are_no_share_are_refused(alpha):
    with pytest.raises(RequestError, match=r"alpha=.* is no share: it must be 0 .* to 1 \(flat\); 0.2 is usual"):
        Ada(alpha)


def test_score_based_allocations_by_name():
    assert allocation("ada") == Ada(0.2)
    assert allocation("ada:alpha=0.5") == Ada(0.5)
    assert allocation("global") == Global()


@given(st.lists(st.lists(TIED, min_size=5, max_size=5), min_size=1, max_size=4), st.data())
@LAWS
def test_counting_the_best_is_a_sort(rows, data):
    count = data.draw(st.integers(0, 5 * len(rows)))
    best = sorted((-score, head, i) for head, row in enumerate(rows) for i, score in enumerate(row))[:count]

    assert count_best(torch.tensor(rows), count) == [sum(e[1] == head for e in best) for head in range(len(rows))]


@pytest.mark.parametrize(
    ("count", "expected"), [(0, [0, 0]), (1, [0, 1]), (2, [1, 1]), (3, [2, 1]), (4, [2, 1])]
)  # head 0 holds the second and third most recent, head 1 the most recent
def test_counting_the_most_recent(count, expected):
    recent = torch.tensor([[False, True, True], [True, False, False]])

    assert count_recent(recent, count) == expected


def test_a_context_without_a_body_or_without_must_keep_has_none():
    body = Body.of(Scores((torch.zeros(2, 4),), torch.tensor([True, True, False, False])), 2)

    assert body.must is None
    assert body.counts == ((2, 2),)
    empty = Body.of(Scores((torch.zeros(2, 4),)), 4)
    assert (
        Global().per_head(BudgetRequest(0, 0, 1), empty) == Ada().per_head(BudgetRequest(0, 0, 1), empty) == ((0, 0),)
    )
