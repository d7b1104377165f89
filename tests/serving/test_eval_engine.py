"""`wakesight eval --engine vllm`: the same runner, the same records, the same grades within a bfloat16's reach."""

from __future__ import annotations

import json

import pytest

from wakesight.cli.main import run

ARGUMENTS = [
    "--model", "tiny-hybrid", "--tasks", "closed_single,closed_dense", "--length", "400", "--items", "1",
    "--methods", "gatesight,keydiff", "--allocations", "flat", "--keep", "0.5", "--seed", "3", "--limit", "8",
]  # fmt: skip


def rows(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for engine in ("vllm", "hf"):
        assert run(["eval", "closed", *ARGUMENTS, "--engine", engine, "--out", str(folder / engine)]) == 0
    return folder


def test_the_records_are_alike(runs):
    mine, theirs = rows(runs / "vllm"), rows(runs / "hf")
    same = 0
    for a, b in zip(mine, theirs, strict=True):
        for name in ("task", "context", "question", "arm", "prompt", "tokens", "prefix", "kept", "kept_per_layer"):
            assert a[name] == b[name]
        assert a["skipped"] is None
        same += a["output_ids"] == b["output_ids"]
        if b["margin"] > 1.0:
            assert a["output_ids"] == b["output_ids"]
    assert same >= 0.7 * len(mine)
