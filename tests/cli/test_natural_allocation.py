"""Without --scorer and --allocation every command takes those that suit model and scorer; what was typed wins."""

from __future__ import annotations

import json

import pytest

from wakesight.cli.main import run
from wakesight.engines.hf.engine import load
from wakesight.evaluation.records import Records
from wakesight.models.load import ARTIFACT
from wakesight.testing import tiny
from wakesight.testing.artifacts import random_artifact

TEXT = "The keeper wrote the hour into the log. " * 6


@pytest.fixture(scope="module")
def with_artifact(tmp_path_factory) -> str:
    """A model folder with the model's own artifact in it."""
    folder = tiny.save("qwen3_5", tmp_path_factory.mktemp("fitted"))
    random_artifact(load(str(folder))).save(folder / ARTIFACT)
    return str(folder)


def policy_of(capsys, tmp_path, model: str, *words: str) -> dict:
    (tmp_path / "document.txt").write_text(TEXT)
    capsys.readouterr()
    common = ("--model", model, "--context", str(tmp_path / "document.txt"), "--question", "Who?")
    assert run(["ask", *common, "--max-new-tokens", "1", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)["policy"]


@pytest.mark.parametrize(
    ("words", "allocation"),
    [
        ((), "utility_global"),
        (("--scorer", "keydiff"), "flat"),
        (("--scorer", "kvzip"), "global"),
        (("--scorer", "triattention"), "flat"),
        (("--scorer", "gatesight"), "gate"),
        (("--scorer", "gatesight+"), "utility_global"),
        (("--scorer", "gatesight", "--allocation", "flat"), "flat"),
        (("--scorer", "keydiff", "--allocation", "gate_per_head"), "gate_per_head"),
        (("--scorer", "gatesight", "--entries", "20"), "gate"),
        (("--scorer", "kvzip", "--allocation", "20,30"), [20, 30]),
    ],
)
def test_ask(capsys, tmp_path, with_artifact, words, allocation):
    assert policy_of(capsys, tmp_path, with_artifact, *words)["allocation"] == allocation


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--scorer", "gatesight"), "gatesight needs an estimator fitted for this model; make one with: wakesight"),
        (("--scorer", "triattention"), "triattention needs statistics of this model's queries"),
        (("--allocation", "gate"), "wakesight calibrate"),
    ],
)
def test_a_model_without_an_artifact_is_refused_in_a_sentence(capsys, tmp_path, llama, words, sentence):
    (tmp_path / "document.txt").write_text(TEXT)
    capsys.readouterr()
    assert (
        run(["ask", "--model", llama, "--context", str(tmp_path / "document.txt"), "--question", "Who?", *words]) == 2
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1


@pytest.fixture(scope="module", params=["gatesight+", "gatesight", "keydiff"])
def own(request, tmp_path_factory) -> tuple[str, str]:
    """A model folder whose artifact holds the readers that one scorer needs, and that scorer."""
    folder = tiny.save("qwen3_5", tmp_path_factory.mktemp("own"))
    whole = random_artifact(load(str(folder)))
    names = {"gatesight+": ("signals", "signals+keys"), "gatesight": ("signals",), "keydiff": ()}[request.param]
    whole.replaced(readers={name: whole.readers[name] for name in names}).save(folder / ARTIFACT)
    return str(folder), request.param


def test_without_a_scorer_the_models_own_estimator_is_used(capsys, tmp_path, own):
    folder, expected = own
    assert policy_of(capsys, tmp_path, folder)["scorer"] == expected
    assert policy_of(capsys, tmp_path, folder, "--scorer", "snapkv")["scorer"] == "snapkv"


def test_a_session_saved_whole_can_be_compacted_by_that_scorer_later(capsys, tmp_path, own):
    folder, expected = own
    (tmp_path / "document.txt").write_text(TEXT)
    saved = str(tmp_path / "document.ws")
    assert run(["prefill", "--model", folder, "--context", str(tmp_path / "document.txt"), "--save", saved]) == 0
    capsys.readouterr()
    words = ("--question", "Who?", "--max-new-tokens", "1", "--keep", "0.5", "--json")
    assert run(["ask", "--session", saved, *words]) == 0
    assert json.loads(capsys.readouterr().out)["policy"]["scorer"] == expected


def test_eval_writes_down_which_scorer_it_took(tmp_path, own):
    folder, expected = own
    words = ["fidelity", "--tasks", "narrative", "--length", "160", "--items", "1", "--option", "continuation=24"]
    out = tmp_path / "run"
    assert run(["eval", *words, "--model", folder, "--keep", "0.5", "--out", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["defaults"]["methods"] == expected
    assert any(row["arm"].startswith(f"{expected}/") for row in Records(out).read())


def test_a_damaged_artifact_is_named_before_the_model_is_read(capsys, tmp_path, llama):
    (tmp_path / "document.txt").write_text(TEXT)
    words = ["--model", llama, "--context", str(tmp_path / "document.txt"), "--question", "Who?"]
    assert run(["ask", *words, "--artifact", str(tmp_path)]) == 2
    assert "is no estimator: it has no artifact.json" in capsys.readouterr().err


def test_eval(tmp_path, with_artifact):
    words = ["fidelity", "--tasks", "narrative", "--length", "160", "--items", "1", "--option", "continuation=24"]
    methods = "keydiff,kvzip,gatesight,gatesight@flat,gatesight+"
    out = tmp_path / "run"
    assert (
        run(["eval", *words, "--model", with_artifact, "--methods", methods, "--keep", "0.5", "--out", str(out)]) == 0
    )

    assert {row["arm"] for row in Records(out).read()} == {
        "whole", "keydiff/flat/drop/0.5", "kvzip/global/drop/0.5", "gatesight/gate/drop/0.5",
        "gatesight/flat/drop/0.5", "gatesight+/utility_global/drop/0.5",
    }  # fmt: skip


@pytest.mark.parametrize("method", ["keydiff", "kvzip"])
def test_eval_refuses_what_can_never_work_before_the_model_is_read(
    capsys, tmp_path, with_artifact, monkeypatch, method
):
    def read(*_, **__):
        raise AssertionError("the model was read")

    monkeypatch.setattr("wakesight.engines.hf.engine.load", read)
    words = ["eval", "fidelity", "--model", with_artifact, "--methods", f"{method}@utility_global", "--keep", "0.5"]
    assert run([*words, "--out", str(tmp_path / "run")]) == 2
    assert f"'{method}' is none; use --scorer gatesight+" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "scorer gatesight+, allocation utility_global; kept "),
        (("--scorer", "kvzip"), "scorer kvzip, allocation global; kept "),
        (("--scorer", "snapkv:window=8", "--allocation", "20,30"), "scorer snapkv:window=8, allocation 20, 30 per "),
    ],
)
def test_ask_and_prefill_say_what_was_chosen(capsys, tmp_path, with_artifact, words, said):
    (tmp_path / "document.txt").write_text(TEXT)
    read = ("--model", with_artifact, "--context", str(tmp_path / "document.txt"))
    saved = str(tmp_path / "document.ws")
    assert run(["ask", *read, "--question", "Who?", "--max-new-tokens", "1", *words]) == 0
    assert said in capsys.readouterr().err
    size = () if "20,30" in words else ("--keep", "0.3")
    assert run(["prefill", *read, "--save", saved, *words, *size]) == 0
    assert said in capsys.readouterr().err
    assert run(["ask", "--session", saved, "--question", "Who?", "--max-new-tokens", "1"]) == 0
    assert said in capsys.readouterr().err  # by what it was kept then
