"""One demoted layer, without a model: what it reads, what it holds, and that it is as before after an answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.cache.pool import Pool
from wakesight.cache.residency.paged import PagedSlots, Traffic
from wakesight.cache.residency.plan import PagePlan
from wakesight.errors import WorkError

LAWS = settings(max_examples=20, deadline=None, derandomize=True)
HEADS, GROUP, DIM, VALUE_DIM, SCALING = 2, 2, 6, 4, 0.4


@dataclass(frozen=True)
class World:
    """Keys, values and queries of one layer; the first `tokens` are the context, then the pieces follow."""

    plan: PagePlan
    tokens: int
    pieces: tuple[int, ...]
    seed: int

    def draw(self):
        noise = torch.Generator().manual_seed(self.seed)
        total = self.tokens + sum(self.pieces)
        key, value = (torch.randn(HEADS, total, dim, generator=noise) for dim in (DIM, VALUE_DIM))
        return key, value, 3 * torch.randn(1, HEADS * GROUP, total, DIM, generator=noise)

    def first(self, seed: int) -> torch.Tensor:
        """A random first resident set, the best first."""
        pages = max(0, self.tokens // self.plan.page_size - self.plan.strip - self.plan.recent)
        noise = torch.Generator().manual_seed(seed)
        return torch.stack([torch.randperm(pages, generator=noise) for _ in range(HEADS)])

    def layer(self, seed: int = 0, pool: Pool | None = None) -> PagedSlots:
        key, value, _ = self.draw()
        held = (key[:, : self.tokens], value[:, : self.tokens])
        return PagedSlots.demote(pool or Pool(poison=True), self.plan, *held, self.first(seed))

    def run(self, layer: PagedSlots) -> list[torch.Tensor]:
        """The output of every piece."""
        key, value, query = self.draw()
        at, outputs = self.tokens, []
        for size in self.pieces:
            here = slice(at, at + size)
            layer.append({"key": key[:, here], "value": value[:, here]})
            outputs.append(layer.attend(query[:, :, here], SCALING, plainly))
            at += size
        return outputs

    def full(self) -> list[torch.Tensor]:
        """The same over all entries."""
        key, value, query = self.draw()
        at, outputs = self.tokens, []
        for size in self.pieces:
            stop = at + size
            outputs.append(plainly(query[:, :, at:stop], key[None, :, :stop], value[None, :, :stop], SCALING))
            at = stop
        return outputs


def plainly(query, key, value, scaling, hidden=None):
    """Attention in float64, the queries' own tokens last. hidden: bool [kv_head, token]."""
    new, tokens = query.shape[2], key.shape[2]
    grouped = query.double().view(HEADS, GROUP, new, -1)
    logits = grouped @ key[0, :, None].double().transpose(2, 3) * scaling
    logits = logits.masked_fill(torch.ones(new, tokens, dtype=torch.bool).triu(tokens - new + 1), -torch.inf)
    if hidden is not None:
        logits = logits.masked_fill(hidden[:, None, None], -torch.inf)
    output = logits.softmax(dim=-1) @ value[0, :, None].double()
    return output.view(1, HEADS * GROUP, new, -1).to(query.dtype)


@st.composite
def worlds(draw, *, most: int | None = None, reads_all: bool = False) -> World:
    """most: the largest piece."""
    page = draw(st.sampled_from([1, 3, 4, 8]))
    slots = draw(st.integers(1, 9))
    plan = PagePlan(
        page_size=page,
        slots=slots,
        attend=None if reads_all else draw(st.integers(1, slots)),
        strip=draw(st.integers(0, 2)),
        recent=draw(st.integers(0, 2)),
        rerank=draw(st.sampled_from([1, 1, 2, 7])),
        block=draw(st.sampled_from([4, 32])),
        wants=draw(st.sampled_from(["sketch", "oracle"])),
        sketch=draw(st.sampled_from(["same", "int8"])),
    )
    size = st.integers(1, most or 40)
    pieces = draw(st.lists(st.one_of(st.just(1), size), min_size=1, max_size=9))
    return World(plan, draw(st.integers(1, 70)), tuple(pieces), draw(st.integers(0, 99)))


def close(one, other) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def snapshot(layer: PagedSlots) -> tuple[torch.Tensor, ...]:
    """Every bit of fast memory, and what is where."""
    held, bits = layer._fast.read(layer.plan.slots), {torch.float32: torch.int32}
    rows = [part.contiguous().view(bits[part.dtype]).clone() for part in held]
    return (*rows, *(array.clone() for array in (layer.table.slot_page, layer.table.last_use)))


