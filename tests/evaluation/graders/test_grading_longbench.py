"""LongBench's metrics, by hand, and ROUGE-L against the package it stands for."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.errors import RequestError
from wakesight.evaluation.graders import grade
from wakesight.evaluation.graders.summaries import NESTED_CALLS, TooDeep, rouge_l

F1_TASKS = ["narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"]


def both(task, prediction, reference, **extra):
    return tuple(grade(task, prediction, reference, rule, **extra) for rule in ("official", "strict"))


@pytest.mark.parametrize("task", F1_TASKS)
def test_english_f1(task):
    # cat sat on mat against cat on mat: precision 3/4, recall 1
    assert both(task, "The cat sat on a mat!", ["a dog", "cat on mat"]) == (pytest.approx(6 / 7),) * 2
    assert both(task, "THE, Answer", "answer") == (1, 1)
    assert both(task, "the", "the") == (0, 0)  # nothing is left of either


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("北京天安门", "我爱北京天安门", 2 / 3),  # 北京/天安门 of 我/爱/北京/天安门
        ("我爱北京天安门。", "我爱北京、天安门", 1),
        ("上海", "北京", 0),
    ],
)
def test_chinese_f1(prediction, reference, expected):
    assert both("multifieldqa_zh", prediction, reference) == (pytest.approx(expected),) * 2


@pytest.mark.parametrize("task", ["triviaqa", "samsum", "trec", "lsht"])
def test_only_the_first_line_counts(task):
    extra = {"all_classes": ["Right answer"]}

    assert both(task, "\n\nRight answer\nQuestion: next", "Right answer", **extra) == (pytest.approx(1, abs=1e-6),) * 2
    assert both(task, "nothing\nRight answer", "Right answer", **extra) == (0, 0)


@pytest.mark.parametrize("task", ["gov_report", "qmsum", "multi_news", "samsum"])
def test_english_rouge(task):
    assert grade(task, "the cat sat", "the cat ran fast") == pytest.approx(4 / 7, abs=1e-6)  # 2 of 3, 2 of 4
    assert grade(task, "go go go", "go") == pytest.approx(1, abs=1e-6)  # a word counts once
    assert grade(task, "cc dd. aa bb", "aa bb. cc dd") == pytest.approx(1, abs=1e-6)  # sentence by sentence
    assert grade(task, "...", "aa") == 0
    assert grade(task, "", "aa") == 0


@pytest.mark.parametrize("task", ["dureader", "vcsum"])
def test_chinese_rouge(task):
    # 北京/天安门 of 我/爱/北京/天安门: precision 1, recall 1/2
    assert both(task, "北京天安门", "我爱北京天安门") == (pytest.approx(2 / 3, abs=1e-6),) * 2


def test_a_long_chinese_summary_is_officially_nothing():
    """One sentence of 1,500 words walks the table back in 1,501 nested calls, and the official except says 0."""
    text = "我爱北京天安门" * 375

    start = time.perf_counter()
    official, strict = both("vcsum", text, text)

    assert (official, strict) == (0, pytest.approx(1, abs=1e-6))
    assert time.perf_counter() - start < 30


words = st.lists(st.sampled_from(["ant", "bee", "cat", "dog", ".", "..", ""]), max_size=25).map(" ".join)


@settings(deadline=None)
@given(words, words)
def test_rouge_is_the_package_s(prediction, reference):
    rouge = pytest.importorskip("rouge")
    try:
        expected = rouge.Rouge(metrics=["rouge-l"]).get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
    except ValueError:
        expected = 0.0

    assert rouge_l(prediction, reference) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("others", [NESTED_CALLS - 2, NESTED_CALLS - 1])
def test_where_recursion_ends(others):
    """The reference's one word comes first in the reply: a call per other word, one for the match, one at the end."""
    reply = " ".join(["key", *(f"w{i}" for i in range(others))])

    if others + 2 <= NESTED_CALLS:
        assert rouge_l(reply, "key", NESTED_CALLS) > 0
    else:
        with pytest.raises(TooDeep):
            rouge_l(reply, "key", NESTED_CALLS)


@pytest.mark.parametrize("task", ["trec", "lsht"])
@pytest.mark.parametrize(
    ("prediction", "reference", "official", "strict"),
    [
        ("city", "city", 1, 1),
        ("city or country", "city", 0.5, 0.5),
        ("country", "city", 0, 0),
        # "ab" and "b" are inside "abc"; taking "ab" out of the list walked steps over "b"
        ("abc", "abc", 0.5, 1),
        ("none", "city", 0, 0),
    ],
)
def test_classification(task, prediction, reference, official, strict):
    classes = ["ab", "b", "abc", "city", "country"]

    assert both(task, prediction, reference, all_classes=classes) == (official, strict)


def test_classification_needs_the_classes():
    with pytest.raises(RequestError, match="the grader of trec needs all_classes"):
        grade("trec", "city", "city")


@pytest.mark.parametrize(
    ("task", "prediction", "reference", "expected"),
    [
        ("passage_retrieval_en", "Paragraph 12", "Paragraph 12", 1),
        ("passage_retrieval_en", "Paragraph 12, not 3 or 4", "Paragraph 12", 1 / 3),
        ("passage_retrieval_en", "none", "Paragraph 12", 0),
        ("passage_retrieval_zh", "段落12和段落3", "段落12", 0.5),
        ("passage_count", "There are 7. 7!", "7", 1),
        ("passage_count", "07", "7", 0),
        ("passage_count", "7", 7, 1),
    ],
)
def test_numbers(task, prediction, reference, expected):
    assert both(task, prediction, reference) == (pytest.approx(expected),) * 2


def test_a_reference_without_a_paragraph_is_refused():
    with pytest.raises(RequestError, match="'12' names no paragraph"):
        grade("passage_retrieval_en", "12", "12")


@pytest.mark.parametrize("task", ["lcc", "repobench-p"])
@pytest.mark.parametrize(
    ("prediction", "reference", "official", "strict"),
    [
        ("x = 1", "x = 1", 1, 1),
        ("```python\nx = 1\n```", "x = 1", 1, 1),
        ("# a comment\nx = 1", "x = 1", 1, 1),
        ("x = 1  # one", "x = 1  # one", 0, 1),  # the right line is passed over
        ('url = "http://a"\nx', 'url = "http://a"', 0, 1),  # the next line, "x", is compared
        ("#include <a>", "#include <a>", 0, 1),
        ("abcd", "abxd", 0.75, 0.75),
        ("abc", "abd", 0.67, 2 / 3),  # rounded to per cents
        ("", "abc", 0, 0),
    ],
)
def test_code(task, prediction, reference, official, strict):
    assert both(task, prediction, reference) == (pytest.approx(official), pytest.approx(strict))


def test_difflib_takes_a_long_line_for_junk():
    line = "ab" * 150  # both characters are more than a hundredth of it

    # one insertion and one deletion in 602 characters
    assert both("lcc", "x" + line, "y" + line) == (0, pytest.approx(600 / 602))


def test_the_e_tasks_are_graded_alike():
    assert both("qasper_e", "cat", "cat") == (1, 1)
    assert both("passage_retrieval_en_e", "Paragraph 2", "Paragraph 2") == (1, 1)
