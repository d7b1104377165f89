"""The script that records and measures the traces of docs/evidence.md, on little recordings."""

from __future__ import annotations

import json

import numpy as np
import pytest

from wakesight.cli.trace_record import command as record_command
from wakesight.traces.schema import Trace
from wakesight.traces.writing import write, writing

pytest.importorskip("zarr")
pytest.importorskip("numba")

from benchmarks import traces, traces_tables


def little(model: str, regime: str, seed: int, steps: int = 48) -> Trace:
    """2 layers of 2 heads (one KV head) with a first resident set; heads look at 6 positions near one another."""
    rng = np.random.default_rng([seed, len(model), len(regime)])
    prompt = 320
    ctx_len = (prompt + np.arange(steps)).astype(np.int32)
    first = rng.integers(0, prompt // 25, (steps, 2, 2, 1)) * 25
    idx = (first + rng.permuted(np.tile(np.arange(25), (steps, 2, 2, 1)), axis=-1)[..., :6]).astype(np.int32)
    return Trace(
        name=f"{regime}-{seed}", topk_idx=idx, topk_val=np.full(idx.shape, 0.125, np.float32),
        needle=rng.choice([0.0, 0.5], p=[0.9, 0.1], size=(steps, 2, 2)).astype(np.float32),
        copy=rng.random((steps, 2, 2)) < 0.2, tokens=rng.integers(0, 3, steps).astype(np.int32), ctx_len=ctx_len,
        prompt_len=prompt, needle_spans=((0, 4),), kv_heads=(1, 1), prompt_mass=rng.random((2, 2, prompt), np.float32),
        prompt_scores={"keydiff": rng.random((2, 1, prompt), np.float32)}, meta={"model": model, "regime": regime},
    )  # fmt: skip


def recorded(folder, *found: Trace):
    with writing(folder, {}) as run:
        for one in found:
            write(run, one)
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("traces")
    recorded(out / "smollm2-niah", *(little("smollm2", "niah", seed) for seed in (0, 1)))
    recorded(out / "tiny-hybrid-reasoning", *(little("tiny-hybrid", "reasoning", seed, 200) for seed in (0, 1)))
    with writing(out / "smollm2-recall", {}) as run:  # begun, and never finished
        run.create("recall-0", layers=2, query_heads=2, top=6, prompt_len=9, kv_heads=(1, 1), needle_spans=())
    assert traces.main(["measure", "--out", str(out)]) == 0
    return out / "results"


def read(folder, name):
    return json.loads((folder / f"traces-{name}.json").read_text())


def test_every_study_has_the_finished_combos_only(out):
    combos = {"smollm2 / niah", "tiny-hybrid / reasoning"}
    for name in ("churn", "predict"):
        assert read(out, name)["combos"].keys() == combos
    found = read(out, "simulate")
    assert {row["combo"] for row in found["rows"]} == combos
    assert {row["policy"] for row in found["rows"]} == {*traces.POLICIES, *traces.SHORT}
    assert {one["run"] for one in found["runs"]} == {"niah-0", "niah-1", "reasoning-0", "reasoning-1"}


def test_comparisons_count_what_their_points_say(out):
    found = read(out, "simulate")
    for one in [*found["comparisons"], *found["with_curve"], *found["short"]]:
        assert one["wins"] == sum(point["reactive"] <= point["other"] + 1e-4 for point in one["matches"])
        assert one["matched"] + len(one["dropped"]) == one["points"]
        for point in one["matches"]:
            row = next(
                row
                for row in found["rows"]
                if (row["combo"], row["policy"], row["budget"]) == (point["combo"], one["other"], point["budget"])
            )
            assert point["other"] == pytest.approx(row["miss_rate"], abs=1e-4)
    assert {one["other"] for one in found["short"]} == set(traces.SHORT)
    assert all(one["points"] == 4 for one in found["short"])  # the short combo alone
    fuller = {one["other"]: one["matched"] for one in found["with_curve"]}
    assert all(fuller[one["other"]] >= one["matched"] for one in found["comparisons"])


def test_tables_list_every_loss_and_hold_the_papers_figures_apart(out):
    text = (out / "traces.md").read_text()
    found = read(out, "simulate")
    for kind in ("comparisons", "with_curve", "short"):
        lost = [
            (one["other"], point)
            for one in found[kind]
            for point in one["matches"]
            if not point["won"] and one["other"] != "belady"  # a bound
        ]
        lines = traces_tables.losses(found[kind]).splitlines()
        assert sum(line.startswith("|") for line in lines) == (len(lost) + 2 if lost else 0)
        for other, point in lost:
            assert any(line.startswith(f"| {other} | {point['combo']} | {point['budget']} |") for line in lines)
    for one in found["comparisons"]:
        for combo, budget in one["dropped"]:
            (line,) = [part for part in traces_tables.losses([one]).split("Left out")[1:]]
            assert combo in line
            assert str(budget) in line
    assert "| 17 of 17 | 5 combos |" in text
    assert "| 19 of 20 | 5 combos |" in text
    assert "| 32 of 32 | 4 combos |" in text
    rows = [line for line in text.splitlines() if line.startswith("| niah: adjacent Jaccard of active heads, binary")]
    assert [row.endswith("| 0.71 (3B) |") for row in rows] == [True]


def test_measuring_twice_gives_the_same_bytes(out):
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert traces.main(["measure", "--out", str(out.parent)]) == 0
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_tables_go_between_the_marks_of_the_page(out, tmp_path):
    page = tmp_path / "evidence.md"
    page.write_text("# Evidence\n\n<!-- traces: begin -->\nold\n<!-- traces: end -->\n\n## Next\n")
    found = {name: read(out, name) for name in ("churn", "predict", "simulate")}

    traces.document(found, out, tmp_path)

    text = page.read_text()
    assert text.startswith("# Evidence\n\n<!-- traces: begin -->\n\n| model / regime |")
    assert text.endswith("<!-- traces: end -->\n\n## Next\n")
    assert "old" not in text
    assert "| 17 of 17 | 5 combos |" in text
    assert (tmp_path / "results" / "traces-churn.json").read_bytes() == (out / "traces-churn.json").read_bytes()
    traces.document(found, out, tmp_path)
    assert page.read_text() == text


def test_a_page_without_the_marks_is_refused(out, tmp_path):
    (tmp_path / "evidence.md").write_text("# Evidence\n")

    with pytest.raises(SystemExit, match="no place for the tables"):
        traces.document({}, out, tmp_path)
    assert not (tmp_path / "results").exists()


def test_nothing_finished_is_said(tmp_path):
    with pytest.raises(SystemExit, match="no trace is finished yet"):
        traces.main(["measure", "--out", str(tmp_path)])


@pytest.mark.parametrize("quick", [False, True])
def test_every_recording_is_a_command_that_can_be_typed(tmp_path, quick):
    names = set()
    for each in traces.RECORDINGS:
        words = each.words(tmp_path, quick)
        assert words[:2] == ["trace", "record"]
        with record_command.make_context("record", words[2:]) as context:
            assert context.params["resume"]
            assert context.params["model"] == each.model
        names.add(context.params["out"])
    assert len(names) == len(traces.RECORDINGS) == 6


def test_the_bundled_hybrid_is_recorded_and_measured_quickly(tmp_path, capsys):
    words = ["--out", str(tmp_path), "--model", "tiny-hybrid", "--regime", "niah", "--quick"]
    assert traces.main(words) == 0
    assert traces.main(["record", *words]) == 0  # nothing is left to do

    assert "0 traces recorded" in capsys.readouterr().out
    assert read(tmp_path / "results", "churn")["combos"]["tiny-hybrid / niah"]["steps"] == 48