def same(one, other) -> bool:
    """NaN (poison) has equal bits."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@given(worlds(reads_all=True))
@LAWS
def test_reading_all_in_waves_is_full_attention(world):
    """From one slot on; freed and demoted memory is NaN, so nothing else can have been read."""
    close(world.run(world.layer()), world.full())


@given(worlds())
@LAWS
def test_wanting_as_many_pages_as_there_are_is_full_attention(world):
    world = replace(world, plan=replace(world.plan, slots=1000, attend=1000))

    close(world.run(world.layer()), world.full())


@given(worlds(most=1))
@LAWS
def test_it_reads_the_wanted_pages_and_what_is_always_read_and_nothing_else(world):
    layer, wanted = world.layer(), []
    layer.listener = lambda step, pages, weights: wanted.append(pages)
    key, value, query = world.draw()
    strip, size = world.plan.strip * world.plan.page_size, world.plan.page_size
    for at in range(world.tokens, world.tokens + len(world.pieces)):
        layer.append({"key": key[:, at : at + 1], "value": value[:, at : at + 1]})
        found = layer.attend(query[:, :, at : at + 1], SCALING, plainly)

        position, settled = torch.arange(at + 1), layer.counters[0]
        hidden = ((position >= strip) & (position < strip + settled * size)).repeat(HEADS, 1)
        for head in range(HEADS if wanted else 0):
            for page in wanted[-1][head].tolist():
                hidden[head, strip + page * size : strip + (page + 1) * size] = False
        here = slice(0, at + 1)
        close([found], [plainly(query[:, :, at : at + 1], key[None, :, here], value[None, :, here], SCALING, hidden)])


@given(worlds(), st.integers(0, 9), st.integers(0, 9))
@LAWS
def test_at_r_1_outputs_do_not_depend_on_b_or_on_the_first_resident_set(world, more, seed):
    world = replace(world, plan=replace(world.plan, rerank=1))
    roomy = replace(world, plan=replace(world.plan, slots=world.plan.slots + more))

    close(world.run(world.layer()), roomy.run(roomy.layer(seed)))


@given(worlds(), st.sampled_from(["wanted", "resident"]))
@LAWS
def test_after_an_answer_the_layer_is_as_before_and_the_next_one_starts_alike(world, reads):
    world = replace(world, plan=replace(world.plan, reads=reads))
    layer = world.layer()
    before, start = snapshot(layer), layer.lengths
    first, traffic = world.run(layer), layer.traffic
    layer.truncate(start)

    assert same(snapshot(layer), before)
    assert layer.lengths == start
    already = layer.traffic
    assert all(torch.equal(a, b) for a, b in zip(world.run(layer), first, strict=True))
    again = layer.traffic - already
    assert (again.wants, again.misses, again.fetches) == (traffic.wants, traffic.misses, traffic.fetches)


@given(worlds())
@LAWS
def test_a_committed_layer_goes_on_from_where_it_is(world):
    layer = world.layer()
    world.run(layer)
    layer.commit()
    length = layer.lengths

    assert length == (world.tokens + sum(world.pieces),) * HEADS
    layer.truncate(length)  # nothing was appended since
    with pytest.raises(RuntimeError, match="only back to"):
        layer.truncate((world.tokens,) * HEADS)


@given(worlds())
@LAWS
def test_the_ledger_is_the_bytes_of_real_tensors(world):
    pool = Pool(poison=True)
    layer = world.layer(pool=pool)
    for _ in range(2):
        assert pool.held_bytes == layer.held_bytes + layer.slack_bytes
        assert layer.held_bytes == layer._fast.bytes + layer.sketch_bytes + layer.staging_bytes
        assert layer._fast.bytes == HEADS * world.plan.fast_pages * world.plan.page_size * (DIM + VALUE_DIM) * 4
        assert layer.reservoir_bytes == HEADS * layer.pages * world.plan.page_size * (DIM + VALUE_DIM) * 4
        assert pool.reservoir_bytes >= layer.reservoir_bytes
        world.run(layer)
    layer.release()
    assert (pool.held_bytes, pool.reservoir_bytes, pool.leases) == (0, 0, 0)


@given(worlds())
@LAWS
def test_traffic_adds_up(world):
    layer = world.layer()
    world.run(layer)
    traffic = layer.traffic

    assert traffic.wants == traffic.hits + traffic.misses
    assert traffic.misses == traffic.fetches  # first touches count as misses
    assert traffic.moved_bytes == traffic.fetches * world.plan.page_size * (DIM + VALUE_DIM) * 4
    assert traffic.restores == 0
    resident = layer.table.slot_page
    assert ((resident >= -1) & (resident < max(layer.counters[0], 1))).all()
    for row in resident:
        held = row[row >= 0]
        assert len(held) == len(held.unique())


@given(worlds())
@LAWS
def test_a_page_comes_back_with_the_bits_that_left(world):
    layer = world.layer()
    world.run(layer)
    key, value, _ = world.draw()
    pages, start = layer.pages, world.plan.strip * world.plan.page_size
    back = layer._from_reservoir(0, pages)
    for found, source in zip(back, (key, value), strict=True):
        body = source[:, start : start + pages * world.plan.page_size]
        assert torch.equal(found.flatten(1, 2), body)
    flat = [part.view(HEADS, -1, world.plan.page_size, part.shape[-1]) for part in layer._fast.flat()]
    for head, slot in (layer.table.slot_page >= 0).nonzero().tolist():
        page = int(layer.table.slot_page[head, slot])
        for held, source in zip(flat, back, strict=True):
            assert torch.equal(held[head, world.plan.slots - 1 - slot], source[head, page])


@given(worlds())
@LAWS
def test_a_copy_answers_alike_and_shares_nothing(world):
    layer = world.layer()
    twin = layer.copy()
    expected = world.run(layer)
    layer.release()

    assert all(torch.equal(a, b) for a, b in zip(world.run(twin), expected, strict=True))


@given(worlds())
@LAWS
def test_what_was_saved_comes_back_bit_for_bit(world):
    layer = world.layer()
    held = {**layer.saved(), **{name: read() for name, read in layer.saved_pages().items()}}
    back = PagedSlots(Pool(poison=True), world.plan, held["rest_key"], held["rest_value"])
    back.load(held, *layer.counters)

    assert same(snapshot(back), snapshot(layer))
    assert back.lengths == layer.lengths
    assert all(torch.equal(a, b) for a, b in zip(world.run(back), world.run(layer), strict=True))


PLAN = PagePlan(page_size=4, slots=3, attend=3, strip=1)
WORLD = World(PLAN, 63, (9, 1, 1, 1, 1, 1, 1, 1), 0)


def test_with_torchs_body_it_decides_alike(monkeypatch):
    expected = WORLD.layer()
    outputs = WORLD.run(expected)
    from wakesight.cache.residency import on_device, table

    monkeypatch.setattr(table, "_rule", lambda on_cpu: on_device)
    layer = WORLD.layer()

    close(WORLD.run(layer), outputs)
    assert layer.traffic == expected.traffic
    assert torch.equal(layer.table.slot_page, expected.table.slot_page)


def test_a_full_disk_or_memory_leaves_the_layer_as_it_was(monkeypatch):
    layer = WORLD.layer()
    before, start = snapshot(layer), layer.lengths

    def full(key, value):
        raise WorkError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(layer._reservoir, "append", full)
        with pytest.raises(WorkError):
            WORLD.run(layer)
        layer.truncate(start)

    assert same(snapshot(layer), before)
    close(WORLD.run(layer), WORLD.run(WORLD.layer()))


def test_a_page_that_cannot_be_brought_back_leaves_its_slot_empty(monkeypatch):
    layer = WORLD.layer()
    start, fetch = layer.lengths, layer._reservoir.fetch
    expected = WORLD.run(layer)

    def broken(units, pages, rows, key, value):
        if len(units) > HEADS:  # the slots; the tail's page is one per head
            raise WorkError("page 3 is damaged")
        fetch(units, pages, rows, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(layer._reservoir, "fetch", broken)
        layer.truncate(start)

    assert (layer.table.slot_page == -1).any()
    close(WORLD.run(layer), expected)


def test_tokens_attend_before_others_come():
    layer = WORLD.layer()
    fresh = {"key": torch.zeros(HEADS, 1, DIM), "value": torch.zeros(HEADS, 1, VALUE_DIM)}
    with pytest.raises(RuntimeError, match="no tokens were appended"):
        layer.attend(torch.zeros(1, HEADS * GROUP, 1, DIM), SCALING, plainly)
    layer.append(fresh)
    with pytest.raises(RuntimeError, match="have not attended yet"):
        layer.append(fresh)


@pytest.mark.parametrize(
    "read", [lambda one: one.storage("key"), lambda one: one.strips("key"), lambda one: one.read("key")]
)
def test_it_cannot_be_read_as_one_piece(read):
    with pytest.raises(RuntimeError):
        read(WORLD.layer())


def test_pages_of_a_file_are_read_alike(tmp_path):
    filed = replace(WORLD, plan=replace(PLAN, reservoir=f"file:{tmp_path}"))

    close(filed.run(filed.layer()), WORLD.run(WORLD.layer()))


def test_traffic_is_added_and_subtracted_field_by_field():
    one = Traffic(1, 2, 3, 4, 5, 6)

    assert one + one - one == one
    assert sum((one, one), Traffic()) == Traffic(2, 4, 6, 8, 10, 12)
