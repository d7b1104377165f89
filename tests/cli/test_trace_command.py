"""wakesight trace record, show and import."""

from __future__ import annotations

import json

import numpy as np
import pytest

from wakesight.cli import main
from wakesight.cli.main import run
from wakesight.traces.schema import STEP_ARRAYS
from wakesight.traces.store import load_traces

RECORD = ["trace", "record", "--model", "tiny-hybrid", "--length", "200", "--new-tokens", "5", "--past-end"]


@pytest.fixture(autouse=True)
def _listed(monkeypatch):
    monkeypatch.setitem(main.COMMANDS, "trace", "Record and study attention logs.")


@pytest.fixture(scope="module")
def niah(tmp_path_factory):
    """Two depths of one text."""
    folder = tmp_path_factory.mktemp("niah") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(main.COMMANDS, "trace", "")
        assert run([*RECORD, "--out", str(folder), "--seeds", "1", "--depths", "0.25,0.75"]) == 0
    return folder


def test_a_recording_holds_one_trace_per_text_and_depth(niah):
    traces = load_traces(niah)

    assert traces.names == ("niah-200-d0.25-s0", "niah-200-d0.75-s0")
    for trace in traces:
        assert trace.steps == 5
        assert trace.meta["model"] == "tiny-hybrid"
        assert {"versions", "commit", "fingerprint", "reply"} <= set(trace.meta)
    assert traces[0].needle_spans[0] < traces[1].needle_spans[0]


def test_resume_records_only_what_is_missing(niah, capsys):
    asked = [*RECORD, "--out", str(niah), "--seeds", "1", "--depths", "0.25,0.75"]

    assert run(asked) == 2
    assert "type --resume to go on" in capsys.readouterr().err
    assert run([*asked, "--resume", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["resumed"], found["traces"]) == (2, [])
    assert run([*RECORD, "--out", str(niah), "--seeds", "1", "--depths", "0.5", "--resume"]) == 2
    assert "was recorded with depths=[0.25, 0.75], and now depths=[0.5] was asked" in capsys.readouterr().err


def test_show_lists_traces_and_damage(niah, tmp_path, capsys):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(niah, copy)
    chunk = copy / "niah-200-d0.25-s0" / "topk_idx" / "c" / "0" / "0" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-1])

    assert run(["trace", "show", str(copy), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["traces"]
    assert [row["steps"] for row in rows] == [0, 5]
    assert rows[0]["damaged"] == [
        "the trace niah-200-d0.25-s0: array topk_idx, steps 0 to 4: the chunk's checksum is wrong"
    ]
    assert rows[1]["damaged"] == []
    assert rows[1]["depth"] == 0.75
    assert run(["trace", "show", str(copy)]) == 0
    shown = capsys.readouterr()
    assert "damaged: the trace niah-200-d0.25-s0: array topk_idx, steps 0 to 4" in shown.out
    assert "2 traces, 2 of them finished, 5 steps, 1 damaged chunks" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize("regime", ["recall", "reasoning"])
def test_the_other_regimes_are_recorded_too(tmp_path, capsys, regime):
    asked = ["trace", "record", "--model", "tiny-hybrid", "--regime", regime, "--seeds", "1", "--new-tokens", "3"]
    asked += ["--length", "200"] if regime == "recall" else []

    assert run([*asked, "--half", "--out", str(tmp_path / "run"), "--json"]) == 0

    (made,) = json.loads(capsys.readouterr().out)["traces"]
    (trace,) = load_traces(tmp_path / "run")
    assert trace.meta["regime"] == regime
    assert trace.topk_val.dtype == np.float16
    assert made["steps"] <= trace.steps <= 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--regime", "niha"], "unknown regime 'niha'"),
        (["--regime", "recall", "--depths", "0.5"], "--depths belongs to the regime niah"),
        (["--regime", "reasoning", "--length", "99"], "--length belongs to the regimes niah and recall"),
        (["--depths", "a"], "--depths a is no list of numbers"),
        (["--seeds", "0"], "give at least 1 seed"),
        (["--new-tokens", "0"], "--new-tokens=0 must be at least 1"),
        (["--length", "20"], "--length 20 has no room"),
    ],
)
def test_bad_requests_are_one_sentence(tmp_path, capsys, words, message):
    asked = ["trace", "record", "--model", "tiny-hybrid", "--out", str(tmp_path / "run"), *words]

    assert run(asked) == 2

    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_unknown_command_is_named(capsys):
    assert run(["trace", "shwo"]) == 2
    assert "there is no command trace 'shwo', did you mean 'show'" in capsys.readouterr().err
    assert run(["trace"]) == 0
    assert "record" in capsys.readouterr().out


