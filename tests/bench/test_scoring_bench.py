"""Scoring benches: the paper's shape, streams that are read like recorded signals, and shares of a prefill."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from wakesight.bench import scorers, scoring
from wakesight.bench.prefill import bench_prefill
from wakesight.cli.main import run
from wakesight.core import ModelGeometry
from wakesight.errors import RequestError
from wakesight.estimator.artifact import Artifact, described
from wakesight.estimator.features import FeatureSpec
from wakesight.estimator.net import empty_reader
from wakesight.testing import tiny

SMALL = ModelGeometry(
    family="qwen3_5", n_layers=4, attention_layers=(1, 3), recurrent_layers=(0, 2), query_heads=2, kv_heads=(2, 2),
    key_dims=(4, 4), value_dims=(4, 4), itemsize=4, max_positions=512, native_heads=(3, 3),
)  # fmt: skip


def artifact(engine, *readers: str) -> Artifact:
    parts = {"signals": ("native", "age"), "signals+keys": ("native", "age", "key_stats", "key")}
    made = {name: empty_reader(FeatureSpec(parts[name]), engine.geometry, hidden=4) for name in readers}
    return Artifact(engine.weights_fingerprint(), described(engine.geometry), readers=made)


def test_the_shape_is_the_papers():
    geometry = scoring.paper_geometry()
    reader = empty_reader(FeatureSpec(("native", "age")), geometry)
    assert (len(geometry.recurrent_layers), set(geometry.native_heads)) == (48, {48})
    assert sum(geometry.kv_heads) == 64
    assert [nets.inputs for nets in reader.layers] == [435] + [867] * 15
    assert reader.parameters == 3_448_896
    biases = 64 * (64 + 1)
    assert scoring.least_flops(reader, 10) == 2 * 10 * (3_448_896 - biases)
    assert scoring.least_bytes(geometry, 10) == 4 * 10 * (48 * 48 * 3 + 64)


def test_a_stream_is_read_like_signals_that_lie_in_memory(monkeypatch):
    monkeypatch.setattr(scoring, "STREAM", 128)
    streams = scoring.random_streams(SMALL, 300, torch.device("cpu"), chunk=64)
    assert [len(stream.rows) for stream in streams] == [128, 128]
    reader = empty_reader(FeatureSpec(("native", "age")), SMALL, hidden=8)
    found = reader.scores(scoring.signals_of(SMALL, 300, streams), chunk=64)
    whole = [torch.cat([stream.rows] * 3)[:300] for stream in streams]
    signals = dataclasses.replace(scoring.signals_of(SMALL, 300, streams), streams={"native": whole})
    for mine, theirs in zip(found, reader.scores(signals, chunk=300), strict=True):
        assert mine.shape == (2, 300)
        torch.testing.assert_close(mine, theirs)
    assert float(found[0].std()) > 0


def test_the_scoring_bench_holds_time_against_a_limit(monkeypatch):
    monkeypatch.setattr(scoring, "COPY_BYTES", 2**16)
    monkeypatch.setattr(scoring, "GEMM", 32)
    rounds: list[tuple[int, int]] = []
    found = scoring.bench_scoring(
        lengths=(64, 200), rounds=2, chunk=64, geometry=SMALL, on_round=lambda a, b: rounds.append((a, b))
    )
    assert json.loads(json.dumps(found))["lengths"] == [64, 200]
    assert rounds == [(1, 2), (2, 2)]
    assert found["inputs"] == [12, 21]
    for row in found["rows"]:
        assert row["bytes"] == 4 * row["tokens"] * (18 + 4)
        assert row["limit_s"] >= max(row["memory_s"], row["product_s"]) * (1 - 1e-9)
        assert row["over_limit"]["rounds"] == 2
        assert row["seconds"] > 0


def test_prefill_has_a_share_for_every_scorer_that_runs():
    engine = tiny.engine("qwen3_5", poison=False)
    engine.__dict__["artifact"] = artifact(engine, "signals")
    found = bench_prefill(engine, tokens=130, rounds=2, lengths=(70, 130))

    names = [row["arm"] for row in found["scoring"]]
    assert names == ["scoring keydiff", "scoring snapkv", "scoring gatesight", "scoring kvzip", "ranking",
                     "ours, recording native"]  # fmt: skip
    assert found["left_out"].keys() == {"gatesight+"}
    assert "has no reader 'signals+keys'" in found["left_out"]["gatesight+"]
    assert len(found["rows"]) == 3
    for row in found["scoring"]:
        assert row["share"]["mean"] > 0
        assert len(found["seconds"][row["arm"]]) == len(found["seconds"]["ours with taps"]) == 2
    more = found["lengths"]
    assert {row["tokens"] for row in more["rows"]} == {70, 130}
    assert more["exponents"].keys() == {"ours with taps", *names}
    assert all(isinstance(value, float) for value in more["exponents"].values())


def test_both_readers_are_timed_where_both_are_there():
    engine = tiny.engine("qwen3_5", poison=False)
    engine.__dict__["artifact"] = artifact(engine, "signals", "signals+keys")
    with scorers.scoring_arms(engine, tiny.tokens(70)) as (arms, left_out):
        assert left_out == {}
        assert {"scoring gatesight", "scoring gatesight+"} <= arms.keys()


@pytest.mark.parametrize("family", [f for f in ("llama", "kimi_linear", "qwen4_exp") if f in tiny.FAMILIES])
def test_what_cannot_run_is_left_out_with_its_reason(family):
    engine = tiny.engine(family, poison=False)
    with scorers.scoring_arms(engine, tiny.tokens(70)) as (arms, left_out):
        assert "gatesight" in left_out
        if engine.only_whole is None:
            assert "needs an estimator fitted" in left_out["gatesight"]
            assert {"scoring keydiff", "ranking"} <= arms.keys()
        else:
            assert (arms, left_out.keys()) == ({}, set(scorers.SCORERS))


def test_a_second_pass_needs_no_tokenizer_and_the_engine_asks_as_before_afterwards():
    engine = tiny.engine("llama", poison=False)
    engine.tokenizer = None
    with scorers.scoring_arms(engine, tiny.tokens(70), names=("kvzip",)) as (arms, left_out):
        assert "scoring kvzip" in arms
        assert left_out == {}
    assert engine.repeat_instruction is None


def test_a_second_pass_that_does_not_fit_is_left_out():
    engine = tiny.engine("llama", poison=False)
    with scorers.scoring_arms(engine, tiny.tokens(900), names=("keydiff", "kvzip")) as (arms, left_out):
        assert "scoring kvzip" not in arms
        assert "reads at most 1024" in left_out["kvzip"]


def test_growth_is_the_slope_of_logarithms():
    spent = {(n, "a"): [k * n**2 for k in (1.0, 5.0, 0.1)] for n in (10, 100, 1000)}  # the machine's speed drifts
    assert scorers.exponent({**spent, (10, "b"): [1.0] * 3}, "a") == pytest.approx(2)
    assert scorers.exponent({**spent, (10, "b"): [1.0] * 3}, "b") is None
    with pytest.raises(RequestError, match="twice"):
        scorers.bench_lengths(tiny.engine("llama"), lengths=(64, 64))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["decode", "--tokens", "100,200"], "runs at one length"),
        (["prefill", "--tokens", "many"], "--tokens many is no length"),
        (["prefill", "--lengths", "100,100"], "--lengths names a length twice"),
        (["prefill", "--lengths", "1"], "at least 2 each"),
        (["sweep", "--lengths", "100"], "--lengths belongs to bench prefill"),
        (["scoring", "--tokens", "1"], "--tokens at least 2"),
        (["scoring", "--device", "tpu9"], "tpu9"),
        (["scoring", "--dtype", "float16"], "leave --dtype out"),
    ],
)
def test_wrong_lengths_are_one_sentence(capsys, words, sentence):
    assert run(["bench", *words]) == 2
    shown = capsys.readouterr().err
    assert sentence in shown
    assert len(shown.strip().splitlines()) == 1


def test_the_tables_say_shares_and_limits(tmp_path, capsys, monkeypatch):
    folder = str(tiny.save("llama", tmp_path / "llama"))
    assert run(["bench", "prefill", "--model", folder, "--tokens", "100", "--rounds", "1", "--lengths", "64,96"]) == 0
    shown = capsys.readouterr().out
    assert "scoring keydiff" in shown
    assert "gatesight left out: gatesight needs an estimator" in shown
    assert "grows as tokens^" in shown
    monkeypatch.setattr(scoring, "paper_geometry", lambda: SMALL)
    assert run(["bench", "scoring", "--tokens", "64,128", "--rounds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "4 networks of 12, 21 inputs" in shown
    assert "the limit of" in shown
