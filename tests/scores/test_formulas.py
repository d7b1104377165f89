"""Every scorer against its formula, written out once more as plain float64 loops over heads and tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from wakesight.core import ModelGeometry, Scores, Signals
from wakesight.errors import RequestError, WorkError
from wakesight.estimator.artifact import Artifact, described
from wakesight.estimator.features import READERS, FeatureSpec
from wakesight.estimator.net import empty_reader
from wakesight.scores.base import has_probe
from wakesight.scores.expected_attention import ExpectedAttention
from wakesight.scores.h2o import H2O
from wakesight.scores.keydiff import KeyDiff
from wakesight.scores.knorm import KNorm
from wakesight.scores.random import Random
from wakesight.scores.snapkv import SnapKV
from wakesight.scores.streaming import Streaming
from wakesight.scores.table import SCORERS, scorer
from wakesight.scores.tova import TOVA
from wakesight.signals.chunk import Chunk
from wakesight.signals.query_moments import QueryMoments
from wakesight.signals.rope import rotate

WINDOW = 8
GROUPS = (1, 3, 8)  # query heads per KV head
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 50)
SHAPES = ((2, 16), (3, 4))  # (KV heads, dim) of the two layers
NATIVE = (2, 4)  # heads of the two recurrent layers
ROTARY = {"full": (16, 4), "partial": (8, 2), "none": (0, 0)}  # rotary dims of the two layers

BY_SIGNALS = [name for name in SCORERS if not has_probe(scorer(name))]  # the others need an engine
ELSEWHERE = {  # scorers whose formula is in a test file of its own
    "random": "test_formulas", "kvzip": "test_kvzip", "triattention": "test_triattention",
    "gatesight": "test_gatesight", "gatesight+": "test_gatesight",
}  # fmt: skip


def rotation(positions: range, rotary_dim: int, factor: float = 1.0) -> torch.Tensor:
    """RoPE's cosine and sine, float64 [2, position, rotary_dim], front and back half alike."""
    half = rotary_dim // 2
    turns = torch.tensor([[p * 100.0 ** -(i / half) for i in range(half)] * 2 for p in positions], dtype=torch.float64)
    return torch.stack([turns.cos(), turns.sin()]).reshape(2, len(positions), rotary_dim) * factor


def signals(
    tokens: int, *, group: int = 3, recorded: int = WINDOW, seed: int = 0, dtype=torch.float64, rope: str = "partial",
    holes: bool = False,
) -> Signals:  # fmt: skip
    """Two layers of different shape and scale, as an engine would hand them over.

    holes: heads hold different entries, the first one a single one; NaN lies where nothing is held.
    """
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    streams: dict[str, list[torch.Tensor]] = {}
    held = []
    for (heads, dim), rotary_dim in zip(SHAPES, ROTARY[rope], strict=True):
        root = normal(heads * group, dim, dim)
        layer = {
            "keys": normal(heads, tokens, dim) + normal(heads, 1, dim),  # real keys share a direction
            "values": normal(heads, tokens, dim),
            "queries": normal(heads * group, min(recorded, tokens), dim) * 2,
            "attention_sums": torch.rand(heads * group, tokens, generator=noise, dtype=torch.float64) * tokens,
            "query_mean": normal(heads * group, dim),
            "query_covariance": root @ root.mT / dim,
            "future_rotation": rotation(range(tokens, tokens + 600), rotary_dim),
        }
        if holes:
            there = torch.rand(heads, tokens, generator=noise) < 0.6
            there[torch.arange(heads), torch.randint(tokens, (heads,), generator=noise)] = True
            if not held:
                there[0] = torch.arange(tokens) == tokens // 3
            held.append(there)
            for name in ("keys", "values"):
                layer[name][~there] = math.nan
            layer["attention_sums"][~there.repeat_interleave(group, dim=0)] = math.nan
        for name, tensor in layer.items():
            streams.setdefault(name, []).append(tensor.to(dtype))
    streams["native"] = [torch.rand(tokens, heads, 3, generator=noise) for heads in NATIVE]
    return Signals(
        tokens,
        0,
        (16**-0.5, 0.3),
        {name: tuple(layers) for name, layers in streams.items()},
        tuple(held) if holes else None,
        artifact(group, rope),
    )


