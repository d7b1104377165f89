"""Storage that grows in advance and is cut back, each head for itself: against plain lists of rows."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from wakesight.cache.compaction.gather import copy, gather
from wakesight.cache.pool import Pool
from wakesight.cache.slots import GROWTH, Payload, Slots
from wakesight.errors import WorkError

LAWS = settings(deadline=None, derandomize=True, max_examples=100)
DIMS = {"key": 3, "value": 5, "index": 4}
SLOT_BYTES = 4 * (3 + 5)  # of one KV head without an index


def payloads(count: int, *, start: int = 0, heads: int = 2, index: bool = False) -> dict[str, torch.Tensor]:
    """`count` slots whose numbers tell their slot, head and payload; K and V are of different widths."""
    slot = torch.arange(start, start + count, dtype=torch.float32).reshape(1, count, 1)
    head = torch.arange(heads, dtype=torch.float32).reshape(heads, 1, 1) / 4
    made = {"key": slot + head + torch.zeros(heads, count, 3), "value": -slot - head + torch.zeros(heads, count, 5)}
    return {**made, "index": slot + torch.zeros(1, count, 4) + 0.5} if index else made


def filled(count: int, *, pool: Pool | None = None, capacity: int = 0, heads: int = 2, index: bool = False) -> Slots:
    slots = Slots(pool or Pool(poison=True), capacity)
    slots.append(payloads(count, heads=heads, index=index))
    return slots


def ragged(lengths: list[int], *, pool: Pool | None = None, slack: int = 0, index: bool = False) -> Slots:
    """Heads that hold the first `lengths` slots each."""
    whole = filled(max(max(lengths), 1), heads=len(lengths), index=index, pool=pool)
    return gather(whole, [torch.arange(length) for length in lengths], slack)


def holds(slots: Slots, expected: dict[str, torch.Tensor]) -> bool:
    return set(slots.names) == set(expected) and all(torch.equal(slots.read(n), expected[n]) for n in expected)


def slack_of(slots: Slots, name: str) -> torch.Tensor:
    """Everything in the flat storage that no head holds."""
    storage, start, parts = slots.storage(name), 0, []
    for length, capacity in zip(slots.lengths[: slots.payloads[name].heads], slots.capacities, strict=False):
        parts.append(storage[start + length : start + capacity])
        start += capacity
    assert start == len(storage)
    return torch.cat(parts)


class Lists(RuleBasedStateMachine):
    """Slots of 1 to 4 heads, appended to, cut back, gathered and grown in any order, beside one list per head."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh = 0

    @initialize(heads=st.integers(1, 4), capacity=st.integers(0, 100), index=st.booleans(), count=st.integers(1, 80))
    def start(self, heads: int, capacity: int, index: bool, count: int) -> None:
        self.pool, self.index = Pool(poison=True), index
        self.slots = Slots(self.pool, capacity)
        self.rows: list[list[int]] = [[] for _ in range(heads)]
        self.append(count)
        assert self.slots.uniform

    @rule(count=st.integers(0, 90))
    def append(self, count: int) -> None:
        self.fresh += 1000
        self.slots.append(payloads(count, start=self.fresh, heads=len(self.rows), index=self.index))
        for row in self.rows:
            row += range(self.fresh, self.fresh + count)

    @rule(shares=st.lists(st.floats(0, 1), min_size=4, max_size=4))
    def truncate(self, shares: list[float]) -> None:
        self.rows = [row[: round(share * len(row))] for row, share in zip(self.rows, shares, strict=False)]
        self.slots.truncate([len(row) for row in self.rows])

    @rule(head=st.integers(0, 3), over=st.integers(1, 3))
    def truncate_above_a_length(self, head: int, over: int) -> None:
        lengths = [len(row) for row in self.rows]
        lengths[head % len(lengths)] += over
        with pytest.raises(RuntimeError, match="cannot cut heads of"):
            self.slots.truncate(lengths)

    @rule(more=st.lists(st.integers(0, 200), min_size=4, max_size=4))
    def reserve(self, more: list[int]) -> None:
        wanted = [len(row) + extra for row, extra in zip(self.rows, more, strict=False)]
        before = self.slots.capacities
        self.slots.reserve(wanted)
        enough = all(need <= have for need, have in zip(wanted, before, strict=True))
        assert (self.slots.capacities == before) == enough
        assert all(need <= have for need, have in zip(wanted, self.slots.capacities, strict=True))

    @rule(data=st.data(), slack=st.integers(0, 100))
    def drop(self, data: st.DataObject, slack: int) -> None:
        """Go on with a gather of some entries of each head."""
        kept = [sorted(data.draw(st.sets(st.integers(0, len(row) - 1)))) if row else [] for row in self.rows]
        small = gather(self.slots, [torch.tensor(k, dtype=torch.int64) for k in kept], slack)
        self.slots.release()
        self.slots = small
        self.rows = [[row[i] for i in k] for row, k in zip(self.rows, kept, strict=True)]
        assert all(c >= len(r) + slack for c, r in zip(small.capacities, self.rows, strict=True))

    @rule(slack=st.integers(0, 100))
    def move(self, slack: int) -> None:
        other = copy(self.slots, slack)
        self.slots.release()
        self.slots = other

    @invariant()
    def every_head_holds_its_list(self) -> None:
        if not hasattr(self, "slots"):
            return
        slots = self.slots
        assert slots.lengths == tuple(len(row) for row in self.rows)
        assert slots.length == max(slots.lengths)
        assert all(
            capacity % GROWTH == 0 and capacity >= length
            for capacity, length in zip(slots.capacities, slots.lengths, strict=True)
        )
        assert slots.uniform == (len({*slots.lengths}) == 1 and len({*slots.capacities}) == 1)
        for head, row in enumerate(self.rows):
            assert slots.strip("key", head)[:, 2].tolist() == [n + head / 4 for n in row]
            assert slots.strip("value", head)[:, 4].tolist() == [-n - head / 4 for n in row]
        if self.index:  # one head for all follows head 0
            assert [strip[:, 3].tolist() for strip in slots.strips("index")] == [[n + 0.5 for n in self.rows[0]]]
        if slots.uniform:
            assert torch.equal(slots.read("value"), torch.stack(slots.strips("value")))
        for name in slots.names:
            assert bool(slack_of(slots, name).isnan().all())  # slack holds nothing readable

    @invariant()
    def the_ledger_counts_the_storage(self) -> None:
        if not hasattr(self, "slots"):
            return
        index = 4 * DIMS["index"] if self.index else 0
        held, capacities = self.slots.lengths, self.slots.capacities
        assert self.slots.held_bytes == sum(held) * SLOT_BYTES + held[0] * index
        assert self.pool.held_bytes == sum(capacities) * SLOT_BYTES + capacities[0] * index
        assert self.pool.held_bytes == self.slots.held_bytes + self.slots.slack_bytes
        assert self.pool.leases == len(self.slots.names)


