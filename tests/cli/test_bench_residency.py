"""`wakesight bench residency`: its options reach the bench, its table says what was measured."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from wakesight.bench import residency
from wakesight.cli.main import run
from wakesight.engines.hf import engine as engines

RATIO = {"mean": 1.5, "low": 1.25, "high": 1.75, "rounds": 3}
SPEED = {"step_ms": 20.0, "tokens_per_s": 50.0, "speedup": RATIO, "over_whole": RATIO}
COST = {
    "kv_bytes_kept": 47_000_000, "sketch_bytes": 23_000_000, "kv_bytes_full": 377_000_000, "kv_bytes_slack": 0,
    "reservoir_bytes": 375_000_000, "read_bytes": 47_000_000, "agreement": 0.75, "wants_per_step": 2880.0,
    "misses_per_step": 12.5, "fetches_per_step": 12.5, "moved_bytes_per_step": 102_400.0, "recall": 0.5,
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """What the bench was asked for; it measures nothing."""
    found = {}

    def bench(engine, **given):
        found.update(given, engine=engine)
        return {
            "bench": "residency", "model": engine.name, "context_tokens": 8000, "attend": 32, "page_size": 16,
            "steps": 64,
            "rounds": 3, "questions": 4, "heads": 90, "unstable_heads": 22, "copy_bandwidth": 2e10, "weight_bytes": 1,
            "versions": {"torch": "x"}, "seconds": {},
            "rows": [{"arm": "transformers DynamicCache", **SPEED}, {"arm": "reactive B=32 R=4", **SPEED, **COST}],
        }  # fmt: skip

    monkeypatch.setattr(residency, "bench_residency", bench)
    monkeypatch.setattr(
        engines,
        "load",
        lambda model, **place: SimpleNamespace(name=model, geometry=SimpleNamespace(max_positions=8192)),
    )
    return found


def test_the_options_reach_the_bench(asked, capsys):
    assert run(["bench", "residency", "--tokens", "3000", "--steps", "5", "--rounds", "2", "--json"]) == 0

    assert (asked["engine"].name, asked["tokens"], asked["steps"], asked["rounds"]) == ("smollm2", 3000, 5, 2)
    assert json.loads(capsys.readouterr().out)["bench"] == "residency"
    assert run(["bench", "residency"]) == 0
    assert (asked["tokens"], asked["steps"], asked["rounds"]) == (8192, 64, 9)


def test_the_table_shows_speed_bytes_traffic_and_faithfulness(asked, capsys):
    assert run(["bench", "residency"]) == 0

    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("bench residency: smollm2, 8,000 tokens, 32 pages of 16 read")
    assert "22 of 90 heads unstable" in shown[0]
    assert shown[1].split()[:2] == ["transformers", "DynamicCache"]
    assert "50.0 tokens/s  1.50x [1.25, 1.75] transformers, 1.50x [1.25, 1.75] ours whole" in shown[2]
    assert "47.0 MB fast (23.0 sketches), 375.0 reservoir; per step 12.5 fetches, 0.10 MB" in shown[3]
    assert shown[3].endswith("75% of tokens alike, recall 0.50")
