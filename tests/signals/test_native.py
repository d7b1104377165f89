"""Rows, native signals and output gates, on tensors that no model made."""

from __future__ import annotations

import pytest
import torch

from wakesight.errors import WorkError
from wakesight.signals.gates import OutputGate
from wakesight.signals.native import delta_rule, mamba2, norms
from wakesight.signals.rows import Rows


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rows_are_joined_once_and_never_change():
    rows = Rows()
    with pytest.raises(WorkError, match="nothing was overheard yet"):
        rows.whole()
    chunks = [drawn(5, 2, 3, seed=i) for i in range(4)]
    for chunk in chunks:
        rows.add(chunk)
    assert rows.count == 20
    whole = rows.whole()
    assert torch.equal(whole, torch.cat(chunks))
    assert rows.whole() is whole

    twin = rows.copy()
    twin.add(drawn(3, 2, 3))
    assert (rows.count, twin.count) == (20, 23)
    assert rows.whole() is whole
    assert torch.equal(twin.whole()[:20], whole)
    assert Rows().copy().count == 0


def test_growing_by_chunks_copies_every_row_once(monkeypatch):
    joined = []
    stock = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, *rest: joined.append(sum(map(len, parts))) or stock(parts, *rest))
    rows = Rows()
    for index in range(200):
        rows.add(drawn(4, 3, seed=index))
    rows.whole()
    rows.whole()
    assert joined == [800]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_delta_rule_rows(dtype):
    beta, g, value = drawn(7, 4).sigmoid().to(dtype), -drawn(7, 4, seed=1).abs(), drawn(7, 4, 16, seed=2).to(dtype)
    rows = delta_rule(beta, g, value)
    assert (rows.shape, rows.dtype) == ((7, 4, 3), torch.float32)
    expected = torch.stack([beta.double(), g.double(), value.double().square().sum(-1).sqrt()], dim=-1)
    assert torch.allclose(rows.double(), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_do_not_depend_on_the_layout(dtype):
    by_token = drawn(33, 4, 16).to(dtype)
    by_channel = by_token.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert by_channel.stride(0) == 1
    for layout in (by_token, by_channel, by_token[:1], by_channel[:, :1]):
        expected = layout.double().square().sum(-1).sqrt()
        assert norms(layout).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.allclose(norms(layout).double(), expected, rtol=1e-6)


def test_a_decay_per_channel_becomes_its_mean():
    beta, g, value = drawn(7, 4).sigmoid(), -drawn(7, 4, 8, seed=1).abs(), drawn(7, 4, 16, seed=2)
    assert torch.allclose(delta_rule(beta, g, value)[..., 1], g.mean(dim=-1))


@pytest.mark.parametrize("limits", [None, (0.3, 0.9)])
def test_mamba2_rows(limits):
    x, dt, decay, bias = drawn(7, 4, 16), drawn(7, 4, seed=1), -drawn(4, seed=2).exp(), drawn(4, seed=3)
    rows = mamba2(x, dt, decay, bias, limits)
    step = torch.log1p((dt.double() + bias.double()).exp())
    step = step if limits is None else step.clamp(*limits)
    expected = torch.stack([step, step * decay.double(), x.double().norm(dim=-1)], dim=-1)
    assert torch.allclose(rows.double(), expected, rtol=1e-6)
    assert limits is None or bool((step == 0.3).any() and (step == 0.9).any())


def test_output_gate_means_do_not_depend_on_chunks():
    gate = drawn(50, 6, 8) * 3
    whole, parts = OutputGate(2), OutputGate(2)
    whole.add(gate)
    for start in range(0, 50, 7):
        parts.add(gate[start : start + 7])
    opened = gate.double().sigmoid()
    for tap in (whole, parts):
        assert tap.count == 50
        assert torch.allclose(tap.mean.double(), opened.mean(dim=(0, 2)), atol=1e-7)
        peak = torch.stack([opened[:, :3].amax(1).mean(), opened[:, 3:].amax(1).mean()])
        assert torch.allclose(tap.peak.double(), peak, atol=1e-7)
    assert (whole.peak >= whole.mean.view(2, 3).amax(1)).all()


def test_output_gate_copies_and_restores():
    tap = OutputGate(2)
    with pytest.raises(WorkError, match="no output gate was seen yet"):
        _ = tap.mean
    assert tap.tensors() == {}
    tap.add(drawn(10, 6, 8))
    mean = tap.mean
    twin, restored = tap.copy(), OutputGate.restored(tap.tensors())
    for other in (twin, restored):
        assert torch.equal(other.mean, mean)
        other.add(drawn(10, 6, 8, seed=1))
        assert (tap.count, other.count) == (10, 20)
        assert torch.equal(tap.mean, mean)
    assert torch.equal(twin.mean, restored.mean)
    assert torch.equal(twin.peak, restored.peak)