TestAgainstLists = Lists.TestCase
TestAgainstLists.settings = settings(deadline=None, derandomize=True, max_examples=60, stateful_step_count=20)


@given(st.integers(1, 400), st.integers(0, 400), st.integers(0, 400))
@LAWS
def test_growth_keeps_the_content_and_what_was_asked_for_fits(count, capacity, more):
    slots = filled(count, capacity=capacity)
    before = slots.capacities

    slots.reserve([count + more] * 2)

    assert holds(slots, payloads(count))
    assert all(c % GROWTH == 0 and c >= max(count + more, capacity) for c in slots.capacities)
    assert (slots.capacities == before) == (count + more <= before[0])


def test_storage_grows_by_a_quarter_so_that_appending_one_by_one_copies_rarely():
    slots = filled(1)
    capacities = set()

    for i in range(1, 2000):
        slots.append(payloads(1, start=i))
        capacities.add(slots.capacities)

    assert len(capacities) <= 14
    assert holds(slots, payloads(2000))


def test_growth_is_a_quarter_or_what_is_needed_in_multiples_of_64():
    slots = filled(1000)  # in strips of 1024
    slots.append(payloads(25, start=1000))
    assert slots.capacities == (1280, 1280)  # 1000 + 1024 / 4 = 1256

    slots.append(payloads(976, start=1025))
    assert slots.capacities == (2048, 2048)  # 2001 are needed


def test_a_short_head_that_grows_does_not_stretch_a_long_one():
    """All heads fill up at the same time, so the whole grows by a quarter and copies stay rare."""
    slots = ragged([4, 10000], slack=64)
    changes = []

    for i in range(2000):
        before = slots.capacities
        slots.append(payloads(1, start=i))
        if slots.capacities != before:
            changes.append(before)

    assert len(changes) <= 3
    assert sum(slots.capacities) < 1.3 * sum(slots.lengths)
    assert slots.strip("key", 0)[4:, 0].tolist() == list(range(2000))


