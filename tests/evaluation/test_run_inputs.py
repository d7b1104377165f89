"""What a run is made from: it goes on, and is joined, only with the same files, weights and version; checks before."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from small_runs import contexts, plan

from wakesight.core import Scores, Signals
from wakesight.errors import RequestError
from wakesight.evaluation.arms import Arm, make_arms
from wakesight.evaluation.checks import check_length, check_runnable, reads_artifact
from wakesight.evaluation.config import PLANNED, read_config
from wakesight.evaluation.folders import finish, merge
from wakesight.evaluation.items import Context, Question
from wakesight.evaluation.pieces import pieces
from wakesight.evaluation.records import Records, write_json
from wakesight.evaluation.runner import Plan, run
from wakesight.evaluation.suites.files import records
from wakesight.policy import Policy
from wakesight.testing import tiny

WHOLE_ONLY = [Arm(None)]


@pytest.fixture(scope="module")
def engine():
    return tiny.engine("llama")


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    write_data(folder, "lamp")
    return folder


def write_data(folder: Path, word: str) -> None:
    lines = [json.dumps({"text": f"the {word} number {n} was lit at dusk"}) + "\n" for n in range(4)]
    (folder / "trec.jsonl").write_text("".join(lines))


def from_files(engine, folder: Path, arms=WHOLE_ONLY, **changes: Any) -> Plan:
    def source() -> Iterator[Context]:
        for number, record in enumerate(records(folder / "trec.jsonl")):
            question = Question("q0", "What was lit?", ("lamp",), "fake", 3)
            yield Context(f"item {number}", "lamp", record.text("text"), (question,))

    base = plan(engine, arms=arms, source=source, data=folder, **changes)
    shard = changes.get("shard")
    return Plan(**{**vars(base), "config": {"arguments": {"shard": shard and f"{shard[0]}/{shard[1]}"}}})


def with_config(base: Plan, **values: Any) -> Plan:
    return Plan(**{**vars(base), "config": {**base.config, **values}})


def test_a_run_does_not_go_on_with_another_data_file(engine, data, tmp_path):
    run(from_files(engine, data), tmp_path / "run")
    found = read_config(tmp_path / "run")
    assert list(found["inputs"]["data"]) == ["trec.jsonl"]
    assert found[PLANNED] == 4
    write_data(data, "tower")
    with pytest.raises(RequestError, match=r"the data file trec.jsonl changed \(sha256 \w{12}, then \w{12}\)"):
        run(from_files(engine, data), tmp_path / "run", resume=True)


def test_shards_of_different_files_are_not_joined(engine, data, tmp_path):
    run(from_files(engine, data, shard=(0, 2)), tmp_path / "0")
    write_data(data, "tower")
    run(from_files(engine, data, shard=(1, 2)), tmp_path / "1")
    with pytest.raises(RequestError, match=r"no shards of one run: the data file trec.jsonl changed"):
        merge([tmp_path / "0", tmp_path / "1"], tmp_path / "all")


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({"versions": {"wakesight": "1"}}, {"versions": {"wakesight": "2"}}, "wakesight was 1 and is 2"),
        ({"inputs": {"model": "a" * 64}}, {"inputs": {"model": "b" * 64}}, "the model's weights changed"),
        ({"inputs": {"artifact": "a" * 64}}, {"inputs": {"artifact": None}}, r"artifact changed \(a{12}, then none\)"),
    ],
)
def test_nor_with_another_version_model_or_artifact(engine, tmp_path, before, after, says):
    base = plan(engine, arms=WHOLE_ONLY)
    run(with_config(base, **before), tmp_path)
    with pytest.raises(RequestError, match=says):
        run(with_config(base, **after), tmp_path, resume=True)
    assert run(with_config(base, **before), tmp_path, resume=True).resumed == 6


def test_nor_with_items_that_are_made_otherwise(engine, tmp_path):
    run(plan(engine, arms=WHOLE_ONLY), tmp_path)
    with pytest.raises(RequestError, match="the items made for the same arguments changed"):
        run(plan(engine, arms=WHOLE_ONLY, source=lambda: contexts(3, 1)), tmp_path, resume=True)


def test_a_folder_of_an_older_version_goes_on_and_learns_its_total(engine, tmp_path):
    run(plan(engine, arms=WHOLE_ONLY), tmp_path)
    found = read_config(tmp_path)
    write_json(tmp_path / "config.json", {"arguments": found["arguments"]})
    assert run(plan(engine, arms=WHOLE_ONLY), tmp_path, resume=True).resumed == 6
    assert read_config(tmp_path) == {"arguments": found["arguments"], PLANNED: 6}


def test_data_that_nothing_reads_is_refused(engine, data, tmp_path):
    with pytest.raises(RequestError, match=r"nothing in --data .* was read"):
        run(plan(engine, data=data), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def shards(engine, tmp_path) -> list[Path]:
    folders = [tmp_path / name for name in "01"]
    for index, folder in enumerate(folders):
        run(plan(engine, arms=WHOLE_ONLY, shard=(index, 2)), folder)
    return folders


def test_an_unfinished_shard_is_not_joined(engine, tmp_path):
    folders = shards(engine, tmp_path)
    path = folders[0] / "records.jsonl"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:1]))
    with pytest.raises(RequestError, match=r"0 has 1 of 4 questions; finish it with wakesight eval --resume"):
        merge(folders, tmp_path / "all")
    path.write_text(whole)
    merge(folders, tmp_path / "all")
    assert read_config(tmp_path / "all")[PLANNED] == 6


def test_of_an_older_shard_the_summary_says_whether_it_was_finished(engine, tmp_path):
    folders = shards(engine, tmp_path)
    for folder in folders:
        write_json(folder / "config.json", {"arguments": read_config(folder)["arguments"]})
    with pytest.raises(RequestError, match="was not finished"):
        merge(folders, tmp_path / "all")
    for folder in folders:
        finish(folder)
    merge(folders, tmp_path / "all")
    assert len(Records(tmp_path / "all").read()) == 6


@pytest.mark.parametrize("chunk", [100, 0, 32])
def test_a_chunk_that_reads_nothing_is_refused_at_once(engine, tmp_path, chunk):
    with pytest.raises(RequestError, match=f"chunk={chunk} must be a multiple of 64"):
        run(plan(engine, chunk=chunk), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("gatesight", "the arm gatesight/gate/drop/0.5 cannot run: gatesight needs an estimator"),
        ("triattention", "the arm triattention/flat/drop/0.5 cannot run: triattention needs statistics"),
        ("keydiff@gate", "the arm keydiff/gate/drop/0.5 cannot run: .*was not measured for this model"),
    ],
)
def test_an_arm_that_the_model_never_runs_is_named_before_anything_is_read(engine, tmp_path, method, says):
    arms = make_arms(["keydiff", method], ["natural"], [0.5])
    with pytest.raises(RequestError, match=says):
        run(plan(engine, arms=arms), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert [reads_artifact(arm) for arm in arms] == [False, False, True]


@dataclass(frozen=True)
class Misspelt:
    reads: ClassVar[tuple[str, ...]] = ("keyz",)

    def score(self, signals: Signals) -> Scores:
        raise AssertionError("it is never asked")


def test_a_signal_that_there_is_not_is_refused_at_once(engine):
    with pytest.raises(RequestError, match="'keyz', which is no signal"):
        check_runnable(engine, [Arm(Policy(scorer=Misspelt(), keep=0.5))], 512)


def test_a_length_that_the_model_cannot_read(engine):
    most = engine.geometry.max_positions
    check_length(engine, most)
    with pytest.raises(RequestError, match=f"--length {most + 1} is more than .* reads; use --length {most} or less"):
        check_length(engine, most + 1)


@dataclass(frozen=True)
class Failing:
    reads: ClassVar[tuple[str, ...]] = ("keys",)

    def score(self, signals: Signals) -> Scores:
        return {"a": Scores(())}["beta"]


@dataclass(frozen=True)
class Nan:
    reads: ClassVar[tuple[str, ...]] = ("keys",)

    def score(self, signals: Signals) -> Scores:
        return Scores(tuple(torch.full(keys.shape[:2], torch.nan) for keys in signals["keys"]))


@pytest.mark.parametrize(
    ("scorer", "says"),
    [(Failing(), r"the plug-in test_run_inputs.Failing failed in compacting \(KeyError: 'beta'\)"), (Nan(), "Nan")],
)
def test_a_plugin_that_fails_is_named_and_costs_its_own_arm(engine, tmp_path, scorer, says):
    arms = [*make_arms(["keydiff"], ["flat"], [0.5]), Arm(Policy(scorer=scorer, keep=0.5))]
    run(plan(engine, arms=arms), tmp_path)
    summary = finish(tmp_path)
    (reason,) = summary["skipped"]
    assert re.search(says, reason)
    assert summary["scored_questions"] == 6
    assert len({row["arm"] for row in summary["arms"]}) == 2


def utf8(tokens) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["für 中文 und 🦉!", "plain", "", "ends in ü"])
def test_a_character_of_several_tokens_is_one_piece(text):
    found = pieces(utf8, list(text.encode()))
    assert len(found) == len(text.encode())
    assert "".join(found) == text
    assert [piece for piece in found if piece] == list(text)


def test_what_is_no_text_stays_token_by_token():
    assert "".join(pieces(utf8, [0xFF] * 20 + list(b"ab"))) == "\ufffd" * 20 + "ab"
    assert pieces(utf8, [0x61, 0xC3]) == ["a", "\ufffd"]
