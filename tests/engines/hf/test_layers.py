"""Rows of any shape in one layer: attention equals a loop over rows and heads; windows; rows apart and together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import LinearAttentionLayer

from wakesight.cache.compaction.gather import gather
from wakesight.cache.pool import Pool
from wakesight.cache.slots import Slots
from wakesight.engines.hf import compat
from wakesight.engines.hf.attention import attend, attend_eager
from wakesight.engines.hf.layers import (
    IndexedLayer,
    OwnMask,
    SlotAndStateLayer,
    SlotLayer,
    WindowLayer,
    join,
    row_of,
    states_of,
    take_pending,
)
from wakesight.errors import RequestError

LAWS = settings(deadline=None, derandomize=True, max_examples=60)
DIM, VALUE_DIM = 8, 12


@pytest.fixture(autouse=True)
def _no_pending_layer():
    """Tests that only store keys leave a layer waiting for an attention call that never comes."""
    yield
    take_pending()


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slots_of(lengths: list[int], *, pool: Pool | None = None, slack: int = 5, seed: int = 0) -> Slots:
    """Random storage whose heads hold `lengths` entries."""
    whole, count = Slots(pool or Pool(poison=True)), max(*lengths, 1)
    shape = (len(lengths), count)
    whole.append({"key": noise(*shape, DIM, seed=seed), "value": noise(*shape, VALUE_DIM, seed=seed + 1)})
    return gather(whole, [torch.arange(length) for length in lengths], slack)


def one_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """float64 attention of query [q, dim] over one head's strip; the last q keys are the queries' own."""
    past, rows = len(key) - len(query), []
    for j, row in enumerate(query.double()):
        seen = slice(0 if window is None else max(0, past + j + 1 - window), past + j + 1)
        rows.append((key[seen].double() @ row * 0.3).softmax(0) @ value[seen].double())
    return torch.stack(rows)


ROWS = st.integers(1, 3).flatmap(
    lambda heads: st.lists(st.lists(st.integers(0, 70), min_size=heads, max_size=heads), min_size=1, max_size=4)
)


@given(ROWS, st.integers(1, 20), st.sampled_from([1, 3]), st.sampled_from([attend, attend_eager]))
@LAWS
def test_a_layer_of_ragged_rows_is_a_loop_over_rows_and_heads(lengths, new, group, kernel):
    heads = len(lengths[0])
    rows = [slots_of(row, seed=10 * i) for i, row in enumerate(lengths)]
    before = [[strip.clone() for strip in slots.strips("key")] for slots in rows]
    layer = SlotLayer(rows, [100 + i for i in range(len(rows))])
    key, value = noise(len(rows), heads, new, DIM, seed=1), noise(len(rows), heads, new, VALUE_DIM, seed=2)
    query = noise(len(rows), heads * group, new, DIM, seed=3)

    handed_on = layer.update(key, value)
    assert take_pending() is layer
    found = layer.attend(None, query, *handed_on, 0.3, kernel)

    assert found.shape == (len(rows), heads * group, new, VALUE_DIM)
    assert layer.seen == [100 + i + new for i in range(len(rows))]
    assert layer.get_seq_length() == 99 + len(rows) + new
    for r, slots in enumerate(rows):
        assert slots.lengths == tuple(n + new for n in lengths[r])
        for h in range(heads):
            assert torch.equal(slots.strip("key", h), torch.cat([before[r][h], key[r, h]]))
            for g in range(h * group, (h + 1) * group):
                expected = one_head(query[r, g], slots.strip("key", h), slots.strip("value", h))
                assert torch.allclose(found[r, g].double(), expected, atol=1e-5)


def test_rows_need_not_be_of_one_kind():
    """A whole row, an uneven one, and one whose heads are alike in unequal strips."""
    odd = slots_of([5, 90])
    odd.truncate([5, 5])
    rows = [slots_of([40, 40]), slots_of([0, 33], seed=4), odd]
    layer = SlotLayer(rows, [40, 40, 40])
    query, key, value = noise(3, 4, 2, DIM), noise(3, 2, 2, DIM, seed=5), noise(3, 2, 2, VALUE_DIM, seed=6)

    found = layer.attend(None, query, *layer.update(key, value), 0.3, attend)

    for r, slots in enumerate(rows):
        for g in range(4):
            expected = one_head(query[r, g], slots.strip("key", g // 2), slots.strip("value", g // 2))
            assert torch.allclose(found[r, g].double(), expected, atol=1e-5)


def test_every_row_is_shown_to_the_recorder_as_it_is_stored():
    heard = []
    layer = SlotLayer([slots_of([3, 6])], [50])
    layer.recorder = SimpleNamespace(hear=lambda *told: heard.append(told))
    query, key, value = noise(1, 4, 2, DIM), noise(1, 2, 2, DIM, seed=5), noise(1, 2, 2, VALUE_DIM, seed=6)

    layer.attend(None, query, *layer.update(key, value), 0.3, attend)

    ((queries, keys, start, scaling),) = heard
    assert torch.equal(queries, query[0])
    assert [len(strip) for strip in keys] == [5, 8]
    assert torch.equal(keys[1], layer.rows[0].strip("key", 1))
    assert (start, scaling) == (50, 0.3)


def test_transformers_is_told_to_build_no_mask():
    length, offset = SlotLayer([slots_of([3, 6])], [50]).get_mask_sizes(4)
    assert isinstance(length, OwnMask)
    assert (length, offset) == (54, 0)


@given(
    st.integers(2, 40), st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=2, max_size=2),
    st.sampled_from([attend, attend_eager]),
)  # fmt: skip
@LAWS
def test_a_window_layer_is_masked_full_attention_whatever_the_chunks(window, chunks, kernel):
    """Two rows that read the same tokens; the second reads them in other chunks, alone."""
    total = min(map(sum, chunks))
    key, value, query = noise(1, 2, total, DIM), noise(1, 2, total, VALUE_DIM, seed=1), noise(1, 6, total, DIM, seed=2)
    expected = torch.stack([one_head(query[0, g], key[0, g // 3], value[0, g // 3], window) for g in range(6)])

    for sizes in chunks:
        layer, start, made = WindowLayer(window, [None], [0]), 0, []
        for size in sizes:
            part = slice(start, min(start + size, total))
            if part.start < total:
                handed_on = layer.update(key[:, :, part], value[:, :, part])
                made.append(layer.attend(None, query[:, :, part], *handed_on, 0.3, kernel))
                assert layer.rows[0][0].shape[1] == min(window - 1, part.stop)
                start = part.stop
        assert torch.allclose(torch.cat(made, dim=2)[0].double(), expected[:, :start], atol=1e-5)
        assert layer.seen == [start]


def test_a_window_of_one_keeps_nothing():
    layer = WindowLayer(1, [None], [0])
    layer.update(noise(1, 2, 9, DIM), noise(1, 2, 9, VALUE_DIM))
    assert layer.rows[0][0].shape[1] == 0


def test_windows_of_rows_may_differ_in_length():
    window, pasts = 10, [0, 4, 30]
    keys = [noise(1, 1, past + 3, DIM, seed=past) for past in pasts]
    values = [noise(1, 1, past + 3, VALUE_DIM, seed=past + 1) for past in pasts]
    queries = noise(3, 2, 3, DIM)
    parts = []
    for key, value, past in zip(keys, values, pasts, strict=True):
        part = WindowLayer(window, [None], [0])
        if past:
            part.update(key[:, :, :past], value[:, :, :past])
        parts.append(part)
    layer = join(parts)

    fresh = torch.cat([key[:, :, -3:] for key in keys]), torch.cat([value[:, :, -3:] for value in values])
    found = layer.attend(None, queries, *layer.update(*fresh), 0.3, attend)

    assert layer.seen == [3, 7, 33]
    for r in range(3):
        for g in range(2):
            expected = one_head(queries[r, g], keys[r][0, 0], values[r][0, 0], window)
            assert torch.allclose(found[r, g].double(), expected, atol=1e-5)


def test_a_snapshot_of_a_window_does_not_move_when_the_layer_goes_on():
    layer = WindowLayer(6, [None], [0])
    layer.update(noise(1, 2, 9, DIM), noise(1, 2, 9, VALUE_DIM))
    snapshot = states_of(layer)
    before = {name: tensor.clone() for name, tensor in snapshot.items()}

    layer.update(noise(1, 2, 9, DIM, seed=3), noise(1, 2, 9, VALUE_DIM, seed=3))

    assert snapshot.keys() == {"window.key", "window.value"}
    assert all(torch.equal(snapshot[name], before[name]) for name in before)
    assert states_of(WindowLayer(6, [None], [0])) == {}
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in snapshot.values())  # no chunk behind it


def slot_layer() -> SlotLayer:
    return SlotLayer([slots_of([4, 9], seed=1), slots_of([7, 7], seed=2), slots_of([0, 2], seed=3)], [20, 30, 40])


def window_layer() -> WindowLayer:
    rows = [(noise(2, n, DIM, seed=n), noise(2, n, VALUE_DIM, seed=n)) for n in (3, 5, 5)]
    return WindowLayer(6, rows, [3, 30, 40])


def state_layer(rows: int = 3) -> LinearAttentionLayer:
    layer = LinearAttentionLayer(number_of_states=2)
    made = {name: noise(rows, 4, 5, seed=i) for i, name in enumerate(("conv.0", "recurrent.0", "recurrent.1"))}
    compat.restore_states(layer, made)
    return layer


def mixed_layer() -> SlotAndStateLayer:
    slots = slot_layer()
    layer = SlotAndStateLayer(slots.rows, slots.seen, 2)
    compat.restore_states(layer, compat.state_tensors(state_layer()))
    return layer


MAKERS = [slot_layer, window_layer, state_layer, mixed_layer]


def same(one, other) -> bool:
    """Everything a layer holds, bit for bit."""
    assert type(one) is type(other)
    for name in ("seen", "forked", "window", "latent"):
        assert getattr(one, name, None) == getattr(other, name, None)
    if isinstance(one, SlotLayer):
        assert all(a is b for a, b in zip(one.rows, other.rows, strict=True))
    if isinstance(one, WindowLayer):
        assert all(a[0] is b[0] and a[1] is b[1] for a, b in zip(one.rows, other.rows, strict=True))
    mine, theirs = compat.state_tensors(one), compat.state_tensors(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("make", MAKERS)
def test_rows_taken_apart_and_joined_are_the_layer_again(make):
    layer = make()
    apart = [row_of(layer, index) for index in range(3)]

    assert same(join(apart), layer)
    assert same(join([row_of(row, 0) for row in apart]), layer)


@pytest.mark.parametrize("make", MAKERS)
def test_rows_can_be_chosen_and_repeated(make):
    layer = make()
    chosen = join([row_of(layer, index) for index in (2, 0, 2)])

    for to, source in enumerate((2, 0, 2)):
        assert same(row_of(chosen, to), row_of(layer, source))


@pytest.mark.parametrize("make", [state_layer, mixed_layer])
def test_a_row_taken_out_has_recurrent_states_of_its_own(make):
    layer = make()
    before = compat.state_tensors(layer)["recurrent.0"].clone()

    row = row_of(layer, 1)
    row.update_recurrent_state(torch.ones(1, 4, 5), state_idx=0)

    assert torch.equal(compat.state_tensors(layer)["recurrent.0"], before)


def test_rows_that_stop_sharing_have_equal_content_in_storage_of_their_own():
    pool = Pool(poison=True)
    mine, other = slots_of([4, 9], pool=pool), slots_of([7, 7], pool=pool)
    layer = SlotLayer([mine, mine, other, mine], [9] * 4)

    layer.unshare()

    assert layer.rows[0] is mine
    assert layer.rows[2] is other
    assert len({slots.storage("key").data_ptr() for slots in layer.rows}) == 4
    for copied in (layer.rows[1], layer.rows[3]):
        assert all(torch.equal(a, b) for a, b in zip(copied.strips("value"), mine.strips("value"), strict=True))
    assert layer.forked == [(4, 9), (4, 9), (7, 7), (4, 9)]


class Copying:
    """What rows hold, as plain tensors that a reorder simply copies."""

    def __init__(self, layer: SlotLayer) -> None:
        self.rows = [[(k, v) for k, v in zip(s.strips("key"), s.strips("value"), strict=True)] for s in layer.rows]
        self.rows = [[(k.clone(), v.clone()) for k, v in heads] for heads in self.rows]

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.rows = [
            [(torch.cat([k, key[r, h]]), torch.cat([v, value[r, h]])) for h, (k, v) in enumerate(heads)]
            for r, heads in enumerate(self.rows)
        ]

    def reorder(self, indices: list[int]) -> None:
        self.rows = [self.rows[index] for index in indices]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(2, 5), st.data())
@LAWS
def test_beams_in_any_order_equal_a_model_that_copies_everything(lengths, beams, data):
    row = slots_of(lengths, slack=data.draw(st.sampled_from([0, 64])))
    layer = SlotLayer([row] * beams, [50] * beams)
    layer.unshare()
    copying = Copying(layer)

    for step in range(data.draw(st.integers(1, 8))):
        key = noise(beams, len(lengths), 1, DIM, seed=step)
        value = noise(beams, len(lengths), 1, VALUE_DIM, seed=step + 50)
        layer.update(key, value)
        copying.append(key, value)
        indices = data.draw(st.lists(st.integers(0, beams - 1), min_size=beams, max_size=beams))
        layer.reorder_cache(torch.tensor(indices))
        copying.reorder(indices)

        assert layer.seen == [51 + step] * beams
        for slots, heads in zip(layer.rows, copying.rows, strict=True):
            for h, (k, v) in enumerate(heads):
                assert torch.equal(slots.strip("key", h), k)
                assert torch.equal(slots.strip("value", h), v)
    assert len({slots.storage("key").data_ptr() for slots in layer.rows}) == beams


def test_windows_of_beams_go_with_their_beam():
    layer = window_layer()
    rows = list(layer.rows)

    layer.reorder_cache(torch.tensor([2, 2, 0]))

    assert [row is rows[source] for row, source in zip(layer.rows, (2, 2, 0), strict=True)] == [True] * 3
    assert layer.seen == [40, 40, 3]


def test_beams_reorder_recurrent_states_too():
    layer = mixed_layer()
    layer.rows = [layer.rows[0]] * 3
    layer.seen = [20] * 3
    layer.unshare()
    before = compat.state_tensors(layer)["recurrent.1"].clone()

    layer.reorder_cache(torch.tensor([2, 0, 0]))

    assert torch.equal(compat.state_tensors(layer)["recurrent.1"], before[[2, 0, 0]])


def indexed_layer() -> IndexedLayer:
    layer = IndexedLayer([Slots(Pool(poison=True))], [0])
    for step in range(2):
        fresh = noise(1, 3, 4, seed=step)
        raw = layer.update_indexer(fresh)
        keys, values = layer.update(noise(1, 2, 3, DIM, seed=step), noise(1, 2, 3, VALUE_DIM, seed=step))
        assert raw.shape[1] == keys.shape[2] == values.shape[2] == 3 * (step + 1)
        assert torch.equal(raw[:, -3:], fresh)
    return layer


def test_an_indexed_layer_keeps_its_raw_keys_with_the_entries():
    layer = indexed_layer()
    assert layer.rows[0].lengths == (6, 6)
    assert layer.rows[0].payloads["index"].heads == 1
    assert torch.equal(layer.rows[0].read("index")[0, 3:], noise(1, 3, 4, seed=1)[0])
    assert layer.attended  # transformers' own attention runs on what it returns
    assert not isinstance(layer.get_mask_sizes(2)[0], OwnMask)


def test_indexed_rows_do_not_go_together():
    layer = indexed_layer()
    assert join([row_of(layer, 0)]) is layer
    with pytest.raises(RequestError, match="sparse indexer cannot run several sequences at once"):
        join([row_of(layer, 0), row_of(layer, 0)])
