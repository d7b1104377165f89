"""Tables hold the summary's numbers, keep runs apart and stay tables whatever is in them."""

from __future__ import annotations

import csv
import io
import re
import shutil

import pytest
from run_folders import ARMS, make_run

from wakesight.errors import RequestError
from wakesight.evaluation.comparison import compare
from wakesight.evaluation.records import Records, read_json, write_json
from wakesight.report import tables
from wakesight.report.folder import open_runs


@pytest.fixture(scope="module")
def run(run_folder):
    return open_runs([run_folder])[0]


def test_csv_has_every_mean_of_the_summary_in_full(run, run_folder):
    table = next(table for table in tables.csv_tables([run]) if table.name == "scores")
    rows = list(csv.DictReader(io.StringIO(tables.to_csv(table))))
    means = compare(Records(run_folder).read(), {"seed": 3})["rules"]["official"]["means"]
    found = {(row["task"], row["arm"]): row for row in rows if row["rule"] == "official"}
    assert len(found) == 3 * len(ARMS)
    for task, by_arm in means.items():
        for arm, cell in by_arm.items():
            assert float(found[task, arm]["mean"]) == cell["mean"]
            assert found[task, arm]["run"] == "hand"
    assert found["niah_64", "snapkv:window=8/ada/drop/0.3"]["method"] == "snapkv:window=8/ada"


def test_differences_areas_and_costs_are_there(run):
    found = {table.name: table for table in tables.csv_tables([run])}
    assert list(found) == ["scores", "differences", "areas", "costs", "skipped"]
    columns = found["differences"].columns
    assert {"p_value", "p_holm"} < set(columns)
    assert not any("p" in table.columns for table in found.values())  # a kept fraction or a p-value?
    families = [row[columns.index("family")] for row in found["differences"].rows]
    # two rules; every arm on two tasks and their mean; three curves on two tasks; all pairs of four curves
    assert [families.count(name) for name in ("whole", "first", "pairs")] == [2 * 3 * 12, 2 * 2 * 9, 2 * 3 * 6]
    assert len(found["areas"].rows) == 2 * 3 * 4
    whole = next(row for row in found["costs"].rows if row[1] == "whole")
    assert whole[4:] == (16.0, 96.0, 6144.0, 6144.0, 0.25, 0.125)


def test_markdown_shows_intervals_sources_and_skipped_rows(tmp_path):
    text = tables.markdown(open_runs([make_run(tmp_path / "a|b", skip="niah_64-0")]))
    assert text.startswith("# a\\|b\n")
    assert "10 of 12 questions scored, 6 contexts." in text
    assert "- generated:niah_64" in text
    assert "| the model reads at most 8 tokens \\| &lt;i>and&lt;/i> this has 16 | 26 |" in text
    widths = {}
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line
        elif line.startswith("|"):
            cells = line.replace("\\|", "").count("|")
            assert widths.setdefault(heading, cells) == cells


def test_markdown_compares_method_with_method_and_over_tasks(run):
    text = tables.markdown([run])
    assert re.search(r"\| snapkv:window=8/flat 0.5 \| keydiff/flat 0.5 \| niah_64 \| [+-]0", text)
    assert re.search(r"\| snapkv:window=8/flat 0.5 \| snapkv:window=8/ada 0.5 \| mean \| [+-]0", text)
    assert re.search(r"\| keydiff/flat 0.1 \| whole cache \| mean \| -0", text)
    assert "p-value (Holm)" in text
    assert "| p |" not in text


def test_a_mean_over_one_task_is_not_shown_beside_it(tmp_path):
    run = open_runs([make_run(tmp_path / "one", tasks=("niah_64",))])[0]
    assert tables.wide_scores(run, "strict").columns == ("arm", "niah_64")
    assert not any("mean" in row for row in tables.differences(run).rows)


def test_one_context_has_no_interval_anywhere(tmp_path):
    run = open_runs([make_run(tmp_path / "one", tasks=("niah_64",), items=1)])[0]
    text = tables.markdown([run])
    assert "2 of 2 questions scored, 1 context." in text
    assert "| 1.000 [-] |" in text
    scores = tables.to_csv(tables.scores(run)).splitlines()
    assert scores[1] == "strict,niah_64,whole,whole cache,1.0,1.0,,,2,1"


def test_an_unfinished_run_and_dropped_questions_are_told(run_folder, tmp_path):
    folder = tmp_path / "hand"
    shutil.copytree(run_folder, folder)
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "planned_questions": 14})
    Records(folder).append([dict(row, question="cut") for row in Records(folder).read()[:4]])
    run = open_runs([folder])[0]
    assert run.progress == "12 of 14 questions scored, unfinished: 12 run so far"
    assert run.dropped == ("niah_64-0, cut: 4 of 13 rows are there",)
    text = tables.markdown([run])
    assert "12 of 14 questions scored, unfinished" in text
    assert "- niah_64-0, cut: 4 of 13 rows are there" in text
    finished = open_runs([run_folder])[0]
    assert (finished.progress, finished.dropped) == ("12 of 12 questions scored", ())


def test_several_runs_stand_below_each_other_under_names_that_differ(run_folder, tmp_path):
    for place in ("x", "y"):
        shutil.copytree(run_folder, tmp_path / place / "hand")
    runs = open_runs([tmp_path / "x" / "hand", tmp_path / "y" / "hand"])
    assert [run.name for run in runs] == ["x/hand", "y/hand"]
    table = tables.csv_tables(runs)[0]
    assert [row[0] for row in table.rows] == ["x/hand"] * (len(table.rows) // 2) + ["y/hand"] * (len(table.rows) // 2)


def test_a_missing_or_stale_summary_and_a_half_written_question_do_not_matter(run_folder, tmp_path):
    folder = tmp_path / "hand"
    shutil.copytree(run_folder, folder)
    (folder / "summary.json").write_text('{"rules": {}}')
    rows = [dict(row, context="new") for row in Records(folder).read()[:3]]
    Records(folder).append(rows)
    assert open_runs([folder])[0].comparison == open_runs([run_folder])[0].comparison
    (folder / "summary.json").unlink()
    assert open_runs([folder])[0].comparison == open_runs([run_folder])[0].comparison
    assert not (folder / "summary.json").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: shutil.rmtree(f), "is no folder"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "is damaged"),
        (lambda f: (f / "config.json").write_text("[]"), "is damaged"),
        (lambda f: (f / "records.jsonl").unlink(), "no finished question"),
        (lambda f: (f / "records.jsonl").write_text("{}\n"), "damaged in line 1"),
        (lambda f: (f / "records.jsonl").write_text("nonsense\n"), "damaged in line 1"),
    ],
)
def test_what_is_no_run_folder_is_refused_in_one_sentence(run_folder, tmp_path, change, says):
    folder = tmp_path / "hand"
    shutil.copytree(run_folder, folder)
    change(folder)
    with pytest.raises(RequestError, match=says):
        open_runs([folder])


def test_one_folder_twice_is_refused(run_folder):
    with pytest.raises(RequestError, match="given twice"):
        open_runs([run_folder, run_folder / ".." / "hand"])
