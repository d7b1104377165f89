"""LongBench: official lines become contexts, and nothing is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wakesight.errors import RequestError
from wakesight.evaluation.items import SuiteOptions
from wakesight.evaluation.suites import longbench


def count(text: str) -> int:
    return len(text.split())


def asked(data: Path | None, *tasks: str, length: int = 2048, items: int = 5) -> SuiteOptions:
    return SuiteOptions(length=length, items=items, seed=0, count=count, tasks=tasks, data=data)


def official(folder: Path, task: str, **changes: object) -> None:
    record = {
        "input": "Who rang the bell?",
        "context": "The keeper rang the bell. " * 3,
        "answers": ["the keeper", "Keeper"],
        "length": 15,
        "dataset": task.removesuffix("_e"),
        "language": "en",
        "all_classes": None,
        "_id": "f00",
    }
    with (folder / f"{task}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record | changes, ensure_ascii=False) + "\n")


@pytest.mark.parametrize("task", longbench.TASKS + longbench.ALSO)
def test_every_task_is_read(tmp_path: Path, task: str) -> None:
    official(tmp_path, task, all_classes=["bell", "keeper"])

    (context,) = longbench.contexts(asked(tmp_path, task))

    (question,) = context.questions
    outline = longbench.OUTLINES[task.removesuffix("_e")]
    assert context.task == task
    assert context.source == f"{task}.jsonl"
    assert context.instruction
    assert context.text == "The keeper rang the bell. " * 3
    assert question.grader == task.removesuffix("_e")
    assert question.references == ("the keeper", "Keeper")
    assert question.max_new_tokens == outline.new_tokens
    assert ("Who rang the bell?" in question.text) == ("{input}" in outline.question)
    assert "{" not in question.text
    assert question.extra["all_classes"] == ["bell", "keeper"]
    assert context.meta["record"] == "f00"


def test_solved_examples_and_code_go_without_the_chat_template() -> None:
    plain = {task for task, outline in longbench.OUTLINES.items() if not outline.chat}

    assert plain == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    for task in plain - {"repobench-p"}:  # its input is code that continues the context
        assert longbench.OUTLINES[task].question.startswith("\n")


def test_there_are_21_tasks_with_the_official_number_of_new_tokens() -> None:
    rows = {
        512: "gov_report multi_news qmsum vcsum",
        128: "dureader narrativeqa qasper samsum",
        64: "lcc lsht multifieldqa_en multifieldqa_zh repobench-p trec",
        32: "2wikimqa hotpotqa musique passage_count passage_retrieval_en passage_retrieval_zh triviaqa",
    }
    for new_tokens, tasks in rows.items():
        found = [task for task, outline in longbench.OUTLINES.items() if outline.new_tokens == new_tokens]
        assert " ".join(sorted(found)) == tasks
    assert len(longbench.TASKS) == 21


def test_a_long_context_loses_its_middle(tmp_path: Path) -> None:
    official(tmp_path, "qasper", context=" ".join(f"w{place}" for place in range(5000)))

    (context,) = longbench.contexts(asked(tmp_path, "qasper", length=1024))

    (question,) = context.questions
    total = sum(count(part) for part in (context.instruction or "", context.text, question.text))
    assert 1000 <= total + question.max_new_tokens <= 1024
    assert context.text.startswith("w0 ")
    assert context.text.endswith(" w4999")
    assert context.meta["cut"] == "middle, by characters"


def test_items_are_the_first_lines(tmp_path: Path) -> None:
    for number in range(3):
        official(tmp_path, "hotpotqa", _id=str(number))

    found = list(longbench.contexts(asked(tmp_path, "hotpotqa", items=2)))

    assert [context.meta["record"] for context in found] == ["0", "1"]
    assert len({context.id for context in found}) == 2


def test_without_files_it_says_which_are_needed(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no substitutes; name a folder with --data that holds qasper\.jsonl"):
        list(longbench.contexts(asked(None, "qasper")))
    with pytest.raises(RequestError, match=r"holds narrativeqa\.jsonl, .* and 18 more .* or fewer tasks with --tasks"):
        list(longbench.contexts(asked(None)))
    with pytest.raises(RequestError, match=r"has no narrativeqa\.jsonl, qasper\.jsonl, \S+ and 18 more; .* --tasks"):
        list(longbench.contexts(asked(tmp_path)))


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="unknown task 'hotpot', did you mean 'hotpotqa'"):
        list(longbench.contexts(asked(tmp_path, "hotpot")))


@pytest.mark.parametrize(
    ("task", "changes", "said"),
    [
        ("qasper", {"answers": []}, "line 1: answers is \\[\\], and this format needs a list of strings"),
        ("qasper", {"context": None}, "context is null"),
        ("trec", {}, "all_classes is null, and this format needs the list of class names"),
    ],
)
def test_malformed_lines_are_refused(tmp_path: Path, task: str, changes: dict[str, object], said: str) -> None:
    official(tmp_path, task, **changes)

    with pytest.raises(RequestError, match=said):
        list(longbench.contexts(asked(tmp_path, task)))


def test_a_length_without_room_is_refused(tmp_path: Path) -> None:
    official(tmp_path, "gov_report")

    with pytest.raises(RequestError, match="length=512 is too short for gov_report"):
        list(longbench.contexts(asked(tmp_path, "gov_report", length=512)))
