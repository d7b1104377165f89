"""Dropping for good: the gather against its loop, and the promises of a session's state."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.cache.compaction.gather import gather
from wakesight.cache.compaction.reference import gather_reference
from wakesight.cache.pool import Pool
from wakesight.cache.slots import Slots
from wakesight.cache.state import SessionState
from wakesight.core import KeptSet
from wakesight.errors import WorkError

LAWS = settings(deadline=None, derandomize=True, max_examples=150)


def layer(pool: Pool, tokens: int, *, batch: int = 1, heads: int = 2, index: bool = False, seed: int = 0) -> Slots:
    """Random slots; K and V of different widths, and on request an index key that all heads share."""
    noise = torch.Generator().manual_seed(seed)
    shapes = {"key": (heads, 3), "value": (heads, 5), **({"index": (1, 4)} if index else {})}
    slots = Slots(pool, capacity=tokens + 7)
    slots.append({n: torch.randn(batch, h, tokens, dim, generator=noise) for n, (h, dim) in shapes.items()})
    return slots


def bits(slots: Slots) -> dict[str, tuple[int, bytes]]:
    """Place and every byte of the whole storage, slack and its poison included."""
    raw = {name: slots.storage(name) for name in slots.names}
    return {name: (t.data_ptr(), t.contiguous().view(torch.uint8).numpy().tobytes()) for name, t in raw.items()}


@st.composite
def cases(draw):
    """tokens, batch, and for each head as many positions, ascending."""
    tokens, heads = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    kept = draw(st.one_of(st.just(0), st.just(tokens), st.integers(0, tokens)))
    rows = [sorted(draw(st.permutations(range(tokens)))[:kept]) for _ in range(heads)]
    positions = torch.tensor(rows, dtype=torch.int64).reshape(heads, kept)
    return tokens, draw(st.integers(1, 2)), positions


@given(cases(), st.booleans(), st.integers(0, 200))
@LAWS
def test_a_gather_is_the_loop_over_entries(case, index, slack):
    tokens, batch, positions = case
    heads, kept = positions.shape
    source = layer(Pool(poison=True), tokens, batch=batch, heads=heads, index=index)

    target = gather(source, positions, Pool(poison=True), slack)

    assert target.length == kept
    assert target.names == source.names
    assert target.capacity >= kept + slack
    for name in ("key", "value"):
        assert torch.equal(target.read(name), gather_reference(source.read(name), positions))
        assert bool(target.storage(name)[:, :, kept:].isnan().all())
    if index:  # one key for all heads follows head 0
        assert torch.equal(target.read("index"), gather_reference(source.read("index"), positions[:1]))


@given(cases())
@LAWS
def test_a_gather_leaves_its_source_untouched_bit_for_bit(case):
    tokens, batch, positions = case
    source = layer(Pool(poison=True), tokens, batch=batch, heads=positions.shape[0], index=True)
    before, length = bits(source), source.length

    target = gather(source, positions, Pool(poison=True), 5)
    target.append({name: torch.ones_like(source.read(name)) for name in source.names})
    target.release()

    assert (bits(source), source.length) == (before, length)


def test_positions_need_not_ascend():
    source, positions = layer(Pool(), 6), torch.tensor([[5, 0, 3], [2, 2, 1]])

    target = gather(source, positions, Pool(), 0)

    assert torch.equal(target.read("key"), gather_reference(source.read("key"), positions))


def test_all_positions_are_the_same_content_in_storage_of_its_own():
    source = layer(Pool(), 33)

    target = gather(source, torch.arange(33).expand(2, -1), Pool(), 0)

    assert torch.equal(target.read("value"), source.read("value"))
    assert target.storage("value").data_ptr() != source.storage("value").data_ptr()


def test_a_gathered_layer_goes_on_growing():
    source = layer(Pool(poison=True), 100)
    target = gather(source, torch.tensor([[3, 50], [0, 99]]), Pool(poison=True), 0)
    fresh = {"key": torch.ones(1, 2, 300, 3), "value": torch.ones(1, 2, 300, 5)}

    target.append(fresh)

    assert torch.equal(target.read("key")[:, 1, :2], source.read("key")[:, 1, [0, 99]])
    assert torch.equal(target.read("key")[:, :, 2:], fresh["key"])


@pytest.fixture
def pool() -> Pool:
    return Pool(poison=True)


@pytest.fixture
def state(pool) -> SessionState:
    """Three attention layers of 50 tokens and two recurrent states."""
    slots = tuple(layer(pool, 50, index=True, seed=seed) for seed in range(3))
    recurrent = {"0.state": pool.adopt(torch.ones(4, 4)), "0.conv": pool.adopt(torch.ones(2, 3))}
    return SessionState(pool, slots, recurrent, tuple(range(50)), prefix=4)


KEPT = KeptSet(
    tuple(torch.stack([torch.arange(0, 50, step), torch.arange(49, -1, -step).flip(0)]) for step in (2, 7, 50))
)


def contents(state: SessionState) -> list:
    recurrent = {name: lease.tensor.tolist() for name, lease in state.recurrent.items()}
    return [*map(bits, state.slots), recurrent, state.tokens, state.prefix, state.physical_lengths]


def test_a_child_holds_what_was_kept_and_still_knows_its_whole_length(state):
    child = state.compacted(KEPT, slack=10)

    for mine, slots, positions in zip(child.slots, state.slots, KEPT.positions, strict=True):
        assert torch.equal(mine.read("key"), gather_reference(slots.read("key"), positions))
        assert torch.equal(mine.read("value"), gather_reference(slots.read("value"), positions))
    assert child.physical_lengths == [25, 8, 1]
    assert child.logical_length == state.logical_length == 50
    assert (child.tokens, child.prefix, child.kept) == (state.tokens, 4, KEPT)
    assert state.kept is None


def test_compaction_only_reads_its_parent(state):
    before = contents(state)

    child = state.compacted(KEPT, slack=10)
    child.slots[0].append({name: child.slots[0].read(name).clone() for name in child.slots[0].names})
    child.release()

    assert contents(state) == before


def test_recurrent_states_are_shared_and_go_with_their_last_owner(pool, state):
    child = state.compacted(KEPT, slack=0)
    assert child.recurrent_bytes == state.recurrent_bytes == (16 + 6) * 4
    assert child.recurrent["0.state"].tensor is state.recurrent["0.state"].tensor

    state.release()

    assert child.recurrent["0.state"].tensor.tolist() == [[1.0] * 4] * 4
    child.release()
    assert (pool.held_bytes, pool.leases) == (0, 0)


@pytest.mark.parametrize("parent_first", [True, False])
def test_the_ledger_returns_to_zero_whoever_goes_first(pool, state, parent_first):
    family = [state, state.compacted(KEPT, slack=3), state.copy(slack=3)]

    for one in family if parent_first else reversed(family):
        one.release()

    assert (pool.held_bytes, pool.leases) == (0, 0)


def test_a_forgotten_child_returns_its_slots(pool, state):
    before = pool.held_bytes
    child = state.compacted(KEPT, slack=3)
    assert pool.held_bytes > before

    del child
    gc.collect()

    assert pool.held_bytes == before


def run_out_at(pool: Pool, call: int, monkeypatch) -> None:
    leases, calls = pool.lease, iter(range(1, 1000))

    def lease(*args):
        if next(calls) == call:
            raise WorkError("out of memory")
        return leases(*args)

    monkeypatch.setattr(pool, "lease", lease)


@pytest.mark.parametrize("call", range(1, 10))  # three layers of three payloads
@pytest.mark.parametrize("verb", ["compacted", "copy"])
def test_when_memory_runs_out_nothing_new_stays_allocated(pool, state, verb, call, monkeypatch):
    before, ledger = contents(state), (pool.held_bytes, pool.leases)
    run_out_at(pool, call, monkeypatch)

    with pytest.raises(WorkError):
        state.compacted(KEPT, 10) if verb == "compacted" else state.copy(10)

    assert (pool.held_bytes, pool.leases) == ledger
    assert contents(state) == before
    state.release()
    assert (pool.held_bytes, pool.leases) == (0, 0)  # no recurrent state kept an owner that never was


def test_a_position_beyond_the_storage_leaves_nothing_allocated_either(pool, state):
    wrong = KeptSet((*KEPT.positions[:2], torch.tensor([[0, 50], [0, 1]])))
    ledger = (pool.held_bytes, pool.leases)

    with pytest.raises((IndexError, RuntimeError)):
        state.compacted(wrong, 10)
    gc.collect()

    assert (pool.held_bytes, pool.leases) == ledger


def test_a_copy_is_equal_and_independent(state):
    child = state.compacted(KEPT, slack=0)

    copy = child.copy(slack=100)
    for slots in copy.slots:
        slots.storage("key")[:, :, : slots.length] += 1

    assert copy.physical_lengths == child.physical_lengths
    assert copy.kept is child.kept
    for mine, slots in zip(copy.slots, child.slots, strict=True):
        assert mine.capacity >= slots.length + 100
        assert torch.equal(mine.read("value"), slots.read("value"))
        assert torch.equal(mine.read("key"), slots.read("key") + 1)


def test_a_state_with_an_empty_layer_can_be_copied(state):
    nothing = KeptSet((*KEPT.positions[:2], torch.zeros(2, 0, dtype=torch.int64)))
    child = state.compacted(nothing, slack=0)

    assert child.copy(slack=10).physical_lengths == [25, 8, 0]
