"""A run that is killed whenever, and goes on, ends in the same summary.json; so do two shards, merged."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wakesight.cli.main import run
from wakesight.evaluation.records import Records, read_json

KILLS = 3
QUESTIONS = 12


@pytest.fixture(scope="module")
def words(llama) -> list[str]:
    """Continuations under a random model: grades of all sizes, no two alike."""
    return [
        "eval", "fidelity", "--model", llama, "--length", "700", "--items", str(QUESTIONS // 3),
        "--option", "continuation=64", "--methods", "random,keydiff,knorm", "--allocations", "flat,global",
        "--keep", "0.2,0.5,1",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(words, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run([*words, "--out", str(folder)]) == 0
    return folder


def kill_after(questions: int, delay: float, words: list[str], folder: Path) -> None:
    """Start the command, and kill it `delay` seconds after so many questions are on disk."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "wakesight", *words, "--out", str(folder)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 120
        while len(asked(folder)) < questions and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        error = process.communicate()[1].decode()
    assert process.returncode == -signal.SIGKILL, f"it was over before it was killed: {error}"


def asked(folder: Path) -> set[str]:
    path = folder / "records.jsonl"
    return {row["context"] for row in Records(folder).read()} if path.exists() else set()


def test_killed_three_times_and_resumed_it_is_the_same_run(words, uninterrupted, tmp_path):
    chance = random.Random(20261130)
    moments = sorted(chance.sample(range(1, QUESTIONS - 2), KILLS))
    folder = tmp_path / "run"
    for number, questions in enumerate(moments):
        kill_after(questions, chance.uniform(0, 0.08), [*words, *(["--resume"] if number else [])], folder)
        assert questions <= len(asked(folder)) < QUESTIONS
        assert not (folder / "summary.json").exists()

    assert run([*words, "--resume", "--out", str(folder)]) == 0

    assert (folder / "summary.json").read_bytes() == (uninterrupted / "summary.json").read_bytes()
    assert {path.name for path in (folder / "contexts").iterdir()} == {
        path.name for path in (uninterrupted / "contexts").iterdir()
    }


def test_two_shards_merged_are_the_same_run(words, uninterrupted, tmp_path):
    shards = [str(tmp_path / name) for name in "01"]
    for index, shard in enumerate(shards):
        assert run([*words, "--shard", f"{index}/2", "--out", shard]) == 0
    assert run(["merge", *reversed(shards), "--out", str(tmp_path / "all")]) == 0
    assert (tmp_path / "all" / "summary.json").read_bytes() == (uninterrupted / "summary.json").read_bytes()


def test_the_grades_that_are_compared_differ(uninterrupted):
    rows = Records(uninterrupted).read()
    assert len(asked(uninterrupted)) == QUESTIONS
    pruned = [row["grades"] for row in rows if not row["arm"].endswith(("/1", "whole"))]
    assert len({grades["kl"] for grades in pruned}) > len(pruned) // 2
    assert len({grades["top1"] for grades in pruned}) > 10
    means = [row["mean"] for row in read_json(uninterrupted / "summary.json")["arms"]]
    assert len(set(means)) > 10
