"""What holds for every grader: the table, the requests it refuses, and laws over arbitrary replies."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from wakesight.errors import RequestError
from wakesight.evaluation.graders import RULES, after_thinking, grade, rule_of

FUNCTION = "def f(a, b):\n    total = a + b\n    return total"
CLASSES = ["sports", "sports news", "weather"]

# task -> a reference that answers itself, and what the grader needs besides
ITEMS = {
    **{task: (["1234567", "7654321"], {}) for task, rule in RULES.items() if rule.family in ("ruler", "wakekv")},
    "scbench_kv": (str(uuid.UUID(int=2**100 + 7)), {}),
    "scbench_prefix_suffix": ("qwertzuiop" * 7, {}),
    "scbench_vt": (["ABCDE", "FGHIJ"], {}),
    "scbench_repoqa": (FUNCTION, {"needles": {"f": FUNCTION}, "lang": "python"}),
    "scbench_repoqa_and_kv": (FUNCTION, {"needles": {"f": FUNCTION}, "lang": "python", "part": "scbench_repoqa"}),
    "scbench_qa_eng": (["the old mill"], {}),
    "scbench_qa_chn": ("红", {}),
    "scbench_choice_eng": ("B", {}),
    "scbench_many_shot": ("(C)", {}),
    "scbench_mf": (42, {}),
    "scbench_passkey": ("71432", {}),
    "scbench_summary": ("the mill burned\nnobody was hurt", {}),
    "scbench_summary_with_needles": ("71432", {"part": "scbench_passkey"}),
    **{task: ("the old mill burned down", {}) for task, rule in RULES.items() if rule.family == "longbench"},
    "multifieldqa_zh": ("我爱北京天安门", {}),
    "dureader": ("我爱北京天安门", {}),
    "vcsum": ("我爱北京天安门", {}),
    "trec": ("weather", {"all_classes": CLASSES}),
    "lsht": ("weather", {"all_classes": CLASSES}),
    "passage_retrieval_en": ("Paragraph 7", {}),
    "passage_retrieval_zh": ("段落7", {}),
    "passage_count": ("7", {}),
    "lcc": ("x = total + 1", {}),
    "repobench-p": ("x = total + 1", {}),
    "math500": (r"\frac{1}{2}", {}),
    "aime": ("204", {}),
    "gsm8k": ("18", {}),
    "reasoning_gym": ("18", {}),
}
NOT_COMPARED = {"math500"}  # arbitrary replies go to math-verify, which is slow; the ladder has tests of its own
MOVES = st.sampled_from(
    ["A", "B. ", "(C)", " is ", "answer: ", "1234567", "71432", "7", "42.5", "weather", "sports news", "Paragraph ",
     "段落", "红", "天安门", "ABCDE", "the old mill", "x = ", "# ", "`", "```python\n", "\n", ".", "def f(a):\n", "-"]
)  # fmt: skip
REPLIES = st.one_of(st.text(max_size=60), st.lists(MOVES, max_size=12).map("".join))


def test_every_task_has_a_case_here():
    assert set(ITEMS) == set(RULES)


def test_the_table_counts_what_the_benchmarks_have():
    families = [rule.family for rule in RULES.values()]

    assert families.count("ruler") == 13
    assert families.count("longbench") == 21
    assert families.count("scbench") == 12 + 1  # the passkey part is no task of the twelve
    assert families.count("reasoning") == 4
    assert {task for task, rule in RULES.items() if rule.revised} == {"scbench_qa_chn", "scbench_choice_eng"}
    assert all(rule.task == task and rule.metric and rule.source for task, rule in RULES.items())


SAME = {
    "scbench_passkey", "scbench_summary", "scbench_summary_with_needles", "narrativeqa", "qasper", "multifieldqa_en",
    "hotpotqa", "2wikimqa", "musique", "triviaqa", "multifieldqa_zh", "passage_retrieval_en", "passage_retrieval_zh",
    "passage_count",
}  # fmt: skip


def test_which_tasks_have_a_strict_rule_of_their_own():
    assert {task for task, rule in RULES.items() if not rule.strict_differs} == SAME


@pytest.mark.parametrize("task", sorted(set(ITEMS) - NOT_COMPARED))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(reply="")
@given(reply=REPLIES)
def test_a_grade_is_between_nothing_and_one(task, reply):
    reference, extra = ITEMS[task]

    official, strict = (grade(task, reply, reference, rule, **extra) for rule in ("official", "strict"))

    assert 0 <= official <= 1
    assert 0 <= strict <= 1
    if task in SAME:
        assert official == strict


@pytest.mark.parametrize("task", sorted(ITEMS))
@pytest.mark.parametrize("rule", ["official", "strict"])
def test_the_reference_is_right_and_silence_is_wrong(task, rule):
    reference, extra = ITEMS[task]
    reply = " ".join(reference) if isinstance(reference, list) else str(reference)

    assert grade(task, reply, reference, rule, **extra) == pytest.approx(1, abs=1e-6)
    assert grade(task, "", reference, rule, **extra) == 0


@given(st.uuids(), st.uuids())
def test_any_uuid_answers_itself_and_no_other(value, other):
    for rule in ("official", "strict"):
        assert grade("scbench_kv", f"It is {value}.", str(value), rule) == 1
        assert grade("scbench_kv", str(other), str(value), rule) == (value == other)


@given(st.text("红楼梦西游记水浒传", min_size=1, max_size=12))
def test_a_chinese_answer_is_strictly_right_and_officially_by_its_commonest_character(answer):
    most = max(answer.count(character) for character in answer)

    assert most >= 1
    assert grade("scbench_qa_chn", answer, answer, "strict") == 1
    # one character against all: precision 1/n, recall 1
    assert grade("scbench_qa_chn", answer, answer) == pytest.approx(2 / (len(answer) + 1))


def test_a_substitute_and_an_e_task_are_graded_as_their_originals():
    assert rule_of("qa_1_synth") is RULES["qa_1"]
    assert rule_of("scbench_kv_synth") is RULES["scbench_kv"]
    assert rule_of("qasper_e") is RULES["qasper"]
    assert grade("scbench_choice_eng_synth", "Based on x", ["the cook", "B"], "strict") == 0


@pytest.mark.parametrize("task", ["niah_single_4", "vt_e", "", "scbench_kv_synth_e"])
def test_an_unknown_task_is_refused(task):
    with pytest.raises(RequestError, match="no grader for task"):
        grade(task, "x", "x")


def test_near_misses_are_named():
    with pytest.raises(RequestError, match="no grader for task 'scbench_choice', did you mean 'scbench_choice_eng'"):
        grade("scbench_choice", "x", "x")
    with pytest.raises(RequestError, match="unknown rule 'strickt', did you mean 'strict'\\?; rules: official, strict"):
        grade("vt", "x", "x", "strickt")


def test_an_item_without_references_is_refused():
    with pytest.raises(RequestError, match="the item of vt has no reference answer"):
        grade("vt", "x", [])


@pytest.mark.parametrize("task", ["niah_single_1", "scbench_vt", "scbench_many_shot", "qasper", "aime"])
@pytest.mark.parametrize("reference", ["", " \n", ["right", ""]])
def test_an_empty_reference_is_refused(task, reference):
    """The rules that look for a reference in the reply find an empty one in every reply."""
    with pytest.raises(RequestError, match=f"the item of {task} has an empty reference answer"):
        grade(task, "x", reference)


@pytest.mark.parametrize("task", ["niah_single_1", "scbench_many_shot", "scbench_mf", "qasper", "aime"])
@pytest.mark.parametrize("reference", [None, [None], b"x", ["x", b"x"], {"x": 1}, [["x"]], True, object()])
def test_a_reference_that_is_neither_text_nor_a_number_is_refused(task, reference):
    with pytest.raises(RequestError, match=f"of {task} is neither text nor a number"):
        grade(task, "x", reference)


@pytest.mark.parametrize("task", ["niah_single_1", "scbench_kv", "qasper", "aime"])
@pytest.mark.parametrize("reply", [None, 5, b"x", ["x"]])
def test_a_reply_that_is_no_text_is_refused(task, reply):
    with pytest.raises(RequestError, match=f"to an item of {task} is no text"):
        grade(task, reply, "x")


@pytest.mark.parametrize("task", ["niah_single_1", "scbench_vt", "scbench_many_shot", "scbench_qa_eng", "qasper"])
def test_a_number_is_a_reference_like_its_text(task):
    for rule in ("official", "strict"):
        assert grade(task, "it is 417", 417, rule) == grade(task, "it is 417", "417", rule) > 0


def test_other_extras_are_ignored():
    assert grade("vt", "ABCDE", "ABCDE", depth=0.5, options=None) == 1


@pytest.mark.parametrize(
    ("task", "module", "package"),
    [("lcc", "rapidfuzz.fuzz", "rapidfuzz"), ("scbench_repoqa", "nltk.translate.bleu_score", "nltk")],
)
def test_a_missing_package_is_one_sentence(monkeypatch, task, module, package):
    reference, extra = ITEMS[task]
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(RequestError, match=rf"needs the package {package}; type: pip install 'wakesight\[eval\]'"):
        grade(task, "x", reference, "strict", **extra)


def test_a_missing_math_verify_is_the_same_sentence(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)

    with pytest.raises(RequestError, match=r"needs the package math-verify.* pip install 'wakesight\[eval\]'"):
        grade("math500", "x", "y")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>17? No, 18.</think>\n\n18", "18"),
        ("17? No, 18.</think>18", "18"),  # the template opened the thought
        ("<think>a</think>b<think>c</think> d", "d"),
        ("<think>17? No, 1", ""),  # cut off
        ("18", "18"),
        ("", ""),
        ("<think>a</think>", ""),
    ],
)
def test_after_thinking(text, expected):
    assert after_thinking(text) == expected


def test_after_thinking_with_another_tag():
    assert after_thinking("a[/THINK] b", close="[/THINK]") == "b"
    assert after_thinking("[THINK]a", close="[/THINK]") == ""


def test_long_replies_take_no_time():
    """As long as the tasks allow, and then some; the graders run beside a model on a shared machine."""
    essay = "the old mill burned down, and nobody was hurt. " * 200
    start = time.perf_counter()
    for task in sorted(set(ITEMS) - NOT_COMPARED - {"scbench_summary"}):
        reference, extra = ITEMS[task]
        for rule in ("official", "strict"):
            grade(task, essay, reference, rule, **extra)

    assert time.perf_counter() - start < 20


def test_importing_the_graders_loads_no_optional_package():
    names = {"torch", "jieba", "nltk", "rouge", "rouge_score", "rapidfuzz", "sympy", "math_verify", "tree_sitter"}
    code = f"import sys, wakesight.evaluation.graders\nassert not {names} & set(sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
