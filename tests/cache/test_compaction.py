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
from wakesight.cache.state import SessionState, _slots_of
from wakesight.core import KeptSet
from wakesight.errors import WorkError

LAWS = settings(deadline=None, derandomize=True, max_examples=150)


def layer(pool: Pool, tokens: int, *, heads: int = 2, index: bool = False, seed: int = 0) -> Slots:
    """Random slots; K and V of different widths, and on request an index key that all heads share."""
    noise = torch.Generator().manual_seed(seed)
    shapes = {"key": (heads, 3), "value": (heads, 5), **({"index": (1, 4)} if index else {})}
    slots = Slots(pool, capacity=tokens + 7)
    slots.append({n: torch.randn(h, tokens, dim, generator=noise) for n, (h, dim) in shapes.items()})
    return slots


def bits(slots: Slots) -> dict[str, tuple[int, bytes]]:
    """Place and every byte of the whole storage, slack and its poison included."""
    raw = {name: slots.storage(name) for name in slots.names}
    return {name: (t.data_ptr(), t.contiguous().view(torch.uint8).numpy().tobytes()) for name, t in raw.items()}


def equal(strips, expected) -> bool:
    return all(torch.equal(a, b) for a, b in zip(strips, expected, strict=True))


def some(tokens: int):
    """Ascending positions below `tokens`, none of them or all of them included."""
    every = st.just(list(range(tokens)))
    return st.one_of(st.just([]), every, st.sets(st.integers(0, tokens - 1)).map(sorted) if tokens else st.just([]))


@st.composite
def cases(draw):
    """tokens, and for each head its own positions, ascending."""
    tokens, heads = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    rows = [draw(some(tokens)) for _ in range(heads)]
    if draw(st.booleans()):  # heads alike
        rows = [sorted(draw(st.permutations(range(tokens)))[: len(rows[0])]) for _ in rows]
    return tokens, [torch.tensor(row, dtype=torch.int64) for row in rows]


@given(cases(), st.booleans(), st.integers(0, 200))
@LAWS
def test_a_gather_is_the_loop_over_entries(case, index, slack):
    tokens, kept = case
    source = layer(Pool(poison=True), tokens, heads=len(kept), index=index)

    target = gather(source, kept, slack)

    assert target.lengths == tuple(map(len, kept))
    assert target.names == source.names
    assert all(have >= held + slack for have, held in zip(target.capacities, target.lengths, strict=True))
    for name in ("key", "value"):
        assert equal(target.strips(name), gather_reference(source.strips(name), kept))
        assert int(target.storage(name)[:, 0].isnan().sum()) == sum(target.capacities) - sum(target.lengths)
    if index:  # one key for all heads follows head 0
        assert equal(target.strips("index"), gather_reference(source.strips("index"), kept[:1]))
    if len(set(map(len, kept))) == 1:
        assert equal(target.read("value"), target.strips("value"))


@given(cases())
@LAWS
def test_a_gather_leaves_its_source_untouched_bit_for_bit(case):
    tokens, kept = case
    source = layer(Pool(poison=True), tokens, heads=len(kept), index=True)
    before, lengths = bits(source), source.lengths

    target = gather(source, kept, 5)
    target.append({name: torch.ones_like(source.read(name)) for name in source.names})
    target.release()

    assert (bits(source), source.lengths) == (before, lengths)


def test_positions_need_not_ascend():
    source, kept = layer(Pool(), 6), [torch.tensor([5, 0, 3]), torch.tensor([2, 2, 1, 0])]

    target = gather(source, kept, 0)

    assert equal(target.strips("key"), gather_reference(source.strips("key"), kept))


def test_all_positions_are_the_same_content_in_storage_of_its_own():
    source = layer(Pool(), 33)

    target = gather(source, [torch.arange(33)] * 2, 0)

    assert torch.equal(target.read("value"), source.read("value"))
    assert target.storage("value").data_ptr() != source.storage("value").data_ptr()


def test_a_gathered_layer_goes_on_growing():
    source = layer(Pool(poison=True), 100)
    target = gather(source, [torch.tensor([3]), torch.tensor([0, 50, 99])], 0)
    fresh = {"key": torch.ones(2, 300, 3), "value": torch.ones(2, 300, 5)}

    target.append(fresh)

    assert target.lengths == (301, 303)
    assert torch.equal(target.strip("key", 0)[:1], source.strip("key", 0)[[3]])
    assert torch.equal(target.strip("key", 1)[:3], source.strip("key", 1)[[0, 50, 99]])
    assert torch.equal(target.strip("key", 1)[3:], fresh["key"][1])


