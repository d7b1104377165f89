"""Gate table and query statistics: what hooks and taps find on the same texts, and an artifact that is whole or old."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from wakesight.core import Tables
from wakesight.errors import RequestError
from wakesight.estimator.artifact import Artifact, described
from wakesight.estimator.features import FeatureSpec
from wakesight.estimator.net import empty_reader
from wakesight.learning import query_statistics
from wakesight.learning.calibrate import calibrate, drawn, measure
from wakesight.learning.documents import Document
from wakesight.testing import tiny

FAMILIES = ("qwen3_5", "llama")
LENGTHS = (150, 70, 90)


def documents() -> list[Document]:
    return [Document(f"doc {n}", "ab"[n % 2], "", tuple(tiny.tokens(length, n))) for n, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request):
    return tiny.engine(request.param)


@pytest.fixture(scope="module")
def hybrid():
    return tiny.engine("qwen3_5")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class Gates:
    """sigmoid(gate) of every token in float64, worked out from what enters the attention modules."""

    def __init__(self, engine) -> None:
        layers = engine.model.get_decoder().layers
        self.modules = [layers[i].self_attn for i in engine.geometry.attention_layers]
        self.heads = engine.geometry.query_heads
        self.seen: list[list[torch.Tensor]] = [[] for _ in self.modules]
        self.hooks = [
            m.register_forward_pre_hook(self._hook(at), with_kwargs=True) for at, m in enumerate(self.modules)
        ]

    def _hook(self, at: int):
        def hook(module, args, kwargs):
            self.seen[at].append((args[0] if args else kwargs["hidden_states"])[0].double())

        return hook

    def opened(self) -> list[torch.Tensor]:
        """[token, query_head, dim] per attention layer."""
        for hook in self.hooks:
            hook.remove()
        found = []
        for module, seen in zip(self.modules, self.seen, strict=True):
            both = torch.cat(seen) @ module.q_proj.weight.double().T
            found.append(both.view(len(both), self.heads, 2, -1)[:, :, 1].sigmoid())
        return found


@pytest.mark.parametrize("reduce", ["mean_then_max", "max_then_mean"])
def test_the_gate_table_equals_a_float64_recomputation(hybrid, tmp_path, reduce):
    gates = Gates(hybrid)
    report = calibrate(hybrid, documents(), tmp_path / "a", reduce=reduce, chunk=64)
    opened = gates.opened()

    table = Artifact.load(tmp_path / "a").tables.gate
    assert table is not None
    assert report["tokens"] == sum(LENGTHS) == len(opened[0])
    for found, layer in zip(table, opened, strict=True):
        grouped = layer.view(len(layer), 2, 3, -1)
        if reduce == "mean_then_max":
            expected = grouped.mean(dim=(0, 3)).amax(dim=1)
        else:
            expected = grouped.amax(dim=2).mean(dim=(0, 2))
        assert list(found) == pytest.approx(expected.tolist(), rel=1e-6)
    assert len({round(x, 6) for layer in table for x in layer}) == 4
    assert report["gate_by_layer"] == pytest.approx([sum(layer) / 2 for layer in table])


def test_query_statistics_are_those_of_taps_on_the_same_texts(engine, tmp_path):
    """One tap per layer, watching a throwaway pass over each document."""
    calibrate(engine, documents(), tmp_path / "a")
    taps = query_statistics.taps(len(engine.geometry.attention_layers))
    for one, ids in drawn(engine, documents(), 10_000, 0):
        assert ids[-len(one.ids) :] == one.ids
        state = engine.empty_state(len(ids))
        engine.overhear(state, ids, taps)
        state.release()

    found, expected = Artifact.load(tmp_path / "a").query_stats, query_statistics.collect(taps)
    assert found is not None
    assert all(tap.count == sum(LENGTHS) for tap in taps)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_model_without_output_gates_gets_no_table_and_is_told_so(tmp_path):
    llama = tiny.engine("llama")
    report = calibrate(llama, documents(), tmp_path / "a")
    assert report["gate"] is None
    assert report["no_gate"] == "llama models have no gate on their attention output"
    assert Artifact.load(tmp_path / "a").tables.gate is None


def test_the_same_seed_gives_the_same_bytes_in_whatever_order_documents_come(engine, tmp_path):
    for name, given in (("a", documents()), ("b", documents()[::-1])):
        calibrate(engine, given, tmp_path / name, seed=3, tokens=200)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    orders = {tuple(one.id for one, _ in drawn(engine, documents(), 10_000, seed)) for seed in range(8)}
    assert len(orders) > 1


def test_reading_stops_at_the_tokens_asked_for_and_at_the_models_limit(engine):
    ids = [row for _, row in drawn(engine, documents(), 160, 0)]
    assert sum(map(len, ids)) == 160
    (long,) = drawn(engine, [Document("long", "a", "", tuple(tiny.tokens(2000)))], 5000, 0)
    assert len(long[1]) == engine.geometry.max_positions - 1
    assert list(drawn(engine, [Document("short", "a", "", (1,))], 100, 0)) == []
    with pytest.raises(RequestError, match="no text to measure on"):
        measure(engine, [])


def test_an_artifact_keeps_what_calibration_does_not_measure(hybrid, tmp_path):
    reader = empty_reader(FeatureSpec(("native", "age")), hybrid.geometry, hidden=8)
    mass = ((0.5, 0.25), (1.0, 0.75))
    before = Artifact(
        hybrid.weights_fingerprint(), described(hybrid.geometry), Tables(((9.0, 9.0), (9.0, 9.0)), mass),
        {"signals": reader}, training={"rows": 5}, metrics={"rho": 0.5},
    )  # fmt: skip
    before.save(tmp_path / "a")
    (tmp_path / "a" / "report.md").write_text("how it was fitted")

    calibrate(hybrid, documents(), tmp_path / "a")

    after = Artifact.load(tmp_path / "a")
    assert after.tables.utility_mass == mass
    assert after.tables.gate is not None
    assert max(map(max, after.tables.gate)) < 1
    assert torch.equal(after.readers["signals"].layers[1].first, reader.layers[1].first)
    assert (after.training["rows"], after.training["calibrate"]["seed"]) == (5, 0)
    assert after.metrics == {"rho": 0.5}
    assert (tmp_path / "a" / "report.md").read_text() == "how it was fitted"
    assert json.loads((tmp_path / "a" / "calibrate.json").read_text())["tokens"] == sum(LENGTHS)


def test_another_models_artifact_is_refused_before_anything_is_read(hybrid, tmp_path):
    calibrate(tiny.engine("qwen3_5", seed=1), documents(), tmp_path / "a")
    before = content(tmp_path / "a")
    with pytest.raises(RequestError, match="other weights"):
        calibrate(hybrid, _unread(), tmp_path / "a")
    assert content(tmp_path / "a") == before
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("mine")
    with pytest.raises(RequestError, match="holds no artifact"):
        calibrate(hybrid, _unread(), tmp_path / "b")


def _unread():
    raise AssertionError("documents were read")
    yield


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"reduce": "median"}, "use mean_then_max or max_then_mean"),
        ({"tokens": 1}, "tokens"),
        ({"seed": -1}, "seed"),
        ({"chunk": 100}, "chunk"),
    ],
)
def test_wrong_settings_are_refused(hybrid, tmp_path, changes, sentence):
    with pytest.raises(RequestError, match=sentence):
        calibrate(hybrid, documents(), tmp_path / "a", **changes)
    assert not (tmp_path / "a").exists()


def test_killed_midway_the_old_artifact_stands(hybrid, tmp_path):
    calibrate(hybrid, documents(), tmp_path / "a", seed=1)
    before = content(tmp_path / "a")
    child = multiprocessing.get_context("fork").Process(target=_dies, args=(hybrid, tmp_path / "a"))
    child.start()
    child.join(120)
    assert child.exitcode == 9
    assert content(tmp_path / "a") == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def _dies(engine, out: Path) -> None:
    read = 0

    def second(done: int, total: int) -> None:
        nonlocal read
        read += 1
        if read == 2:
            os._exit(9)

    calibrate(engine, documents(), out, seed=2, on_document=second)


@pytest.mark.skipif("qwen4_exp" not in tiny.FAMILIES, reason="this transformers has no qwen4_exp")
def test_a_model_that_must_be_kept_whole_is_refused(tmp_path):
    with pytest.raises(RequestError, match="cannot be calibrated"):
        calibrate(tiny.engine("qwen4_exp"), documents(), tmp_path / "a")
