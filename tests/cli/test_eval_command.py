"""wakesight eval: flags, recipes, suite options, what config.json holds, the bar on a terminal."""

from __future__ import annotations

import importlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from wakesight.cli.eval import clock, showing
from wakesight.cli.main import run
from wakesight.engines.hf.engine import load
from wakesight.engines.session import Session
from wakesight.errors import WorkError
from wakesight.evaluation.items import Context
from wakesight.evaluation.records import Records, read_json
from wakesight.evaluation.runner import Progress
from wakesight.models.load import ARTIFACT
from wakesight.testing import tiny
from wakesight.testing.artifacts import random_artifact

SMALL = {
    "suite": "fidelity", "tasks": "code,narrative", "length": 160, "items": 1, "methods": "random", "keep": "0.5",
    "options": {"continuation": 24},
}  # fmt: skip
WORDS = [
    "fidelity", "--tasks", "code,narrative", "--length", "160", "--items", "1", "--methods", "random", "--keep", "0.5",
    "--option", "continuation=24",
]  # fmt: skip


@pytest.fixture(scope="module")
def by_flags(llama, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("flags") / "run"
    assert run(["eval", *WORDS, "--model", llama, "--out", str(folder)]) == 0
    return folder


def refused(capsys, *words: str) -> str:
    capsys.readouterr()
    assert run(["eval", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def same(folder: Path, other: Path) -> bool:
    return (folder / "summary.json").read_bytes() == (other / "summary.json").read_bytes()


def test_config_tells_what_was_given_from_defaults(by_flags, llama):
    config = read_json(by_flags / "config.json")
    assert config["given"] == {**SMALL, "model": llama, "options": {"continuation": "24"}}
    assert config["defaults"]["seed"] == 42
    assert config["defaults"]["allocations"] == "natural"
    assert not config["given"].keys() & config["defaults"].keys()
    assert {"wakesight", "torch", "transformers", "python"} <= config["versions"].keys()
    assert {"system", "processor", "cores", "memory_bytes", "devices"} <= config["machine"].keys()
    assert "commit" in config


def test_a_suite_option_reaches_the_suite(by_flags):
    about = [json.loads(path.read_text()) for path in (by_flags / "contexts").iterdir()]
    assert len(about) == 2
    for one in about:
        (question,) = one["questions"].values()
        assert 18 <= len(question["text"].encode()) <= 24
        assert one["meta"]["tokens"] <= 160 - 24


@pytest.mark.parametrize("form", ["json", "yaml", "lists"])
def test_a_recipe_does_the_same_as_the_flags(by_flags, llama, tmp_path, form):
    recipe: dict[str, Any] = {**SMALL, "model": llama, "out": str(tmp_path / "run")}
    if form == "json":
        (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    else:
        if form == "lists":
            recipe |= {"tasks": ["code", "narrative"], "keep": [0.5], "option": recipe.pop("options"), "page-size": 16}
        yaml = pytest.importorskip("yaml")
        (tmp_path / "recipe.yaml").write_text("# a comment\n" + yaml.safe_dump(recipe))
    (path,) = tmp_path.glob("recipe.*")
    assert run(["eval", "--recipe", str(path)]) == 0
    given = read_json(tmp_path / "run" / "config.json")["given"]
    given.pop("page_size", None)
    assert given == read_json(by_flags / "config.json")["given"]
    assert same(tmp_path / "run", by_flags)


def test_the_config_of_a_run_is_a_recipe_and_flags_win(by_flags, tmp_path, capsys):
    config = str(by_flags / "config.json")
    assert "--out" in refused(capsys, "--recipe", config)
    assert run(["eval", "--recipe", config, "--out", str(tmp_path / "again")]) == 0
    assert same(tmp_path / "again", by_flags)
    before, again = (read_json(folder / "config.json") for folder in (by_flags, tmp_path / "again"))
    assert (again["given"], again["defaults"]) == (before["given"], before["defaults"])

    words = ["--recipe", config, "--keep", "0.3,0.5", "--seed", "7", "--out", str(tmp_path / "other")]
    assert run(["eval", *words]) == 0
    other = read_json(tmp_path / "other" / "config.json")
    assert (other["given"]["keep"], other["given"]["seed"]) == ("0.3,0.5", 7)
    assert "seed" not in other["defaults"]
    assert len({row["arm"] for row in Records(tmp_path / "other").read()}) == 3


def test_the_config_of_an_older_run_is_a_recipe_too(by_flags, llama, tmp_path):
    old = {"arguments": {**SMALL, "model": llama, "limit": None}, "versions": {"torch": "2"}}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert run(["eval", "--recipe", str(tmp_path / "config.json"), "--out", str(tmp_path / "run")]) == 0
    assert same(tmp_path / "run", by_flags)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"keeps": 0.3}', "has 'keeps', which is no option, did you mean 'keep'"),
        ('{"recipe": "x"}', "has 'recipe', which is no option"),
        ('{"versions": {}, "given": 3, "defaults": {}}', "has 'versions', which is no option"),
        ('{"keep": {"from": 0.1}}', "has a nested keep"),
        ('{"resume": "yes"}', "resume: 'yes', which takes true or false"),
        ('{"data": true}', "data: True, which takes text or a number"),
        ('{"length": "long"}', "has length: 'long' is not a valid integer"),
        ("length: long", "has length: 'long' is not a valid integer"),
        ("keep: 0.1\nlength: 512\nkeep: 0.3", "has keep twice"),
        ('{"keep": 0.1, "keep": 0.3}', "has keep twice"),
        ('{"options": {"depths": 1, "depths": 2}}', "has depths twice"),
        ('{"page-size": 8, "page_size": 8}', "has page_size twice"),
        ("{", "is no JSON"),
        ("- a\n- b", "is no mapping"),
        ("a: [", "is no YAML"),
        ("keeps: 0.3", "did you mean 'keep'"),
    ],
)
def test_a_bad_recipe_is_refused_in_one_sentence(tmp_path, capsys, text, says):
    (tmp_path / "recipe").write_text(text)
    assert says in refused(capsys, "niah", "--model", "m", "--out", "o", "--recipe", str(tmp_path / "recipe"))
    assert "recipe file nowhere does not exist" in refused(capsys, "--recipe", "nowhere")


def test_yaml_without_pyyaml_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "recipe.yaml").write_text("suite: niah")
    assert "pip install pyyaml" in refused(capsys, "--recipe", str(tmp_path / "recipe.yaml"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "say which suite to run"),
        (["niah"], "say which model to run with --model"),
        (["niah", "--model", "m"], "say where the run goes with --out"),
        (["nih", "--model", "m", "--out", "o"], "did you mean 'niah'"),
        (["niah", "--model", "m", "--out", "o", "--limit", "0"], "--limit 0 must be at least 1"),
        (["niah", "--model", "m", "--out", "o", "--option", "depths"], "--option depths sets nothing"),
        (["niah", "--model", "m", "--out", "o", "--option", "depth=3"], "did you mean 'depths'"),
        (["niah", "--model", "m", "--out", "o", "--option", "depths=3", "--option", "depths=4"], "given twice"),
        (["niah", "--model", "m", "--out", "o", "--evicted", "burn"], "evicted='burn' is unknown"),
        (["niah", "--model", "m", "--out", "o", "--rerank", "4"], "--rerank belongs to --evicted demote"),
        (
            ["niah", "--model", "m", "--out", "o", "--match", "grades"],
            "--match grades is unknown; use bytes or entries",
        ),
        (["niah", "--model", "m", "--out", "o", "--seed", "-1"], "--seed -1 must be at least 0"),
        (["niah", "--model", "m", "--out", "o", "--thinking", "0"], "--thinking 0 must be at least 1"),
        (["niah", "--model", "m", "--out", "o", "--model", "n"], "--model is given 2 times; give it once"),
        (["niah", "--model", "m", "--out", "o", "--tasks", "a", "--tasks", "b"], "--tasks is given 2 times"),
        (["--recipe", "a", "--recipe", "b"], "--recipe is given 2 times"),
    ],
)
def test_bad_requests(capsys, words, says):
    assert says in refused(capsys, *words)


