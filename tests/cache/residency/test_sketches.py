"""A sketch's bound is never below what a query finds in the page, and costs what it says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.cache.pool import Pool
from wakesight.cache.residency.sketches import Sketches, encode
from wakesight.errors import RequestError, WorkError

LAWS = settings(deadline=None, derandomize=True, max_examples=150)
CPU = torch.device("cpu")
KINDS = ["same", "int8"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def keys(heads: int, pages: int, size: int, dim: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """[kv_head, page, page_size, dim]; heads and numbers of very different size, some zero, some equal."""
    noise = torch.Generator().manual_seed(seed)
    made = torch.randn(heads, pages, size, dim, generator=noise)
    made *= torch.exp(3 * torch.randn(heads, 1, 1, dim, generator=noise)) * scale
    made[torch.rand(made.shape, generator=noise) < 0.1] = 0
    return made


def truth(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest q.k per [kv_head, page], in float64, and what a float32 sum may round of it."""
    products = torch.einsum("hgqd,hpsd->hpgqs", query.double(), key.double())
    sizes = torch.einsum("hgqd,hpsd->hpgqs", query.double().abs(), key.double().abs())
    error = (key.shape[-1] + 2) * 2 * torch.finfo(torch.float32).eps * sizes.amax((2, 3, 4))
    return products.amax((2, 3, 4)), error + torch.finfo(torch.float32).tiny * key.shape[-1]


@given(
    st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.integers(0, 10**6),
    st.sampled_from(KINDS), st.sampled_from(DTYPES), st.sampled_from([1e-3, 1.0, 30.0]),
)  # fmt: skip
@LAWS
def test_a_bound_is_at_least_every_product_of_its_page(heads, pages, size, dim, seed, kind, dtype, scale):
    key = keys(heads, pages, size, dim, seed, scale).clamp(-6e4, 6e4).to(dtype)
    noise = torch.Generator().manual_seed(seed + 1)
    query = torch.randn(heads, 2, 3, dim, generator=noise).to(dtype)
    sketches = Sketches(Pool(poison=True), kind, size)
    sketches.append(key)

    bounds = sketches.bounds(query)

    largest, error = truth(query, key)
    assert bounds.dtype == torch.float32
    assert bounds.shape == (heads, pages)
    assert bool((bounds.double() >= largest - error).all())


@pytest.mark.parametrize("scale", [1e-44, 1e-39, 1e-30, 1.0, 1e30, 3e38])
def test_int8_rounds_outward_over_the_whole_range_of_float32(scale):
    """The law number by number, exact: what is read back encloses the true range. No allowance."""
    key = (torch.rand(2, 50, 3, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1) * scale

    numbers, unit = encode(key, "int8")

    back = numbers.float() * unit[..., None]
    assert bool((back[..., :16] >= key.amax(2)).all())
    assert bool((back[..., 16:] <= key.amin(2)).all())
    assert numbers.dtype == torch.int8


@given(st.integers(0, 10**6))
@LAWS
def test_int8_never_wraps_and_wastes_at_most_two_levels(seed):
    key = keys(2, 8, 4, 8, seed)

    numbers, unit = encode(key, "int8")

    back = numbers.float() * unit[..., None]
    exact = torch.cat([key.amax(2), key.amin(2)], -1)
    assert bool(((back - exact).abs() <= 2 * unit[..., None]).all())
    assert bool((unit <= exact.abs().amax(-1) / 126 * 1.001 + 2e-38).all())


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_of_a_page_of_one_key_is_its_product(kind):
    key = keys(2, 6, 1, 8, 3)
    query = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(4))
    sketches = Sketches(Pool(), kind, 1)
    sketches.append(key)

    largest, error = truth(query, key)

    slack = 0 if kind == "same" else (query.abs().sum(-1).amax((1, 2))[:, None] * encode(key, kind).scale * 2).double()
    assert bool(((sketches.bounds(query).double() - largest).abs() <= error + slack).all())


def test_the_bound_is_the_maximum_over_a_heads_queries():
    key = keys(2, 6, 4, 8, 3)
    query = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(4))
    sketches = Sketches(Pool(), "same", 4)
    sketches.append(key)

    one_by_one = [sketches.bounds(query[:, g : g + 1, q : q + 1]) for g in range(3) for q in range(5)]

    assert torch.allclose(sketches.bounds(query), torch.stack(one_by_one).amax(0), rtol=1e-5)


def test_the_plain_rule():
    """max over the corners of the box: 2*3 - 1*(-4) with the greatest of the first and the least of the second."""
    sketches = Sketches(Pool(), "same", 2)
    sketches.append(torch.tensor([[[[3.0, 5.0], [1.0, -4.0]]]]))

    assert sketches.bounds(torch.tensor([[[[2.0, -1.0]]]])).tolist() == [[10.0]]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=10), st.sampled_from(KINDS))
