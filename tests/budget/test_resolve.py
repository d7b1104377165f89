"""Sizes become counts and counts become budgets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.budget.ada import Ada
from wakesight.budget.base import Body, BudgetRequest
from wakesight.budget.flat import Flat
from wakesight.budget.pooled import Global
from wakesight.budget.pyramid import Pyramid
from wakesight.budget.resolve import check_allocation, entries_per_head, make_budget
from wakesight.core import LayerIndex, ModelGeometry
from wakesight.errors import RequestError

LAWS = settings(deadline=None, derandomize=True, max_examples=200)


def geometry(kv_heads=(2, 2, 2), key_dims=None, value_dims=None, itemsize=2) -> ModelGeometry:
    layers = len(kv_heads)
    return ModelGeometry(
        family="llama",
        n_layers=layers,
        attention_layers=tuple(LayerIndex(i) for i in range(layers)),
        recurrent_layers=(),
        query_heads=6,
        kv_heads=kv_heads,
        key_dims=key_dims or (16,) * layers,
        value_dims=value_dims or (16,) * layers,
        itemsize=itemsize,
        max_positions=1024,
    )


def body(n_body: int, model: ModelGeometry, held: tuple[torch.Tensor, ...] | None = None) -> Body:
    return Body(tuple(torch.rand(heads, n_body) for heads in model.kv_heads), None, held)


def per_head(*, keep=None, entries=None, limit_bytes=None, n_body=100, prefix=10, fixed=1000, token=384) -> int:
    return entries_per_head(
        keep=keep, entries=entries, limit_bytes=limit_bytes, n_body=n_body, prefix=prefix, fixed_bytes=fixed,
        token_bytes=token,
    )  # fmt: skip


@pytest.mark.parametrize(("keep", "count"), [(0.3, 30), (0.125, 12), (0.135, 14), (1.0, 100)])
def test_a_fraction_is_rounded_once(keep, count):
    assert per_head(keep=keep) == count


def test_a_fraction_that_keeps_nothing_is_refused():
    with pytest.raises(RequestError, match="keeps 0 of 100 entries per KV head; raise --keep"):
        per_head(keep=0.001)


@pytest.mark.parametrize("entries", [1, 37, 100])
def test_a_count_is_itself(entries):
    assert per_head(entries=entries) == entries


@pytest.mark.parametrize("entries", [0, -1, 101])
def test_counts_the_context_does_not_have_are_refused(entries):
    with pytest.raises(RequestError, match=f"entries={entries} cannot be kept: .* give --entries 1 to 100"):
        per_head(entries=entries)


def test_a_count_of_a_context_that_is_all_prefix_is_refused_with_what_can_be_done():
    with pytest.raises(RequestError, match=r"all 10 tokens .* protected prefix.*; give --keep 1, or .* --protect$"):
        per_head(entries=5, n_body=0)
    assert per_head(keep=1, n_body=0) == 0


@st.composite
def models(draw):
    layers = draw(st.integers(1, 5))
    sizes = st.tuples(*[st.integers(1, 9)] * layers)
    return geometry(draw(sizes), draw(sizes), draw(sizes), draw(st.sampled_from([1, 2, 4])))


def held_bytes(model: ModelGeometry, entries: int) -> int:
    """`entries` of every KV head, added up one head at a time."""
    total = 0
    for heads, key_dim, value_dim in zip(model.kv_heads, model.key_dims, model.value_dims, strict=True):
        for _ in range(heads):
            total += entries * key_dim * model.itemsize + entries * value_dim * model.itemsize
    return total


@given(models(), st.integers(0, 300), st.integers(0, 50), st.integers(0, 10**5), st.integers(1, 10**6))
@LAWS
def test_a_byte_limit_is_used_up_and_never_passed(model, n_body, prefix, fixed, limit):
    if held_bytes(model, prefix + 1) + fixed > limit:
        with pytest.raises(RequestError, match=f"raise --fit to at least {held_bytes(model, prefix + 1) + fixed}$"):
            per_head(limit_bytes=limit, n_body=n_body, prefix=prefix, fixed=fixed, token=model.token_bytes)
        return

    count = per_head(limit_bytes=limit, n_body=n_body, prefix=prefix, fixed=fixed, token=model.token_bytes)

    assert type(count) is int
    assert 0 <= count <= n_body
    assert held_bytes(model, prefix + count) + fixed <= limit
    assert count == n_body or held_bytes(model, prefix + count + 1) + fixed > limit


def test_the_smallest_limit_the_refusal_names_is_enough_for_one_entry():
    with pytest.raises(RequestError) as refused:
        per_head(limit_bytes=5)
    least = int(str(refused.value).rsplit(" ", 1)[1])

    assert per_head(limit_bytes=least) == 1
    with pytest.raises(RequestError, match=f"^{least - 1} bytes are too few"):
        per_head(limit_bytes=least - 1)


@given(models(), st.integers(0, 200), st.data())
@LAWS
def test_all_heads_of_a_layer_share_the_layers_count(model, n_body, data):
    mean = data.draw(st.integers(0, n_body))
    rule = data.draw(st.sampled_from([Flat(), Pyramid(), Pyramid(3)]))

    budget = make_budget(rule, mean, body(n_body, model), model)

    assert tuple(len(heads) for heads in budget.counts) == model.kv_heads
    assert all(len(set(heads)) == 1 for heads in budget.counts)
    assert sum(heads[0] for heads in budget.counts) == mean * len(model.kv_heads)
    assert budget.total == sum(n for heads in budget.counts for n in heads)


def test_with_equal_heads_the_total_is_layers_times_heads_times_the_mean():
    model = geometry(kv_heads=(4,) * 16)
    for rule in (Flat(), Pyramid(), Ada(), Global()):
        assert make_budget(rule, 123, body(1000, model), model).total == 16 * 4 * 123


def test_a_rule_that_reads_scores_may_give_every_head_another_count():
    model = geometry(kv_heads=(2, 1))
    scores = (torch.tensor([[3.0] * 4, [1.0] * 4]), torch.tensor([[2.0] * 4]))

    assert make_budget(Global(), 2, Body(scores), model).counts == ((4, 0), (2,))
    assert make_budget(Ada(0), 2, Body(scores), model).counts == ((4, 0), (2,))


@given(models(), st.integers(1, 40), st.data())
@LAWS
def test_no_head_keeps_more_than_it_holds_and_nothing_is_invented(model, n_body, data):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    held = tuple(torch.rand(heads, n_body) < 0.5 for heads in model.kv_heads)
    rest, mean = body(n_body, model, held), data.draw(st.integers(0, n_body))

    flat = make_budget(Flat(), mean, rest, model)
    assert flat.counts == tuple(tuple(min(mean, have) for have in heads) for heads in rest.counts)
    explicit = make_budget((mean,) * len(held), None, rest, model)
    assert explicit == flat
    layers = Pyramid().per_layer(BudgetRequest(mean, n_body, len(held)))
    assert make_budget(Pyramid(), mean, rest, model).counts == tuple(
        tuple(min(count, have) for have in heads) for count, heads in zip(layers, rest.counts, strict=True)
    )
    asked, there = mean * sum(model.kv_heads), sum(map(sum, rest.counts))
    assert make_budget(Global(), mean, rest, model).total == min(asked, there)
    assert make_budget(Ada(), mean, rest, model).total == sum(
        min(len(heads) * mean, sum(heads)) for heads in rest.counts
    )


UNEVEN = [geometry(kv_heads=(2, 1)), geometry(kv_heads=(2, 2), key_dims=(16, 32))]


@pytest.mark.parametrize("model", UNEVEN)
@pytest.mark.parametrize(("rule", "name"), [(Pyramid(), "pyramid"), (Ada(0.5), "ada:alpha=0.5"), (Global(), "global")])
def test_bytes_are_not_shared_among_layers_that_cost_differently(model, rule, name):
    with pytest.raises(RequestError, match=f"bytes=999 .* allocation '{name}' .*; use --allocation flat, or give"):
        check_allocation(rule, limit_bytes=999, n_body=10, geometry=model)
    check_allocation(rule, limit_bytes=None, n_body=10, geometry=model)
    check_allocation(Flat(), limit_bytes=999, n_body=10, geometry=model)
    check_allocation(rule, limit_bytes=999, n_body=10, geometry=geometry())


def test_explicit_counts_are_taken_as_they_are():
    model = geometry(kv_heads=(2, 1, 3))

    budget = make_budget((0, 17, 100), None, body(100, model), model)

    assert budget.counts == ((0, 0), (17,), (100, 100, 100))
    assert budget.total == 317


@pytest.mark.parametrize("counts", [(), (5,), (5, 5), (5, 5, 5, 5)])
def test_explicit_counts_for_another_number_of_layers_are_refused(counts):
    with pytest.raises(RequestError, match=f"names {len(counts)} layers, but this model has 3 attention layers"):
        make_budget(counts, None, body(100, geometry()), geometry())
    with pytest.raises(RequestError, match="3 attention layers"):
        check_allocation(counts, limit_bytes=None, n_body=100, geometry=geometry())


@pytest.mark.parametrize("count", [-1, 101])
def test_explicit_counts_the_context_does_not_have_are_refused(count):
    with pytest.raises(RequestError, match=f"asks for {count} entries in attention layer 1; .* 0 to 100"):
        make_budget((5, count, 5), None, body(100, geometry()), geometry())
    with pytest.raises(RequestError, match=f"asks for {count} entries"):
        check_allocation((5, count, 5), limit_bytes=None, n_body=100, geometry=geometry())