@pytest.fixture
def pool() -> Pool:
    return Pool(poison=True)


@pytest.fixture
def state(pool) -> SessionState:
    """Three attention layers of 50 tokens and two states that do not grow."""
    slots = tuple(layer(pool, 50, index=True, seed=seed) for seed in range(3))
    fixed = {"0/recurrent.0": pool.adopt(torch.ones(4, 4)), "0/conv.0": pool.adopt(torch.ones(2, 3))}
    return SessionState(pool, slots, fixed, tuple(range(50)), prefix=4)


def kept_set(*layers) -> KeptSet:
    return KeptSet(tuple(tuple(torch.tensor(list(head), dtype=torch.int64) for head in heads) for heads in layers))


KEPT = kept_set([range(0, 50, 2), range(1, 50, 2)], [range(0, 50, 7), range(3)], [[], [49]])  # uneven from layer 1 on
KEPT_LENGTHS = [(25, 25), (8, 3), (0, 1)]


def contents(state: SessionState) -> list:
    fixed = {name: lease.tensor.tolist() for name, lease in state.states.items()}
    return [*map(bits, state.slots), fixed, state.tokens, state.prefix, state.physical_lengths]


def test_a_child_holds_what_was_kept_and_still_knows_its_whole_length(state):
    child = state.compacted(KEPT, slack=10)

    for mine, slots, kept in zip(child.slots, state.slots, KEPT.positions, strict=True):
        assert equal(mine.strips("key"), gather_reference(slots.strips("key"), kept))
        assert equal(mine.strips("value"), gather_reference(slots.strips("value"), kept))
    assert child.physical_lengths == KEPT_LENGTHS
    assert child.logical_length == state.logical_length == 50
    assert (child.tokens, child.prefix, child.kept) == (state.tokens, 4, KEPT)
    assert state.kept is None


def test_bytes_follow_every_head(pool, state):
    before = pool.held_bytes

    child = state.compacted(KEPT, slack=0)

    slots = sum(sum(slots.capacities) for slots in child.slots)
    assert slots == 6 * 64
    assert pool.held_bytes - before == slots * (3 + 5) * 4 + sum(s.capacities[0] for s in child.slots) * 4 * 4
    assert [s.held_bytes for s in child.slots] == [50 * 32 + 25 * 16, 11 * 32 + 8 * 16, 32]


@given(st.data())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_a_child_of_a_child_holds_what_a_child_of_the_parent_would(data):
    """Positions are logical; storage of a child holds other slots than its parent's."""
    pool = Pool(poison=True)
    state = SessionState(pool, tuple(layer(pool, 30, index=True, seed=s) for s in range(2)), {}, tuple(range(30)), 0)
    first = [[data.draw(some(30)) for _ in range(2)] for _ in range(2)]
    second = [[[head[i] for i in data.draw(some(len(head)))] for head in heads] for heads in first]

    child = state.compacted(kept_set(*first), slack=3)
    grandchild = child.compacted(kept_set(*second), slack=3)
    direct = state.compacted(kept_set(*second), slack=3)

    assert grandchild.physical_lengths == direct.physical_lengths
    for mine, expected in zip(grandchild.slots, direct.slots, strict=True):
        assert all(equal(mine.strips(name), expected.strips(name)) for name in mine.names)
    for where, held, wanted in zip(_slots_of(grandchild.kept, child.kept), first, second, strict=True):
        slots = [[have.index(p) for p in want] for have, want in zip(held, wanted, strict=True)]
        assert [head.tolist() for head in where] == slots


def test_compaction_only_reads_its_parent(state):
    before = contents(state)

    child = state.compacted(KEPT, slack=10)
    child.slots[1].append({"key": torch.ones(2, 99, 3), "value": torch.ones(2, 99, 5), "index": torch.ones(1, 99, 4)})
    child.release()

    assert contents(state) == before


def test_states_are_shared_and_go_with_their_last_owner(pool, state):
    child = state.compacted(KEPT, slack=0)
    assert child.state_bytes == state.state_bytes == (16 + 6) * 4
    assert child.states["0/recurrent.0"].tensor is state.states["0/recurrent.0"].tensor

    state.release()

    assert child.states["0/recurrent.0"].tensor.tolist() == [[1.0] * 4] * 4
    child.release()
    assert (pool.held_bytes, pool.leases) == (0, 0)