@LAWS
def test_any_history_equals_sketches_built_at_once(history, kind):
    pool = Pool(poison=True)
    sketches, left = Sketches(pool, kind, 4), keys(2, 0, 4, 8, 0)
    query = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(1))
    for index, (grow, count) in enumerate(history):
        if grow:
            fresh = keys(2, count, 4, 8, index)
            sketches.append(fresh)
            left = torch.cat([left, fresh], dim=1)
        else:
            left = left[:, : min(count, sketches.pages)]
            sketches.truncate(left.shape[1])
        again = Sketches(Pool(), kind, 4)
        again.append(left)
        assert sketches.pages == again.pages == left.shape[1]
        assert torch.equal(sketches.bounds(query), again.bounds(query))
        assert sketches.bytes == again.bytes
    sketches.release()
    assert (pool.held_bytes, pool.leases) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_exact_and_counted_as_fast_memory(kind, dtype):
    pool = Pool()
    sketches = Sketches(pool, kind, 4)
    for pages in range(1, 15):
        sketches.append(keys(3, 1, 4, 8, pages).to(dtype))
        per_page = 2 * 8 * dtype.itemsize if kind == "same" else 2 * 8 + 4
        assert sketches.bytes == 3 * pages * per_page
        assert sketches.bytes + sketches.slack_bytes == pool.held_bytes
        assert sketches.slack_bytes <= (pages / 4 + 4) * 3 * per_page
        assert pool.reservoir_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_equal_and_its_own(kind):
    pool = Pool(poison=True)
    sketches = Sketches(pool, kind, 4)
    sketches.append(keys(2, 5, 4, 8, 0))
    query = torch.randn(2, 1, 1, 8)
    before = sketches.bounds(query)

    twin = sketches.copy()
    sketches.release()

    assert torch.equal(twin.bounds(query), before)
    assert pool.held_bytes == twin.bytes + twin.slack_bytes
    twin.release()
    assert pool.held_bytes == 0
    assert Sketches(pool, kind, 4).copy().pages == 0


@pytest.mark.parametrize(("kind", "call"), [("same", 1), ("int8", 1), ("int8", 2)])
@pytest.mark.parametrize("held", [0, 4])
def test_a_lack_of_memory_changes_nothing(run_out_at, kind, call, held):
    pool = Pool()
    sketches = Sketches(pool, kind, 4)
    sketches.append(keys(2, held, 4, 8, 0))
    before = (sketches.pages, sketches.bytes, pool.held_bytes, pool.leases)
    query = torch.randn(2, 1, 1, 8)
    bounds = sketches.bounds(query)
    run_out_at(pool, call)

    with pytest.raises(WorkError):
        sketches.append(keys(2, 1, 4, 8, 1))

    assert (sketches.pages, sketches.bytes, pool.held_bytes, pool.leases) == before
    assert torch.equal(sketches.bounds(query), bounds)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_not_hidden(kind, bad):
    key = torch.ones(1, 2, 4, 8)
    key[0, 1, 2, 3] = bad
    sketches = Sketches(Pool(), kind, 4)
    sketches.append(key)

    bounds = sketches.bounds(torch.tensor([1.0, -1.0] * 4).view(1, 1, 1, 8))

    assert bool(bounds[0, 0].isfinite())
    assert not bool(bounds[0, 1].isfinite())


@pytest.mark.parametrize("kind", KINDS)
def test_cut_off_pages_turn_nan_under_poison(kind):
    sketches = Sketches(Pool(poison=True), kind, 4)
    sketches.append(torch.ones(1, 3, 4, 8))

    sketches.truncate(1)

    storage = sketches._leases[-1].tensor
    assert bool(storage[:, 1:].isnan().all())
    assert bool(storage[:, :1].isfinite().all())


def test_misuse_is_a_bug_or_a_sentence():
    with pytest.raises(RequestError, match="no sketch 'int4'; give same"):
        Sketches(Pool(), "int4", 4)
    sketches = Sketches(Pool(), "same", 4)
    with pytest.raises(RuntimeError, match="pages of 3 keys"):
        sketches.append(torch.ones(1, 1, 3, 8))
    with pytest.raises(RuntimeError, match="cannot cut"):
        sketches.truncate(1)
    with pytest.raises(RuntimeError, match="no sketches"):
        sketches.read()
    assert sketches.bounds(torch.ones(2, 1, 1, 8)).shape == (2, 0)


def test_bounds_are_a_few_batched_calls_whatever_the_heads():
    """No loop over heads: as many torch calls for 16 heads as for 1."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    calls = []
    for heads in (1, 16):
        sketches = Sketches(Pool(), "same", 4)
        sketches.append(torch.ones(heads, 3, 4, 8))
        with Counting() as counting:
            sketches.bounds(torch.ones(heads, 2, 1, 8))
        calls.append(counting.calls)
    assert calls[0] == calls[1] < 20
