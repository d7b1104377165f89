"""The fused and the plain attention equal a float64 loop over repeated heads; KV heads are never repeated."""

from __future__ import annotations

import pytest
import torch

from wakesight.engines.hf.attention import attend, attend_eager, causal_tail


def reference(query, key, value, scaling):
    """float64, KV heads repeated, one query token at a time."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (t.double() for t in (query, key, value))
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    past = key.shape[2] - query.shape[2]
    rows = []
    for j in range(query.shape[2]):
        seen = slice(0, past + j + 1)
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
        assert torch.allclose(attend_eager(query, key, value, 0.3)[0].double(), expected, atol=1e-5)


def test_values_may_be_narrower_than_keys():
    query, key, value = tensors(1, 4, 2, 7, 30, 24, value_dim=16)
    expected = reference(query, key, value, 0.2)
    assert torch.allclose(attend(query, key, value, 0.2).double(), expected, atol=1e-5)
    assert torch.allclose(attend_eager(query, key, value, 0.2)[0].double(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("new", "past"), [(1, 200), (50, 200), (50, 0)])
def test_half_precision_stays_within_its_own_rounding(dtype, new, past):
    query, key, value = (t.to(dtype) for t in tensors(1, 6, 2, new, past, 64))
    expected = reference(query, key, value, 0.125)
    for found in (attend(query, key, value, 0.125), attend_eager(query, key, value, 0.125)[0]):
        assert found.dtype == dtype
        assert (found.double() - expected).abs().max() < 8 * torch.finfo(dtype).eps


def test_causal_tail_hides_exactly_the_later_new_slots():
    mask = causal_tail(3, 5, torch.device("cpu"), torch.float32)
    assert (mask == 0).tolist() == [
        [True, True, True, False, False],
        [True, True, True, True, False],
        [True, True, True, True, True],
    ]


@pytest.mark.parametrize("new", [1, 64])
def test_memory_of_a_call_does_not_hold_repeated_heads(new):
    """Nothing as large as K and V for every query head is allocated."""
    query, key, value = tensors(1, 16, 1, new, 4096, 64)
    with torch.profiler.profile(profile_memory=True) as profile:
        attend(query, key, value, 0.125)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert allocated < 16 * key.nbytes / 4
