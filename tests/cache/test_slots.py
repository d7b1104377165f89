"""Storage of one layer: content survives growth, cuts are cuts, the ledger closes, stale reads are loud."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.cache.compaction.gather import gather
from wakesight.cache.compaction.reference import gather_reference
from wakesight.cache.pool import Pool
from wakesight.cache.slots import GROWTH, Slots
from wakesight.cache.state import SessionState
from wakesight.core import KeptSet


def payloads(count: int, *, batch: int = 1, heads: int = 2, extra: bool = False) -> dict[str, torch.Tensor]:
    made = {"key": torch.randn(batch, heads, count, 4), "value": torch.randn(batch, heads, count, 6)}
    if extra:
        made["index_key"] = torch.randn(batch, 1, count, 3)
    return made


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=8), st.integers(0, 200))
def test_appends_read_back_whatever_the_growth(sizes, capacity):
    slots = Slots(Pool(poison=True), capacity)
    parts = [payloads(size, extra=True) for size in sizes]
    for part in parts:
        slots.append(part)
    for name in ("key", "value", "index_key"):
        assert torch.equal(slots.read(name), torch.cat([part[name] for part in parts], dim=2))
    assert slots.length == sum(sizes) <= slots.capacity
    assert slots.capacity % GROWTH == 0
    assert slots.held_bytes + slots.slack_bytes == slots._pool.held_bytes


def test_cut_slots_turn_to_nan_and_the_rest_stays():
    slots = Slots(Pool(poison=True), 100)
    part = payloads(50)
    slots.append(part)
    slots.truncate(20)
    assert torch.equal(slots.read("key"), part["key"][:, :, :20])
    assert slots.storage("key")[:, :, 20:].isnan().all()


def test_a_failed_growth_changes_nothing(monkeypatch):
    pool = Pool(poison=True)
    slots = Slots(pool, 64)
    part = payloads(64)
    slots.append(part)
    held, lease = pool.held_bytes, pool.lease
    calls = iter(range(9))

    def second_fails(*arguments):
        if next(calls) == 1:
            raise MemoryError
        return lease(*arguments)

    monkeypatch.setattr(pool, "lease", second_fails)
    with pytest.raises(MemoryError):
        slots.append(payloads(1))

    assert (pool.held_bytes, slots.length) == (held, 64)
    assert all(torch.equal(slots.read(name), part[name]) for name in part)


def test_the_ledger_closes_and_a_second_release_is_a_bug():
    pool = Pool(poison=True)
    lease = pool.lease((3, 5), torch.float32, torch.device("cpu"))
    tensor = lease.tensor
    other = lease.share()
    lease.release()
    assert pool.held_bytes == 60
    other.release()
    assert (pool.held_bytes, pool.leases) == (0, 0)
    assert tensor.isnan().all()
    with pytest.raises(RuntimeError, match="already released"):
        lease.release()


def test_a_forgotten_lease_comes_back():
    pool = Pool()
    pool.lease((10,), torch.float32, torch.device("cpu"))
    slots = Slots(pool)
    slots.append(payloads(5))
    del slots
    gc.collect()
    assert (pool.held_bytes, pool.leases) == (0, 0)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(1, 60), st.data(), st.sampled_from([1, 2]), st.integers(0, 100))
def test_gather_equals_the_loop_and_only_reads(count, data, batch, slack):
    source = Slots(Pool(poison=True))
    source.append(payloads(count, batch=batch, extra=True))
    before = {name: source.read(name).clone() for name in source.names}
    kept = data.draw(st.integers(0, count))
    positions = torch.stack([torch.randperm(count)[:kept].sort().values for _ in range(2)])

    target = gather(source, positions, source._pool, slack)

    for name in source.names:
        assert torch.equal(target.read(name), gather_reference(before[name], positions))
        assert torch.equal(source.read(name), before[name])
    assert target.capacity >= kept + slack


def test_a_child_is_made_whole_or_not_at_all(monkeypatch):
    pool = Pool(poison=True)
    layers = []
    for _ in range(3):
        layers.append(Slots(pool))
        layers[-1].append(payloads(40))
    state = SessionState(pool, tuple(layers), {}, tuple(range(40)), 0)
    before, lease = (pool.held_bytes, pool.leases), pool.lease
    calls = iter(range(20))

    def fifth_fails(*arguments):
        if next(calls) == 4:
            raise MemoryError
        return lease(*arguments)

    monkeypatch.setattr(pool, "lease", fifth_fails)
    kept = KeptSet(tuple(torch.arange(10).expand(2, -1) for _ in range(3)))
    for fork in (lambda: state.compacted(kept, 8), lambda: state.copy(8)):
        calls = iter(range(20))
        with pytest.raises(MemoryError):
            fork()
        assert (pool.held_bytes, pool.leases) == before
