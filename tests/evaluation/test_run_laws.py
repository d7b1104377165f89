"""What a run must hold to: p = 1 is the baseline, equal counts, no question near a scorer; and what it survives."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from small_runs import ARMS, clear, contexts, grade, plan

from wakesight.core import Scores, Signals
from wakesight.engines.session import Session
from wakesight.errors import RequestError
from wakesight.evaluation.arms import WHOLE, Arm, make_arms
from wakesight.evaluation.folders import finish
from wakesight.evaluation.items import Context, Question
from wakesight.evaluation.records import Records
from wakesight.evaluation.runner import Plan, run
from wakesight.policy import Policy
from wakesight.testing import tiny


@pytest.fixture(scope="module")
def engine():
    return tiny.engine("llama")


def changed(base: Plan, **values: Any) -> Plan:
    return Plan(**{**vars(base), **values})


def passages(count: int = 3) -> Iterator[Context]:
    """Contexts as the suite fidelity has them."""
    for number, context in enumerate(contexts(count, 1)):
        after = Question("f0", " and so the lamp was lit", (), "fidelity", 20)
        yield replace(context, id=f"passage {number}", questions=(after,), chat=False)


@pytest.mark.parametrize("family", [name for name in ("llama", "qwen3_5", "gemma3") if name in tiny.FAMILIES])
@pytest.mark.parametrize("rows", [16, 2])
def test_at_p_1_an_arm_is_the_baseline_row_by_row(family, rows, tmp_path):
    arms = make_arms(["random", "keydiff"], ["flat", "global"], [0.4, 1.0])

    def source() -> Iterator[Context]:
        yield from contexts(2)
        yield from passages(2)

    run(plan(tiny.engine(family), arms=arms, source=source, rows=rows), tmp_path)
    found = Records(tmp_path).read()
    whole = {(row["context"], row["question"]): row for row in found if row["arm"] == WHOLE}
    compared = near = 0
    for row in found:
        base = whole[row["context"], row["question"]]
        if not row["arm"].endswith("/1"):
            continue
        assert row["kept"] == base["kept"]
        if "output_ids" not in base:
            assert row["grades"]["top1"] == 1.0
            assert row["grades"]["kl"] < 1e-6
            assert row["grades"]["nll"] == pytest.approx(base["grades"]["nll"], abs=1e-5)
        elif not clear(base):
            near += 1
            continue
        else:
            assert row["output_ids"] == base["output_ids"]
            assert row["grades"] == base["grades"]
        compared += 1
    assert compared > near
    less = [row for row in found if row["arm"].endswith("/0.4") and "kl" in row["grades"]]
    assert all(row["grades"]["kl"] > 1e-4 for row in less)


@pytest.mark.parametrize("rows", [16, 1])
def test_an_arm_that_holds_more_than_its_equals_ends_the_run(engine, tmp_path, rows, monkeypatch):
    real = Session.compact

    def cheat(self: Session, policy: Policy) -> Session:
        return real(self, policy.at(keep=0.5) if policy.scorer == "keydiff" and policy.keep == 0.3 else policy)

    monkeypatch.setattr(Session, "compact", cheat)
    with pytest.raises(RuntimeError, match=r"holds \d+ entries where its equals hold"):
        run(plan(engine, rows=rows), tmp_path)
    assert Records(tmp_path).read() == []


@dataclass(frozen=True)
class Spy:
    """Scores by position and remembers a digest of all it was shown."""

    seen: ClassVar[list[str]] = []
    reads: ClassVar[tuple[str, ...]] = ("keys", "queries")

    def score(self, signals: Signals) -> Scores:
        shown = hashlib.sha256(str(signals.tokens).encode())
        for tensor in (*signals["keys"], *signals["queries"]):
            shown.update(tensor.float().contiguous().numpy().tobytes())
        Spy.seen.append(shown.hexdigest())
        return Scores(tuple(torch.arange(keys.shape[1]).expand(keys.shape[:2]).float() for keys in signals["keys"]))


def shown_to_a_scorer(engine, folder, asked: str) -> list[str]:
    """What a scorer saw of a run in which every question is `asked`."""

    def source() -> Iterator[Context]:
        for context in contexts(2):
            yield replace(context, questions=tuple(replace(one, text=asked) for one in context.questions))

    Spy.seen.clear()
    run(plan(engine, arms=[Arm(None), Arm(Policy(scorer=Spy(), keep=0.5))], source=source), folder)
    return list(Spy.seen)


def test_whatever_is_asked_a_scorer_sees_the_same(engine, tmp_path):
    one = shown_to_a_scorer(engine, tmp_path / "one", "What about the lamp?")
    other = shown_to_a_scorer(engine, tmp_path / "other", "And who rang the bell, and when?")
    assert one == other
    assert len(set(one)) == 2


def test_the_spy_would_notice_a_question(engine, tmp_path, monkeypatch):
    """The law above can fail: with an engine that lets the question in, the scorer sees another context."""
    asked = ["What about the lamp?", "And who rang the bell, and when?"]
    real = engine.prefill
    found = []
    for number, question in enumerate(asked):

        def leaking(text: str, leak: str = question, **options: Any) -> Session:
            return real(f"{text} {leak}", **options)

        monkeypatch.setattr(engine, "prefill", leaking)
        found.append(shown_to_a_scorer(engine, tmp_path / str(number), question))
    assert found[0] != found[1]


MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", MEMORY, ids=["python", "cuda", "cpu"])
@pytest.mark.parametrize("place", ["prefill", "compact", "generate", "logits"])
def test_lack_of_memory_is_a_row_and_the_run_goes_on(engine, tmp_path, place, error, monkeypatch):
    owner = Session if place == "compact" else engine
    real, calls = getattr(owner, place), []

    def fail(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return real(*arguments, **options)

    held = engine.pool.held_bytes
    monkeypatch.setattr(owner, place, fail)
    run(plan(engine, source=(lambda: passages(3)) if place == "logits" else contexts), tmp_path)
    found = Records(tmp_path).read()
    gone = [row for row in found if row["skipped"]]
    assert engine.pool.held_bytes == held
    assert {row["skipped"] for row in gone} == {f"out of memory in {WORK[place]}"}
    assert len(gone) == {"prefill": 2 * len(ARMS), "compact": 2, "generate": len(ARMS), "logits": len(ARMS)}[place]
    assert len(found) == (3 if place == "logits" else 6) * len(ARMS)
    assert all(row["grades"] for row in found if not row["skipped"])
    assert finish(tmp_path)["arms"]


WORK = {"prefill": "reading the context", "compact": "compacting", "generate": "answering", "logits": "answering"}


@pytest.mark.parametrize("place", ["prefill", "compact", "generate"])
def test_a_bug_is_no_reason_to_skip(engine, tmp_path, place, monkeypatch):
    def fail(*arguments: Any, **options: Any) -> Any:
        raise TypeError("a bug")

    monkeypatch.setattr(Session if place == "compact" else engine, place, fail)
    with pytest.raises(TypeError, match="a bug"):
        run(plan(engine), tmp_path)


@pytest.mark.parametrize(
    ("marks", "reason"),
    [
        (lambda: 1 / 0, "the grader of fake failed: division by zero"),
        (lambda: float("nan"), "the grader of fake gave no number"),
        (lambda: [][0], "the grader of fake failed"),
    ],
)
def test_a_grader_without_a_grade_is_a_row(engine, tmp_path, marks, reason):
    def broken(task: str, prediction: str, references: list[str], rule: str = "official", **extra: Any) -> float:
        return float(marks()) if references == ["keeper"] else grade(task, prediction, references, rule)

    run(changed(plan(engine), grade=broken), tmp_path)
    found = Records(tmp_path).read()
    assert {row["skipped"] is None for row in found if row["question"] == "q0"} == {True}
    assert all(row["skipped"].startswith(reason) and "output" in row for row in found if row["question"] == "q1")
    assert finish(tmp_path)["scored_questions"] == 3


def test_a_stop_ends_the_answer_and_stays_from_the_grader(engine, tmp_path, monkeypatch):
    seen = []

    def watching(task: str, prediction: str, references: list[str], rule: str = "official", **extra: Any) -> float:
        seen.append((prediction, extra))
        return 1.0

    def source() -> Iterator[Context]:
        for context in contexts(1, 2):
            first, second = context.questions
            stopped = replace(first, extra={"stop": "\n", "language": "en"})
            yield replace(context, questions=(stopped, second))

    monkeypatch.setattr(engine, "decode", lambda tokens: "\n They meet at six.\nDialogue: Ann: hi")
    run(changed(plan(engine, arms=[Arm(None)], source=source), grade=watching), tmp_path)
    assert seen[0] == ("\n They meet at six.", {"language": "en"})
    assert seen[2] == ("\n They meet at six.\nDialogue: Ann: hi", {})


@pytest.mark.parametrize(("limit", "asked"), [(1, [1]), (3, [2, 1]), (6, [2, 2, 2]), (99, [2, 2, 2])])
def test_a_limit_counts_questions(engine, tmp_path, limit, asked):
    progress = run(plan(engine, arms=[Arm(None)], limit=limit), tmp_path)
    found = Records(tmp_path).read()
    by_context = [sum(row["context"] == f"item {number}" for row in found) for number in range(3)]
    assert [count for count in by_context if count] == asked
    assert progress.total == progress.questions == sum(asked)


def test_shards_of_a_limited_run_are_the_limited_run(engine, tmp_path):
    for index in range(2):
        run(plan(engine, arms=[Arm(None)], limit=3, shard=(index, 2)), tmp_path / str(index))
    run(plan(engine, arms=[Arm(None)], limit=3), tmp_path / "all")
    parts = [row for index in range(2) for row in Records(tmp_path / str(index)).read()]
    whole = Records(tmp_path / "all").read()
    assert {(r["context"], r["question"]) for r in parts} == {(r["context"], r["question"]) for r in whole}
    assert len(parts) == len(whole) == 3


def test_progress_knows_the_total_and_the_time_left(engine, tmp_path):
    seen = []
    run(plan(engine, arms=[Arm(None)], limit=3), tmp_path)
    run(plan(engine, arms=[Arm(None)], limit=3), tmp_path, resume=True, on_question=lambda p, _: seen.append(1))
    assert seen == []
    for path in tmp_path.iterdir():
        if path.name == "records.jsonl":
            path.write_text(path.read_text().splitlines(keepends=True)[0])
    run(
        plan(engine, arms=[Arm(None)], limit=3), tmp_path, resume=True,
        on_question=lambda p, _: seen.append((p.done, p.total, p.seconds_left / p.wall)),
    )  # fmt: skip
    assert seen == [(2, 3, pytest.approx(1.0)), (3, 3, 0.0)]


def test_what_can_be_refused_at_once_leaves_no_run(engine, tmp_path):
    def without_room() -> Iterator[Context]:
        yield from contexts(1)
        raise RequestError("length=16 is too short for vt")

    with pytest.raises(RequestError, match="too short for vt"):
        run(plan(engine, source=without_room), tmp_path)
    with pytest.raises(RequestError, match="no thinking model"):
        run(plan(engine, thinking=100), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}


def test_contexts_beyond_what_is_held_are_made_again(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("wakesight.evaluation.runner.HELD_CHARACTERS", 200)
    made = []

    def source() -> Iterator[Context]:
        made.append(1)
        yield from contexts()

    progress = run(plan(engine, arms=[Arm(None)], source=source), tmp_path)
    assert (len(made), progress.total, progress.questions) == (2, 6, 6)
