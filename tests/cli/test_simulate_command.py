"""wakesight simulate: what it prints and writes, and one sentence for what it refuses."""

from __future__ import annotations

import csv
import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from wakesight.cli import simulate
from wakesight.errors import RequestError
from wakesight.traces.schema import Trace

pytest.importorskip("zarr")
pytest.importorskip("numba")

FIELDS = [
    "policy", "budget", "runs", "accesses", "misses", "miss_rate", "first_touches", "fetches", "mean_resident_pages",
    "peak_resident_pages", "bytes_in", "bytes_out", "stall_steps", "stall_seconds",
]  # fmt: skip
ALL = "full,reactive,evict,frozen,frozen_tail,snapkv,rkv:buffer=4,reasonalloc:interval=4,belady,arc,reactive:snapkv"


def trace(seed: int, regime: str = "niah", mass: bool = True) -> Trace:
    """40 steps of 2 layers of 2 heads (one KV head) that look at 6 positions each, mostly near one another."""
    rng = np.random.default_rng(seed)
    steps, prompt = 40, 200
    ctx_len = (prompt + np.arange(steps)).astype(np.int32)
    idx = np.empty((steps, 2, 2, 6), np.int32)
    for place in np.ndindex(steps, 2, 2):
        around = (rng.integers(8) * 25 + rng.permutation(25)[:6]) % ctx_len[place[0]]
        idx[place] = np.unique(around) if len(np.unique(around)) == 6 else np.arange(6)
    return Trace(
        name=f"{regime}-{seed}", topk_idx=idx, topk_val=np.full(idx.shape, 0.125, np.float32),
        needle=np.zeros((steps, 2, 2), np.float32), copy=np.zeros((steps, 2, 2), bool),
        tokens=np.arange(steps, dtype=np.int32), ctx_len=ctx_len, prompt_len=prompt, needle_spans=((0, 4),),
        kv_heads=(1, 1), prompt_mass=rng.random((2, 2, prompt), np.float32) if mass else None,
        meta={"model": "none", "regime": regime},
    )  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return written(tmp_path_factory.mktemp("traces") / "run", trace(0), trace(1), trace(2))


def written(folder, *traces):
    from wakesight.traces.writing import write, writing

    with writing(folder, {}) as run:
        for one in traces:
            write(run, one)
    return folder


def invoke(*words):
    words = [str(word) for word in words]
    names = ["-h", "--help"]
    done = CliRunner().invoke(simulate.command, words, catch_exceptions=False, help_option_names=names)
    assert done.exit_code == 0, done.output
    return done


def test_rows_of_every_policy(source):
    found = json.loads(invoke("--traces", source, "--policies", ALL, "--budgets", "4,2", "--json").stdout)["rows"]
    assert [list(row) for row in found] == [FIELDS] * len(found)
    assert [(row["policy"], row["budget"]) for row in found[:3]] == [("full", None), ("reactive", 2), ("reactive", 4)]
    assert len(found) == 1 + 2 * 10
    by = {(row["policy"], row["budget"]): row for row in found}
    assert len({row["accesses"] for row in found}) == 1
    assert {row["runs"] for row in found} == {3}
    assert by["full", None]["misses"] == 0
    for budget in (2, 4):
        for name in ("reactive", "arc"):
            assert by["belady", budget]["misses"] <= by[name, budget]["misses"]
        assert by["reactive", budget]["bytes_in"] == by["reactive", budget]["fetches"] * 8192 > 0
        assert by["evict", budget]["fetches"] == by["evict", budget]["bytes_out"] == 0
        assert by["reactive", budget]["peak_resident_pages"] <= 4 * budget  # 2 layers of 2 heads


def test_units_runs_and_costs(source):
    words = ["--traces", source, "--policies", "reactive", "--budgets", "3", "--json"]
    (heads,) = json.loads(invoke(*words).stdout)["rows"]
    (groups,) = json.loads(invoke(*words, "--unit", "kv_head").stdout)["rows"]
    assert groups["accesses"] < heads["accesses"]
    assert groups["peak_resident_pages"] <= 2 * 3
    runs = json.loads(invoke(*words, "--per-run").stdout)["rows"]
    assert [row["run"] for row in runs] == ["niah-0", "niah-1", "niah-2"]
    assert sum(row["misses"] for row in runs) == heads["misses"]
    slow = ["--bandwidth-gbps", "0.001", "--latency-us", "5", "--overlap", "0.5", "--step-ms", "10"]
    (row,) = json.loads(invoke(*words, *slow, "--page-bytes", "1000").stdout)["rows"]
    assert row["bytes_in"] == heads["fetches"] * 1000
    assert row["stall_seconds"] <= 5e-6 * row["stall_steps"] + row["bytes_in"] / 1e6
    assert row["stall_seconds"] > row["bytes_in"] / 1e6 - 0.005 * row["stall_steps"]


def test_a_table_for_people(source):
    text = invoke("--traces", source, "--budgets", "2").stdout
    lines = text.splitlines()
    assert lines[0].split()[:4] == ["policy", "B", "miss", "rate"]
    assert [line.split()[0] for line in lines[1:]] == ["full", "reactive", "evict", "belady"]
    assert lines[1].split()[1] == "-"


