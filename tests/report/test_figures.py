"""Figures: which there are, that they are the same for the same run, and one colour per method."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from run_folders import ARMS, EVIL, make_run

from wakesight.report import figures, rules
from wakesight.report.arm_names import curves, parse
from wakesight.report.depth_grid import grids
from wakesight.report.folder import open_runs
from wakesight.report.inline_svg import inline
from wakesight.report.palette import LIGHT, looks

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def run(run_folder):
    return open_runs([run_folder])[0]


def test_every_subject_is_a_png_and_an_svg_with_the_same_bytes_each_time(run):
    first, second = dict(figures.figure_files(run)), dict(figures.figure_files(run))
    subjects = ["costs", *(f"{s}-{r}" for r in ("strict", "official") for s in ("score", "differences", "depth"))]
    assert list(first) == [f"{subject}.{kind}" for subject in subjects for kind in ("png", "svg")]
    assert first == second
    for name, content in first.items():
        assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml"), name


def test_tasks_and_their_mean_have_a_panel_each(run):
    titles = [panel.title for panel in figures.run_panels(run) if panel.subject == "score-official"]
    assert titles == ["mean over tasks", "niah_128", "niah_64"]
    apart = [panel.title for panel in figures.run_panels(run) if panel.subject == "differences-official"]
    assert apart == titles


def test_one_context_alone_is_drawn_without_an_interval(tmp_path):
    run = open_runs([make_run(tmp_path / "one", items=1)])[0]
    assert all(figures.panel_svg(panel) for panel in figures.run_panels(run))


def test_equal_rules_are_shown_once(tmp_path):
    results = {"strict": {"means": 1}, "official": {"means": 1}, "kl": {"means": 2}}
    assert rules.distinct(results) == {
        "strict": "strict grade = official grade",
        "kl": "KL divergence from the whole cache (nats)",
    }


def test_the_depth_grid_has_the_mean_of_each_cell(run):
    grid = grids(run, "official")["keydiff/flat/drop/0.5"]
    assert (grid.lengths, grid.depths) == ((64, 128), (0.0, 0.5, 1.0))
    assert grid.values[0] == (pytest.approx(0.375), pytest.approx(0.375))  # questions with luck 0 and 1


def test_a_run_without_a_grid_of_depths_has_no_heat_map(tmp_path):
    run = open_runs([make_run(tmp_path / "one", tasks=("vt_64",))])[0]
    assert grids(run, "official") == {}
    assert not any(panel.subject.startswith("depth") for panel in figures.run_panels(run))


def test_a_method_has_one_colour_and_its_variants_differ_in_line_style():
    styles = looks(ARMS)
    assert list(styles) == ["keydiff/flat", "keydiff/ada", "snapkv:window=8/flat", "snapkv:window=8/ada"]
    assert styles["keydiff/flat"].colour == styles["keydiff/ada"].colour == LIGHT[0]
    assert styles["keydiff/flat"].dashes == () != styles["keydiff/ada"].dashes
    assert looks(["whole", "snapkv/flat/drop/0.1"])["snapkv/flat"].colour == styles["snapkv:window=8/ada"].colour


def test_unknown_and_many_scorers_get_colours_of_their_own_while_there_are_any():
    names = [f"mine{i}/flat/drop/0.5" for i in range(8)] + ["keydiff/flat/drop/0.5", "keydiff:a=1/flat/drop/0.5"]
    assert len({look.colour for look in looks(names).values()}) == 10
    assert len(looks([f"mine{i}/flat/drop/0.5" for i in range(30)])) == 30


def test_arm_names():
    name = parse("snapkv:window=16/ada/page16-mean/drop/0.25")
    assert (name.curve, name.scorer, name.keep) == ("snapkv:window=16/ada/page16-mean", "snapkv:window=16", 0.25)
    assert name.label == "snapkv:window=16/ada/page16-mean 0.25"
    assert [p.keep for p in curves(["whole", "a/flat/drop/0.5", "a/flat/drop/0.1"])["a/flat"]] == [0.1, 0.5]


def test_an_inlined_svg_is_well_formed_has_its_own_ids_and_escapes_its_title(tmp_path):
    run = open_runs([make_run(tmp_path / "evil", tasks=(f"{EVIL}_64", "$x^2$_64"), items=1)])[0]
    for number, panel in enumerate(figures.run_panels(run)):
        text = inline(figures.panel_svg(panel), f"p{number}", panel.about)
        tree = ElementTree.fromstring(text)
        assert all(x.get("id", "p").startswith(f"p{number}-") for x in tree.iter() if x.get("id"))
        assert "http" not in text
        assert "<script" not in text


def test_lower_is_better_where_it_is():
    assert rules.goodness("kl", 0.0, 0.0, 4.0) == 1.0
    assert rules.goodness("official", 0.4, 0.2, 0.9) == 0.4
    assert rules.goodness("rouge", 30.0, 10.0, 50.0) == 0.5
    assert rules.better("kl", 0.1, 0.2)
    assert not rules.better("official", 0.1, 0.2)