def arrays_of(trace):
    arrays = {name: np.asarray(getattr(trace, name)) for name in STEP_ARRAYS}
    return {
        **arrays, "prompt_len": trace.prompt_len, "kv_heads": np.array(trace.kv_heads),
        "needle_spans": np.array(trace.needle_spans), "prompt_mass": trace.prompt_mass,
        "meta": json.dumps(dict(trace.meta)),
    }  # fmt: skip


def test_an_imported_log_is_the_recorded_one(niah, tmp_path, capsys):
    trace = load_traces(niah)[0]
    arrays = {**arrays_of(trace), "topk_idx": np.asarray(trace.topk_idx).astype(np.int64)}
    np.savez(tmp_path / "theirs.npz", **arrays)

    assert run(["trace", "import", str(tmp_path / "theirs.npz"), "--out", str(tmp_path / "run"), "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["traces"] == ["theirs"]
    (read,) = load_traces(tmp_path / "run")
    for name in STEP_ARRAYS:
        assert np.array_equal(np.asarray(getattr(read, name)), np.asarray(getattr(trace, name)))
    assert np.array_equal(read.prompt_mass, trace.prompt_mass)
    assert dict(read.meta) == dict(trace.meta)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("needle"), "has no array 'needle'; it needs topk_idx"),
        (lambda a: a.update(needles=a["needle_spans"]), "unknown array 'needles', did you mean 'needle'"),
        (lambda a: a.update(copy=a["copy"][:-1]), r"copy has the shape"),
        (lambda a: a.update(copy=a["copy"].astype(np.int8)), "copy has the dtype int8; it must hold booleans"),
        (lambda a: a.update(tokens=a["tokens"].astype(np.int64) + 2**40), "tokens holds a number that is no int32"),
        (lambda a: a.update(topk_val=a["topk_val"] * 3), "sum to more than 1"),
        (lambda a: a.update(prompt_len=np.array([3, 4])), r"prompt_len has the shape \[2\]; give one whole number"),
        (lambda a: a.update(needle_spans=np.array([1, 2])), r"needle_spans has the shape \[2\]"),
        (lambda a: a.update(meta="[1]"), "meta is no JSON object"),
        (lambda a: a.update(kv_heads=np.array([1.5])), "kv_heads has the dtype float64"),
    ],
)
def test_mistakes_in_a_log_are_named_and_nothing_is_written(niah, tmp_path, capsys, change, message):
    arrays = arrays_of(load_traces(niah)[0])
    np.savez(tmp_path / "good.npz", **arrays)
    change(arrays)
    np.savez(tmp_path / "bad.npz", **arrays)

    files = [str(tmp_path / "good.npz"), str(tmp_path / "bad.npz")]
    assert run(["trace", "import", *files, "--out", str(tmp_path / "run")]) == 2

    said = capsys.readouterr().err
    assert message.replace("\\", "") in said
    assert "bad" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [b"", b"no zip", None])
def test_files_that_are_no_npz_are_refused(tmp_path, capsys, content):
    file = tmp_path / "log.npz"
    if content is not None:
        file.write_bytes(content)

    assert run(["trace", "import", str(file), "--out", str(tmp_path / "run")]) == 2

    assert "log.npz" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_pickled_objects_are_never_read(tmp_path, capsys):
    np.savez(tmp_path / "log.npz", needle=np.array([{"a": 1}], dtype=object))

    assert run(["trace", "import", str(tmp_path / "log.npz"), "--out", str(tmp_path / "run")]) == 2

    assert "is no readable .npz file of plain arrays" in capsys.readouterr().err
