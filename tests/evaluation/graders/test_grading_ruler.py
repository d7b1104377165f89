"""RULER's string matches, by hand."""

from __future__ import annotations

import pytest

from wakesight.evaluation.graders import grade


def both(task, prediction, reference, **extra):
    return tuple(grade(task, prediction, reference, rule, **extra) for rule in ("official", "strict"))


@pytest.mark.parametrize(
    ("task", "prediction", "references", "official", "strict"),
    [
        ("niah_multivalue", "The numbers are 1234567 and 7654321.", ["1234567", "7654321"], 1, 1),
        ("niah_multivalue", "The number is 1234567.", ["1234567", "7654321"], 0.5, 0.5),
        ("niah_single_1", "It is 91234567.", ["1234567"], 1, 0),  # inside a longer number
        ("niah_single_1", "It is 1234567.5", ["1234567"], 1, 0),
        ("niah_single_1", "1234567.", "1234567", 1, 1),
        ("niah_single_1", "1234567,7654321", "7654321", 1, 1),
        ("niah_single_3", "0-AB-12 or AB-12", "ab-12", 1, 1),  # the second one stands on its own
        ("niah_single_3", "f0-ab-12", "ab-12", 1, 0),
        ("vt", "The variables are ABCDE, fghij and KLMNO.", ["ABCDE", "FGHIJ", "KLMNO", "PQRST", "UVWXY"], 0.6, 0.6),
        ("cwe", "1. party 2. stone", ["art", "stone"], 1, 0.5),
        ("fwe", "kqjzxw, kqjzxwa", ["kqjzxw", "qqqqqq", "kqjzxwa"], 2 / 3, 2 / 3),
        ("qa_1", "I do not know.", ["no", "never"], 1, 0),
        ("qa_1", "It was in Paris, 1789.", ["London", "paris"], 1, 1),
        ("qa_2", "No.", ["yes", "no"], 1, 1),
        ("qa_2", "perhaps", ["yes", "no"], 0, 0),
        ("niah", "the code is 3f2a-99.", "3F2A-99", 1, 1),
        ("recall", "it was 3f2a-991", "3f2a-99", 1, 0),
    ],
)
def test_match(task, prediction, references, official, strict):
    assert both(task, prediction, references) == (pytest.approx(official), pytest.approx(strict))


def test_control_characters_are_line_ends():
    assert both("qa_1", "\x00one\x07two\x1f", ["one\ntwo"]) == (1, 1)


def test_a_value_between_chinese_characters_stands_on_its_own():
    assert both("niah_single_1", "密码是1234567号", "1234567") == (1, 1)
