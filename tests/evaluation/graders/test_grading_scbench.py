"""SCBench's scorers: what the official one says, faults included, and what is right."""

from __future__ import annotations

import pytest

from wakesight.errors import RequestError
from wakesight.evaluation.graders import grade

KEY = "11111111-aaaa-4bbb-8ccc-000000000001"
VALUE = "22222222-aaaa-4bbb-8ccc-000000000002"
OTHER = "33333333-aaaa-4bbb-8ccc-000000000003"
FOURTH = "44444444-aaaa-4bbb-8ccc-000000000004"


def both(task, prediction, reference, **extra):
    return tuple(grade(task, prediction, reference, rule, **extra) for rule in ("official", "strict"))


@pytest.mark.parametrize(
    ("prediction", "extra", "official", "strict"),
    [
        (VALUE, {}, 1, 1),
        (f'"{VALUE}".', {}, 1, 1),
        (f"The value of {KEY} is {VALUE}.", {}, 1, 1),
        (f"The value of {KEY} is {VALUE}.", {"key": KEY}, 1, 1),
        (f'{{"{OTHER}": "{FOURTH}", "{KEY}": "{VALUE}"}}', {}, 1, 0),  # the whole object
        (f'{{"{OTHER}": "{FOURTH}", "{KEY}": "{VALUE}"}}', {"key": KEY}, 1, 0),
        (f"{VALUE}, then {OTHER}: {FOURTH}", {"key": KEY}, 1, 1),  # it goes on after the answer
        (f"{OTHER} or {VALUE}", {"key": KEY}, 1, 0),
        (f"{OTHER} or {VALUE}", {}, 1, 1),  # without the key the first is taken for it
        (f"ab{VALUE}", {}, 1, 0),
        (f"{VALUE}-9f", {}, 1, 0),
        (f"{VALUE}0", {}, 1, 0),
        (VALUE.upper(), {}, 0, 0),
        (VALUE[:-1], {}, 0, 0),
        (OTHER, {}, 0, 0),
        ("", {}, 0, 0),
    ],
)
def test_key_value(prediction, extra, official, strict):
    assert both("scbench_kv", prediction, VALUE, **extra) == (official, strict)
    assert both("scbench_repoqa_and_kv", prediction, VALUE, part="scbench_kv", **extra) == (official, strict)


def test_prefix_suffix_wants_the_whole_string():
    label = "qwertyuiopasdfghjklzxcvbnm" * 3

    assert both("scbench_prefix_suffix", f"The string is: {label}", label) == (1, 1)
    assert both("scbench_prefix_suffix", f"x{label}", label) == (1, 0)
    assert both("scbench_prefix_suffix", f"{label[::-1]} {label.upper()} {label}", label) == (1, 0)


@pytest.mark.parametrize(
    ("prediction", "reference", "official", "strict"),
    [
        ("ABCDE and FGHIJ", ["ABCDE", "FGHIJ", "KLMNO"], 0.67, 2 / 3),
        ("abcde", ["ABCDE", "FGHIJ", "KLMNO"], 0.33, 1 / 3),
        ("XABCDE FGHIJ KLMNO", ["ABCDE", "FGHIJ", "KLMNO"], 1, 2 / 3),
        ("ABCDE", "ABCDE, FGHIJ", 0.5, 0.5),  # KVzip's form
    ],
)
def test_variables(prediction, reference, official, strict):
    assert both("scbench_vt", prediction, reference) == (official, pytest.approx(strict))


@pytest.mark.parametrize(
    ("prediction", "official", "strict"),
    [
        ("B", 1, 1),
        ("B. the cook", 1, 1),
        ("B) the cook", 1, 1),
        ("**B**", 0, 1),
        ("(B)", 0, 1),
        ("Option B", 1, 1),
        ("Answer: B", 0, 1),  # "A" comes first
        ("answer: B", 1, 1),
        ("answer is: B", 1, 1),
        ("The correct answer is (B).", 0, 1),
        ("the best answer is", 0, 0),
        ("Based on chapter 3 it is C.", 1, 0),
        ("Clearly option B", 0, 1),
        ("A man did it. Answer: B", 0, 1),
        ("The answer is A man called Bob", 0, 0),
        ("the cook", 1, 0),  # no letter: unresolved
        ("The cook, B of course", 1, 0),
        ("maybe AB then B", 0, 0),  # the word AB ends the official search
        ("A. a\nB. the cook\nC. c\nD. d", 0, 0),  # the options repeated
        ("A. a\nB. the cook\nC. c\nD. d\nAnswer: B", 0, 1),
        ("B\n\nQuestion: next\nA. x\nThe correct answer is C", 1, 1),
        ("C", 0, 0),
        ("b", 0, 0),
        ("", 0, 0),
        ("   ", 0, 0),
    ],
)
def test_choice(prediction, official, strict):
    assert both("scbench_choice_eng", prediction, ["the cook", "B"]) == (official, strict)
    options = ["a", "the cook", "c", "d"]
    assert both("scbench_choice_eng", prediction, "the cook", options=options) == (official, strict)


def test_choice_by_letter_alone_and_an_answer_that_is_no_option():
    assert both("scbench_choice_eng", "D. the moon", "D") == (1, 1)
    with pytest.raises(RequestError, match="none of the options; options: a, b"):
        grade("scbench_choice_eng", "A", "c", options=["a", "b"])


