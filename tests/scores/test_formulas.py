"""Every scorer against its formula, written out once more as plain float64 loops over heads and tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from wakesight.core import Scores, Signals
from wakesight.errors import RequestError, WorkError
from wakesight.scores.keydiff import KeyDiff
from wakesight.scores.knorm import KNorm
from wakesight.scores.random import Random
from wakesight.scores.snapkv import SnapKV
from wakesight.scores.streaming import Streaming
from wakesight.scores.table import SCORERS, scorer

WINDOW = 8
GROUPS = (1, 3, 8)  # query heads per KV head
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 50)


def signals(tokens: int, *, group: int = 3, recorded: int = WINDOW, seed: int = 0, dtype=torch.float32) -> Signals:
    """Two layers of different shape and scale, as an engine would hand them over."""
    noise = torch.Generator().manual_seed(seed)
    streams: dict[str, list[torch.Tensor]] = {"keys": [], "values": [], "queries": []}
    for heads, dim in ((2, 16), (3, 4)):
        offset = torch.randn(heads, 1, dim, generator=noise)  # real keys share a direction
        streams["keys"].append((torch.randn(heads, tokens, dim, generator=noise) + offset).to(dtype))
        streams["values"].append(torch.randn(heads, tokens, dim, generator=noise).to(dtype))
        window = min(recorded, tokens)
        streams["queries"].append(torch.randn(heads * group, window, dim, generator=noise).to(dtype) * 2)
    return Signals(tokens, 0, (16**-0.5, 0.3), {name: tuple(layers) for name, layers in streams.items()})


def assert_close(found: Scores, expected: list[np.ndarray]) -> None:
    assert len(found.layers) == len(expected)
    for layer, wanted in zip(found.layers, expected, strict=True):
        assert layer.dtype == torch.float32
        assert layer.shape == wanted.shape
        np.testing.assert_allclose(layer.numpy(), wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def float64(stream: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
    return [layer.double().numpy() for layer in stream]


@pytest.mark.parametrize("tokens", LENGTHS)
def test_knorm_is_minus_the_length_of_the_key(tokens):
    given = signals(tokens)
    expected = []
    for keys in float64(given["keys"]):
        layer = np.zeros(keys.shape[:2])
        for head in range(keys.shape[0]):
            for i in range(tokens):
                layer[head, i] = -math.sqrt(sum(x * x for x in keys[head, i]))
        expected.append(layer)

    assert_close(KNorm().score(given), expected)


@pytest.mark.parametrize("anchor", ["mean", "normalised_mean"])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_keydiff_is_minus_the_cosine_to_the_average_key(tokens, anchor):
    given = signals(tokens)
    expected = []
    for keys in float64(given["keys"]):
        layer = np.zeros(keys.shape[:2])
        for head in range(keys.shape[0]):
            average = np.zeros(keys.shape[2])
            for i in range(tokens):
                length = math.sqrt(sum(x * x for x in keys[head, i])) if anchor == "normalised_mean" else 1.0
                average += keys[head, i] / length / tokens
            for i in range(tokens):
                key = keys[head, i]
                layer[head, i] = -(key @ average) / math.sqrt((key @ key) * (average @ average))
        expected.append(layer)

    assert_close(KeyDiff(anchor).score(given), expected)


def test_the_two_keydiff_anchors_differ_when_norms_do():
    given = signals(50)
    given["keys"][0][:, 7] *= 40

    plain, normalised = KeyDiff("mean").score(given), KeyDiff("normalised_mean").score(given)

    assert not torch.allclose(plain.layers[0], normalised.layers[0], atol=1e-2)
    assert torch.allclose(plain.layers[0][:, 7], torch.tensor(-1.0), atol=0.1)  # one long key owns the plain mean


@pytest.mark.parametrize("anchor", ["mean", "normalised_mean"])
def test_a_key_of_zeros_has_no_direction_and_a_finite_score(anchor):
    given = signals(20)
    given["keys"][0][:, 3] = 0

    scores = KeyDiff(anchor).score(given).checked("keydiff")

    assert scores.layers[0][:, 3].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("sinks", [0, 4, 60])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_streaming_is_the_age_and_always_keeps_the_sinks(tokens, sinks):
    found = Streaming(sinks).score(signals(tokens))

    assert_close(found, [np.array([[i / tokens for i in range(tokens)]] * heads) for heads in (2, 3)])
    assert found.must_keep.tolist() == [i < sinks for i in range(tokens)]


def snapkv(given: Signals, *, window: int, kernel: int, pooling: str, group: str) -> list[np.ndarray]:
    """SnapKV with nothing but loops: attention of the last queries, mean over them, group, pool."""
    tokens, width = given.tokens, min(window, given.tokens)
    earlier = tokens - width
    layers = []
    for keys, queries, scale in zip(
        float64(given["keys"]), float64(given["queries"]), given.scaling, strict=True
    ):  # fmt: skip
        heads = keys.shape[0]
        share = queries.shape[0] // heads
        layer = np.zeros((heads, tokens))
        for head in range(heads):
            rows = []
            for query_head in range(head * share, (head + 1) * share):
                row = np.zeros(earlier)
                for t in range(width):
                    query = queries[query_head, queries.shape[1] - width + t]
                    seen = earlier + t + 1  # causal inside the window
                    weights = [math.exp(scale * float(query @ keys[head, i])) for i in range(seen)]
                    row += np.array(weights[:earlier]) / sum(weights) / width
                rows.append(row)
            reduced = [(max if group == "max" else np.mean)([row[i] for row in rows]) for i in range(earlier)]
            half = kernel // 2
            for i in range(earlier):
                around = reduced[max(i - half, 0) : i + half + 1]
                layer[head, i] = {
                    "none": reduced[i],
                    "max": max(around),
                    "avg": sum(around) / kernel,  # zeros beyond either end, as the original pads
                }[pooling]
        layers.append(layer)
    return layers


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("pooling", ["max", "avg", "none"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_snapkv_is_the_attention_of_the_last_queries(tokens, group, pooling, reduce):
    given = signals(tokens, group=group, seed=tokens)

    found = SnapKV(WINDOW, 5, pooling, reduce).score(given)

    assert_close(found, snapkv(given, window=WINDOW, kernel=5, pooling=pooling, group=reduce))
    assert found.must_keep.tolist() == [i >= tokens - WINDOW for i in range(tokens)]


@pytest.mark.parametrize(("window", "kernel"), [(1, 1), (1, 7), (3, 3), (16, 99)])
def test_snapkv_takes_the_last_of_the_recorded_queries(window, kernel):
    given = signals(40, recorded=20)

    found = SnapKV(window, kernel).score(given)

    assert_close(found, snapkv(given, window=window, kernel=kernel, pooling="max", group="mean"))


def test_snapkv_defaults_are_the_documented_setting():
    given = signals(100, recorded=64)

    found = SnapKV().score(given)

    assert_close(found, snapkv(given, window=32, kernel=7, pooling="max", group="mean"))


def test_snapkv_ignores_how_large_its_logits_are():
    """A softmax of huge logits must not overflow."""
    given = signals(30)
    for queries in given["queries"]:
        queries *= 1e4

    SnapKV(WINDOW).score(given).checked("snapkv")


def test_snapkv_refuses_a_window_that_was_not_recorded():
    with pytest.raises(
        RequestError, match="needs the last 8 queries, but 5 were recorded; prefill with query_window=8"
    ):
        SnapKV(WINDOW).score(signals(40, recorded=5))


@pytest.mark.parametrize(("window", "kernel"), [(0, 7), (-1, 7), (32, 0), (32, 6), (32, -3)])
def test_snapkv_refuses_windows_and_kernels_that_are_none(window, kernel):
    with pytest.raises(RequestError, match=f"got window={window}, kernel={kernel}"):
        SnapKV(window, kernel)


def test_random_is_the_same_for_a_seed_and_another_for_another():
    one, again, other = (Random(seed).score(signals(50)) for seed in (3, 3, 4))

    assert all(torch.equal(a, b) for a, b in zip(one.layers, again.layers, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one.layers, other.layers, strict=True))


def test_random_depends_on_the_shape_of_the_context_only():
    one, other = (Random().score(signals(50, seed=seed)) for seed in (1, 2))

    assert all(torch.equal(a, b) for a, b in zip(one.layers, other.layers, strict=True))


def test_random_differs_between_heads_and_layers_and_is_uniform():
    found = Random().score(signals(4000))
    rows = [row for layer in found.layers for row in layer]

    assert len({tuple(row[:20].tolist()) for row in rows}) == len(rows)
    assert all(stats.kstest(row.numpy(), "uniform").pvalue > 1e-3 for row in rows)


def test_random_leaves_torchs_own_generator_alone():
    before = torch.random.get_rng_state()

    Random().score(signals(50))

    assert torch.equal(torch.random.get_rng_state(), before)


def test_random_refuses_a_seed_beyond_64_bits():
    with pytest.raises(RequestError):
        Random(10**20).score(signals(5))


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("tokens", [1, 33, 200])
def test_every_scorer_gives_finite_float32_for_every_entry(name, tokens):
    given = signals(tokens, recorded=64)

    found = scorer(name).score(given).checked(name)

    assert [tuple(layer.shape) for layer in found.layers] == [(2, tokens), (3, tokens)]
    assert all(layer.dtype == torch.float32 for layer in found.layers)
    assert found.must_keep is None or (found.must_keep.dtype == torch.bool and found.must_keep.shape == (tokens,))


@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_reads_only_what_it_says_and_changes_nothing(name):
    method = scorer(name)
    given = signals(80, recorded=64)
    before = {stream: [layer.clone() for layer in layers] for stream, layers in given.streams.items()}
    lean = Signals(80, 0, given.scaling, {stream: given[stream] for stream in method.reads})

    found, leaner = method.score(given), method.score(lean)

    assert all(torch.equal(a, b) for a, b in zip(found.layers, leaner.layers, strict=True))
    for stream, layers in given.streams.items():
        assert all(torch.equal(a, b) for a, b in zip(layers, before[stream], strict=True))


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keys_are_scored_in_float32(name, dtype):
    half = signals(80, recorded=64, dtype=dtype)
    streams = {stream: tuple(layer.float() for layer in layers) for stream, layers in half.streams.items()}
    wide = Signals(80, 0, half.scaling, streams)

    found, expected = scorer(name).score(half), scorer(name).score(wide)

    assert all(torch.equal(a, b) for a, b in zip(found.layers, expected.layers, strict=True))


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_score_that_is_not_finite_is_named_by_layer_head_and_position(value, shown):
    layers = (torch.zeros(2, 9), torch.zeros(3, 9))
    layers[1][2, 4] = layers[1][2, 6] = value

    with pytest.raises(WorkError, match=f"'knorm' gave {shown} at attention layer 1, KV head 2, position 4;"):
        Scores(layers).checked("knorm")


@pytest.mark.parametrize("name", ["knorm", "keydiff", "snapkv"])
def test_keys_that_overflowed_are_found_after_scoring(name):
    given = signals(80, recorded=64)
    given["keys"][1][2, 11] = math.nan

    with pytest.raises(WorkError, match="attention layer 1, KV head 2, position"):
        scorer(name).score(given).checked(name)


def test_a_signal_that_was_not_recorded_is_named():
    with pytest.raises(RequestError, match="'gates' was not recorded for this session; it has keys, queries, values"):
        _ = signals(5)["gates"]