def test_room_that_is_there_is_used_in_place():
    slots = filled(10, capacity=200)
    place = slots.storage("key").data_ptr()

    slots.append(payloads(190, start=10))
    slots.reserve([200, 200])

    assert slots.storage("key").data_ptr() == place
    assert holds(slots, payloads(200))


def test_bytes_are_those_of_the_storage():
    pool = Pool()
    slots = filled(70, pool=pool, index=True)

    assert slots.capacities == (128, 128)
    assert slots.held_bytes == 70 * (2 * 3 + 2 * 5 + 4) * 4
    assert slots.held_bytes + slots.slack_bytes == pool.held_bytes == 128 * (2 * 3 + 2 * 5 + 4) * 4


def test_a_shorter_head_takes_a_shorter_strip():
    pool = Pool()
    slots = ragged([0, 10, 500], pool=pool, index=True)
    gc.collect()

    assert slots.capacities == (64, 64, 512)
    assert slots.held_bytes == 510 * SLOT_BYTES  # the index follows the empty head 0
    assert pool.held_bytes == (64 + 64 + 512) * SLOT_BYTES + 64 * 16
    assert [len(strip) for strip in slots.strips("value")] == [0, 10, 500]


@pytest.mark.parametrize("lengths", [[3, 4], [0, 1], [64, 65]])
def test_uneven_heads_are_not_read_as_one(lengths):
    slots = ragged(lengths)

    assert not slots.uniform
    with pytest.raises(RuntimeError, match="strip by strip"):
        slots.read("key")


def test_equal_heads_in_unequal_strips_are_not_read_as_one():
    slots = ragged([10, 100])
    slots.truncate([10, 10])

    assert not slots.uniform
    assert slots.strip("key", 1)[:, 0].tolist() == [n + 0.25 for n in range(10)]
    with pytest.raises(RuntimeError, match="strip by strip"):
        slots.read("key")


def test_views_are_views():
    slots = ragged([3, 70])
    slots.strip("key", 1)[69] = 7
    assert slots.storage("key")[64 + 69].tolist() == [7.0] * 3

    even = filled(5)
    even.read("value")[1, 4] = 8
    assert even.strip("value", 1)[4].tolist() == [8.0] * 5


def test_an_empty_head_goes_on():
    slots = ragged([0, 3], index=True)

    slots.append(payloads(2, start=50, index=True))

    assert slots.lengths == (2, 5)
    assert slots.strip("key", 0)[:, 0].tolist() == [50, 51]
    assert slots.strip("key", 1)[:, 0].tolist() == [0.25, 1.25, 2.25, 50.25, 51.25]
    assert slots.strip("index", 0)[:, 0].tolist() == [50.5, 51.5]


def test_empty_slots_hold_nothing():
    pool = Pool()
    slots = Slots(pool, capacity=500)

    assert (slots.length, slots.lengths, slots.capacities, slots.names) == (0, (), (), ())
    assert (slots.held_bytes, slots.slack_bytes, pool.leases) == (0, 0, 0)
    assert slots.uniform


def test_appending_no_slots_to_empty_storage_is_a_no_op():
    slots = Slots(Pool(), capacity=10)

    slots.append(payloads(0))

    assert (slots.lengths, slots.names) == ((), ())
    slots.append(payloads(3, index=True))
    assert holds(slots, payloads(3, index=True))


@pytest.mark.parametrize("lengths", [[5], [5, 5], [0, 9, 4]])
def test_like_is_the_same_layout_with_nothing_in_it(lengths):
    pool = Pool(poison=True)
    source = filled(20, heads=len(lengths), pool=pool, index=True)

    made = Slots.like(source, lengths, slack=60)

    assert made.payloads == source.payloads
    assert made.lengths == tuple(lengths)
    assert made.capacities == tuple(GROWTH if length + 60 <= GROWTH else 2 * GROWTH for length in lengths)
    assert all(bool(made.storage(name).isnan().all()) for name in made.names)
    assert holds(source, payloads(20, heads=len(lengths), index=True))


def test_like_of_empty_slots_takes_its_layout_from_the_first_append():
    made = Slots.like(Slots(Pool()), [], slack=60)
    made.append(payloads(3))
    assert holds(made, payloads(3))


