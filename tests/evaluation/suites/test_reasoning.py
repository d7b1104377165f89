"""Reasoning problems: official rows and generated ones, the problem as context and the request as question."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wakesight.errors import RequestError
from wakesight.evaluation.items import SuiteOptions
from wakesight.evaluation.suites import reasoning

ROWS: dict[str, dict[str, Any]] = {
    "math500": {
        "problem": "What is $1+1$?",
        "solution": "Add.",
        "answer": "2",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    },
    "aime24": {"id": 60, "question": "Find it.", "answer": 204},
    "gsm8k": {"question": "How much?", "answer": "First 1,000 then more.\n#### 1,234"},
}


def asked(*tasks: str, data: Path | None = None, length: int = 4096, items: int = 2, **extra: Any) -> SuiteOptions:
    return SuiteOptions(length, items, 42, lambda text: len(text) // 3 + 1, tasks, data, extra)


def publish(folder: Path, task: str, **changes: Any) -> None:
    (folder / f"{task}.jsonl").write_text(json.dumps(ROWS[task] | changes))


@pytest.mark.parametrize(
    ("task", "grader", "answer"), [("math500", "math500", "2"), ("aime24", "aime", "204"), ("gsm8k", "gsm8k", "1234")]
)
def test_official_rows_are_read(tmp_path: Path, task: str, grader: str, answer: str) -> None:
    publish(tmp_path, task)

    (context,) = reasoning.contexts(asked(task, data=tmp_path, length=1 << 15))

    (question,) = context.questions
    assert context.task == task
    assert context.source == f"{task}.jsonl"
    assert context.text == ROWS[task].get("problem", ROWS[task].get("question"))
    assert question.text == reasoning.ASK
    assert question.grader == grader
    assert question.references == (answer,)
    assert question.max_new_tokens == reasoning.OFFICIAL[task][0]


def test_an_answer_gets_what_the_length_leaves(tmp_path: Path) -> None:
    publish(tmp_path, "math500")

    (short,) = reasoning.contexts(asked("math500", data=tmp_path, length=1024))
    (limited,) = reasoning.contexts(asked("math500", data=tmp_path, length=1024, new_tokens=50))

    assert 900 < short.questions[0].max_new_tokens < 1024
    assert limited.questions[0].max_new_tokens == 50
    with pytest.raises(RequestError, match="length=128 is too short for math500"):
        list(reasoning.contexts(asked("math500", data=tmp_path, length=128)))


def test_aime_may_call_its_question_a_problem(tmp_path: Path) -> None:
    (tmp_path / "aime24.jsonl").write_text('{"problem": "Find it.", "answer": "33"}')

    (context,) = reasoning.contexts(asked("aime24", data=tmp_path))

    assert (context.text, context.questions[0].references) == ("Find it.", ("33",))


@pytest.mark.parametrize(
    ("task", "changes", "said"),
    [
        (
            "gsm8k",
            {"answer": "1234"},
            "line 1: answer is \"1234\", and this format needs a solution that ends in '#### '",
        ),
        ("math500", {"answer": None}, "answer is null"),
        ("aime24", {"question": 3}, "question is 3, and this format needs a string"),
    ],
)
def test_malformed_rows_are_refused(tmp_path: Path, task: str, changes: dict[str, Any], said: str) -> None:
    publish(tmp_path, task, **changes)

    with pytest.raises(RequestError, match=said):
        list(reasoning.contexts(asked(task, data=tmp_path)))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    publish(tmp_path, "gsm8k")

    with pytest.raises(RequestError, match=r"math500 needs the official file math500\.jsonl"):
        list(reasoning.contexts(asked("math500")))
    with pytest.raises(RequestError, match=r"has no math500\.jsonl, aime24\.jsonl"):
        list(reasoning.contexts(asked(data=tmp_path)))
    with pytest.raises(RequestError, match="unknown task 'gsm8', did you mean 'gsm8k'"):
        list(reasoning.contexts(asked("gsm8", data=tmp_path)))


def test_without_reasoning_gym_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)

    with pytest.raises(RequestError, match=r"pip install 'wakesight\[eval\]'"):
        list(reasoning.contexts(asked("gcd")))


def test_every_generated_problem_is_short_and_its_answer_scores() -> None:
    gym = pytest.importorskip("reasoning_gym")

    found = list(reasoning.contexts(asked()))

    assert [context.task for context in found[::2]] == list(reasoning.GYM)
    assert len({context.id for context in found}) == len(found) == 44
    for context in found:
        (question,) = context.questions
        assert question.grader == "reasoning_gym"
        assert question.extra["dataset"] == context.task
        assert context.text == question.extra["entry"]["question"]
        assert len(context.text) < 2000
        assert context.source.startswith("generated:reasoning-gym-")
        # what went through JSON is still what the scorer takes
        extra = json.loads(json.dumps(question.extra))
        score = gym.get_score_answer_fn(extra["dataset"])
        assert score(question.references[0], extra["entry"]) == 1.0


def printed_under(code: str, hash_seed: int) -> str:
    """What `code` prints in a Python of its own, with strings hashed by that seed."""
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    return done.stdout


def test_the_same_problems_in_every_process() -> None:
    pytest.importorskip("reasoning_gym")
    code = """
import hashlib
from wakesight.evaluation.items import SuiteOptions
from wakesight.evaluation.suites import reasoning
for context in reasoning.contexts(SuiteOptions(4096, 6, 42, len)):
    print(context.id, hashlib.sha256(repr(context).encode()).hexdigest())
"""
    assert printed_under(code, hash_seed=1) == printed_under(code, hash_seed=2)


def test_items_do_not_depend_on_how_many_are_asked_for() -> None:
    pytest.importorskip("reasoning_gym")

    few, many = (list(reasoning.contexts(asked("gsm_symbolic", items=items))) for items in (2, 5))

    assert few == many[:2]
