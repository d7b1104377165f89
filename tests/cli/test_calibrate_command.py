"""wakesight calibrate, and what wakesight analyze does with a model: from documents to files."""

from __future__ import annotations

import json

import pytest

from wakesight.cli.main import run
from wakesight.estimator.artifact import Artifact
from wakesight.testing import tiny

LETTERS = "abcdefghij klmno"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for corpus in ("code", "wiki"):
        (folder / corpus).mkdir()
        for number in range(3):
            text = "".join(LETTERS[(number * 7 + at * at + len(corpus)) % 16] for at in range(200 + number))
            (folder / corpus / f"{number}.txt").write_text(text)
    return str(folder)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return str(tiny.save("qwen3_5", tmp_path_factory.mktemp("hybrid")))


def test_a_gate_table_is_made_and_then_shares_budgets(texts, hybrid, tmp_path, capsys):
    out = str(tmp_path / "artifact")
    assert run(["calibrate", texts, "--model", hybrid, "--out", out, "--tokens", "500"]) == 0
    shown = capsys.readouterr()
    assert "by KV head" in shown.out
    assert "500 tokens of 3 documents" in shown.err
    assert "measured on 500 tokens only, which is too few to rely on" in shown.err
    assert sorted(path.name for path in (tmp_path / "artifact").iterdir()) == [
        "artifact.json", "artifact.safetensors", "calibrate.json",
    ]  # fmt: skip
    assert Artifact.load(out).tables.gate is not None
    assert run(["calibrate", texts, "--model", hybrid, "--out", out, "--tokens", "500", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert report["tokens"] == 500
    assert report == json.loads((tmp_path / "artifact" / "calibrate.json").read_text())


def test_a_model_without_gates_says_so(texts, llama, tmp_path, capsys):
    assert run(["calibrate", texts, "--model", llama, "--out", str(tmp_path / "a"), "--tokens", "300"]) == 0
    assert "gate table: none, llama models have no gate" in capsys.readouterr().out


def test_heads_are_closed_and_static_half_lives_read(texts, hybrid, tmp_path, capsys):
    out = tmp_path / "seen"
    assert run(["analyze", texts, "--close", "--model", hybrid, "--out", str(out), "--seeds", "1"]) == 0
    assert "| lowest gates (2) |" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["closing.json", "closing.md"]
    found = json.loads((out / "closing.json").read_text())
    assert found["model"] == hybrid
    labels = str(tmp_path / "labels")
    words = ["--continuations", "1", "--tokens", "4", "--min-tokens", "50", "--limit", "2"]
    assert run(["label", texts, "--model", hybrid, "--out", labels, *words]) == 0
    capsys.readouterr()
    assert run(["analyze", labels, "--model", hybrid, "--out", str(out), "--json"]) == 0
    life = json.loads(capsys.readouterr().out)["analysis"]["half_life"]
    assert [len(layer) for layer in life["static"]] == [4] * 6
    assert -1 <= life["static_against_measured"] <= 1
    other = str(tiny.save("qwen3_5", tmp_path / "other", seed=5))
    assert run(["analyze", labels, "--model", other, "--out", str(tmp_path / "no")]) == 2
    assert "is not the model that these labels were made with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["calibrate", "{none}", "--model", "{llama}", "--out", "{out}"], "does not exist"),
        (["calibrate", "{texts}", "--model", "{llama}", "--out", "{texts}"], "holds no artifact"),
        (["calibrate", "{texts}", "--model", "{llama}", "--out", "{out}", "--reduce", "sum"], "reduce='sum'"),
        (["calibrate", "{texts}", "--model", "{llama}", "--out", "{out}", "--tokens", "0"], "tokens"),
        (["analyze", "{texts}", "--close", "--out", "{out}"], "name one with --model"),
        (["analyze", "{texts}", "--close", "--model", "{llama}", "--out", "{out}", "--share", "2"], "--share 2.0"),
        (
            ["analyze", "{texts}", "--close", "--model", "{llama}", "--out", "{out}", "--artifact", "x"],
            "--artifact is about labels, and --close reads none",
        ),
        (
            ["analyze", "{texts}", "--close", "--model", "{llama}", "--out", "{out}", "--utility", "relative"],
            "--utility is about labels, and --close reads none",
        ),
        (["analyze", "{texts}", "--out", "{out}", "--share", "0.5"], "--share belongs to --close; add it"),
        (["bench", "scoring", "--artifact", "nowhere"], "bench scoring runs networks of the paper's shape"),
        (["bench", "prefill", "--model", "{llama}", "--tokens", "9999999"], "--tokens 9999999 is more than"),
    ],
)
def test_a_wrong_request_is_one_sentence(texts, llama, tmp_path, capsys, words, sentence):
    places = {"texts": texts, "llama": llama, "out": tmp_path / "out", "none": tmp_path / "none"}
    code = run([word.format(**places) for word in words])
    shown = capsys.readouterr()
    assert code == 2
    assert sentence in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