def test_help_lists_the_options_of_every_suite(capsys):
    run(["eval", "--help"])
    shown = capsys.readouterr().out
    for name in ("niah depths", "fidelity continuation", "scbench turns", "reasoning new_tokens", "ruler reserve"):
        assert name in shown


def test_limit_and_items_and_tasks_with_their_suite(llama, tmp_path, capsys):
    words = [
        "eval", "ruler", "--model", llama, "--tasks", "ruler:vt,niah_single_1", "--length", "900", "--items", "2",
        "--limit", "3", "--methods", "random", "--keep", "0.5", "--json", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    capsys.readouterr()
    assert run(words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["progress"]["questions"], shown["progress"]["total"]) == (3, 3)
    assert {row["task"] for row in shown["summary"]["arms"]} == {"ruler:vt", "niah_single_1", "mean"}
    assert [row["n"] for row in shown["summary"]["arms"] if row["arm"] == "whole"] == [2, 1, 3]


def test_a_terminal_shows_how_many_of_how_many_and_the_time_left():
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    with showing(console) as on_question:
        on_question(Progress(total=26, questions=3, resumed=10, wall=33.0), Context("c", "cwe", "", ()))
        console.print("")  # makes the bar draw itself
    assert "13 of 26 questions" in shown.getvalue()
    assert "2:23 left" in shown.getvalue()
    assert "cwe" in shown.getvalue()
    with showing(None) as nothing:
        assert nothing is None


def test_a_clock():
    assert [clock(seconds) for seconds in (0, 9.6, 90, 3700)] == ["0:00", "0:10", "1:30", "1:01:40"]


def test_the_package_is_a_program():
    done = subprocess.run([sys.executable, "-m", "wakesight", "--version"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.startswith("wakesight, version")


def test_the_commit_is_that_of_a_checkout_only(monkeypatch, tmp_path):
    machine = importlib.import_module("wakesight.bench.machine")
    asked: list[tuple[str, ...]] = []

    def git(folder: Path, *words: str) -> str | None:
        asked.append(words)
        return "f00-dirty" if words[0] == "describe" else tracked

    monkeypatch.setattr(machine, "_git", git)
    tracked: str | None = "__init__.py"
    assert machine.commit() == "f00-dirty"
    tracked = None  # an installed copy inside somebody's repository
    assert machine.commit() is None
    monkeypatch.undo()
    assert machine._git(tmp_path, "rev-parse", "HEAD") is None


def test_a_length_that_the_model_cannot_read_is_refused(llama, tmp_path, capsys):
    words = ["fidelity", "--model", llama, "--length", "99999", "--out", str(tmp_path / "run")]
    assert "--length 99999 is more than" in refused(capsys, *words)
    assert not (tmp_path / "run").exists()


def test_other_weights_do_not_go_on_with_a_run(tmp_path, capsys):
    model = str(tiny.save("llama", tmp_path / "model"))
    words = [*WORDS, "--model", model, "--out", str(tmp_path / "run")]
    assert run(["eval", *words]) == 0
    tiny.save("llama", tmp_path / "model", seed=1)
    assert "the model's weights changed" in refused(capsys, *words, "--resume")


def test_the_artifact_of_an_arm_that_reads_it_is_recorded(tmp_path, capsys):
    folder = tiny.save("llama", tmp_path / "model")
    random_artifact(load(str(folder))).save(folder / ARTIFACT)
    words = ["fidelity", *WORDS[1:], "--model", str(folder)]
    gated = [*(word if word != "random" else "gatesight" for word in words), "--out", str(tmp_path / "run")]
    assert run(["eval", *words, "--out", str(tmp_path / "plain")]) == 0
    assert run(["eval", *gated]) == 0
    assert read_json(tmp_path / "plain" / "config.json")["inputs"]["artifact"] is None
    random_artifact(load(str(folder)), seed=1).save(folder / ARTIFACT)
    assert "the model's artifact changed" in refused(capsys, *gated, "--resume")


def without_answers(monkeypatch, model: str, *words: str) -> int:
    def fail(self: Session, tokens: object) -> None:
        raise WorkError("the numbers are not finite")

    monkeypatch.setattr(Session, "logits", fail)
    return run(["eval", *WORDS, "--model", model, *words])


def test_a_run_that_scored_nothing_fails_with_the_reason(llama, tmp_path, capsys, monkeypatch):
    assert without_answers(monkeypatch, llama, "--out", str(tmp_path / "run")) == 1
    out, err = capsys.readouterr()
    assert out == "no question was scored\n"
    assert "skipped: 4 rows, the numbers are not finite" in err
    assert err.endswith("wakesight: no question was scored; the first reason: the numbers are not finite\n")


def test_why_rows_were_skipped_is_told(llama, tmp_path, capsys):
    words = ["eval", *("0.001,0.5" if word == "0.5" else word for word in WORDS)]
    assert run([*words, "--model", llama, "--out", str(tmp_path / "run")]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"skipped: \d rows?, keep=0\.001 keeps 0 of", err)
    assert "random/flat/drop/0.5" in out


def test_ctrl_c_says_what_is_there_and_how_to_go_on(llama, tmp_path, capsys, monkeypatch):
    real, written = Records.append, []

    def append(self: Records, rows: Any) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(1)
        real(self, rows)

    monkeypatch.setattr(Records, "append", append)
    folder = tmp_path / "run"
    assert run(["eval", *WORDS, "--model", llama, "--out", str(folder)]) == 130
    assert f"wakesight: interrupted; 1 question is in {folder}, go on with --resume\n" in capsys.readouterr().err
    monkeypatch.undo()
    assert run(["eval", *WORDS, "--model", llama, "--out", str(folder), "--resume"]) == 0
    assert read_json(folder / "config.json")["planned_questions"] == 2


def test_ctrl_c_before_anything_is_written_leaves_no_folder(llama, tmp_path, capsys, monkeypatch):
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("wakesight.evaluation.suites.fidelity.contexts", stop)
    assert run(["eval", *WORDS, "--model", llama, "--out", str(tmp_path / "run")]) == 130
    assert "wakesight: interrupted; nothing was written\n" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
