"""The recording that comes with the package."""

from __future__ import annotations

import json
from pathlib import Path

import wakesight
from wakesight.cli.main import run
from wakesight.traces.store import load_traces


def test_it_is_small_and_holds_three_needles():
    assert (Path(wakesight.__file__).parent / "data" / "traces" / "niah.zip").stat().st_size <= 5_000_000
    traces = load_traces("sample:niah")
    assert [trace.meta["depth"] for trace in traces] == [0.25, 0.5, 0.75]
    for trace in traces:
        assert trace.meta["model"] == "smollm2"
        assert trace.topk_idx.shape[1:] == (30, 9, 64)
        assert trace.needle_spans


def test_the_documented_commands_run_on_it(capsys):
    assert run(["simulate", "--traces", "sample:niah", "--policies", "full,reactive,evict,belady", "--json"]) == 0
    rows = {(row["policy"], row["budget"]): row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["full", None]["misses"] == 0
    for budget in (8, 16, 32):
        assert rows["belady", budget]["misses"] <= rows["reactive", budget]["misses"]
    assert run(["trace", "churn", "sample:niah", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
