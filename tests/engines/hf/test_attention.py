"""The fused and the plain attention equal a float64 loop over repeated heads; KV heads are never repeated."""

from __future__ import annotations

import pytest
import torch

from wakesight.cache.pool import Pool
from wakesight.cache.slots import Slots
from wakesight.engines.hf.attention import attend, attend_eager, causal_tail, eager, sdpa
from wakesight.engines.hf.layers import SlotLayer, take_pending


def reference(query, key, value, scaling, window=None):
    """float64, KV heads repeated, one query token at a time."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (t.double() for t in (query, key, value))
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    past = key.shape[2] - query.shape[2]
    rows = []
    for j in range(query.shape[2]):
        seen = slice(0 if window is None else max(0, past + j + 1 - window), past + j + 1)
        weights = (torch.einsum("bhd,bhtd->bht", query[:, :, j], key[:, :, seen]) * scaling).softmax(-1)
        rows.append(torch.einsum("bht,bhtd->bhd", weights, value[:, :, seen]))
    return torch.stack(rows, dim=2)


def tensors(batch, heads, kv_heads, new, past, dim, value_dim=None):
    torch.manual_seed(new * 1000 + past)
    query = torch.randn(batch, new, heads, dim).transpose(1, 2)  # the layout that models hand over
    key = torch.randn(batch, kv_heads, past + new + 40, dim)[:, :, : past + new]  # a view into larger storage
    value = torch.randn(batch, kv_heads, past + new + 40, value_dim or dim)[:, :, : past + new]
    return query, key, value


@pytest.mark.parametrize("past", [0, 1, 63, 300])
@pytest.mark.parametrize("new", [1, 2, 5, 50, 130])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (9, 3), (8, 1)])
def test_every_shape_equals_the_reference(heads, kv_heads, new, past):
    for batch, dim in ((1, 16), (2, 64)):
        query, key, value = tensors(batch, heads, kv_heads, new, past, dim)
        expected = reference(query, key, value, 0.3)

        assert torch.allclose(attend(query, key, value, 0.3).double(), expected, atol=1e-5)
        assert torch.allclose(attend_eager(query, key, value, 0.3).double(), expected, atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 100, 400])
@pytest.mark.parametrize(("new", "past"), [(1, 0), (1, 31), (1, 300), (7, 0), (7, 25), (7, 300), (90, 0), (90, 60)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (8, 1)])
def test_a_window_hides_what_lies_before_it(heads, kv_heads, new, past, window):
    for value_dim in (16, 24):
        query, key, value = tensors(2, heads, kv_heads, new, past, 16, value_dim)
        expected = reference(query, key, value, 0.3, window)

        assert torch.allclose(attend(query, key, value, 0.3, window).double(), expected, atol=1e-5)
        assert torch.allclose(attend_eager(query, key, value, 0.3, window).double(), expected, atol=1e-5)


@pytest.mark.parametrize(("new", "past"), [(1, 30), (7, 0), (7, 30), (70, 300)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
def test_values_may_be_narrower_or_wider_than_keys(heads, kv_heads, new, past):
    for value_dim in (16, 40):
        query, key, value = tensors(1, heads, kv_heads, new, past, 24, value_dim)
        expected = reference(query, key, value, 0.2)
        assert torch.allclose(attend(query, key, value, 0.2).double(), expected, atol=1e-5)
        assert torch.allclose(attend_eager(query, key, value, 0.2).double(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("new", "past"), [(1, 200), (50, 200), (50, 0)])
def test_half_precision_stays_within_its_own_rounding(dtype, new, past):
    query, key, value = (t.to(dtype) for t in tensors(1, 6, 2, new, past, 64))
    expected = reference(query, key, value, 0.125)
    for found in (attend(query, key, value, 0.125), attend_eager(query, key, value, 0.125)):
        assert found.dtype == dtype
        assert (found.double() - expected).abs().max() < 8 * torch.finfo(dtype).eps


def test_causal_tail_hides_exactly_the_later_new_slots():
    mask = causal_tail(3, 5, torch.device("cpu"), torch.float32)
    assert (mask == 0).tolist() == [
        [True, True, True, False, False],
        [True, True, True, True, False],
        [True, True, True, True, True],
    ]


@pytest.mark.parametrize("new", [1, 2, 5])
@pytest.mark.parametrize("window", [1, 2, 4, 9])
def test_causal_tail_of_a_window_is_its_definition(new, window):
    for slots in range(new, 9):
        mask = causal_tail(new, slots, torch.device("cpu"), torch.float32, window)
        past = slots - new
        for j in range(new):
            seen = [past + j - window < slot <= past + j for slot in range(slots)]
            assert mask[j].tolist() == [0.0 if see else float("-inf") for see in seen]


@pytest.mark.parametrize("new", [1, 64])
def test_memory_of_a_call_does_not_hold_repeated_heads(new):
    """Nothing as large as K and V for every query head is allocated."""
    query, key, value = tensors(1, 16, 1, new, 4096, 64)
    with torch.profiler.profile(profile_memory=True) as profile:
        attend(query, key, value, 0.125)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert allocated < 16 * key.nbytes / 4


@pytest.mark.parametrize("function", [sdpa, eager])
@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_a_softmax_that_our_kernels_do_not_make_is_refused(function, name):
    layer = SlotLayer([Slots(Pool())], [0])
    query, key, value = tensors(1, 2, 2, 3, 0, 8)
    layer.update(key, value)
    with pytest.raises(RuntimeError, match=f"uses {name}, which wakesight's kernels do not know"):
        function(None, query, key, value, None, scaling=0.3, **{name: 20.0})
    assert not layer.attended


@pytest.mark.parametrize("function", [sdpa, eager])
def test_a_layer_that_stored_keys_attends_once(function):
    layer = SlotLayer([Slots(Pool())], [0])
    query, key, value = tensors(1, 6, 2, 5, 0, 8)
    keys, values = layer.update(key, value)
    assert not layer.attended

    found, weights = function(None, query, keys, values, None, scaling=0.3, dropout=0.0)

    assert weights is None
    assert layer.attended
    assert torch.allclose(found.transpose(1, 2).double(), reference(query, key, value, 0.3), atol=1e-5)
    assert take_pending() is None
