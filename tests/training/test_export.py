"""What comes after a training: an evaluation, curves, and a model folder that the engine loads and KVzip can ask."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from training import evaluate, export, kernels, plots, train
from wakesight.engines.hf.engine import load
from wakesight.errors import RequestError
from wakesight.evaluation.suites.closed import tasks
from wakesight.policy import Policy

pytestmark = pytest.mark.skipif(kernels.compiler() is None, reason="training needs a C++ compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("training") / "run"
    settings = train.Settings(layers=4, hidden=64, intermediate=64, batch=128, tokens=400, lengths=(64,), latest=())
    with torch.enable_grad():
        train.run(train.Training(path, settings), log_every=0.0)
    return path


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):
    rows = evaluate.table(evaluate.load(folder), (96,), 1, 0)
    out = tmp_path_factory.mktemp("exported") / "model"
    export.export(folder, out, rows)
    return out


def test_the_evaluation_has_a_row_per_task_and_the_card_shows_it(exported):
    rows = json.loads((exported / "eval.json").read_text())
    assert {row["task"] for row in rows} == set(tasks.TASKS)
    assert all(0 <= row["forced"] <= 1 and len(row["closed"]) == 1 for row in rows)
    card = (exported / "README.md").read_text()
    assert all(f"| {task} | 96 |" in card for task in tasks.TASKS)


def test_an_evaluation_that_cannot_be_written_leaves_the_older_one(tmp_path, monkeypatch):
    path = tmp_path / "eval.json"
    evaluate.write(path, [{"task": "older"}])
    monkeypatch.setattr(Path, "write_text", lambda self, text: self.write_bytes(text[:9].encode()) and None)
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        evaluate.write(path, [{"task": "newer"}])
    assert json.loads(path.read_text()) == [{"task": "older"}]


def test_the_folder_loads_and_its_words_reach_kvzip(exported):
    engine = load(exported)
    assert engine.decode(engine.repeat_instruction(None)) == " ".join(tasks.WHOLE)
    assert engine.decode(engine.repeat_instruction(engine.encode("the otter"))).endswith("starting with the otter .")
    with engine.prefill("the otter is near the heron . " * 8, instruction="remember the text .") as doc:
        child = doc.compact(Policy(scorer="kvzip", allocation="global", keep=0.5))
        assert child.stats.kv_bytes_freed > 0
    with pytest.raises(RequestError, match="not 'zebra'"):
        engine.prefill("the zebra is near")


def test_a_folder_that_is_no_model_is_not_overwritten(folder, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="no model folder"):
        export.export(folder, tmp_path, [])
    assert (tmp_path / "notes.txt").read_text() == "mine"


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("config", ['{"model": "runs/niah"}', '{"model_type": "qwen3_5_text"}', "[1]", "damaged"])
def test_a_folder_with_a_config_of_something_else_is_not_overwritten(folder, tmp_path, config):
    """A run of `wakesight eval` has a config.json too."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(config)
    (run / "records.jsonl").write_text("hours")
    before = content(run)
    with pytest.raises(RequestError, match="no model folder of this command"):
        export.export(folder, run, [])
    assert content(run) == before


def test_a_second_export_keeps_the_estimator_and_what_lies_beside(folder, exported, tmp_path):
    out = tmp_path / "model"
    shutil.copytree(exported, out)
    (out / "wakesight").mkdir()
    (out / "wakesight" / "artifact.json").write_text("hours")
    (tmp_path / "model.new").mkdir()
    (tmp_path / "model.new" / "notes.txt").write_text("mine")
    export.export(folder, out, [])
    assert (out / "wakesight" / "artifact.json").read_text() == "hours"
    assert "no eval.json" in (out / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.new"]
    assert (tmp_path / "model.new" / "notes.txt").read_text() == "mine"


def test_an_export_that_fails_leaves_the_model_and_its_estimator(folder, exported, tmp_path, monkeypatch):
    out = tmp_path / "model"
    shutil.copytree(exported, out)
    (out / "wakesight").mkdir()
    (out / "wakesight" / "artifact.json").write_text("hours")
    before, rename = content(out), Path.rename

    def full(self, target):
        if self.name == "new":
            raise OSError("no space left")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="no space"):
        export.export(folder, out, [])
    assert content(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_curves_are_drawn(folder, tmp_path):
    plots.curves([folder], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
