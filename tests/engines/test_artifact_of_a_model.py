"""load(artifact=): an estimator goes with one model, in whatever dtype, and is refused with any other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from wakesight.engines.hf.engine import load
from wakesight.errors import RequestError
from wakesight.estimator.artifact import JSON, WEIGHTS
from wakesight.models.load import ARTIFACT
from wakesight.policy import Policy
from wakesight.testing import tiny
from wakesight.testing.artifacts import random_artifact

FAMILIES = ("llama", "qwen3_5")
READERS = {"llama": ["hidden", "hidden+keys"], "qwen3_5": ["signals", "signals+keys"]}
READS = {"llama": "hidden", "qwen3_5": "native"}
N = 80


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory) -> Path:
    return tiny.save(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def fitted_here(folder, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("artifacts") / "one"
    random_artifact(load(folder)).save(path)
    return path


def test_it_comes_with_the_engine(folder, fitted_here, family):
    engine = load(folder, artifact=fitted_here)

    assert sorted(engine.artifact.readers) == READERS[family]
    assert engine.artifact.tables == random_artifact(engine).tables
    assert engine.artifact.query_stats.keys() == random_artifact(engine).query_stats.keys()
    assert load(folder).artifact is None


def test_it_is_found_beside_the_weights(family, tmp_path):
    model = tiny.save(family, tmp_path / "model")
    random_artifact(load(model), seed=1).save(model / ARTIFACT)
    random_artifact(load(model), seed=2).save(tmp_path / "other")

    beside, given = load(model), load(model, artifact=tmp_path / "other")

    assert beside.artifact.tables == random_artifact(beside, seed=1).tables
    assert given.artifact.tables == random_artifact(given, seed=2).tables != beside.artifact.tables


def test_both_dtypes_of_a_checkpoint_take_the_same_artifact(folder, fitted_here):
    wide, narrow = (load(folder, dtype=dtype, artifact=fitted_here) for dtype in ("float32", "bfloat16"))

    assert wide.weights_fingerprint() == narrow.weights_fingerprint() == wide.artifact.fingerprint
    assert wide.fingerprint() != narrow.fingerprint()  # a saved cache belongs to one of them
    for engine in (wide, narrow):
        with engine.prefill(tiny.tokens(N), record=["gatesight"]) as session:
            child = session.compact(Policy(scorer="gatesight", allocation="gate", keep=0.4))
            assert sum(map(sum, child.kept.counts)) < N * sum(engine.geometry.kv_heads)


def test_a_bfloat16_checkpoint_and_its_float32_copy_are_one_model(family, tmp_path):
    model = tiny.model(family).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)

    assert load(tmp_path, dtype="bfloat16").weights_fingerprint() == load(tmp_path).weights_fingerprint()


def test_weights_of_another_training_are_another_model(family, tmp_path, fitted_here):
    other = tiny.save(family, tmp_path / "other", seed=5)

    with pytest.raises(RequestError, match="fitted on other weights of a model of the same shape"):
        load(other, artifact=fitted_here)


def test_a_single_changed_weight_matrix_is_noticed(folder):
    engine = load(folder)
    before = engine.weights_fingerprint()
    engine.model.get_output_embeddings().weight.data *= 1.5

    assert engine.weights_fingerprint() != before


def test_an_artifact_of_another_family_is_refused_by_what_differs(family, tmp_path, fitted_here):
    other = tiny.save("qwen2" if family == "llama" else "falcon_h1", tmp_path / "other")

    with pytest.raises(RequestError, match=f"belongs to another model: its family is {family} and the loaded model"):
        load(other, artifact=fitted_here)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda at: _cut(at / WEIGHTS), f"{WEIGHTS} is damaged or belongs to another artifact; copy the folder again"),
        (lambda at: _cut(at / JSON), f"{JSON} is damaged or cannot be read"),
        (lambda at: (at / WEIGHTS).unlink(), f"{WEIGHTS} cannot be read"),
        (lambda at: (at / JSON).unlink(), f"is no estimator: it has no {JSON}"),
        (lambda at: (at / JSON).write_text("{}"), f"is no estimator: {JSON} has another format"),
    ],
)
def test_a_damaged_folder_is_refused_at_load(folder, tmp_path, damage, message):
    random_artifact(load(folder)).save(tmp_path / "one")
    damage(tmp_path / "one")

    with pytest.raises(RequestError, match=re.escape(message)):
        load(folder, artifact=tmp_path / "one")


def test_a_missing_folder_is_refused_at_load(folder, tmp_path):
    with pytest.raises(RequestError, match="is no estimator: there is no such folder; make one with wakesight label"):
        load(folder, artifact=tmp_path / "nothing")


@pytest.mark.parametrize("scorer", ["gatesight", "gatesight+"])
def test_naming_a_scorer_records_what_its_reader_here_reads(folder, fitted_here, family, scorer):
    session = load(folder, artifact=fitted_here).prefill(tiny.tokens(N), record=[scorer])

    assert set(session.signals().streams) == {"keys", "values", "queries", READS[family]}
    assert session.compact(Policy(scorer=scorer, keep=0.5)).kept is not None


@pytest.mark.parametrize("scorer", ["gatesight", "gatesight+"])
def test_without_an_artifact_naming_it_is_refused_before_anything_is_read(folder, scorer):
    engine = load(folder)
    before = (engine.pool.held_bytes, engine.pool.leases)

    with pytest.raises(RequestError, match=f"^{re.escape(scorer)} needs an estimator fitted for this model; make one"):
        engine.prefill(tiny.tokens(N), record=[scorer])
    assert (engine.pool.held_bytes, engine.pool.leases) == before


def test_a_signal_that_was_not_recorded_is_named(folder, fitted_here, family):
    session = load(folder, artifact=fitted_here).prefill(tiny.tokens(N))

    with pytest.raises(RequestError, match=f"'{READS[family]}' was not recorded"):
        session.compact(Policy(scorer="gatesight", keep=0.5))