def artifact(group: int, rope: str) -> Artifact:
    """Readers and query statistics of some model with these shapes."""
    noise = torch.Generator().manual_seed(7)
    geometry = ModelGeometry(
        family="drawn", n_layers=4, attention_layers=(1, 3), recurrent_layers=(0, 2), query_heads=0,
        kv_heads=tuple(heads for heads, _ in SHAPES), key_dims=tuple(dim for _, dim in SHAPES),
        value_dims=tuple(dim for _, dim in SHAPES), itemsize=4, max_positions=4096, native_heads=NATIVE,
    )  # fmt: skip
    readers = {name: empty_reader(FeatureSpec(READERS[name]), geometry, 8) for name in ("signals", "signals+keys")}
    stats = {}
    for layer, ((heads, dim), rotary_dim) in enumerate(zip(SHAPES, ROTARY[rope], strict=True)):
        half = rotary_dim // 2
        mean = torch.randn(heads * group, dim // 2, 2, generator=noise)
        stats |= {
            f"mean.{layer}": mean,
            f"abs.{layer}": mean.norm(dim=-1) + torch.rand(heads * group, dim // 2, generator=noise),
            f"omega.{layer}": torch.tensor([100.0 ** -(i / half) for i in range(half)] + [0.0] * (dim // 2 - half)),
            f"scale.{layer}": torch.tensor(1.0),
            f"rotary.{layer}": torch.tensor(half),
        }
    return Artifact("ab" * 32, described(geometry), readers=readers, query_stats=stats)


def assert_close(found: Scores, expected: list[np.ndarray], dtype=torch.float64) -> None:
    assert len(found.layers) == len(expected)
    for layer, wanted in zip(found.layers, expected, strict=True):
        assert layer.dtype == dtype
        assert layer.shape == wanted.shape
        np.testing.assert_allclose(layer.numpy(), wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


def float64(stream: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
    return [layer.double().numpy() for layer in stream]


def present(given: Signals) -> list[list[list[int]]]:
    """Positions held, per layer and KV head, ascending."""
    if given.held is None:
        return [[list(range(given.tokens))] * heads for heads, _ in SHAPES]
    return [[head.nonzero().flatten().tolist() for head in layer] for layer in given.held]


def softmax(logits: dict[int, float]) -> dict[int, float]:
    total = sum(math.exp(x) for x in logits.values())
    return {i: math.exp(x) / total for i, x in logits.items()}


def knorm(given: Signals) -> list[np.ndarray]:
    layers = []
    for keys, held in zip(float64(given["keys"]), present(given), strict=True):
        layer = np.zeros(keys.shape[:2])
        for head in range(keys.shape[0]):
            for i in held[head]:
                layer[head, i] = -math.sqrt(sum(x * x for x in keys[head, i]))
        layers.append(layer)
    return layers


def keydiff(given: Signals, anchor: str = "mean") -> list[np.ndarray]:
    layers = []
    for keys, held in zip(float64(given["keys"]), present(given), strict=True):
        layer = np.zeros(keys.shape[:2])
        for head in range(keys.shape[0]):
            average = np.zeros(keys.shape[2])
            for i in held[head]:
                length = math.sqrt(sum(x * x for x in keys[head, i])) if anchor == "normalised_mean" else 1.0
                average += keys[head, i] / length / len(held[head])
            for i in held[head]:
                key = keys[head, i]
                layer[head, i] = -(key @ average) / math.sqrt((key @ key) * (average @ average))
        layers.append(layer)
    return layers


def streaming(given: Signals) -> list[np.ndarray]:
    layers = []
    for held in present(given):
        layer = np.zeros((len(held), given.tokens))
        for head, positions in enumerate(held):
            for i in positions:
                layer[head, i] = i / given.tokens
        layers.append(layer)
    return layers


def snapkv(given: Signals, window: int = 32, kernel: int = 7, pooling: str = "max", group: str = "mean"):
    """SnapKV with nothing but loops: attention of the last queries, mean over them, group, pool."""
    tokens, width = given.tokens, min(window, given.tokens)
    earlier = tokens - width
    layers = []
    for keys, queries, scale, held in zip(
        float64(given["keys"]), float64(given["queries"]), given.scaling, present(given), strict=True
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
                    seen = [i for i in held[head] if i <= earlier + t]  # causal inside the window
                    weights = softmax({i: scale * float(query @ keys[head, i]) for i in seen})
                    for i in seen:
                        if i < earlier:
                            row[i] += weights[i] / width
                rows.append(row)
            reduced = [(max if group == "max" else np.mean)([row[i] for row in rows]) for i in range(earlier)]
            half = kernel // 2
            for i in held[head]:
                if i >= earlier:
                    continue
                around = reduced[max(i - half, 0) : i + half + 1]
                layer[head, i] = {
                    "none": reduced[i],
                    "max": max(around),
                    "avg": sum(around) / kernel,  # zeros beyond either end, as the original pads
                }[pooling]
        layers.append(layer)
    return layers


def tova(given: Signals) -> list[np.ndarray]:
    layers = []
    for keys, queries, scale, held in zip(
        float64(given["keys"]), float64(given["queries"]), given.scaling, present(given), strict=True
    ):  # fmt: skip
        heads, query_heads = keys.shape[0], queries.shape[0]
        one_list = np.zeros(given.tokens)
        for query_head in range(query_heads):
            head = query_head * heads // query_heads
            query = queries[query_head, -1]
            for i, weight in softmax({i: scale * float(query @ keys[head, i]) for i in held[head]}).items():
                one_list[i] += weight / query_heads
        layer = np.zeros((heads, given.tokens))
        for head in range(heads):
            for i in held[head]:
                layer[head, i] = one_list[i]
        layers.append(layer)
    return layers


def h2o(given: Signals, normalise: bool = False, group: str = "mean") -> list[np.ndarray]:
    layers = []
    for sums, held in zip(float64(given["attention_sums"]), present(given), strict=True):
        share = sums.shape[0] // len(held)
        layer = np.zeros((len(held), given.tokens))
        for head, positions in enumerate(held):
            for i in positions:
                received = [sums[query_head, i] for query_head in range(head * share, (head + 1) * share)]
                layer[head, i] = (max if group == "max" else np.mean)(received)
                if normalise:
                    layer[head, i] /= sum(1 for t in range(given.tokens) if t >= i)
        layers.append(layer)
    return layers


def mean_rope_matrix(table: np.ndarray, horizon: int, dim: int) -> np.ndarray:
    """The average over positions of the matrix that RoPE multiplies a query with: [dim, dim]."""
    rotary_dim = table.shape[2]
    half = rotary_dim // 2
    average = np.zeros((dim, dim))
    for position in range(horizon):
        matrix = np.eye(dim)
        for i in range(half):
            cos, sin = table[:, position, i]
            matrix[i, i] = matrix[i + half, i + half] = cos
            matrix[i, i + half], matrix[i + half, i] = -sin, sin
        average += matrix / horizon
    return average


def expected_attention(
    given: Signals, horizon: int = 512, sinks: int = 4, epsilon: float = 0.0, use_covariance: bool = True,
    use_values: bool = True,
) -> list[np.ndarray]:  # fmt: skip
    names = ("keys", "values", "query_mean", "query_covariance", "future_rotation")
    layers = []
    for keys, values, mean, covariance, table, scale, held in zip(
        *(float64(given[name]) for name in names), given.scaling, present(given), strict=True
    ):
        heads, share, dim = keys.shape[0], mean.shape[0] // keys.shape[0], keys.shape[2]
        turn = mean_rope_matrix(table, horizon, dim)
        layer = np.zeros((heads, given.tokens))
        for head in range(heads):
            counted = [i for i in held[head] if i >= sinks]
            for query_head in range(head * share, (head + 1) * share):
                ahead = turn @ mean[query_head]
                spread = turn @ covariance[query_head] @ turn.T
                logits = {}
                for i in counted:
                    key = keys[head, i]
                    logits[i] = scale * float(key @ ahead)
                    if use_covariance:
                        logits[i] += scale**2 * float(key @ spread @ key) / 2
                for i, weight in softmax(logits).items():
                    layer[head, i] += weight / share
            if use_values:
                for i in counted:
                    length = math.sqrt(sum(x * x for x in values[head, i]))
                    layer[head, i] = (layer[head, i] + epsilon) * length
        layers.append(layer)
    return layers


# the formula at the scorer's default settings
FORMULAS: dict[str, Callable[[Signals], list[np.ndarray]]] = {
    "streaming": streaming,
    "knorm": knorm,
    "keydiff": keydiff,
    "snapkv": snapkv,
    "tova": tova,
    "h2o": h2o,
    "expected_attention": expected_attention,
}


def test_every_scorer_has_its_formula_here():
    assert set(SCORERS) == {*FORMULAS, *ELSEWHERE}
    assert all((Path(__file__).parent / f"{file}.py").is_file() for file in ELSEWHERE.values())


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_float32_scores_are_the_float64_ones_up_to_rounding(name, holes):
    """To 1e-6 of the largest score; over 12 seeds the worst measured was 4e-7 (softmaxes), 1e-7 (plain sums)."""
    given = signals(100, recorded=64, dtype=torch.float32, holes=holes)

    assert_close(scorer(name).score(given), FORMULAS[name](given), dtype=torch.float32)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", FORMULAS)
def test_only_held_entries_are_seen_and_scored(name, tokens, group):
    """The formulas loop over held entries only, and NaN lies wherever nothing is held."""
    given = signals(tokens, group=group, seed=tokens, holes=True)
    method = SnapKV(WINDOW) if name == "snapkv" else scorer(name)
    expected = snapkv(given, WINDOW) if name == "snapkv" else FORMULAS[name](given)

    found = method.score(given)

    assert_close(found.checked(name), expected)
    for layer, held in zip(found.layers, given.held, strict=True):
        assert not layer[~held].any()


def test_random_gives_held_entries_what_they_would_have_had_anyway():
    given = signals(50, holes=True)

    found, everywhere = Random().score(given), Random().score(signals(50))

    for layer, full, held in zip(found.layers, everywhere.layers, given.held, strict=True):
        assert torch.equal(layer, full * held)


@pytest.mark.parametrize("name", BY_SIGNALS)
@pytest.mark.parametrize("tokens", [1, 33, 200])
def test_a_head_that_holds_nothing_scores_zero_everywhere(name, tokens):
    given = signals(tokens, recorded=64, holes=True)
    held = [layer.clone() for layer in given.held]
    held[1][2] = False
    given["keys"][1][2] = given["values"][1][2] = math.nan
    given = dataclasses.replace(given, held=tuple(held))

    found = scorer(name).score(given).checked(name)

    assert not found.layers[1][2].any()


@pytest.mark.parametrize("name", BY_SIGNALS)
def test_a_mask_that_holds_everything_changes_nothing(name):
    given = signals(80, recorded=64)
    everything = tuple(torch.ones(keys.shape[:2], dtype=torch.bool) for keys in given["keys"])
    masked = dataclasses.replace(given, held=everything)

    found, expected = scorer(name).score(masked), scorer(name).score(given)

    for layer, wanted in zip(found.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_knorm_is_minus_the_length_of_the_key(tokens):
    given = signals(tokens)

    assert_close(KNorm().score(given), knorm(given))


@pytest.mark.parametrize("anchor", ["mean", "normalised_mean"])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_keydiff_is_minus_the_cosine_to_the_average_key(tokens, holes, anchor):
    given = signals(tokens, holes=holes)

    assert_close(KeyDiff(anchor).score(given), keydiff(given, anchor))


def test_the_two_keydiff_anchors_differ_when_norms_do():
    given = signals(50)
    given["keys"][0][:, 7] *= 400

    plain, normalised = KeyDiff("mean").score(given), KeyDiff("normalised_mean").score(given)

    assert not torch.allclose(plain.layers[0], normalised.layers[0], atol=1e-2)
    assert plain.layers[0][:, 7].tolist() == pytest.approx([-1.0, -1.0], abs=0.1)  # one long key owns the plain mean


@pytest.mark.parametrize("anchor", ["mean", "normalised_mean"])
def test_a_key_of_zeros_has_no_direction_and_a_finite_score(anchor):
    given = signals(20)
    given["keys"][0][:, 3] = 0

    scores = KeyDiff(anchor).score(given).checked("keydiff")

    assert scores.layers[0][:, 3].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("sinks", [0, 4, 60])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_streaming_is_the_age_and_always_keeps_the_sinks(tokens, sinks):
    given = signals(tokens)

    found = Streaming(sinks).score(given)

    assert_close(found, streaming(given))
    assert found.must_keep.tolist() == [i < sinks for i in range(tokens)]


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("pooling", ["max", "avg", "none"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_snapkv_is_the_attention_of_the_last_queries(tokens, group, pooling, reduce):
    given = signals(tokens, group=group, seed=tokens)

    found = SnapKV(WINDOW, 5, pooling, reduce).score(given)

    assert_close(found, snapkv(given, WINDOW, 5, pooling, reduce))
    assert found.must_keep.tolist() == [i >= tokens - WINDOW for i in range(tokens)]


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(("window", "kernel"), [(1, 1), (1, 7), (3, 3), (16, 99)])
def test_snapkv_takes_the_last_of_the_recorded_queries(window, kernel, holes):
    given = signals(40, recorded=20, holes=holes)

    assert_close(SnapKV(window, kernel).score(given), snapkv(given, window, kernel))


def test_snapkv_defaults_are_the_documented_setting():
    given = signals(100, recorded=64)

    assert_close(SnapKV().score(given), snapkv(given, window=32, kernel=7, pooling="max", group="mean"))


@pytest.mark.parametrize("name", ["snapkv", "tova"])
def test_huge_logits_do_not_overflow(name):
    given = signals(30, recorded=30, dtype=torch.float32)
    for queries in given["queries"]:
        queries *= 1e4

    scorer(name).score(given).checked(name)


def test_snapkv_refuses_a_window_that_was_not_recorded():
    with pytest.raises(
        RequestError, match="window=8 needs the last 8 queries, but 5 were recorded; prefill with query_window=8"
    ):
        SnapKV(WINDOW).score(signals(40, recorded=5))


def test_tova_refuses_to_go_without_the_last_query():
    with pytest.raises(RequestError, match="tova needs the last 1 queries, but 0 were recorded"):
        TOVA().score(signals(40, recorded=0))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_tova_is_the_attention_of_the_last_query_over_all_heads(tokens, group):
    given = signals(tokens, group=group, seed=tokens)

    found = TOVA().score(given)

    assert_close(found, tova(given))
    assert all(torch.equal(head, layer[0]) for layer in found.layers for head in layer)
    assert found.must_keep.tolist() == [i == tokens - 1 for i in range(tokens)]


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_h2o_is_the_attention_of_all_queries(tokens, group, normalise, reduce):
    given = signals(tokens, group=group, seed=tokens)

    found = H2O(WINDOW, normalise, reduce).score(given)

    assert_close(found, h2o(given, normalise, reduce))
    assert found.must_keep.tolist() == [i >= tokens - WINDOW for i in range(tokens)]


def test_h2o_without_a_window_must_keep_nothing():
    assert not H2O(window=0).score(signals(20)).must_keep.any()


@pytest.mark.parametrize("rope", ROTARY)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_expected_attention_is_the_weight_of_a_gaussian_future_query(tokens, group, rope):
    given = signals(tokens, group=group, seed=tokens, rope=rope)

    found = ExpectedAttention(horizon=9).score(given)

    assert_close(found, expected_attention(given, horizon=9))
    assert found.must_keep.tolist() == [i < 4 for i in range(tokens)]


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"horizon": 1},
        {"horizon": 600},
        {"sinks": 0},
        {"sinks": 49},
        {"sinks": 50},
        {"epsilon": 0.02},
        {"use_covariance": False},
        {"use_values": False, "epsilon": 0.02},
        {"sinks": 11, "epsilon": 0.5, "use_covariance": False},
    ],
)
def test_expected_attention_follows_its_settings(settings, holes):
    given = signals(50, holes=holes)

    assert_close(ExpectedAttention(**settings).score(given), expected_attention(given, **settings))


@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize("rotary_dim", [16, 8, 0])
def test_expected_attention_of_one_certain_query_is_its_attention(rotary_dim, factor):
    """All past queries alike before RoPE, one position ahead: nothing is left to expect, only to compute.

    Through the tap, and with a factor inside cosine and sine: it scales the query as the model would.
    """
    given = signals(20)
    query = torch.randn(6, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    table = rotation(range(21), rotary_dim, factor)
    tap = QueryMoments()
    tap.watch(Chunk(rotate(query.expand(-1, 20, -1), *table[:, :20]), (), None, 0, 0.25, table[:, :20]))
    streams = {name: layers[:1] for name, layers in given.streams.items()} | {
        "query_mean": (tap.mean,),
        "query_covariance": (tap.covariance,),
        "future_rotation": (table[:, 20:],),
    }

    found = ExpectedAttention(horizon=1, sinks=0, use_values=False).score(Signals(20, 0, (0.25,), streams))

    turned = rotate(query, *table[:, 20:]).view(2, 3, 16)
    attention = (torch.einsum("hgd,htd->hgt", turned, given["keys"][0]) * 0.25).softmax(dim=-1).mean(dim=1)
    torch.testing.assert_close(found.layers[0], attention, rtol=1e-9, atol=1e-12)


def test_expected_attention_refuses_to_look_beyond_the_recorded_rotation():
    with pytest.raises(
        RequestError, match=r"horizon=601 looks further ahead than the 600 positions .* use horizon=600"
    ):
        ExpectedAttention(horizon=601).score(signals(20))


def test_expected_attention_needs_no_rotation_where_there_is_no_rope():
    given = signals(20, rope="none")
    lean = Signals(
        20, 0, given.scaling, {**given.streams, "future_rotation": (torch.zeros(2, 0, 0, dtype=torch.float64),) * 2}
    )

    assert_close(ExpectedAttention().score(lean), expected_attention(given))


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_expected_attention_holds_no_keys_per_query_head():
    given = signals(5000, group=8)

    with Largest() as watched:
        ExpectedAttention().score(given)

    assert watched.numel <= 2 * 8 * 1024 * 16  # one block of tokens; [query_head, token, dim] has five times as much


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Streaming(-1), "streaming sinks=-1 is too small: it counts the first tokens .*; use sinks=0 or more"),
        (lambda: H2O(-2), "h2o window=-2 is too small: it counts the last tokens .*; use window=0 or more"),
        (lambda: H2O(group="sum"), "h2o group='sum' is unknown; use group=mean or max"),
        (lambda: SnapKV(pooling="min"), "snapkv pooling='min' is unknown; use pooling=max or avg or none"),
        (lambda: SnapKV(group="sum"), "snapkv group='sum' is unknown; use group=mean or max"),
        (lambda: KeyDiff("median"), "keydiff anchor='median' is unknown; use anchor=mean or normalised_mean"),
        (lambda: ExpectedAttention(0), "expected_attention horizon=0 is too small: .*; use horizon=1 or more"),
        (lambda: ExpectedAttention(sinks=-1), "expected_attention sinks=-1 is too small: .*; use sinks=0 or more"),
        (lambda: ExpectedAttention(epsilon=-0.1), "expected_attention epsilon=-0.1 is added to .*; use epsilon=0.0"),
        (lambda: ExpectedAttention(epsilon=math.nan), "epsilon=nan"),
        (lambda: ExpectedAttention(epsilon=math.inf), "epsilon=inf"),
        (lambda: Random(10**20), "random seed=1000.* must fit into 64 bits; use a seed from"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(make, message):
    with pytest.raises(RequestError, match=message):
        make()


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


@pytest.mark.parametrize("name", BY_SIGNALS)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 2, 3, 31, 32, 33, 200])
def test_every_scorer_gives_finite_scores_in_working_precision_for_every_entry(name, tokens, dtype, holes):
    given = signals(tokens, recorded=64, dtype=dtype, holes=holes)

    found = scorer(name).score(given).checked(name)

    assert [tuple(layer.shape) for layer in found.layers] == [(2, tokens), (3, tokens)]
    own = torch.float32 if name.startswith("gatesight") else dtype  # fitted networks are float32
    assert all(layer.dtype == own for layer in found.layers)
    assert found.must_keep is None or (found.must_keep.dtype == torch.bool and found.must_keep.shape == (tokens,))


@pytest.mark.parametrize("name", BY_SIGNALS)
def test_every_scorer_reads_only_what_it_says_and_changes_nothing(name):
    method = scorer(name)
    given = signals(80, recorded=64)
    before = {stream: [layer.clone() for layer in layers] for stream, layers in given.streams.items()}
    always = ("keys", "values") if name == "gatesight+" else ()  # its `reads` are what must be recorded
    lean = dataclasses.replace(given, streams={stream: given[stream] for stream in (*method.reads, *always)})

    found, leaner = method.score(given), method.score(lean)

    assert all(torch.equal(a, b) for a, b in zip(found.layers, leaner.layers, strict=True))
    for stream, layers in given.streams.items():
        assert all(torch.equal(a, b) for a, b in zip(layers, before[stream], strict=True))


@pytest.mark.parametrize("name", BY_SIGNALS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keys_are_scored_in_float32(name, dtype):
    half = signals(80, recorded=64, dtype=dtype)
    streams = {stream: tuple(layer.float() for layer in layers) for stream, layers in half.streams.items()}
    wide = dataclasses.replace(half, streams=streams)

    found, expected = scorer(name).score(half), scorer(name).score(wide)

    assert all(torch.equal(a, b) for a, b in zip(found.layers, expected.layers, strict=True))


@pytest.mark.parametrize("name", BY_SIGNALS)
def test_layers_may_be_computed_as_they_are_asked_for(name):
    """A compacted child builds its dense keys one layer at a time; no scorer may go back or look ahead."""

    class InOrder:
        def __init__(self, layers: tuple[torch.Tensor, ...]) -> None:
            self.layers, self.made = layers, []

        def __iter__(self):
            return (self[layer] for layer in range(len(self.layers)))

        def __getitem__(self, layer: int) -> torch.Tensor:
            self.made.append(layer)
            return self.layers[layer]

    given = signals(80, recorded=64)
    lazy = {stream: InOrder(layers) for stream, layers in given.streams.items() if stream != "native"}

    found = scorer(name).score(dataclasses.replace(given, streams={**lazy, "native": given["native"]}))

    expected = scorer(name).score(given)
    assert all(torch.equal(a, b) for a, b in zip(found.layers, expected.layers, strict=True))
    assert all(stream.made in ([], [0, 1]) for stream in lazy.values())
    assert any(stream.made for stream in lazy.values()) or name == "gatesight"


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_score_that_is_not_finite_is_named_by_layer_head_and_position(value, shown):
    layers = (torch.zeros(2, 9), torch.zeros(3, 9))
    layers[1][2, 4] = layers[1][2, 6] = value

    with pytest.raises(WorkError, match=f"'knorm' gave {shown} at attention layer 1, KV head 2, position 4;"):
        Scores(layers).checked("knorm")


@pytest.mark.parametrize(
    "name", ["knorm", "keydiff", "snapkv", "tova", "expected_attention", "triattention", "gatesight+"]
)
def test_keys_that_overflowed_are_found_after_scoring(name):
    given = signals(80, recorded=64)
    given["keys"][1][2, 11] = math.nan

    # tova's one list serves all heads and gatesight+ reads them in one product, so the first is named
    head = 0 if name in ("tova", "gatesight+") else 2
    with pytest.raises(WorkError, match=f"attention layer 1, KV head {head}, position"):
        scorer(name).score(given).checked(name)


def test_a_signal_that_was_not_recorded_is_named():
    with pytest.raises(RequestError, match=r"'gates' was not recorded for this session \(it has keys, values\)"):
        _ = Signals(5, 0, (1.0,), {"values": (), "keys": ()})["gates"]