def test_comparisons_and_files(source, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "deep" / "out"
    words = ["--traces", source, "--policies", "full,reactive,evict,snapkv,rkv:buffer=4", "--budgets", "1,2,4,8"]
    done = invoke(*words, "--compare", "--curve", "3,6,12", "--out", out, "--json")
    found = json.loads(done.stdout)
    assert [(one["other"], one["match"]) for one in found["comparisons"]] == [
        ("evict", "budget"), ("snapkv", "memory"), ("rkv:buffer=4", "memory")
    ]  # fmt: skip
    evict = found["comparisons"][0]
    assert evict["matched"] == 4 == len(evict["points"])
    assert evict["wins"] + len(evict["losses"]) == 4
    assert all(one["matched"] + len(one["dropped"]) == 4 for one in found["comparisons"])
    assert {row["budget"] for row in found["rows"]} == {None, 1, 2, 4, 8}  # the finer curve makes no rows
    names = {file.name for file in out.iterdir()}
    assert names == {"simulate.json", "simulate.md", "rows.csv", "pareto.png", "pareto.svg"}
    stored = json.loads((out / "simulate.json").read_text())
    assert stored["rows"] == found["rows"]
    assert stored["asked"]["costs"]["page_bytes"] == 8192
    assert [row["policy"] for row in csv.DictReader((out / "rows.csv").read_text().splitlines())] == [
        r["policy"] for r in found["rows"]
    ]
    assert "reactive against evict at equal budget" in (out / "simulate.md").read_text()
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    invoke(*words, "--compare", "--curve", "3,6,12", "--out", out, "--json")
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert ">reactive</text>" in before["pareto.svg"].decode()


def test_combos_have_rows_of_their_own(tmp_path):
    folder = written(tmp_path / "run", trace(0), trace(1, "recall"))
    found = json.loads(invoke("--traces", folder, "--policies", "reactive", "--budgets", "2", "--json").stdout)["rows"]
    assert [(row["combo"], row["runs"]) for row in found] == [("none / niah", 1), ("none / recall", 1)]
    assert "none / recall  reactive" in invoke("--traces", folder, "--policies", "reactive", "--budgets", "2").stdout


def test_a_first_set_needs_prompt_attention(tmp_path):
    folder = written(tmp_path / "run", trace(0, mass=False))
    with pytest.raises(RequestError, match="has not logged"):
        invoke("--traces", folder, "--policies", "reactive:snapkv")


def test_a_first_set_comes_from_logged_scores(tmp_path):
    from dataclasses import replace

    scores = np.zeros((2, 1, 200), np.float32)
    scores[:, :, 32:48] = 1  # page 2 is in the first set of one page
    blank = np.zeros((40, 2, 2, 6))  # nothing is wanted, so what is resident is the first set
    one = replace(
        trace(0),
        topk_idx=blank.astype(np.int32) - 1,
        topk_val=blank.astype(np.float32),
        prompt_scores={"keydiff": scores},
    )
    folder = written(tmp_path / "run", one)
    rows = json.loads(
        invoke("--traces", folder, "--policies", "reactive,reactive:keydiff", "--budgets", "1", "--json").stdout
    )["rows"]
    assert [row["mean_resident_pages"] for row in rows] == [0, 4]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policies", "lru"], "unknown residency policy"),
        (["--policies", "reactive:keydiff"], "no scores of 'keydiff' .*, but of: snapkv; .*--scorers keydiff"),
        (["--policies", "evict,evict"], "twice"),
        (["--policies", ""], "no policy"),
        (["--budgets", "8,x"], "write 8,16,32"),
        (["--budgets", "0"], "holds nothing"),
        (["--unit", "kv_heads"], "did you mean 'kv_head'"),
        (["--page-size", "0"], "--page-size 0"),
        (["--page-bytes", "0"], "page_bytes=0"),
        (["--overlap", "2"], "--overlap"),
        (["--curve", "4"], "--compare"),
        (["--compare", "--policies", "evict"], "add it to --policies"),
        (["--compare", "--policies", "reactive,full"], "nothing to compare"),
        (["--seed", "-1"], "--seed"),
        (["--traces", "elsewhere"], "--traces is given 2 times"),
    ],
)
def test_bad_input_is_one_sentence(source, words, says):
    with pytest.raises(RequestError, match=says):
        invoke("--traces", source, *words)


def test_places_that_are_no_traces_or_no_target(source, tmp_path):
    with pytest.raises(RequestError, match="holds no traces"):
        invoke("--traces", tmp_path)
    pytest.importorskip("matplotlib")
    (tmp_path / "diary.txt").write_text("mine")
    with pytest.raises(RequestError, match=r"diary\.txt"):
        invoke("--traces", source, "--out", tmp_path)
    with pytest.raises(RequestError, match="is a file"):
        invoke("--traces", source, "--out", tmp_path / "diary.txt")


def test_without_numba_it_says_what_to_install(source, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "wakesight.cache.residency.compiled", raising=False)
    with pytest.raises(RequestError, match=r"pip install 'wakesight\[traces\]'"):
        invoke("--traces", source)
