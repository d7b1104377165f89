"""Sizes become counts and counts become budgets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.budget.flat import Flat
from wakesight.budget.pyramid import Pyramid
from wakesight.budget.resolve import entries_per_head, make_budget
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

    budget = make_budget(rule, mean, n_body, model)

    assert tuple(len(heads) for heads in budget.counts) == model.kv_heads
    assert all(len(set(heads)) == 1 for heads in budget.counts)
    assert sum(heads[0] for heads in budget.counts) == mean * len(model.kv_heads)
    assert budget.total == sum(n for heads in budget.counts for n in heads)


def test_with_equal_heads_the_total_is_layers_times_heads_times_the_mean():
    model = geometry(kv_heads=(4,) * 16)
    for rule in (Flat(), Pyramid()):
        assert make_budget(rule, 123, 1000, model).total == 16 * 4 * 123


def test_explicit_counts_are_taken_as_they_are():
    budget = make_budget((0, 17, 100), None, 100, geometry(kv_heads=(2, 1, 3)))

    assert budget.counts == ((0, 0), (17,), (100, 100, 100))
    assert budget.total == 317


@pytest.mark.parametrize("counts", [(), (5,), (5, 5), (5, 5, 5, 5)])
def test_explicit_counts_for_another_number_of_layers_are_refused(counts):
    with pytest.raises(RequestError, match=f"names {len(counts)} layers, but this model has 3 attention layers"):
        make_budget(counts, None, 100, geometry())


@pytest.mark.parametrize("count", [-1, 101])
def test_explicit_counts_the_context_does_not_have_are_refused(count):
    with pytest.raises(RequestError, match=f"asks for {count} entries in attention layer 1; .* 0 to 100"):
        make_budget((5, count, 5), None, 100, geometry())
