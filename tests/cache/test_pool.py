"""The ledger of cache memory."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.cache.pool import Pool
from wakesight.errors import WorkError

LAWS = settings(deadline=None, derandomize=True, max_examples=100)
CPU = torch.device("cpu")


def lease(pool: Pool, *shape: int, dtype: torch.dtype = torch.float32):
    return pool.lease(shape or (2, 3), dtype, CPU)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.sampled_from([torch.float32, torch.int8]))), st.data()
)
@LAWS
def test_the_ledger_is_the_sum_of_what_is_on_loan(shapes, data):
    pool = Pool()
    leases = [lease(pool, rows, columns, dtype=dtype) for rows, columns, dtype in shapes]
    sizes = [rows * columns * dtype.itemsize for rows, columns, dtype in shapes]

    for index in data.draw(st.permutations(range(len(leases)))):
        assert pool.held_bytes == sum(sizes)
        assert pool.leases == sum(1 for one in leases if one is not None)
        leases[index].release()
        leases[index], sizes[index] = None, 0

    assert (pool.held_bytes, pool.leases) == (0, 0)


def test_a_lease_has_the_shape_type_and_bytes_that_were_asked_for():
    one = lease(Pool(), 2, 5, 3, dtype=torch.bfloat16)

    assert (one.tensor.shape, one.tensor.dtype, one.bytes) == ((2, 5, 3), torch.bfloat16, 60)


def test_releasing_twice_is_an_error_and_changes_nothing():
    pool = Pool()
    one, other = lease(pool), lease(pool)
    one.release()

    with pytest.raises(RuntimeError, match="already released"):
        one.release()

    assert (pool.held_bytes, pool.leases) == (other.bytes, 1)


def test_shared_memory_is_counted_once_and_returned_by_its_last_owner():
    pool = Pool(poison=True)
    one = lease(pool)
    one.tensor.fill_(7)
    assert one.share() is one

    one.release()

    assert (pool.held_bytes, pool.leases) == (one.bytes, 1)
    assert one.tensor.tolist() == [[7.0] * 3] * 2  # not poisoned while anyone owns it
    one.release()
    assert (pool.held_bytes, pool.leases) == (0, 0)
    with pytest.raises(RuntimeError, match="already released"):
        one.release()


def test_sharing_what_was_released_is_an_error():
    one = lease(Pool())
    one.release()

    with pytest.raises(RuntimeError):
        one.share()


def test_a_released_lease_lets_go_of_its_tensor():
    one = lease(Pool())

    one.release()

    assert not hasattr(one, "tensor")


@pytest.mark.parametrize("owners", [1, 3])
def test_a_forgotten_lease_returns_its_bytes(owners):
    pool = Pool()
    one = lease(pool)
    for _ in range(owners - 1):
        one.share()

    del one
    gc.collect()

    assert (pool.held_bytes, pool.leases) == (0, 0)


def test_a_released_lease_is_not_returned_again_when_it_is_forgotten():
    pool = Pool()
    one, other = lease(pool), lease(pool)
    one.release()

    del one
    gc.collect()

    assert (pool.held_bytes, pool.leases) == (other.bytes, 1)


def test_an_adopted_tensor_counts_like_a_leased_one():
    pool = Pool(poison=True)
    tensor = torch.ones(4, 4)

    adopted = pool.adopt(tensor)

    assert adopted.tensor is tensor
    assert bool((tensor == 1).all())
    assert (pool.held_bytes, pool.leases) == (64, 1)
    adopted.release()
    assert (pool.held_bytes, pool.leases) == (0, 0)


def test_an_adopted_view_counts_the_storage_it_keeps_alive():
    assert Pool().adopt(torch.ones(100, 4)[:2]).bytes == 1600


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poison_fills_what_nobody_wrote_and_what_was_freed(dtype):
    one = lease(Pool(poison=True), 3, 4, dtype=dtype)
    tensor = one.tensor
    assert bool(tensor.isnan().all())

    tensor.fill_(1)
    one.release()

    assert bool(tensor.isnan().all())


def test_without_poison_freed_memory_is_not_written():
    one = lease(Pool())
    tensor = one.tensor
    tensor.fill_(1)

    one.release()

    assert bool((tensor == 1).all())


@pytest.mark.parametrize("shape", [(1 << 50,), (1 << 40, 1 << 40)])
def test_lack_of_memory_is_one_sentence_and_leaves_the_ledger_alone(shape):
    pool = Pool()
    one = lease(pool)

    with pytest.raises(
        WorkError, match=r"^out of memory: a cache tensor of \d+ bytes does not fit on cpu; use a short"
    ):
        lease(pool, *shape)

    assert (pool.held_bytes, pool.leases) == (one.bytes, 1)
