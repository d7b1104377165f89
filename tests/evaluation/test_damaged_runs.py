"""Folders that cannot be written, or that something has damaged: one sentence each, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from small_runs import contexts, plan

from wakesight.cli.main import run as command
from wakesight.errors import RequestError, WorkError
from wakesight.evaluation.arms import Arm
from wakesight.evaluation.folders import merge
from wakesight.evaluation.records import Records, locked
from wakesight.evaluation.runner import run
from wakesight.testing import tiny


@pytest.fixture(scope="module")
def engine():
    return tiny.engine("llama")


@pytest.fixture
def folder(engine, tmp_path) -> Path:
    run(plan(engine, arms=[Arm(None)]), tmp_path / "run")
    return tmp_path / "run"


def change(folder: Path, line: int, text: str) -> None:
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    lines[line - 1] = text + "\n"
    (folder / "records.jsonl").write_text("".join(lines))


def row(folder: Path, line: int) -> dict:
    return json.loads((folder / "records.jsonl").read_text().splitlines()[line - 1])


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda row: "[]", "it is no object"),
        (lambda row: '{"a": 1}', "it does not say whether it was skipped"),
        (lambda row: "nonsense", "it is no JSON"),
        (lambda row: json.dumps({**row, "grades": {"strict": "x"}}), "its strict grade is no number"),
        (lambda row: json.dumps({**row, "grades": {"strict": float("nan")}}), "its strict grade is no number"),
        (lambda row: json.dumps({**row, "arms": None}), "its arms is missing or of another kind"),
        (lambda row: json.dumps({**row, "kept": "many"}), "its kept is missing or of another kind"),
    ],
)
def test_a_line_that_is_no_row_is_named(engine, folder, tmp_path, made, says):
    change(folder, 2, made(row(folder, 2)))
    for attempt in (
        lambda: Records(folder).read(),
        lambda: run(plan(engine, arms=[Arm(None)]), folder, resume=True),
        lambda: merge([folder], tmp_path / "all"),
    ):
        with pytest.raises(RequestError, match=f"records.jsonl is damaged in line 2: {says}; remove that line"):
            attempt()


def test_a_row_over_another_one_is_named(folder):
    change(folder, 3, json.dumps(row(folder, 1)))
    with pytest.raises(RequestError, match="damaged in line 3: it is the row of line 1 again"):
        Records(folder).read()


@pytest.mark.parametrize("text", ["[]", '{"given": 3, "defaults": {}}', '{"arguments": []}', "{}"])
def test_a_config_that_says_nothing_is_refused(engine, folder, tmp_path, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(RequestError, match=r"config.json is damaged"):
        run(plan(engine, arms=[Arm(None)]), folder, resume=True)
    with pytest.raises(RequestError, match=r"config.json is damaged"):
        merge([folder], tmp_path / "all")


def test_a_file_is_no_run_folder(engine, folder, tmp_path, capsys):
    (tmp_path / "afile").write_text("")
    for out in ("afile", "afile/below"):
        with pytest.raises(RequestError, match=r"cannot be a run folder: .*afile is a file"):
            run(plan(engine), tmp_path / out)
        with pytest.raises(RequestError, match="cannot be a run folder"):
            merge([folder], tmp_path / out)
        assert command(["eval", "niah", "--model", "m", "--out", str(tmp_path / out)]) == 2
    with pytest.raises(RequestError, match="afile is no run folder"):
        merge([tmp_path / "afile"], tmp_path / "all")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(RequestError, match=r"config.json cannot be read"):
        merge([folder], tmp_path / "all")


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (errno.ENOSPC, WorkError, "the disk refuses .*; free space, and type the command again"),
        (errno.EFBIG, WorkError, "the disk refuses"),
        (errno.EACCES, RequestError, "cannot be written .*; give another folder with --out"),
    ],
)
def test_what_the_disk_says_is_one_sentence_and_the_run_goes_on_later(
    engine, tmp_path, number, kind, says, monkeypatch
):
    calls = []

    def full(_: int) -> None:
        calls.append(1)
        if len(calls) > 4:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(kind, match=says):
        run(plan(engine, arms=[Arm(None)]), tmp_path / "run")
    monkeypatch.undo()
    assert not list((tmp_path / "run").glob(".*.tmp"))
    run(plan(engine, arms=[Arm(None)]), tmp_path / "run", resume=True)
    assert len(Records(tmp_path / "run").read()) == 6


def test_a_refused_run_leaves_nothing_and_its_place_is_free(engine, folder, tmp_path):
    def without_room():
        yield from contexts(1)
        raise RequestError("length=16 is too short for vt")

    there = tmp_path / "there"
    there.mkdir()
    for place in (tmp_path / "new", there):
        with pytest.raises(RequestError, match="too short"):
            run(plan(engine, source=without_room), place)
    assert not (tmp_path / "new").exists()
    assert list(there.iterdir()) == []
    (there / ".lock").write_text("")  # as an older version, or a killed process, left it
    merge([folder], there)


def test_a_shard_that_is_being_written_is_not_joined(folder, tmp_path):
    with locked(folder), pytest.raises(RequestError, match="another process is still writing"):
        merge([folder], tmp_path / "all")
    merge([folder], tmp_path / "all")
