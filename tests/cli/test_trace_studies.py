"""wakesight trace churn and predict: what they print and write, and one sentence for what they refuse."""

from __future__ import annotations

import csv
import json
import sys

import pytest
from click.testing import CliRunner

from wakesight.cli import trace_churn, trace_predict
from wakesight.errors import RequestError
from wakesight.testing.planted_traces import WORDS, planted_trace

pytest.importorskip("zarr")

WAKES = [(60, 0, 1), (110, 1, 2), (130, 0, 1)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Three runs of one regime and one of another."""
    from wakesight.traces.writing import write, writing

    folder = tmp_path_factory.mktemp("traces") / "run"
    with writing(folder, {}) as run:
        for seed, regime in enumerate(["niah", "niah", "niah", "reasoning"]):
            write(run, planted_trace(seed, steps=160, wakes=WAKES, warning=5, marker=WORDS, regime=regime))
    return folder


def invoke(module, *words):
    done = CliRunner().invoke(
        module.command, [str(word) for word in words], catch_exceptions=False, help_option_names=["-h", "--help"]
    )
    assert done.exit_code == 0, done.output
    return done


def test_churn_prints_numbers_beside_the_papers(source):
    text = invoke(trace_churn, source).stdout
    assert "## tiny / niah" in text
    assert "| adjacent Jaccard of active heads, binary |" in text
    niah, reasoning = text.split("## tiny / reasoning")
    assert "| paper, 3B / NIAH |" in niah
    assert "CoT" not in niah
    assert "| paper, 8B / CoT | paper, 1.5B / CoT |" in reasoning
    assert "| 0.79 | 0.85 |" in reasoning


def test_churn_as_json_is_the_same_each_time(source):
    first, second = (invoke(trace_churn, source, "--json").stdout for _ in range(2))
    assert first == second
    found = json.loads(first)["churn"]
    assert list(found["combos"]) == ["tiny / niah", "tiny / reasoning"]
    assert found["combos"]["tiny / niah"]["runs"] == 3
    assert found["rule"]["drift"]["window"] == 8


def test_churn_writes_text_table_and_figures(source, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "deep" / "churn"
    told = json.loads(invoke(trace_churn, source, "--out", out, "--json").stdout)
    assert told["files"] == sorted(file.name for file in out.iterdir())
    assert {"churn.json", "churn.md", "heads.csv", "jaccard.png", "jaccard.svg", "heads-tiny-niah.svg"} < set(
        told["files"]
    )
    assert json.loads((out / "churn.json").read_text()) == told["churn"]
    rows = list(csv.DictReader((out / "heads.csv").read_text().splitlines()))
    assert [row["combo"] for row in rows] == ["tiny / niah"] * 6 + ["tiny / reasoning"] * 6
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    invoke(trace_churn, source, "--out", out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_predict_finds_what_was_planted_and_writes_it(source, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "events-of-other-traces.png").write_bytes(b"old")
    (tmp_path / "churn.md").write_text("stays")
    told = json.loads(invoke(trace_predict, source, "--out", tmp_path, "--json").stdout)
    found = told["predict"]["combos"]["tiny / niah"]
    assert (found["events"], found["heads_with_events"]) == (9, 2)
    assert found["detectors"]["page_change"]["recall"] == {"value": 1, "low": 1, "high": 1}
    assert {file.name for file in tmp_path.iterdir()} == {"churn.md", *told["files"]}
    assert "alarms-tiny-niah.png" in told["files"]
    text = (tmp_path / "predict.md").read_text()
    assert "| wake events | 9 | 236 |" in text
    assert "| needle-mass delta |" in text
    assert text == invoke(trace_predict, source).stdout.removesuffix("\n")


def test_runs_too_short_for_any_number_still_make_a_report(tmp_path):
    """No chunk, no event, no alarm: dashes and empty figures."""
    pytest.importorskip("matplotlib")
    from wakesight.traces.writing import write, writing

    with writing(tmp_path / "run", {}) as run:
        write(run, planted_trace(0, steps=1))
    for module in (trace_churn, trace_predict):
        text = invoke(module, tmp_path / "run", "--out", tmp_path / "out").stdout
        assert "nan" not in text.lower()
    assert "| heads that are unstable | - |" in (tmp_path / "out" / "churn.md").read_text()
    assert "| best signal | - |" in (tmp_path / "out" / "predict.md").read_text()


def test_what_cannot_be_is_refused(source, tmp_path):
    (tmp_path / "thesis.tex").touch()
    for words, sentence in (
        ([source, "--out", tmp_path], "holds other files"),
        ([source, "--out", tmp_path / "thesis.tex"], "is a file"),
        ([source, "--seed", "-1"], "--seed -1"),
        ([tmp_path / "absent"], "holds no traces"),
    ):
        for module in (trace_churn, trace_predict):
            with pytest.raises(RequestError, match=sentence):
                invoke(module, *words)
    with pytest.raises(RequestError, match="--lead 0"):
        invoke(trace_predict, source, "--lead", 0)
    with pytest.raises(RequestError, match="--z nan"):
        invoke(trace_predict, source, "--z", "nan")
    with pytest.raises(RequestError, match="--active"):
        invoke(trace_churn, source, "--active", "-0.5")


def test_figures_without_matplotlib_are_refused_before_any_work(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RequestError, match=r"wakesight\[report\]"):
        invoke(trace_churn, source, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert invoke(trace_churn, source).stdout
