"""The residency bench on a tiny model: every arm is there, does equal work, and its numbers are those of its cache."""

from __future__ import annotations

import pytest

from wakesight.bench.residency import PLAIN, WHOLE, bench_residency
from wakesight.errors import RequestError
from wakesight.evaluation.suites import recall
from wakesight.testing import tiny

ATTEND, STEPS = 4, 18


@pytest.fixture(scope="module")
def result():
    engine = tiny.engine("llama", max_position_embeddings=4096, num_hidden_layers=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recall, "NEW_TOKENS", 3)  # a random model knows nothing, however long it writes
        found = bench_residency(
            engine, tokens=2000, steps=STEPS, rounds=1, attend=ATTEND, held=(ATTEND, 8), intervals=(1, 4)
        )
    assert (engine.pool.held_bytes, engine.pool.reservoir_bytes, engine.pool.leases) == (0, 0, 0)
    return found


@pytest.fixture(scope="module")
def rows(result):
    return {row["arm"]: row for row in result["rows"]}


def test_every_arm_is_measured_against_both_whole_caches(result, rows):
    assert list(rows) == [
        PLAIN, WHOLE, "reactive B=4 R=1", "reactive B=4 R=4", "reactive B=8 R=1", "reactive B=8 R=4", "quest",
        "frozen cadence R=16", "flexicache R=16", "rkv every 8", "snapkv every 8",
    ]  # fmt: skip
    for row in rows.values():
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["step_ms"])
        assert row["speedup"]["low"] <= row["speedup"]["mean"] <= row["speedup"]["high"]
    assert rows[PLAIN]["speedup"]["mean"] == rows[WHOLE]["over_whole"]["mean"] == 1
    assert 1600 < result["context_tokens"] < 2000
    assert set(result["seconds"]) == set(rows)


def test_wants_follow_the_cadence(result, rows):
    """3 layers of 2 heads want K pages at every R-th step, the first included."""
    heads = result["heads"]
    for interval, rankings in ((1, STEPS), (4, 5)):
        for pages in (4, 8):
            row = rows[f"reactive B={pages} R={interval}"]
            assert row["wants_per_step"] * STEPS == rankings * heads * ATTEND
            assert row["misses_per_step"] == row["fetches_per_step"] <= row["wants_per_step"]
    assert rows["frozen cadence R=16"]["wants_per_step"] * STEPS == 2 * heads * ATTEND
    dense = result["unstable_heads"]
    assert 0 < dense < heads
    assert rows["flexicache R=16"]["wants_per_step"] * STEPS == ((heads - dense) * 2 + dense * STEPS) * ATTEND
    assert rows["quest"]["wants_per_step"] * STEPS == heads // 3 * STEPS * ATTEND  # two of three layers are dense


def test_more_pages_fetch_less_and_answer_alike_at_every_step_ranked(rows):
    few, many = rows["reactive B=4 R=1"], rows["reactive B=8 R=1"]
    assert many["fetches_per_step"] < few["fetches_per_step"]
    assert (many["agreement"], many["recall"]) == (few["agreement"], few["recall"])
    assert rows[WHOLE]["agreement"] == 1
    assert 0 <= few["agreement"] <= 1


def test_bytes_are_ordered_as_the_arms_are(result, rows):
    kept = {name: row["kv_bytes_kept"] for name, row in rows.items() if name != PLAIN}
    assert kept["reactive B=4 R=1"] == kept["frozen cadence R=16"] < kept["reactive B=8 R=1"]
    assert kept["reactive B=8 R=1"] < kept["flexicache R=16"] < kept["quest"]
    whole = rows[WHOLE]
    assert whole["sketch_bytes"] == whole["reservoir_bytes"] == whole["moved_bytes_per_step"] == 0
    for name, row in rows.items():
        if name != PLAIN:
            assert row["read_bytes"] <= row["kv_bytes_kept"]
    assert rows["reactive B=8 R=1"]["read_bytes"] == rows["reactive B=4 R=1"]["read_bytes"]
    for name in ("rkv every 8", "snapkv every 8"):  # cut to 4 pages' entries, then 2 tokens more: 18 steps
        assert rows[name]["kv_bytes_kept"] == result["heads"] * (ATTEND * 16 + STEPS % 8) * 2 * 16 * 4
    page = 2 * 16 * 16 * 4  # key and value of 16 tokens, dim 16, float32
    row = rows["reactive B=4 R=1"]
    assert row["moved_bytes_per_step"] / row["fetches_per_step"] == pytest.approx(page)


def test_a_context_of_hardly_more_than_is_held_is_refused():
    engine = tiny.engine("llama")
    with pytest.raises(RequestError, match=r"hardly more than the 64 pages .*; raise --tokens to 1152"):
        bench_residency(engine, tokens=1000)
