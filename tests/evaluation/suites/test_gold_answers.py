"""Every suite's items through their own graders: the right answer gets full marks, an empty one none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wakesight.evaluation.graders import grade
from wakesight.evaluation.items import Context, Question, SuiteOptions
from wakesight.evaluation.suites import longbench, niah, reasoning, recall, ruler, scbench

pytest.importorskip("rouge_score")
pytest.importorskip("jieba")
pytest.importorskip("nltk")


def count(text: str) -> int:
    return len(text) // 4 + 1


def gold(question: Question) -> str:
    """The right answer as a model would write it."""
    first, last = question.references[0], question.references[-1]
    written = {
        "scbench_choice_eng": last,  # the letter; the strict rule wants it
        "scbench_many_shot": f"({first})",
        "scbench_repoqa": f"```python\n{first}\n```",
        "reasoning_gym": f"<answer>{first}</answer>",
        **dict.fromkeys(("math500", "aime", "gsm8k"), f"So it is \\boxed{{{first}}}."),
        **dict.fromkeys(longbench.TASKS, first),
    }
    return written.get(question.grader, ", ".join(question.references))


def documented(question: Question, rule: str) -> tuple[float, float]:
    """(most, least): grades of the right and of an empty answer, 1 and 0 but for what official scorers do."""
    if rule == "official" and question.grader == "scbench_qa_chn":  # every character is a reference of its own
        return 2 / (1 + len(question.references[0])), 0.0
    if rule == "official" and question.grader == "reasoning_gym":  # some data sets give a hundredth for a try
        return 1.0, 0.01
    return 1.0, 0.0


def check(context: Context) -> None:
    for question in context.questions:
        extra: dict[str, Any] = json.loads(json.dumps(dict(question.extra)))  # what a record could hold
        extra.pop("stop", None)
        references = list(question.references)
        for rule in ("official", "strict"):
            most, least = documented(question, rule)
            full = grade(question.grader, gold(question), references, rule, **extra)
            assert full == pytest.approx(most, abs=1e-6), (question.id, rule, gold(question))
            assert grade(question.grader, "", references, rule, **extra) <= least, (question.id, rule)


@pytest.mark.parametrize("task", [*ruler.TASKS, *ruler.ALSO])
def test_ruler(task: str) -> None:
    found = list(ruler.contexts(SuiteOptions(2048, 2, 7, count, (task,))))
    assert len(found) == 2
    for context in found:
        check(context)


@pytest.mark.parametrize("suite", [niah, recall])
def test_needles_and_recall(suite: Any) -> None:
    for context in suite.contexts(SuiteOptions(2048, 2, 7, count)):
        check(context)


@pytest.mark.parametrize("task", scbench.OFFLINE)
def test_scbench(task: str) -> None:
    found = list(scbench.contexts(SuiteOptions(4096, 2, 7, count, (task,))))
    assert len(found) == 2
    for context in found:
        check(context)


def official_files(folder: Path) -> Iterator[str]:
    """A file of two lines for every task of LongBench."""
    special = {"passage_count": "7", "passage_retrieval_en": "Paragraph 7", "passage_retrieval_zh": "段落7"}
    for task in longbench.TASKS:
        line = {
            "input": "Who?", "context": "The keeper rang the bell.", "answers": [special.get(task, "keeper of lamps")],
            "all_classes": ["clock", "keeper of lamps", "bell"],
        }  # fmt: skip
        (folder / f"{task}.jsonl").write_text(2 * (json.dumps(line, ensure_ascii=False) + "\n"), encoding="utf-8")
        yield task


def test_longbench(tmp_path: Path) -> None:
    tasks = list(official_files(tmp_path))
    found = list(longbench.contexts(SuiteOptions(4096, 2, 7, count, data=tmp_path)))
    assert len(found) == 2 * len(tasks) == 42
    for context in found:
        check(context)


@pytest.mark.parametrize("task", reasoning.GYM)
def test_reasoning_gym(task: str) -> None:
    pytest.importorskip("reasoning_gym")
    found = list(reasoning.contexts(SuiteOptions(4096, 2, 7, count, (task,))))
    assert len(found) == 2
    for context in found:
        check(context)


def test_official_reasoning_files(tmp_path: Path) -> None:
    rows = {
        "math500": {"problem": "p", "answer": "\\frac{3}{4}"},
        "aime24": {"question": "q", "answer": 204},
        "gsm8k": {"question": "q", "answer": "First that.\n#### 1,234"},
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    for context in reasoning.contexts(SuiteOptions(1 << 15, 2, 7, count, data=tmp_path)):
        check(context)
