"""SCBench: official lines become contexts, generated ones hold their answers, and the seed decides every byte."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from wakesight.errors import RequestError
from wakesight.evaluation.items import Context, SuiteOptions
from wakesight.evaluation.suites import scbench
from wakesight.evaluation.suites.scbench_scripts import woven

LENGTHS = (1024, 4096, 16384)


def count(text: str) -> int:
    """Cheap, and harsher than most tokenizers: four letters, a sign, or a Chinese character a token."""
    return len(re.findall(r"[\u4e00-\u9fff]|[A-Za-z0-9_]{1,4}|[^\w\s]", text))


def asked(*tasks: str, length: int = 4096, items: int = 1, seed: int = 1, data: Path | None = None, **extra: Any):
    return SuiteOptions(length, items, seed, count, tasks, data, extra)


def made(task: str, **changes: Any) -> list[Context]:
    return list(scbench.contexts(asked(task, **changes)))


def total(context: Context) -> int:
    longest = max(count(one.text + one.answer_prefix) + one.max_new_tokens for one in context.questions)
    return count(context.instruction or "") + count(context.text) + longest


# generated


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", scbench.OFFLINE)
def test_generated_contexts_fill_the_length_and_keep_within_it(task: str, length: int) -> None:
    for context in made(task, length=length, items=3):
        assert context.task == task
        assert total(context) <= length
        full = context.meta.get("shots") == 150  # all solved problems there are
        assert full or total(context) > 0.85 * length


@pytest.mark.parametrize("task", scbench.OFFLINE)
def test_a_context_has_several_questions_with_ids_and_plain_extras(task: str) -> None:
    contexts = made(task, length=2048, items=4)

    ids = [context.id for context in contexts] + [one.id for context in contexts for one in context.questions]
    assert len(ids) == len(set(ids))
    for context in contexts:
        assert len(context.questions) > 1
        assert json.loads(json.dumps(context.meta)) == context.meta
        for one in context.questions:
            assert json.loads(json.dumps(one.extra)) == one.extra
            assert one.grader.startswith("scbench_")
            assert one.references
            assert one.max_new_tokens <= 512


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "task", ["kv", "prefix_suffix", "vt", "qa_eng_synth", "choice_eng_synth", "qa_chn_synth", "repoqa_synth",
             "summary_with_needles_synth", "repoqa_and_kv_synth"],
)  # fmt: skip
def test_the_answers_stand_in_the_context(task: str, length: int) -> None:
    for context in made(task, length=length, items=3):
        for one in context.questions:
            if one.grader == "scbench_summary":
                assert all(sentence in context.text for sentence in re.split(r"(?<=\.) ", one.references[0]))
            elif one.grader == "scbench_choice_eng":
                assert one.references[0] in context.text
                assert one.extra["options"]["ABCD".index(one.references[1])] == one.references[0]
            else:
                assert all(reference in context.text for reference in one.references)


def test_kv_asks_for_the_value_of_a_key_in_a_json_object() -> None:
    (context,) = made("kv")
    pairs = json.loads(context.text.removeprefix("JSON data:\n"))

    assert len(pairs) == context.meta["pairs"]
    assert len(context.questions) == 5
    for one in context.questions:
        (key,) = re.findall(r'Key: "(.+)"', one.text)
        assert one.references == (pairs[key],)
        assert one.max_new_tokens == 150


def test_a_short_context_has_fewer_pairs_and_never_more_than_the_official_number() -> None:
    by_length = [made("kv", length=length)[0].meta["pairs"] for length in (1024, 4096, 1 << 20)]

    assert by_length[0] < by_length[1] < by_length[2] == 2500


def test_prefix_and_suffix_name_one_string() -> None:
    (context,) = made("prefix_suffix")
    strings = context.text.split("\n\n")[1].splitlines()

    for one in context.questions:
        start, end = re.findall(r'"(.+?)"', one.text)
        assert [word for word in strings if word.startswith(start)] == list(one.references)
        assert [word for word in strings if word.endswith(end)] == list(one.references)
        assert 65 <= len(one.references[0]) <= 122


def test_chains_of_variables_lead_to_the_value_in_order() -> None:
    for context in made("vt", items=20, length=1024):
        assert len(context.questions) == 2
        for one in context.questions:
            (value,) = re.findall(r"\d{5}", one.text)
            holders = {}
            for name, right in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", context.text):
                holders[name] = holders.get(right, right)
            assert {name for name, held in holders.items() if held == value} == set(one.references)
            assert len(one.references) == 3


def test_statistics_are_those_of_the_list() -> None:
    for context in made("mf", items=30, length=1024):
        numbers = json.loads(context.text)
        ranked = sorted(set(numbers))
        right = {
            "largest number": ranked[-1], "second largest number": ranked[-2], "third largest number": ranked[-3],
            "smallest number": ranked[0], "second smallest number": ranked[1], "third smallest number": ranked[2],
            "median": sorted(numbers)[len(numbers) // 2],
        }  # fmt: skip
        assert len(context.questions) == 3
        for one in context.questions:
            (name,) = re.findall(r"What is the (.+)\?", one.text)
            assert one.references == (str(right[name]),)


def test_solved_problems_are_of_one_kind_and_the_codebook_can_be_read_off_them() -> None:
    kinds = made("many_shot_synth", items=3, length=1024)

    assert [context.meta["kind"] for context in kinds] == ["dates", "tracking", "codebook"]
    for one in kinds[2].questions:
        line = one.text.splitlines()[0]
        told = re.findall(rf"{re.escape(line)}\nOptions:\n((?:\(.\).*\n)+)Answer: \((.)\)", kinds[2].text)
        shelves = {dict(re.findall(r"\((.)\) (.+)", options))[letter] for options, letter in told}
        assert shelves == {one.extra["option"]}
    for context in kinds:
        for one in context.questions:
            assert one.extra["options"]["ABCDEFG".index(one.references[0])] == one.extra["option"]


def test_described_functions_have_lost_their_docstring_and_are_their_own_best_match() -> None:
    (context,) = made("repoqa_synth", length=8192)

    for one in context.questions:
        described = one.text.removeprefix("Description of the function: ").split("\n\n")[0]
        assert described[:40] not in context.text
        assert one.extra["needles"][one.extra["func_name"]] == one.references[0]
        assert set(one.extra["needles"].values()) == {other.references[0] for other in context.questions}
    assert re.fullmatch(r"generated:python-3\.\d+\.\d+-stdlib", context.source)


def test_a_mix_names_the_rule_of_every_question() -> None:
    (needles,) = made("summary_with_needles_synth")
    (pairs,) = made("repoqa_and_kv_synth", length=8192)

    assert [one.grader for one in needles.questions] == ["scbench_summary"] * 3 + ["scbench_passkey"] * 5
    assert [one.max_new_tokens for one in needles.questions] == [800] * 3 + [15] * 5
    assert sorted(one.grader for one in pairs.questions) == ["scbench_kv"] * 4 + ["scbench_repoqa"] * 4
    assert {one.max_new_tokens for one in pairs.questions} == {80, 1024}


@pytest.mark.parametrize("task", ["kv", "summary_synth", "repoqa_synth"])
def test_a_golden_turn_carries_the_turns_before_it(task: str) -> None:
    alone, golden = made(task, length=8192)[0], made(task, length=8192, turns="golden")[0]

    assert golden.questions[0].text == made(task, length=8192, turns="golden")[0].questions[0].text
    for before, later in zip(golden.questions, golden.questions[1:], strict=False):
        assert later.text.startswith(before.text + "\n\n")
        assert before.references[0] in later.text.removeprefix(before.text)
    assert total(golden) <= 8192
    assert len(alone.questions) == len(golden.questions)


def test_items_do_not_depend_on_how_many_are_asked_for_nor_on_other_tasks() -> None:
    few = made("qa_eng_synth", items=2)
    many = [context for context in scbench.contexts(asked("kv", "qa_eng_synth", items=3)) if context.task != "kv"]

    assert few == many[:2]
    assert many[0].text != many[1].text
    assert made("qa_eng_synth", seed=2)[0].text != few[0].text


def printed_under(code: str, hash_seed: int) -> str:
    """What `code` prints in a Python of its own, with strings hashed by that seed."""
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    return done.stdout


def test_the_same_bytes_in_every_process() -> None:
    code = """
