"""FlexiCache's arm as storage does what its rule says, and heads in groups are the same heads."""

from __future__ import annotations

import pytest
import torch

from wakesight.cache.pool import Pool
from wakesight.cache.residency.flexi_slots import HeadGroups, LateSlots, flexicache_slots
from wakesight.cache.residency.flexicache import FlexiState, flexicache
from wakesight.cache.residency.paged import PagedSlots
from wakesight.cache.residency.plan import PagePlan
from wakesight.cache.residency.sketches import Sketches
from wakesight.errors import RequestError, WorkError

HEADS, GROUP, DIM, SIZE, ATTEND, STRIP = 4, 2, 8, 4, 3, 1
SCALING = DIM**-0.5


def kernel(query, key, value, scaling):
    """Causal attention, the queries' own keys last."""
    new, entries = query.shape[2], key.shape[2]
    key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
    hidden = torch.ones(new, entries, dtype=torch.bool).triu(entries - new + 1)
    return (query @ key.transpose(2, 3) * scaling).masked_fill(hidden, float("-inf")).softmax(-1) @ value


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plan(**changes) -> PagePlan:
    return PagePlan(**{"page_size": SIZE, "slots": ATTEND, "attend": ATTEND, "strip": STRIP, **changes})


def step(slots, key, value, query) -> torch.Tensor:
    """Tokens [kv_head, new, dim] with queries [kv_head, group, new, dim] -> [kv_head, group, new, dim]."""
    slots.append({"key": key, "value": value})
    return slots.attend(query.flatten(0, 1)[None], SCALING, kernel)[0].view(HEADS, GROUP, -1, DIM)


@pytest.fixture
def context() -> tuple[torch.Tensor, torch.Tensor]:
    return random(HEADS, 50, DIM, seed=1), random(HEADS, 50, DIM, seed=2)


@pytest.mark.parametrize("interval", [1, 3, 4, 16])
def test_stable_heads_read_what_the_rule_says(context, interval):
    """Step by step against attention over the pages that `flexicache` names, computed from all keys."""
    key, value = context
    stable = torch.zeros(HEADS, dtype=torch.bool)
    first = torch.tensor([[0, 4, 2, 7]] * HEADS)
    slots = flexicache_slots(Pool(poison=True), plan(), key, value, first, stable, room=0, interval=interval)
    state = FlexiState(first[:, :ATTEND], ranked=(50 - STRIP * SIZE) // SIZE)
    for now in range(40):
        fresh = random(HEADS, 1, DIM, seed=100 + now), random(HEADS, 1, DIM, seed=200 + now)
        query = 3 * random(HEADS, GROUP, 1, DIM, seed=300 + now)
        key, value = torch.cat([key, fresh[0]], 1), torch.cat([value, fresh[1]], 1)
        closed = (key.shape[1] - STRIP * SIZE) // SIZE
        sketches = Sketches(Pool(), "same", SIZE)
        sketches.append(key[:, STRIP * SIZE :][:, : closed * SIZE].view(HEADS, closed, SIZE, DIM))

        got = step(slots, *fresh, query)

        done = flexicache(state, sketches.bounds(query), stable, ATTEND, interval)
        seen = torch.ones(HEADS, key.shape[1], dtype=torch.bool)
        seen[:, STRIP * SIZE :][:, : closed * SIZE] = done.read.repeat_interleave(SIZE, dim=1)
        logits = query @ key[:, None].transpose(2, 3) * SCALING
        expected = logits.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1) @ value[:, None]
        assert torch.allclose(got, expected, atol=1e-5), now
        state = done.state


def test_fetches_are_those_of_the_rule(context):
    """Counted over a run; what is listed again is not copied again."""
    key, value = context
    slots = LateSlots.demote(Pool(), plan(rerank=4), key, value, torch.tensor([[0, 4, 2]] * HEADS))
    before = slots.traffic.fetches
    for now in range(9):
        fresh = random(HEADS, 1, DIM, seed=100 + now)
        step(slots, fresh, fresh, random(HEADS, GROUP, 1, DIM, seed=300))

    wants = 3 * HEADS * ATTEND  # rankings behind steps 0, 4 and 8
    assert slots.traffic.wants == wants
    assert 0 < slots.traffic.fetches - before < wants