@pytest.mark.parametrize("parent_first", [True, False])
def test_the_ledger_returns_to_zero_whoever_goes_first(pool, state, parent_first):
    child = state.compacted(KEPT, slack=3)
    grandchild = child.compacted(kept_set([range(0, 50, 4), []], [[7], [0, 2]], [[], []]), slack=3)
    family = [state, child, grandchild, state.copy(slack=3), child.copy(slack=3)]

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


@pytest.mark.parametrize("call", range(1, 10))  # three layers of three payloads
@pytest.mark.parametrize("verb", ["compacted", "copy"])
def test_when_memory_runs_out_nothing_new_stays_allocated(pool, state, verb, call, run_out_at):
    before, ledger = contents(state), (pool.held_bytes, pool.leases)
    run_out_at(pool, call)

    with pytest.raises(WorkError):
        state.compacted(KEPT, 10) if verb == "compacted" else state.copy(10)

    assert (pool.held_bytes, pool.leases) == ledger
    assert contents(state) == before
    state.release()
    assert (pool.held_bytes, pool.leases) == (0, 0)  # no shared state kept an owner that never was


def test_a_position_beyond_the_storage_leaves_nothing_allocated_either(pool, state):
    wrong = KeptSet((*KEPT.positions[:2], (torch.tensor([0, 50]), torch.tensor([1]))))
    ledger = (pool.held_bytes, pool.leases)

    with pytest.raises((IndexError, RuntimeError)):
        state.compacted(wrong, 10)
    gc.collect()

    assert (pool.held_bytes, pool.leases) == ledger


def test_a_copy_is_equal_and_independent(state):
    child = state.compacted(KEPT, slack=0)

    copy = child.copy(slack=100)
    for slots in copy.slots:
        for strip in slots.strips("key"):
            strip += 1

    assert copy.physical_lengths == child.physical_lengths
    assert copy.kept is child.kept
    for mine, slots in zip(copy.slots, child.slots, strict=True):
        assert all(have >= held + 100 for have, held in zip(mine.capacities, slots.lengths, strict=True))
        assert equal(mine.strips("value"), slots.strips("value"))
        assert equal(mine.strips("index"), slots.strips("index"))
        assert equal(mine.strips("key"), [strip + 1 for strip in slots.strips("key")])


def test_reading_on_extends_what_is_kept_and_replaces_the_states(pool, state):
    child = state.compacted(KEPT, slack=10)
    fresh = {"key": torch.ones(2, 3, 3), "value": torch.ones(2, 3, 5), "index": torch.ones(1, 3, 4)}
    for slots in child.slots:
        slots.append(fresh)

    child.read_on([7, 8, 9], {"0/recurrent.0": pool.adopt(torch.zeros(4, 4))})

    assert child.tokens == (*range(50), 7, 8, 9)
    assert (child.logical_length, state.logical_length) == (53, 50)
    assert child.physical_lengths == [tuple(n + 3 for n in lengths) for lengths in KEPT_LENGTHS]
    for mine, parents in zip(child.kept.positions, KEPT.positions, strict=True):
        assert [head.tolist() for head in mine] == [[*head.tolist(), 50, 51, 52] for head in parents]
    assert child.state_bytes == 64
    assert state.states["0/recurrent.0"].tensor.tolist() == [[1.0] * 4] * 4  # the parent keeps its own
    again = child.compacted(kept_set([[0, 51], [52]], [[7], [50]], [[50], [49, 52]]), slack=0)
    assert torch.equal(again.slots[2].strip("key", 1)[0], state.slots[2].strip("key", 1)[49])
    assert again.slots[0].strip("value", 1).tolist() == [[1.0] * 5]
    for one in (state, child, again):
        one.release()
    assert (pool.held_bytes, pool.leases) == (0, 0)


def test_cutting_back_restores_the_lengths_of_every_head(state):
    child = state.compacted(KEPT, slack=10)
    held, before = child.physical_lengths, contents(child)
    for slots in child.slots:
        slots.append({"key": torch.ones(2, 9, 3), "value": torch.ones(2, 9, 5), "index": torch.ones(1, 9, 4)})
    assert child.physical_lengths != held

    child.truncate(held)

    assert contents(child) == before  # slack poison included


def test_a_layer_that_was_empty_is_cut_back_to_nothing(pool):
    state = SessionState(pool, (Slots(pool), Slots(pool)), {}, (), prefix=0)
    held = state.physical_lengths
    state.slots[0].append({"key": torch.ones(2, 9, 3)})

    state.truncate(held)

    assert held == [(), ()]
    assert state.physical_lengths == [(0, 0), ()]
