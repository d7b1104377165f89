"""What a reader sees, and in which order."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from wakesight.core import ModelGeometry, Signals
from wakesight.errors import RequestError
from wakesight.estimator.features import READERS, FeatureSpec, ages, reader_parts

TOKENS, PREFIX = 23, 2


def geometry(**changes) -> ModelGeometry:
    base = ModelGeometry(
        family="drawn", n_layers=8, attention_layers=(3, 7), recurrent_layers=(0, 1, 2, 4, 5, 6), query_heads=4,
        kv_heads=(2, 3), key_dims=(4, 6), value_dims=(4, 6), itemsize=4, max_positions=512,
        native_heads=(2, 3, 2, 3, 2, 3),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def paper() -> ModelGeometry:
    """Of the paper's model: 64 layers, every fourth one attends."""
    attention = tuple(range(3, 64, 4))
    return ModelGeometry(
        family="27b", n_layers=64, attention_layers=attention,
        recurrent_layers=tuple(x for x in range(64) if x not in attention), query_heads=24, kv_heads=(4,) * 16,
        key_dims=(256,) * 16, value_dims=(256,) * 16, itemsize=2, max_positions=1 << 18, native_heads=(48,) * 48,
    )  # fmt: skip


def signals(held: bool = False) -> Signals:
    noise = torch.Generator().manual_seed(0)
    known = geometry()
    streams = {
        "native": [torch.rand(TOKENS, heads, 3, generator=noise) for heads in known.native_heads],
        "hidden": [torch.randn(TOKENS, 5, generator=noise).bfloat16() for _ in range(2)],
        "keys": [torch.randn(h, TOKENS, d, generator=noise) for h, d in zip((2, 3), (4, 6), strict=True)],
        "values": [torch.randn(h, TOKENS, d, generator=noise) for h, d in zip((2, 3), (4, 6), strict=True)],
    }
    there = None
    if held:
        there = tuple(torch.rand(h, TOKENS, generator=noise) < 0.6 for h in (2, 3))
        for name in ("keys", "values"):
            for tensor, mask in zip(streams[name], there, strict=True):
                tensor[~mask] = math.nan
    return Signals(TOKENS, PREFIX, (0.5, 0.5), streams, there)


def test_the_papers_windows_widths_and_order():
    spec, model = FeatureSpec(), paper()
    depths = [[int(model.recurrent_layers[m]) for m in window] for window in spec.windows(model)]

    assert depths[:3] == [[0, 1, 2], [0, 1, 2, 4, 5, 6], [4, 5, 6, 8, 9, 10]]
    assert depths[9] == [32, 33, 34, 36, 37, 38]
    assert [spec.width(model, layer) for layer in range(16)] == [435] + [867] * 15
    names = spec.names(model, 1)
    assert names[(4 * 48 + 7) * 3 + 1] == "native.5.head7.g"
    assert names[864:] == ["age.relative", "age.log_to_end", "age.log_to_start"]
    assert spec.names(model, 0)[432:] == names[864:]


@pytest.mark.parametrize("parts", [*READERS.values(), ("key",), ("key_stats",), ("hidden",), ("native",)])
@pytest.mark.parametrize("held", [False, True])
def test_every_number_stands_where_its_name_says(parts, held):
    spec, found, known = FeatureSpec(parts, window=2), signals(held), geometry()
    for layer in range(2):
        window = spec.windows(known)[layer]
        matrix = spec.matrix(found, layer, window)
        names = spec.names(known, layer, hidden=5)
        heads = known.kv_heads[layer] if spec.own else 1

        assert list(matrix.shape) == [heads, TOKENS, len(names)]
        assert len(names) == spec.width(known, layer, hidden=5)
        for head in range(heads):
            for column, name in enumerate(names):
                expected = torch.tensor([looked_up(found, name, layer, head, t, known) for t in range(TOKENS)])
                torch.testing.assert_close(matrix[head, :, column], expected, rtol=1e-5, atol=1e-6)


