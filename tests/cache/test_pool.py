"""The ledger of cache memory."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.cache.pool import Pool
from wakesight.errors import RequestError, WorkError

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


@given(st.lists(st.tuples(st.sampled_from(["lease", "adopt", "reservoir", "release"]), st.integers(0, 40))), st.data())
@LAWS
def test_fast_memory_never_passes_the_limit(calls, data):
    """And a refusal counts nothing: the ledger is still the sum of what is on loan."""
    pool = Pool(limit_bytes=100)
    held: list = []
    for call, size in calls:
        fast = sum(one.bytes for one in held if not one.reservoir)
        if call == "release":
            if held:
                held.pop(data.draw(st.integers(0, len(held) - 1))).release()
            continue
        make = {
            "lease": lambda size: pool.lease((size,), torch.uint8, CPU),
            "adopt": lambda size: pool.adopt(torch.zeros(size, dtype=torch.uint8)),
            "reservoir": lambda size: pool.lease((size,), torch.uint8, CPU, reservoir=True),
        }[call]
        if call != "reservoir" and fast + size > 100:
            with pytest.raises(WorkError, match=r"needs \d+ bytes of fast memory.*; close sessions"):
                make(size)
        else:
            held.append(make(size))
        assert pool.held_bytes == sum(one.bytes for one in held if not one.reservoir) <= 100
        assert pool.reservoir_bytes == sum(one.bytes for one in held if one.reservoir)
        assert pool.leases == len(held)
        assert pool.free_bytes == 100 - pool.held_bytes


def test_the_limit_counts_what_exists_while_storage_grows():
    """Old and new tensors are both there for a moment, and that moment counts."""
    from wakesight.cache.slots import GROWTH, Slots

    row = 2 * 4  # bytes of one slot, key of dim 2
    pool = Pool(limit_bytes=3 * GROWTH * row - 1)
    slots = Slots(pool)
    slots.append({"key": torch.ones(1, GROWTH, 2)})

    with pytest.raises(WorkError, match="fast memory"):
        slots.append({"key": torch.ones(1, 1, 2)})

    assert slots.lengths == (GROWTH,)
    assert pool.held_bytes == GROWTH * row
    assert bool((slots.read("key") == 1).all())


def test_room_is_asked_for_before_the_work_begins():
    pool = Pool(limit_bytes=50)
    pool.check_room(50, "a prefill")

    with pytest.raises(WorkError, match=r"a prefill of 9 tokens needs 51 bytes .* limit of 50 bytes only 50 are free"):
        pool.check_room(51, "a prefill of 9 tokens")
    Pool().check_room(10**18, "anything")

    assert Pool().free_bytes is None
    assert pool.held_bytes == 0


def test_a_limit_below_nothing_is_refused():
    with pytest.raises(RequestError, match="limit_bytes=-1"):
        Pool(limit_bytes=-1)


def test_the_limit_holds_when_threads_lease_at_once():
    import threading

    pool = Pool(limit_bytes=1000)
    held, refused = [], []

    def work() -> None:
        for _ in range(50):
            try:
                held.append(pool.lease((10,), torch.uint8, CPU))
            except WorkError:
                refused.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (len(held), len(refused), pool.held_bytes) == (100, 100, 1000)


def test_reservoir_memory_is_counted_apart_and_returned():
    pool = Pool(poison=True)
    one = pool.lease((4,), torch.float32, CPU, reservoir=True)
    assert (pool.held_bytes, pool.reservoir_bytes, pool.leases) == (0, 16, 1)
    tensor = one.tensor

    one.release()

    assert (pool.held_bytes, pool.reservoir_bytes, pool.leases) == (0, 0, 0)
    assert bool(tensor.isnan().all())