def test_adopted_tensors_are_read_in_place_and_grow_into_storage_of_our_own():
    pool = Pool(poison=True)
    key, index = torch.arange(12.0).reshape(6, 2), torch.arange(4.0).reshape(4, 1)
    slots = Slots.adopt(pool, {"key": key, "index": index}, {"key": 2, "index": 1}, [3, 1], [4, 2])

    assert slots.payloads["key"] == Payload(2, 2, torch.float32, torch.device("cpu"))
    assert [strip.tolist() for strip in slots.strips("key")] == [[[0, 1], [2, 3], [4, 5]], [[8, 9]]]
    assert slots.strip("index", 0).tolist() == [[0], [1], [2]]
    assert slots.storage("key").data_ptr() == key.data_ptr()
    assert (pool.leases, pool.held_bytes) == (2, key.nbytes + index.nbytes)
    slots.append({"key": torch.ones(2, 2, 2), "index": torch.ones(1, 2, 1)})
    assert slots.strip("key", 0).tolist() == [[0, 1], [2, 3], [4, 5], [1, 1], [1, 1]]
    assert slots.strip("key", 1).tolist() == [[8, 9], [1, 1], [1, 1]]
    assert pool.held_bytes == slots.held_bytes + slots.slack_bytes
    slots.release()
    assert (pool.leases, pool.held_bytes) == (0, 0)


def test_zeroed_slack_leaves_what_is_held():
    slots = ragged([0, 7, 70], index=True)

    slots.zero_slack()

    assert all(bool((slack_of(slots, name) == 0).all()) for name in slots.names)
    assert slots.strip("value", 2)[:, 0].tolist() == [-n - 0.5 for n in range(70)]
    assert slots.strip("value", 1)[:, 0].tolist() == [-n - 0.25 for n in range(7)]


def test_releasing_returns_everything_and_leaves_empty_slots():
    pool = Pool()
    slots = filled(70, pool=pool, index=True)

    slots.release()

    assert (pool.held_bytes, pool.leases) == (0, 0)
    assert (slots.length, slots.lengths, slots.capacities, slots.names) == (0, (), (), ())
    slots.release()  # of nothing
    slots.append(payloads(3, heads=3))
    assert holds(slots, payloads(3, heads=3))


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
    assert pool.held_bytes == sum(slots.capacities) * SLOT_BYTES


def test_truncated_slots_are_poisoned_and_the_rest_is_not():
    slots = filled(60)

    slots.truncate([20, 3])

    assert torch.equal(slots.strip("key", 0), payloads(20)["key"][0])
    assert torch.equal(slots.strip("key", 1), payloads(3)["key"][1])
    for head, length in ((0, 20), (1, 3)):
        assert bool(slots.storage("value")[head * 64 + length : (head + 1) * 64].isnan().all())


def test_truncation_leaves_payloads_that_have_no_nan_alone():
    slots = Slots(Pool(poison=True))
    slots.append({"key": torch.ones(2, 5, 3), "code": torch.ones(2, 5, 3, dtype=torch.int8)})

    slots.truncate([2, 2])

    assert slots.read("code").tolist() == [[[1] * 3] * 2] * 2


def test_a_truncation_above_a_length_changes_nothing():
    slots = ragged([5, 9])

    with pytest.raises(RuntimeError, match=r"cannot cut heads of \(5, 9\) slots to \(3, 10\)"):
        slots.truncate([3, 10])

    assert slots.lengths == (5, 9)
    assert not bool(slots.strip("key", 0).isnan().any())


@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_append_that_fails_leaves_everything_as_it_was(call, run_out_at):
    pool = Pool(poison=True)
    slots = filled(64, pool=pool, index=True)
    places = {name: slots.storage(name).data_ptr() for name in slots.names}
    ledger = (pool.held_bytes, pool.leases, slots.capacities, slots.lengths)
    run_out_at(pool, call)

    with pytest.raises(WorkError):
        slots.append(payloads(1, start=64, index=True))

    assert (pool.held_bytes, pool.leases, slots.capacities, slots.lengths) == ledger
    assert {name: slots.storage(name).data_ptr() for name in slots.names} == places
    assert holds(slots, payloads(64, index=True))
    slots.append(payloads(1, start=64, index=True))  # and the next try succeeds
    assert holds(slots, payloads(65, index=True))


@pytest.mark.parametrize("call", [1, 2])
def test_a_first_append_that_fails_leaves_empty_slots(call, run_out_at):
    pool = Pool(poison=True)
    slots = Slots(pool)
    run_out_at(pool, call)

    with pytest.raises(WorkError):
        slots.append(payloads(5))

    assert (pool.held_bytes, pool.leases, slots.names, slots.lengths) == (0, 0, (), ())
    slots.truncate(())
    slots.append(payloads(5, heads=3))
    assert holds(slots, payloads(5, heads=3))