@pytest.mark.parametrize("heads", [[[0, 1, 2, 3]], [[0, 2], [1, 3]], [[3], [0, 1, 2]]])
def test_heads_in_groups_are_the_same_heads(context, heads):
    """Whatever the split, outputs, lengths, traffic and bytes are those of one storage, before and after a cut."""
    key, value = context
    first = torch.tensor([[0, 4, 2], [1, 5, 3], [7, 8, 9], [2, 1, 0]])
    one = PagedSlots.demote(Pool(poison=True), plan(), key, value, first)
    pool = Pool(poison=True)
    many = HeadGroups([(own, PagedSlots.demote(pool, plan(), key[own], value[own], first[own])) for own in heads])
    for answer in range(2):
        for now, new in enumerate([6, 1, 1, 1, 1, 1, 1]):
            seed = 10 * answer + now
            fresh = random(HEADS, new, DIM, seed=seed), random(HEADS, new, DIM, seed=seed + 50)
            query = random(HEADS, GROUP, new, DIM, seed=seed + 100)
            assert torch.allclose(step(many, *fresh, query), step(one, *fresh, query), atol=1e-6)
        for what in ("lengths", "length", "fast_lengths", "pages", "traffic", "held_bytes", "sketch_bytes"):
            assert getattr(many, what) == getattr(one, what), what
        assert many.reservoir_bytes == one.reservoir_bytes
        for slots in (one, many):
            slots.truncate((50,) * HEADS)
        assert many.lengths == (50,) * HEADS
    many.commit()
    many.release()
    assert (pool.held_bytes, pool.reservoir_bytes, pool.leases) == (0, 0, 0)


def test_unstable_heads_hold_everything_and_choose_at_every_step(context):
    key, value = context
    unstable = torch.tensor([False, True, False, True])
    first = torch.tensor([[0, 4, 2]] * HEADS)
    slots = flexicache_slots(Pool(poison=True), plan(), key, value, first, unstable, room=20)
    quest = PagedSlots.demote(Pool(), plan(slots=20), key, value, torch.arange(11).expand(HEADS, -1))

    for now in range(12):
        fresh = random(HEADS, 1, DIM, seed=100 + now), random(HEADS, 1, DIM, seed=200 + now)
        query = 3 * random(HEADS, GROUP, 1, DIM, seed=300 + now)
        assert torch.allclose(step(slots, *fresh, query)[unstable], step(quest, *fresh, query)[unstable], atol=1e-5)

    lengths = slots.fast_lengths
    assert min(lengths[1], lengths[3]) >= 50
    assert max(lengths[0], lengths[2]) < 50
    assert slots.groups[1][1].traffic.misses == 0  # what they write later comes in by a free first touch


def test_a_cut_brings_back_the_first_state(context):
    """Two answers in a row are alike, in tokens of the cache and in what it reads."""
    key, value = context
    unstable = torch.tensor([False, True, False, True])
    slots = flexicache_slots(Pool(poison=True), plan(), key, value, torch.tensor([[0, 4, 2]] * HEADS), unstable, 20, 4)

    runs = []
    for _ in range(2):
        outputs = []
        for now in range(11):
            fresh = random(HEADS, 1, DIM, seed=100 + now)
            outputs.append(step(slots, fresh, fresh, random(HEADS, GROUP, 1, DIM, seed=300 + now)))
        runs.append(torch.cat(outputs, dim=2))
        slots.truncate((50,) * HEADS)

    assert torch.equal(*runs)


@pytest.mark.parametrize("call", [1, 3, 5, 8])
def test_a_lack_of_memory_leaves_nothing(context, run_out_at, call):
    pool = Pool()
    run_out_at(pool, call)

    with pytest.raises(WorkError):
        flexicache_slots(pool, plan(), *context, None, torch.tensor([False, True, False, True]), 20)

    assert (pool.held_bytes, pool.reservoir_bytes, pool.leases) == (0, 0, 0)


def test_what_the_arm_cannot_do_is_refused(context):
    with pytest.raises(RequestError, match="attend='all'"):
        flexicache_slots(Pool(), plan(attend=None), *context, None, torch.zeros(HEADS, dtype=torch.bool), 20)
    slots = flexicache_slots(Pool(), plan(), *context, None, torch.zeros(HEADS, dtype=torch.bool), 20)
    for refused in (slots.copy, slots.saved):
        with pytest.raises(RequestError, match="not copied or saved"):
            refused()
