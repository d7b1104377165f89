"""A session that was read with --artifact is compacted by that very estimator later, or the command says why not."""

from __future__ import annotations

import json
import shutil

import pytest

from wakesight.cli.main import run
from wakesight.engines.hf.engine import load
from wakesight.engines.saved import about
from wakesight.models.load import ARTIFACT
from wakesight.testing import tiny
from wakesight.testing.artifacts import random_artifact

TEXT = "The keeper wrote the hour into the log. " * 12


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A model with an estimator of its own beside its weights."""
    folder = tiny.save("qwen3_5", tmp_path_factory.mktemp("model"))
    random_artifact(load(str(folder)), seed=1).save(folder / ARTIFACT)
    return str(folder)


@pytest.fixture
def place(tmp_path, model):
    """A document, and another estimator of the same model."""
    (tmp_path / "document.txt").write_text(TEXT)
    random_artifact(load(model), seed=2).save(tmp_path / "other")
    return tmp_path


def prefill(place, model: str, *words: str) -> str:
    saved = str(place / "document.ws")
    read = ("--model", model, "--context", str(place / "document.txt"), "--save", saved)
    assert run(["prefill", *read, *words]) == 0
    return saved


def kept(capsys, *words: str) -> list[list[int]]:
    capsys.readouterr()
    assert run(["ask", *words, "--question", "Who?", "--max-new-tokens", "1", "--keep", "0.3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["policy"]["scorer"] == "gatesight+"
    return printed["kept_entries"]


def test_the_named_estimator_is_remembered(capsys, place, model, monkeypatch):
    monkeypatch.chdir(place)
    saved = prefill(place, model, "--artifact", "other")
    monkeypatch.chdir("/")
    read = ("--model", model, "--context", str(place / "document.txt"))
    own, other = kept(capsys, *read), kept(capsys, *read, "--artifact", str(place / "other"))
    assert own != other  # or this test could not fail
    assert kept(capsys, "--session", saved) == other
    assert kept(capsys, "--session", saved, "--artifact", str(place / "other")) == other
    assert kept(capsys, "--session", saved, "--artifact", f"{model}/{ARTIFACT}") == own  # what is typed wins


@pytest.mark.parametrize("change", ["gone", "fitted anew"])
def test_one_that_is_gone_or_has_changed_is_refused_where_it_matters(capsys, place, model, change):
    saved = prefill(place, model, "--artifact", str(place / "other"))
    shutil.rmtree(place / "other")
    if change == "fitted anew":
        random_artifact(load(model), seed=3).save(place / "other")
    words = ["ask", "--session", saved, "--question", "Who?", "--max-new-tokens", "1"]
    needing = (
        ("--keep", "0.3"),
        ("--fit", "1GB", "--scorer", "gatesight"),
        ("--scorer", "gatesight", "--allocation", "9,9"),
    )
    for size in needing:
        capsys.readouterr()
        assert run([*words, *size]) == 2
        assert "is gone or has changed since; say with --artifact which one to use now" in capsys.readouterr().err
    assert run(words) == 0
    assert run([*words, "--keep", "0.3", "--scorer", "keydiff"]) == 0
    assert kept(capsys, "--session", saved, "--artifact", f"{model}/{ARTIFACT}")


def test_the_models_own_is_not_written_down(capsys, place, model):
    """It is found again beside the model, wherever that lies by then."""
    saved = prefill(place, model)
    assert about(saved).artifact is None
    assert kept(capsys, "--session", saved)
