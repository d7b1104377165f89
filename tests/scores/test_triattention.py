"""TriAttention against its formula with keys turned back to before RoPE, one entry and one offset at a time."""

from __future__ import annotations

import cmath
import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from wakesight.core import Signals
from wakesight.errors import RequestError
from wakesight.registry import resolve, spec_of
from wakesight.scores import triattention as triattention_module
from wakesight.scores.base import score
from wakesight.scores.triattention import TriAttention
from wakesight.signals.rope import rotate

SHAPES = ((2, 16, 16), (3, 12, 4), (1, 10, 0))  # (KV heads, dim, rotary dim) of the layers
KV_HEADS = [heads for heads, _, _ in SHAPES]
OFFSETS = [2**i for i in range(17)]
TABLE = {"triattention": "wakesight.scores.triattention:TriAttention"}


@dataclass(frozen=True)
class Measured:
    """The part of an artifact that this scorer reads."""

    query_stats: dict[str, torch.Tensor] | None


def frequencies(rotary_dim: int) -> list[float]:
    return [1e4 ** -(2 * i / rotary_dim) for i in range(rotary_dim // 2)]


def case(tokens: int, group: int = 3, factor: float = 1.0, holes: bool = False, prefix: int = 0, seed: int = 0):
    """Signals with stored keys, and per layer the same keys before RoPE."""
    noise = torch.Generator().manual_seed(seed)
    stats: dict[str, torch.Tensor] = {}
    stored, before, held = [], [], []
    for layer, (heads, dim, rotary_dim) in enumerate(SHAPES):
        keys = torch.randn(heads, tokens, dim, generator=noise, dtype=torch.float64)
        omega = torch.tensor([*frequencies(rotary_dim), *[0.0] * ((dim - rotary_dim) // 2)], dtype=torch.float64)
        turn = torch.arange(tokens, dtype=torch.float64)[:, None] * omega[: rotary_dim // 2].repeat(2)
        mean = torch.randn(heads * group, dim // 2, 2, generator=noise)
        stats |= {
            f"mean.{layer}": mean,
            f"abs.{layer}": mean.norm(dim=-1) * (1 + torch.rand(heads * group, dim // 2, generator=noise)),
            f"omega.{layer}": omega,
            f"scale.{layer}": torch.tensor(factor**2 if rotary_dim else 1.0, dtype=torch.float64),
            f"rotary.{layer}": torch.tensor(rotary_dim // 2),
        }
        before.append(keys)
        stored.append(rotate(keys, turn.cos() * factor, turn.sin() * factor))
        if holes:
            there = torch.rand(heads, tokens, generator=noise) < 0.5
            there[:, -1] = True
            stored[-1][~there] = math.nan
            held.append(there)
    signals = Signals(
        tokens, prefix, (0.3,) * len(SHAPES), {"keys": tuple(stored)}, tuple(held) if holes else None, Measured(stats)
    )
    return signals, before


def reference(signals, before, factor=1.0, aggregate="mean", group="max", normalise=False, offsets=OFFSETS):
    """baseline formula: amplitude, phase and extra of every band, summed at every offset."""
    layers = []
    for layer, (heads, dim, rotary_dim) in enumerate(SHAPES):
        half, rest = rotary_dim // 2, (dim - rotary_dim) // 2
        pairs = [(f, f + half) for f in range(half)] + [(rotary_dim + x, rotary_dim + x + rest) for x in range(rest)]
        omega = [*frequencies(rotary_dim), *[0.0] * rest]
        scales = [factor**2] * half + [1.0] * rest
        mean, size = (signals.artifact.query_stats[f"{name}.{layer}"].double().numpy() for name in ("mean", "abs"))
        keys = before[layer].numpy()
        present = [
            [i for i in range(signals.tokens) if signals.held is None or signals.held[layer][head, i]]
            for head in range(heads)
        ]
        share = mean.shape[0] // heads
        found = np.zeros((heads, signals.tokens))
        for head in range(heads):
            rows = []
            for query_head in range(head * share, (head + 1) * share):
                row = {}
                for i in present[head]:
                    extra, sums = 0.0, [0.0] * len(offsets)
                    for f, (front, back) in enumerate(pairs):
                        query, key = complex(*mean[query_head, f]), complex(keys[head, i, front], keys[head, i, back])
                        amplitude, phase = abs(query) * abs(key), cmath.phase(query * key.conjugate())
                        extra += scales[f] * (size[query_head, f] - abs(query)) * abs(key)
                        for at, offset in enumerate(offsets):
                            angle = omega[f] * (signals.tokens + offset - i) + phase
                            sums[at] += scales[f] * amplitude * math.cos(angle)
                    row[i] = (max(sums) if aggregate == "max" else sum(sums) / len(sums)) + extra
                if normalise:
                    counted = [value for i, value in row.items() if i >= signals.prefix]
                    spread = max(float(np.std(counted)), 1e-6)
                    row = {i: (value - float(np.mean(counted))) / spread for i, value in row.items()}
                rows.append(row)
            for i in present[head]:
                values = [row[i] for row in rows]
                found[head, i] = max(values) if group == "max" else sum(values) / share
        layers.append(found)
    return layers


def assert_close(found, expected) -> None:
    for layer, wanted in zip(found.layers, expected, strict=True):
        assert layer.dtype == torch.float64
        np.testing.assert_allclose(layer.numpy(), wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("group", [1, 3])
def test_it_is_its_formula_on_keys_before_rope(tokens, group):
    signals, before = case(tokens, group)

    assert_close(score(TriAttention(), signals, KV_HEADS), reference(signals, before))


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregate": "max"},
        {"group": "mean"},
        {"normalise": True},
        {"aggregate": "max", "group": "mean", "normalise": True},
    ],
)
@pytest.mark.parametrize("holes", [False, True])
def test_it_follows_its_settings(settings, holes):
    signals, before = case(30, holes=holes, prefix=4)

    assert_close(TriAttention(**settings).score(signals), reference(signals, before, **settings))


@pytest.mark.parametrize(("reach", "offsets"), [(1, [1]), (7, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_offsets_are_the_powers_of_two_up_to_the_reach(reach, offsets):
    signals, before = case(9)

    assert_close(TriAttention(reach=reach).score(signals), reference(signals, before, offsets=offsets))


def test_rotated_bands_carry_the_square_of_the_attention_factor():
    signals, before = case(20, factor=1.4)

    assert_close(TriAttention().score(signals), reference(signals, before, factor=1.4))


def test_long_contexts_are_taken_in_blocks(monkeypatch):
    signals, _ = case(25)
    whole = TriAttention().score(signals)
    monkeypatch.setattr(triattention_module, "BLOCK", 7)

    for one, other in zip(whole.layers, TriAttention().score(signals).layers, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_keys_are_scored_in_float32(dtype):
    signals, _ = case(50)
    narrow = dataclasses.replace(signals, streams={"keys": tuple(keys.to(dtype) for keys in signals["keys"])})
    exact = dataclasses.replace(signals, streams={"keys": tuple(keys.double() for keys in narrow["keys"])})

    for found, wanted in zip(TriAttention().score(narrow).layers, TriAttention().score(exact).layers, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_scores_without_spread_stay_finite_when_normalised():
    signals, _ = case(1)

    assert not any(layer.any() for layer in score(TriAttention(normalise=True), signals, KV_HEADS).layers)


@pytest.mark.parametrize("artifact", [None, Measured(None), Measured({})])
def test_a_model_without_statistics_is_refused_with_the_command(artifact):
    signals = dataclasses.replace(case(5)[0], artifact=artifact)

    with pytest.raises(RequestError, match=r"were not measured; measure them with: wakesight calibrate$"):
        TriAttention().score(signals)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary.1": None}, r"layer 1 has 3 KV heads of 12 dims, and they lack its 'rotary'"),
        ({"mean.0": torch.zeros(5, 8, 2)}, r"layer 0 has 2 KV heads of 16 dims, and they hold \[5, 8\]"),
        ({"omega.2": torch.zeros(4)}, "layer 2 has 1 KV heads of 10 dims"),
        ({"rotary.2": torch.tensor(6)}, "layer 2 has 1 KV heads of 10 dims"),
    ],
)
def test_statistics_of_another_model_are_refused(change, message):
    signals, _ = case(5)
    stats = {name: tensor for name, tensor in (signals.artifact.query_stats | change).items() if tensor is not None}

    with pytest.raises(RequestError, match=f"are of another model: {message}.*; measure them again"):
        TriAttention().score(dataclasses.replace(signals, artifact=Measured(stats)))


def test_its_text_form_comes_back():
    method = TriAttention("max", "mean", True, 1024)

    assert resolve(spec_of(method, "triattention"), TABLE, "scorer") == method
    assert resolve("triattention", TABLE, "scorer") == TriAttention()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reach": 0}, "triattention reach=0 is too small: .*; use reach=1 or more"),
        ({"aggregate": "sum"}, "triattention aggregate='sum' is unknown; use aggregate=mean or max"),
        ({"group": "sum"}, "triattention group='sum' is unknown; use group=mean or max"),
    ],
)
def test_settings_it_does_not_know_are_refused(settings, message):
    with pytest.raises(RequestError, match=message):
        TriAttention(**settings)