def looked_up(found: Signals, name: str, layer: int, head: int, token: int, known: ModelGeometry) -> float:
    """One feature by its name, in plain arithmetic."""
    part, *rest = name.split(".")
    there = found.held is None or bool(found.held[layer][head, token])
    if part == "native":
        m = known.recurrent_layers.index(int(rest[0]))
        channel = ["beta", "g", "norm_v"].index(rest[2])
        return float(found["native"][m][token, int(rest[1].removeprefix("head")), channel])
    if part == "hidden":
        return float(found["hidden"][layer][token, int(rest[0])])
    if part == "age":
        i, n = token + 1, found.tokens
        return {
            "relative": (n - i) / n,
            "log_to_end": math.log(1 + n - i) / math.log(1 + n),
            "log_to_start": math.log(i) / math.log(n),
        }[rest[0]]
    if not there:
        return 0.0
    key = found["keys"][layer][head, token].double()
    if part == "key":
        return float(key[int(rest[0])])
    if rest[0] == "key_norm":
        return float(key.norm())
    if rest[0] == "value_norm":
        return float(found["values"][layer][head, token].double().norm())
    keys = found["keys"][layer][head].double()
    mask = torch.ones(found.tokens, dtype=torch.bool) if found.held is None else found.held[layer][head]
    mean = keys[mask].sum(dim=0)
    return float(key @ mean / (key.norm() * mean.norm()))


def test_pieces_of_a_context_are_rows_of_the_whole():
    spec, found = FeatureSpec(("native", "age", "key_stats", "key")), signals()
    window = spec.windows(geometry())[1]
    whole = spec.matrix(found, 1, window)
    pieces = [spec.matrix(found, 1, window, start=a, stop=min(a + 5, TOKENS)) for a in range(0, TOKENS, 5)]

    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=0)
    torch.testing.assert_close(spec.matrix(found, 1, window, head=2), whole[2:3], rtol=0, atol=0)


def test_value_norms_stand_in_for_values():
    spec, found = FeatureSpec(("key_stats",)), signals()
    norms = [values.norm(dim=-1) for values in found["values"]]
    streams = {name: value for name, value in found.streams.items() if name != "values"} | {"value_norms": norms}

    torch.testing.assert_close(
        spec.matrix(Signals(TOKENS, PREFIX, (0.5, 0.5), streams), 1, ()), spec.matrix(found, 1, ())
    )


@pytest.mark.parametrize("tokens", [1, 2, 1000])
def test_ages_lie_between_0_and_1_and_the_order_of_parts_is_fixed(tokens):
    found = ages(0, tokens, tokens)

    assert bool(torch.isfinite(found).all())
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1
    assert bool((found[:, 0].diff() < 0).all())
    assert bool((found[:, 2].diff() > 0).all())
    assert FeatureSpec(("key", "age", "native")) == FeatureSpec(("native", "age", "key"))


def test_a_layer_before_every_recurrent_one_has_its_age_alone():
    known = geometry(attention_layers=(0, 7), recurrent_layers=(1, 2, 3, 4, 5, 6))

    assert FeatureSpec().windows(known)[0] == ()
    assert FeatureSpec().width(known, 0) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FeatureSpec(("natve",)), "no feature part 'natve'"),
        (lambda: FeatureSpec(()), "at least one feature part"),
        (lambda: FeatureSpec(window=0), "window=0"),
        (lambda: reader_parts("signal"), "no reader 'signal', did you mean 'signals'"),
        (lambda: FeatureSpec().windows(geometry(native_heads=())), "a drawn model has no native signals.*hidden"),
        (lambda: FeatureSpec(("hidden",)).matrix(without("hidden"), 0, ()), "'hidden' was not recorded"),
        (lambda: FeatureSpec(("native",)).matrix(without("native"), 0, (0, 1)), "'native' was not recorded"),
    ],
)
def test_what_cannot_be_built_is_refused(make, message):
    with pytest.raises(RequestError, match=message):
        make()


def without(name: str) -> Signals:
    found = signals()
    return Signals(TOKENS, PREFIX, (0.5, 0.5), {key: x for key, x in found.streams.items() if key != name})