import hashlib, json
from dataclasses import asdict
from wakesight.evaluation.items import SuiteOptions
from wakesight.evaluation.suites import scbench
for context in scbench.contexts(SuiteOptions(2048, 1, 1, lambda text: len(text) // 3 + 1)):
    print(context.id, hashlib.sha256(json.dumps(asdict(context)).encode()).hexdigest())
"""
    assert printed_under(code, hash_seed=1) == printed_under(code, hash_seed=2)


@pytest.mark.parametrize("length", [32, 128, 256])
@pytest.mark.parametrize("task", scbench.OFFLINE)
def test_a_length_without_room_is_refused_or_kept(task: str, length: int) -> None:
    try:
        (context,) = made(task, length=length)
    except RequestError as error:
        refused = str(error)
        context = None

    if context:
        assert total(context) <= length
    else:
        assert f"length={length} is too short for {task}" in refused


def test_planted_lines_keep_their_order_and_all_arrive() -> None:
    lines = woven(["a", "b", "c"], [(0.99, "last"), (0.0, "first"), (0.5, "middle")])

    assert lines == ["first", "a", "b", "middle", "c", "last"]


# which tasks


def test_names_decide_what_is_generated_and_what_is_read(tmp_path: Path) -> None:
    publish(tmp_path, "kv", KV)

    tasks = [context.task for context in scbench.contexts(asked("kv", "qa_chn_synth", data=tmp_path))]

    assert tasks == ["kv", "qa_chn_synth"]
    assert made("kv", data=tmp_path)[0].source == "scbench_kv.jsonl"
    assert made("kv")[0].source == "generated:scbench_kv"


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("qa_engl", "unknown task 'qa_engl', did you mean 'qa_eng'"),
        ("qa_eng", r"qa_eng needs the official file scbench_qa_eng\.jsonl; .* substitute qa_eng_synth"),
    ],
)
def test_a_task_that_is_not_there_offline_is_refused(task: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        made(task)


def test_all_of_scbench_needs_all_files(tmp_path: Path) -> None:
    publish(tmp_path, "kv", KV)

    with pytest.raises(RequestError, match=r"has no scbench_prefix_suffix\.jsonl, .*--tasks"):
        list(scbench.contexts(asked(data=tmp_path)))


@pytest.mark.parametrize(("extra", "said"), [({"turns": "gold"}, "did you mean 'golden'"), ({"variant": "x"}, "tiny")])
def test_an_unknown_form_is_refused(tmp_path: Path, extra: dict[str, str], said: str) -> None:
    publish(tmp_path, "kv", KV)

    with pytest.raises(RequestError, match=said):
        made("kv", data=tmp_path, **extra)


# official files

KV = {"id": 0, "context": 'JSON data:\n{"k": "v"}', "multi_turns": [{"input": "Key: k", "answer": "v"}]}
CHOICE = {
    "id": 3,
    "context": "The cook did it.",
    "multi_turns": [
        {"input": "Who?", "answer": "the cook", "options": ["the maid", "the cook", "the heir", "the dog"]},
        {"input": "Again?", "answer": "A", "options": ["yes", "no", "maybe", "never"]},
    ],
}
REPOQA = {
    "id": 1,
    "context": "def f(): ...\ndef g(): ...",
    "lang": "python",
    "repo": "a/b",
    "multi_turns": [{"input": "does f", "answer": "def f(): ...", "name": "f"}],
}


def publish(folder: Path, task: str, *rows: dict[str, Any]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / f"scbench_{task}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def read(folder: Path, task: str, *rows: dict[str, Any], **changes: Any) -> list[Context]:
    publish(folder, task, *rows)
    return made(task, data=folder, items=changes.pop("items", 9), **changes)


def turns(*pairs: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": 0, "context": "c", "multi_turns": [{"input": one, "answer": two, **fields} for one, two in pairs]}


def test_an_official_record_keeps_its_words(tmp_path: Path) -> None:
    (context,) = read(tmp_path, "kv", KV)

    assert context.text == KV["context"]
    assert context.instruction
    assert context.questions[0].text == "Key: k"
    assert context.questions[0].references == ("v",)
    assert context.meta["record"] == 0


def test_options_are_lettered_and_either_form_of_answer_is_read(tmp_path: Path) -> None:
    (context,) = read(tmp_path, "choice_eng", CHOICE)

    assert "Question: Who?\nA. the maid\nB. the cook\nC. the heir\nD. the dog\n" in context.questions[0].text
    assert [one.references for one in context.questions] == [("the cook", "B"), ("yes", "A")]


def test_book_questions_are_labelled(tmp_path: Path) -> None:
    (english,) = read(tmp_path, "qa_eng", turns(("Who?", "Anne")))
    (chinese,) = read(tmp_path, "qa_chn", turns(("谁？", "安")))  # noqa: RUF001

    assert english.questions[0].text == "Question: Who?\nAnswer:"
    assert chinese.questions[0].text.startswith("问题")
    assert chinese.questions[0].grader == "scbench_qa_chn"


def test_numbers_to_rank_come_as_a_list(tmp_path: Path) -> None:
    row = turns(("Find it. The largest number of the list is", 9), ("Find it. The median is", 2.5)) | {
        "context": [1, 9, 4, 0]
    }

    (context,) = read(tmp_path, "mf", row)

    assert context.text == "[1, 9, 4, 0]"
    assert context.instruction == "Find it. The largest number of the list is"
    assert context.questions[0].text.startswith("What is the largest number of the list?\n\nFind it.")
    assert [one.references for one in context.questions] == [("9",), ("2.5",)]


def test_lists_of_answers_and_lettered_examples(tmp_path: Path) -> None:
    (chain,) = read(tmp_path, "vt", turns(("which?", ["AAAAA", "BBBBB"])))
    (shots,) = read(tmp_path, "many_shot", turns(("Q\nOptions:\n(A) yes\n(B) no\nAnswer:", "(B)")))

    assert chain.questions[0].references == ("AAAAA", "BBBBB")
    assert shots.questions[0].references == ("(B)",)
    assert shots.questions[0].extra == {"options": ["yes", "no"], "option": "no"}


def test_a_function_is_compared_with_all_of_its_repository(tmp_path: Path) -> None:
    other = REPOQA | {"multi_turns": [{"input": "does g", "answer": "def g(): ...", "name": "g"}]}
    third = other | {"repo": "c/d"}

    contexts = read(tmp_path, "repoqa", REPOQA, other, third, items=1)

    extra = contexts[0].questions[0].extra
    assert extra["needles"] == {"f": "def f(): ...", "g": "def g(): ..."}
    assert (extra["func_name"], extra["lang"], extra["repo"]) == ("f", "python", "a/b")


def test_mixed_turns_go_by_their_task(tmp_path: Path) -> None:
    row = REPOQA | {
        "multi_turns": [
            {"input": "does f", "answer": "def f(): ...", "name": "f", "task": "scbench_repoqa"},
            {"input": "k", "answer": "v", "task": "scbench_kv"},
        ]
    }

    (context,) = read(tmp_path, "repoqa_and_kv", row)

    assert [(one.grader, one.max_new_tokens) for one in context.questions] == [
        ("scbench_repoqa", 1024),
        ("scbench_kv", 80),
    ]
    assert context.questions[0].extra["needles"] == {"f": "def f(): ..."}


def test_golden_turns_of_official_summaries_open_the_reply(tmp_path: Path) -> None:
    row = turns(("First.", "One."), ("Second.", "Two."))

    (context,) = read(tmp_path, "summary", row, turns="golden")

    assert [one.text for one in context.questions] == ["First.", "First.\n\nOne.\n\nSecond."]
    assert [one.answer_prefix for one in context.questions] == ["", "This paper"]


def test_a_long_official_context_loses_its_middle(tmp_path: Path) -> None:
    row = turns(("?", "Anne")) | {"context": " ".join(f"w{place}" for place in range(20000))}

    (context,) = read(tmp_path, "qa_eng", row, length=2048)

    assert 2000 <= total(context) <= 2048
    assert context.text.startswith("w0 ")
    assert context.text.endswith(" w19999")
    assert context.meta["cut"] == "middle, by characters"


def test_a_length_below_the_answers_of_an_official_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="length=1024 is too short for repoqa"):
        read(tmp_path, "repoqa", REPOQA, length=1024)


def preprocessed() -> Iterator[tuple[str, dict[str, Any], list[tuple[str, ...]]]]:
    yield "kv", {"prompts": ["ctx", "k1", "k2"], "ground_truth": ["v1", "v2"]}, [("v1",), ("v2",)]
    yield "vt", {"prompts": ["ctx", "?"], "ground_truth": [["A", "B"]]}, [("A", "B")]
    yield "mf", {"prompts": ["ctx", "?"], "ground_truth": [7]}, [("7",)]
    question = "Who?\nA. x\nB. y\nC. z\nD. w\n"
    yield "choice_eng", {"prompts": ["ctx", question], "ground_truth": ["z"]}, [("z", "C")]
    mixed = {"prompts": ["ctx", "f", "k"], "ground_truth": ["def f(): ...", "v"], "lang": "python", "repo": "a/b",
             "func_name": ["f", None], "task": ["scbench_repoqa", "scbench_kv"]}  # fmt: skip
    yield "repoqa_and_kv", mixed, [("def f(): ...",), ("v",)]


@pytest.mark.parametrize(("task", "row", "references"), list(preprocessed()))
def test_the_shortened_form_is_read(tmp_path: Path, task: str, row: dict[str, Any], references: list[Any]) -> None:
    publish(tmp_path, f"{task}_tiny", row)

    (context,) = made(task, data=tmp_path, variant="tiny")

    assert context.task == f"{task}_tiny"
    assert context.text == "ctx"
    assert context.instruction is None
    assert [one.text for one in context.questions] == row["prompts"][1:]
    assert [one.references for one in context.questions] == references
    assert context.meta["form"] == "preprocessed"


@pytest.mark.parametrize(
    ("task", "row", "said"),
    [
        ("kv", {"context": "c"}, "line 1: multi_turns is missing; the line has context"),
        ("kv", {"multi_turns": [{"input": "?", "answer": "v"}]}, "context is missing"),
        ("kv", turns(("?", None)), r"multi_turns\[0\]\.answer is null"),
        ("kv", turns(), "multi_turns is \\[\\], and this format needs a list of objects"),
        ("mf", turns(("The median is", 1)) | {"context": ["a"]}, "context is \\[\"a\"\\], and .* a list of numbers"),
        ("choice_eng", turns(("?", "x"), options=["a", "b", "c", "d"]), "needs one of the options a, b, c, d"),
        ("choice_eng", turns(("?", "a"), options=["a", "b"]), "needs four options"),
        ("repoqa_and_kv", REPOQA, r"multi_turns\[0\]\.task is null, and .* one of scbench_repoqa, scbench_kv"),
        ("repoqa", {**REPOQA, "multi_turns": [{"input": "?", "answer": "x"}]}, r"multi_turns\[0\]\.name is missing"),
        ("kv", {"prompts": ["c", "q"], "ground_truth": []}, "ground_truth is \\[\\], .* a list of 1 answers"),
        ("choice_eng", {"prompts": ["c", "q"], "ground_truth": ["x"]}, r"prompts\[1\] is .* four options, a line each"),
    ],
)  # fmt: skip
def test_malformed_records_are_refused(tmp_path: Path, task: str, row: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read(tmp_path, task, row)


def test_a_golden_reply_gets_full_marks() -> None:
    graders = pytest.importorskip("wakesight.evaluation.graders")
    for package in ("nltk", "rouge_score"):
        pytest.importorskip(package)

    for context in scbench.contexts(asked(length=2048, items=3)):
        for one in context.questions:
            reply = ", ".join(one.references) if one.grader == "scbench_vt" else one.references[-1]
            # officially every character of a Chinese answer is a reference of its own
            for rule in ("strict",) if one.grader == "scbench_qa_chn" else ("official", "strict"):
                assert graders.grade(one.grader, reply, list(one.references), rule, **one.extra) == 1.0, one.id


def test_contexts_are_plain_values() -> None:
    (context,) = made("kv", length=1024)

    assert json.loads(json.dumps(asdict(context)))["task"] == "kv"
