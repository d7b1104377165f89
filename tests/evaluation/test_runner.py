"""The runner on a tiny model: prefix-only, equal counts, one prefill, reasons for skips, resume, shards, one writer."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from small_runs import ARMS, clear, contexts, plan

from wakesight.core import Scores, Signals
from wakesight.errors import RequestError
from wakesight.evaluation.arms import WHOLE, Arm, make_arms
from wakesight.evaluation.folders import finish, merge
from wakesight.evaluation.items import Context
from wakesight.evaluation.records import Records, locked
from wakesight.evaluation.runner import Plan, run, unpack
from wakesight.policy import Policy
from wakesight.testing import tiny


@pytest.fixture(scope="module")
def engine():
    return tiny.engine("llama")


@pytest.fixture(scope="module")
def folder(engine, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("run")
    run(plan(engine), place)
    finish(place)
    return place


def test_every_question_has_a_row_per_arm_with_what_was_held(folder, engine):
    rows = Records(folder).read()
    assert len(rows) == 3 * 2 * len(ARMS)
    assert all(row["skipped"] is None for row in rows)
    whole = [row for row in rows if row["arm"] == WHOLE]
    assert all(row["kept"] == row["tokens"] * sum(engine.geometry.kv_heads) for row in whole)
    assert {row["prompt"] for row in rows if row["context"] == "item 0" and row["question"] == "q0"} == {
        whole[0]["prompt"]
    }


def test_arms_of_one_fraction_hold_equally_many_entries_on_every_row(folder):
    rows = Records(folder).read()
    for context in {row["context"] for row in rows}:
        for keep in ("0.3", "1"):
            counts = {r["kept"] for r in rows if r["context"] == context and r["arm"].endswith(f"/{keep}")}
            assert len(counts) == 1


def test_at_p_1_every_arm_is_the_unpruned_baseline_row_by_row(folder):
    rows = Records(folder).read()
    whole = {(r["context"], r["question"]): r for r in rows if r["arm"] == WHOLE}
    compared = 0
    for row in rows:
        base = whole[row["context"], row["question"]]
        if row["arm"].endswith("/1") and clear(base):
            assert row["output_ids"] == base["output_ids"]
            assert row["grades"] == base["grades"]
            compared += 1
    assert compared > 20
    changed = [r for r in rows if r["arm"].endswith("/0.3")]
    assert any(r["output_ids"] != whole[r["context"], r["question"]]["output_ids"] for r in changed)


def test_one_batch_gives_the_answers_of_one_arm_at_a_time(engine, folder, tmp_path):
    run(plan(engine, rows=1), tmp_path / "single")
    expected = {(r["context"], r["question"], r["arm"]): r for r in Records(folder).read()}
    for row in Records(tmp_path / "single").read():
        same = expected[row["context"], row["question"], row["arm"]]
        if clear(row):
            assert row["output_ids"] == same["output_ids"]
        assert row["kept_per_layer"] == same["kept_per_layer"]


@dataclass(frozen=True)
class Spy:
    """Scores like random and remembers how many tokens it was shown."""

    seen: ClassVar[list[int]] = []
    reads: ClassVar[tuple[str, ...]] = ("keys", "queries")

    def score(self, signals: Signals) -> Scores:
        Spy.seen += [signals.tokens, *(keys.shape[1] for keys in signals["keys"])]
        return Scores(tuple(torch.rand(keys.shape[:2]) for keys in signals["keys"]))


def test_no_scorer_sees_a_question(engine, tmp_path):
    Spy.seen.clear()
    arms = [Arm(None), Arm(Policy(scorer=Spy(), keep=0.5)), Arm(Policy(scorer=Spy(), keep=0.3))]
    run(plan(engine, arms=arms), tmp_path)
    expected = []
    for context in contexts():
        session = engine.prefill(context.text, instruction=context.instruction)
        expected += [len(session.tokens)] * (1 + len(engine.geometry.attention_layers))
    assert Spy.seen == expected  # scored once per context, over its tokens alone


def test_one_prefill_and_one_scoring_serve_all_arms(engine, tmp_path, monkeypatch):
    calls = []
    real = engine.prefill
    monkeypatch.setattr(engine, "prefill", lambda *a, **k: (calls.append(1), real(*a, **k))[1])
    run(plan(engine), tmp_path)
    assert len(calls) == 3


def test_what_cannot_run_is_a_row_with_its_reason(engine, tmp_path):
    def source() -> Iterator[Context]:
        good = next(iter(contexts(1)))
        yield Context("too long", "lamp", "x" * 3000, good.questions)
        yield good

    progress = run(plan(engine, source=source), tmp_path)
    rows = Records(tmp_path).read()
    assert progress.skipped == 2 * len(ARMS)
    assert all("reads at most" in row["skipped"] for row in rows if row["context"] == "too long")
    summary = finish(tmp_path)
    assert summary["questions"] == 4
    assert summary["scored_questions"] == 2
    assert sum(summary["skipped"].values()) == 2 * len(ARMS)


def test_a_grader_that_fails_costs_its_row_and_nothing_else(engine, tmp_path):
    def broken(task, prediction, references, rule="official", **extra):
        raise ZeroDivisionError("no references")

    failing = plan(engine)
    run(Plan(**{**vars(failing), "grade": broken}), tmp_path)
    rows = Records(tmp_path).read()
    assert len(rows) == 6 * len(ARMS)
    assert all("grader of fake failed: no references" in row["skipped"] for row in rows)


def test_an_arm_that_keeps_nothing_is_left_out_and_the_others_count(engine, tmp_path):
    arms = [*make_arms(["random"], ["flat"], [0.5]), Arm(Policy(scorer="random", keep=1e-4))]
    run(plan(engine, arms=arms), tmp_path)
    summary = finish(tmp_path)
    assert summary["scored_questions"] == 6
    assert any("keeps 0 of" in reason for reason in summary["skipped"])


def test_the_record_shows_where_entries_stayed(folder, engine):
    about = [json.loads(path.read_text()) for path in (folder / "contexts").iterdir()]
    assert sorted(one["context"] for one in about) == ["item 0", "item 1", "item 2"]
    rows = Records(folder).read()
    for one in about:
        for arm, counts in one["kept"].items():
            held = unpack(counts)
            assert len(held) == len(one["pieces"])
            assert held.sum() == next(r["kept"] for r in rows if (r["context"], r["arm"]) == (one["context"], arm))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", [0, 1, 3, 5])
def test_a_resumed_run_equals_an_uninterrupted_one_byte_for_byte(engine, folder, tmp_path, after, monkeypatch):
    written = []
    real = Records.append

    def append(self, rows):
        if len(written) == after:
            with open(self.path, "a") as file:  # killed in the middle of a write
                file.write("".join(json.dumps(row) + "\n" for row in rows[:2]) + '{"task": "la')
            raise Killed
        written.append(1)
        real(self, rows)

    monkeypatch.setattr(Records, "append", append)
    with pytest.raises(Killed):
        run(plan(engine), tmp_path)
    monkeypatch.undo()
    with pytest.raises(RequestError, match="--resume"):
        run(plan(engine), tmp_path)

    progress = run(plan(engine), tmp_path, resume=True)
    finish(tmp_path)

    assert progress.resumed == after
    assert (tmp_path / "summary.json").read_bytes() == (folder / "summary.json").read_bytes()


def test_two_merged_shards_are_the_whole(engine, folder, tmp_path):
    shards = [tmp_path / "0", tmp_path / "1"]
    for index, shard in enumerate(shards):
        run(plan(engine, shard=(index, 2)), shard)
    merge(shards, tmp_path / "all")
    assert (tmp_path / "all" / "summary.json").read_bytes() == (folder / "summary.json").read_bytes()
    assert {p.name for p in (tmp_path / "all" / "contexts").iterdir()} == {
        p.name for p in (folder / "contexts").iterdir()
    }
    with pytest.raises(RequestError, match="overlap"):
        merge([shards[0], shards[0]], tmp_path / "twice")
    with pytest.raises(RequestError, match="not empty"):
        merge(shards, tmp_path / "all")


def test_other_arguments_do_not_resume_a_run(engine, folder):
    other = plan(engine)
    with pytest.raises(RequestError, match="seed=1, and now seed=2"):
        run(
            Plan(**{**vars(other), "config": {"arguments": {"suite": "fake", "seed": 2, "shard": None}}}),
            folder,
            resume=True,
        )


def _hold(folder: str, ready, done) -> None:
    with locked(Path(folder)):
        ready.set()
        done.wait(30)


def test_a_second_process_on_one_folder_is_refused(engine, tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(tmp_path), ready, done))
    other.start()
    assert ready.wait(60)
    try:
        with pytest.raises(RequestError, match="another process is writing"):
            run(plan(engine), tmp_path)
    finally:
        done.set()
        other.join()


def test_arms_are_checked():
    assert [arm.id for arm in make_arms(["snapkv:window=8"], ["ada"], [0.1, 0.25])] == [
        "whole",
        "snapkv:window=8/ada/drop/0.1",
        "snapkv:window=8/ada/drop/0.25",
    ]
    for wrong in ({"methods": []}, {"methods": ["random", "random"]}, {"methods": ["keydif"]}):
        with pytest.raises(RequestError):
            make_arms(**{"methods": ["random"], "allocations": ["flat"], "keeps": [0.5], **wrong})
    with pytest.raises(RequestError, match="burn"):
        make_arms(["random"], ["flat"], [0.5], evicted=["burn"])


def test_arms_that_demote_hold_as_many_bytes_as_arms_that_drop(tmp_path):
    engine = tiny.engine("llama")
    arms = make_arms(["keydiff"], ["flat"], [0.5], evicted=["drop", "demote"], unit=["entry", "page"], page_size=4)
    arms += make_arms(["keydiff"], ["flat"], [0.5], evicted=["demote"], page_size=4, match="entries")[1:]

    run(plan(engine, arms=arms), tmp_path)

    rows = Records(tmp_path).read()
    by_arm = {arm.id: [row for row in rows if row["arm"] == arm.id] for arm in arms}
    _, entry, page, equal, roomy = by_arm.values()
    assert {row["skipped"] for row in rows} == {None}
    for dropped, by_page, demoted, more in zip(entry, page, equal, roomy, strict=True):
        assert by_page["kv_bytes_kept"] <= dropped["kv_bytes_kept"]
        assert demoted["kv_bytes_kept"] <= dropped["kv_bytes_kept"] < more["kv_bytes_kept"]
        assert demoted["kv_bytes_kept"] > dropped["kv_bytes_kept"] - 8 * engine.geometry.token_bytes
        assert (dropped["match"], demoted["match"], more["match"]) == ("entries", "bytes", "entries")
        assert dropped["fetches"] == dropped["reservoir_bytes"] == 0
        assert demoted["fetches"] > 0
        assert demoted["moved_bytes"] > 0
        assert demoted["sketch_bytes"] > 0
