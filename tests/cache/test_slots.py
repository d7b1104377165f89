"""Storage that grows in advance and is cut back: against a plain list of slots."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.cache.pool import Pool
from wakesight.cache.slots import GROWTH, Slots
from wakesight.errors import WorkError

LAWS = settings(deadline=None, derandomize=True, max_examples=100)


def payloads(count: int, *, start: int = 0, batch: int = 1, index: bool = False) -> dict[str, torch.Tensor]:
    """`count` slots whose numbers tell their slot, head and payload; K and V are of different widths."""
    slot = torch.arange(start, start + count, dtype=torch.float32).reshape(1, 1, count, 1)
    head = torch.arange(2, dtype=torch.float32).reshape(1, 2, 1, 1) / 4
    made = {
        "key": slot + head + torch.zeros(batch, 2, count, 3),
        "value": -slot - head + torch.zeros(batch, 2, count, 5),
    }
    return {**made, "index": slot + torch.zeros(batch, 1, count, 4) + 0.5} if index else made


def filled(count: int, *, pool: Pool | None = None, capacity: int = 0, index: bool = False) -> Slots:
    slots = Slots(pool or Pool(poison=True), capacity)
    slots.append(payloads(count, index=index))
    return slots


def holds(slots: Slots, expected: dict[str, torch.Tensor]) -> bool:
    return set(slots.names) == set(expected) and all(torch.equal(slots.read(n), expected[n]) for n in expected)


@given(
    st.integers(0, 100),
    st.integers(1, 2),
    st.booleans(),
    st.lists(st.one_of(st.integers(1, 90), st.floats(0, 1)), min_size=1, max_size=12),
)
@LAWS
def test_any_appends_and_truncations_leave_what_a_list_would(capacity, batch, index, steps):
    """An int appends that many slots; a fraction cuts back to that share of the length."""
    slots, numbers, fresh = Slots(Pool(poison=True), capacity), [], 0
    slots.append(payloads(1, batch=batch, index=index))
    numbers.append(0)

    for step in steps:
        if isinstance(step, int):
            fresh += 1000
            slots.append(payloads(step, start=fresh, batch=batch, index=index))
            numbers += range(fresh, fresh + step)
        else:
            numbers = numbers[: int(step * len(numbers))]
            slots.truncate(len(numbers))

        assert slots.length == len(numbers) <= slots.capacity
        assert slots.read("key")[-1, 0, :, 0].tolist() == numbers
        assert slots.read("value")[0, 1, :, 4].tolist() == [-n - 0.25 for n in numbers]
        for name in slots.names:
            assert bool(slots.storage(name)[:, :, slots.length :].isnan().all())  # slack holds nothing readable


@given(st.integers(1, 400), st.integers(0, 400), st.integers(0, 400))
@LAWS
def test_growth_keeps_the_content_and_what_was_asked_for_fits(count, capacity, more):
    slots = filled(count, capacity=capacity)
    before = slots.capacity

    slots.reserve(count + more)

    assert holds(slots, payloads(count))
    assert slots.capacity % GROWTH == 0
    assert slots.capacity >= max(count + more, capacity)
    assert (slots.capacity == before) == (count + more <= before)


def test_storage_grows_by_a_quarter_so_that_appending_one_by_one_copies_rarely():
    slots = filled(1)
    capacities = set()

    for i in range(1, 2000):
        slots.append(payloads(1, start=i))
        capacities.add(slots.capacity)

    assert len(capacities) <= 14
    assert holds(slots, payloads(2000))


def test_room_that_is_there_is_used_in_place():
    slots = filled(10, capacity=200)
    place = slots.storage("key").data_ptr()

    slots.append(payloads(190, start=10))
    slots.reserve(200)

    assert slots.storage("key").data_ptr() == place
    assert holds(slots, payloads(200))


def test_bytes_are_those_of_the_storage():
    pool = Pool()
    slots = filled(70, pool=pool, index=True)

    assert slots.capacity == 128
    assert slots.slot_bytes == (2 * 3 + 2 * 5 + 4) * 4
    assert slots.held_bytes == 70 * slots.slot_bytes
    assert slots.held_bytes + slots.slack_bytes == pool.held_bytes == 128 * slots.slot_bytes


def test_empty_slots_hold_nothing():
    pool = Pool()
    slots = Slots(pool, capacity=500)

    assert (slots.length, slots.capacity, slots.names) == (0, 0, ())
    assert (slots.slot_bytes, slots.held_bytes, slots.slack_bytes, pool.leases) == (0, 0, 0, 0)


def test_appending_no_slots_to_empty_storage_is_a_no_op():
    slots = Slots(Pool())

    slots.append(payloads(0))

    assert slots.length == 0


def test_releasing_returns_everything_and_leaves_empty_slots():
    pool = Pool()
    slots = filled(70, pool=pool, index=True)

    slots.release()

    assert (pool.held_bytes, pool.leases) == (0, 0)
    assert (slots.length, slots.capacity, slots.names) == (0, 0, ())
    slots.release()  # of nothing
    slots.append(payloads(3))
    assert holds(slots, payloads(3))


def test_forgotten_slots_return_their_memory():
    pool = Pool()
    slots = filled(70, pool=pool)

    del slots
    gc.collect()

    assert (pool.held_bytes, pool.leases) == (0, 0)


def test_growth_returns_and_poisons_the_old_storage():
    pool = Pool(poison=True)
    slots = filled(64, pool=pool)
    stale = slots.read("key")

    slots.append(payloads(1, start=64))

    assert bool(stale.isnan().all())
    assert pool.leases == 2
    assert pool.held_bytes == slots.capacity * slots.slot_bytes


def test_truncated_slots_are_poisoned_and_the_rest_is_not():
    slots = filled(60)

    slots.truncate(20)

    assert holds(slots, payloads(20))
    assert bool(slots.storage("value")[:, :, 20:].isnan().all())


def failing_at(pool: Pool, call: int, monkeypatch) -> None:
    """Let the pool run out of memory at its `call`-th lease from now on."""
    leases, calls = pool.lease, iter(range(1, 1000))

    def lease(*args):
        if next(calls) == call:
            raise WorkError("out of memory")
        return leases(*args)

    monkeypatch.setattr(pool, "lease", lease)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_reserve_that_fails_leaves_everything_as_it_was(call, monkeypatch):
    pool = Pool(poison=True)
    slots = filled(64, pool=pool, index=True)
    places = {name: slots.storage(name).data_ptr() for name in slots.names}
    ledger = (pool.held_bytes, pool.leases, slots.capacity, slots.length)
    failing_at(pool, call, monkeypatch)

    with pytest.raises(WorkError):
        slots.append(payloads(1, start=64, index=True))

    assert (pool.held_bytes, pool.leases, slots.capacity, slots.length) == ledger
    assert {name: slots.storage(name).data_ptr() for name in slots.names} == places
    assert holds(slots, payloads(64, index=True))
    slots.append(payloads(1, start=64, index=True))  # and the next try succeeds
    assert holds(slots, payloads(65, index=True))


@pytest.mark.parametrize("call", [1, 2])
def test_a_first_append_that_fails_leaves_empty_slots(call, monkeypatch):
    pool = Pool()
    slots = Slots(pool)
    failing_at(pool, call, monkeypatch)

    with pytest.raises(WorkError):
        slots.append(payloads(5))

    assert (pool.held_bytes, pool.leases, slots.names, slots.length) == (0, 0, (), 0)
