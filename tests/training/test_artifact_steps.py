"""From raw text to an estimator by one call: which commands, in which order, and from where it goes on."""

from __future__ import annotations

import pytest

from training import artifact
from wakesight.cli.main import cli
from wakesight.errors import RequestError


class Ran:
    """In place of subprocess.run: notes commands and makes the files that they would have made."""

    def __init__(self, out, fails: str = "") -> None:
        self.out, self.fails, self.names = out, fails, []

    def __call__(self, command):
        """A step that fails leaves half of what it makes."""
        name = command[command.index("wakesight") + 1] if "wakesight" in command else "documents"
        self.names.append(name)
        made = {"documents": "documents", "calibrate": "artifact/calibrate.json", "analyze": "analysis/analysis.md"}
        (self.out / "labels").mkdir(parents=True, exist_ok=True)
        if name in made:
            path = self.out / made[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return type("Ended", (), {"returncode": 3 if name == self.fails else 0})


ORDER = ["documents", "label", "fit", "calibrate", "analyze"]


@pytest.mark.parametrize("model", ["tiny-hybrid", "smollm2"])
def test_every_step_runs_once(tmp_path, monkeypatch, model):
    ran = Ran(tmp_path)
    monkeypatch.setattr(artifact.subprocess, "run", ran)
    steps = ORDER if model == "tiny-hybrid" else ORDER[:-1]  # smollm2 has no native signals to analyze
    artifact.main([model, "--out", str(tmp_path)])
    assert ran.names == steps
    artifact.main([model, "--out", str(tmp_path)])
    assert ran.names == steps


def test_documents_that_are_there_are_taken(tmp_path, monkeypatch):
    ran = Ran(tmp_path)
    monkeypatch.setattr(artifact.subprocess, "run", ran)
    artifact.main(["tiny-hybrid", "--out", str(tmp_path), "--documents", "texts"])
    assert ran.names == ORDER[1:]
    with pytest.raises(RequestError, match="begun with another documents; give what"):
        artifact.main(["tiny-hybrid", "--out", str(tmp_path)])


def test_a_failed_step_ends_it_and_is_taken_up_again(tmp_path, monkeypatch):
    ran = Ran(tmp_path, fails="fit")
    monkeypatch.setattr(artifact.subprocess, "run", ran)
    with pytest.raises(SystemExit) as ended:
        artifact.main(["tiny-hybrid", "--out", str(tmp_path)])
    assert ended.value.code == 3
    ran.fails = ""
    artifact.main(["tiny-hybrid", "--out", str(tmp_path)])
    assert ran.names == ["documents", "label", "fit", "fit", "calibrate", "analyze"]


def test_half_of_the_documents_are_not_taken_for_all(tmp_path, monkeypatch):
    """The folder is made before the first of its files: a kill in between must not leave fewer corpora for ever."""
    ran = Ran(tmp_path, fails="documents")
    monkeypatch.setattr(artifact.subprocess, "run", ran)
    with pytest.raises(SystemExit):
        artifact.main(["tiny-hybrid", "--out", str(tmp_path)])
    assert (tmp_path / "documents").exists()
    ran.fails = ""
    artifact.main(["tiny-hybrid", "--out", str(tmp_path)])
    assert ran.names == ["documents", *ORDER]


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["tiny-hybrid", "--seed", "2"], "seed"),
        (["smollm2"], "model, source"),
        (["tiny-hybrid", "--source", "out/other"], "source"),
    ],
)
def test_another_call_into_the_same_folder_is_refused(tmp_path, monkeypatch, words, changed):
    ran = Ran(tmp_path)
    monkeypatch.setattr(artifact.subprocess, "run", ran)
    artifact.main(["tiny-hybrid", "--out", str(tmp_path)])
    with pytest.raises(RequestError, match=f"begun with another {changed}; give what"):
        artifact.main([*words, "--out", str(tmp_path)])
    assert ran.names == ORDER


def test_a_folder_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="nobody knows what its content was made by"):
        artifact.main(["tiny-hybrid", "--out", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("model", ["tiny-hybrid", "smollm2"])
def test_every_command_has_the_options_that_are_typed(tmp_path, model, capsys):
    artifact.main([model, "--source", "somewhere", "--out", str(tmp_path), "--dry-run"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert not list(tmp_path.iterdir())
    for line in lines[1:]:
        words = line[line.index("wakesight") + 1 :]
        known = {flag for parameter in cli.get_command(None, words[0]).params for flag in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known
    assert sum("somewhere" in line for line in lines) == (3 if model == "tiny-hybrid" else 2)
