"""wakesight report and view: what they write and serve, and one sentence for what they refuse."""

from __future__ import annotations

import functools
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from wakesight.cli import report as report_command
from wakesight.errors import RequestError
from wakesight.evaluation.arms import make_arms
from wakesight.evaluation.folders import finish
from wakesight.evaluation.records import Records, read_json, write_json
from wakesight.report.serving import address, outdated, report_folder, server

pytest.importorskip("matplotlib")


def run_folder(folder: Path) -> Path:
    """The smallest run: one question, two arms, no picture of its context."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", {"arguments": {"suite": "vt", "model": "tiny", "seed": 1}})
    arms = make_arms(["keydiff"], ["flat"], [0.5])
    Records(folder).append([
        {
            "task": "vt", "context": "c", "question": "q", "arm": arm.id, "arms": 2, "source": "generated",
            "skipped": None, "grades": {"official": 1.0}, "kept": 4, "tokens": 4, "kv_bytes_full": 64,
            "kv_bytes_kept": 64, "output": "yes", "seconds": {},
        }
        for arm in arms
    ])  # fmt: skip
    finish(folder)
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return run_folder(tmp_path / "run")


def invoke(command, *words: object):
    names = ["-h", "--help"]  # as under `wakesight`: click remembers them, and test_help reads them
    words = [str(word) for word in words]
    return CliRunner().invoke(command.command, words, catch_exceptions=False, help_option_names=names)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_report_is_a_folder_beside_the_records_and_the_same_each_time(folder):
    done = invoke(report_command, folder)
    assert done.stdout == f"{folder}/report/report.html\n"
    first = contents(folder / "report")
    assert {"report.html", "tables.md", "scores.csv", "figures/score-official.svg"} < set(first)
    told = json.loads(invoke(report_command, folder, "--json").stdout)
    assert told["files"] == sorted(first)
    assert contents(folder / "report") == first
    assert [p.name for p in folder.iterdir() if p.name.startswith(".report")] == []


def test_several_runs_need_a_place_and_have_figures_each(folder, tmp_path):
    other = run_folder(tmp_path / "other")
    with pytest.raises(RequestError, match="--out"):
        invoke(report_command, folder, other)
    invoke(report_command, folder, other, "--out", tmp_path / "deep" / "both")
    assert {p.name for p in (tmp_path / "deep" / "both" / "figures").iterdir()} == {"run", "other"}


def test_nothing_but_a_report_is_replaced(folder, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("mine")
    for place, says in (("notes", "diary.txt"), ("run", "no part of a report"), ("notes/diary.txt", "is a file")):
        with pytest.raises(RequestError, match=says):
            invoke(report_command, folder, "--out", tmp_path / place)
    assert (tmp_path / "notes" / "diary.txt").read_text() == "mine"


def test_a_report_that_fails_leaves_the_earlier_one(folder, monkeypatch):
    invoke(report_command, folder)
    before = contents(folder)

    def fail(table):
        raise RuntimeError("in the middle")

    monkeypatch.setattr("wakesight.report.writing.to_csv", fail)
    with pytest.raises(RuntimeError):
        invoke(report_command, folder)
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [(["missing"], "is no folder"), ([".", "--contexts", "-1"], "at least 0"), (["."], "has no config.json")],
)
def test_bad_input_of_report(tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=says):
        invoke(report_command, *words)
    assert list(tmp_path.iterdir()) == []


def test_bad_input_of_view(folder, tmp_path):
    with pytest.raises(RequestError, match="no report yet; type: wakesight report"):
        report_folder(folder)
    with pytest.raises(RequestError, match="is no folder"):
        report_folder(tmp_path / "missing")
    with pytest.raises(RequestError, match="no port"):
        server(folder, 70000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RequestError, match="cannot be used"):
            server(folder, taken.getsockname()[1])


@pytest.fixture
def served(folder):
    invoke(report_command, folder)
    with server(report_folder(folder)) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def fetch(made, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*made.server_address)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_the_report_is_served_on_loopback_alone(served, folder):
    assert served.server_address[0] == "127.0.0.1"
    page = (folder / "report" / "report.html").read_bytes()
    assert fetch(served, "/") == fetch(served, "/report.html") == fetch(served, "/?a=1") == (200, page)
    assert fetch(served, "/figures/score-official.png")[0] == 200


def test_a_report_older_than_its_run_says_so(folder):
    invoke(report_command, folder)
    assert not outdated(folder / "report")
    records = folder / "records.jsonl"
    os.utime(records, (records.stat().st_mtime + 100,) * 2)
    assert outdated(folder / "report")


def test_an_unfinished_run_is_told_on_the_terminal(folder):
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "planned_questions": 4})
    Records(folder).append([dict(Records(folder).read()[0], question="cut")])
    said = invoke(report_command, folder).stderr.splitlines()[0]
    assert said == "run: 1 of 4 questions scored, unfinished: 1 run so far; 1 question left out for missing rows"


def test_nothing_else_is_served(served, folder):
    (folder / "report" / "secret.txt").write_text("no")
    (folder / "report" / "scores.csv").unlink()
    (folder / "report" / "scores.csv").symlink_to(folder / "config.json")
    for path in ("/figures", "/figures/", "/secret.txt", "/scores.csv", "/../config.json", "/%2e%2e/config.json",
                 "/figures/../../config.json", "//etc/passwd", "/a%00b", "/report.html/x"):  # fmt: skip
        assert fetch(served, path)[0] == 404, path
    assert fetch(served, "/", Host="evil.example")[0] == 403
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(address(served), data=b"x")


def test_view_prints_its_address_and_ends_cleanly_on_ctrl_c(folder):
    invoke(report_command, folder)
    code = "from wakesight.cli.view import command; command()"
    words = [sys.executable, "-u", "-c", code, str(folder), "--no-open"]
    heeded = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job in the background has
    with subprocess.Popen(  # it ignored, and children inherit that
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeded
    ) as process:
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:")
            assert urllib.request.urlopen(url).status == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()