@pytest.mark.parametrize(
    ("prediction", "label", "official", "strict"),
    [
        ("(B)", "(B)", 1, 1),
        ("(C)", "(B)", 1, 0),  # a shared parenthesis
        ("B", "(B)", 1, 1),
        ("The answer is (G) green", "(G)", 1, 1),
        ("(A) Tuesday", "(B) Tuesday", 1, 0),
        ("Tuesday", "(B) Tuesday", 1, 1),
        ("It is Tuesday.", "Tuesday", 1, 1),
        ("Malice", "Alice", 1, 0),
        ("E", "C", 0, 0),
        ("C", "C", 1, 1),
        ("zzz", "(B)", 0, 0),
        ("12/14/2026", "01/30/2025", 1, 0),
        ("", "(B)", 0, 0),
    ],
)
def test_many_shot(prediction, label, official, strict):
    assert both("scbench_many_shot", prediction, label) == (official, strict)


def test_many_shot_by_the_option_s_text():
    assert both("scbench_many_shot", "It is Tuesday.", "(B)", option="Tuesday") == (0, 1)
    assert both("scbench_many_shot", "It is Tuesday.", "(B)") == (0, 0)
    assert both("scbench_many_shot", "(A) Tuesday", "(B)", option="Tuesday") == (1, 0)


@pytest.mark.parametrize(
    ("prediction", "answer", "official", "strict"),
    [
        ("I do not know", "no", 1, 0),
        ("No, never.", "no", 1, 1),
        ("The Red House", "red house", 1, 1),
        ("red house, I think", "The Red House.", 0, 1),
        ("in the red  house", "the red house", 0, 1),
        ("Joanna", "Anna", 1, 0),
        ("option A", "A", 1, 1),  # all the answer is an article
        ("bar", "A", 1, 0),
        ("", "no", 0, 0),
    ],
)
def test_qa_english(prediction, answer, official, strict):
    assert both("scbench_qa_eng", prediction, [answer]) == (official, strict)


@pytest.mark.parametrize(
    ("prediction", "answer", "official", "strict"),
    [
        # one character of two: precision 1/2, recall 1 -> 2/3, for the right answer
        ("李明", "李明", 2 / 3, 1),
        # a single character: the official rule takes it for the whole; precision 1, recall 1/2
        ("明", "李明", 1, 2 / 3),
        # 《 is kept by the official set, 》 is not: 1 of 4 characters -> 2 * 1/4 / (5/4)
        ("《红楼梦》", "红楼梦", 0.4, 1),
        ("张三。", "李四", 0, 0),
        ("李 明、", "李明", 2 / 3, 1),
        # precision 2/4, recall 1
        ("他是李明", "李明", 0.4, 2 / 3),
        ("", "李明", 0, 0),
        ("。", "李明", 0, 0),
    ],
)
def test_qa_chinese(prediction, answer, official, strict):
    assert both("scbench_qa_chn", prediction, answer) == (pytest.approx(official), pytest.approx(strict))


def test_qa_chinese_with_several_references_takes_the_best():
    assert both("scbench_qa_chn", "李明", ["王五", "李明"]) == (1, 1)


@pytest.mark.parametrize(
    ("prediction", "label", "official", "strict"),
    [
        ("The median is 42.", 42, 1, 1),
        ("42", "42", 1, 1),
        ("42.9", 42, 1, 0),  # cut off
        ("42.0", 42, 1, 1),
        ("-42", 42, 1, 0),
        ("41.5", 41.5, 1, 1),
        ("41.5", "41.5", 1, 1),
        ("41", 41.5, 0, 0),
        ("2 numbers: 42", 42, 0, 0),
        ("no number", 42, 0, 0),
    ],
)
def test_first_number(prediction, label, official, strict):
    assert both("scbench_mf", prediction, label) == (official, strict)


def test_a_label_of_mf_that_is_no_number_is_refused():
    with pytest.raises(RequestError, match="'many' is not a number"):
        grade("scbench_mf", "42", "many")


@pytest.mark.parametrize(
    ("prediction", "label", "expected"),
    [("The pass key is 71432. 5", "71432", 1), ("1. 71432", "71432", 0), ("71432", 71432, 1), ("none", "71432", 0)],
)
def test_passkey(prediction, label, expected):
    assert both("scbench_passkey", prediction, label) == (expected, expected)
    assert both("scbench_summary_with_needles", prediction, label, part="scbench_passkey") == (expected, expected)


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("the cat sat", "The cat ran fast.", 4 / 7),  # two words of three, of four
        ("cc dd\naa bb", "aa bb\ncc dd", 1),  # per line; over the whole text it would be 1/2
        ("cc dd aa bb", "aa bb cc dd", 0.5),
        ("", "aa", 0),
    ],
)
def test_summary(prediction, reference, expected):
    assert both("scbench_summary", prediction, reference) == (pytest.approx(expected), pytest.approx(expected))
    mixed = grade("scbench_summary_with_needles", prediction, reference, part="scbench_summary")
    assert mixed == pytest.approx(expected)


def test_a_mixed_task_wants_to_know_the_part():
    with pytest.raises(RequestError, match="the grader of scbench_repoqa_and_kv needs part; give it as part="):
        grade("scbench_repoqa_and_kv", "x", "x")
    with pytest.raises(RequestError, match="no part 'scbench_passkeys', did you mean 'scbench_passkey'"):
        grade("scbench_summary_with_needles", "x", "x", part="scbench_passkeys")
