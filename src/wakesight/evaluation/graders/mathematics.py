"""Reasoning sets: MATH-500, AIME, GSM8K, reasoning-gym. Find the answer in the reply, then compare by a ladder.

There is no one official scorer. `official` is the ladder of Zefan-Cai/R-KV evaluation/grader.py in outline, with
math-verify (huggingface/Math-Verify) as its last rung; `strict` is the same without the tolerance for numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from wakesight.evaluation.graders import killable
from wakesight.evaluation.graders.rules import References, Rule, RuleName, table

LONGEST = 1000
_NUMBER = r"(?:(?<![\w)}])-)?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:/\d+)?"


def mathematics(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """1 if the reply's answer equals a reference. A reference may be a worked solution with a box or "#### 42".

    extra: timeout, seconds for one comparison by math-verify. Raises WorkError when that is not enough.
    """
    timeout = float(extra.get("timeout", 10.0))
    return float(any(_right(prediction, str(reference), rule, timeout) for reference in references))


def _right(prediction: str, reference: str, rule: RuleName, timeout: float) -> bool:
    gold = last_boxed(reference) or _last(r"####\s*(.+)", reference) or reference.strip()
    said = answer_of(prediction, numeric=exact_value(gold) is not None)
    return said is not None and same(said, gold, rule, timeout)


def reasoning_gym(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """What the data set's own scorer says, or whether the recorded answer was given.

    The answer is what stands in the last <answer> tag, else what `answer_of` finds, else the whole reply. extra:
    entry, the item, with either score, a callable (answer, entry), or dataset, the name reasoning-gym knows; without
    them the recorded answer is compared, numbers as numbers. Strict: full marks, or the recorded answer's number in
    another spelling, or nothing; some data sets give part of a mark for a text that contains the right answer.
    """
    answer = _tagged(prediction) or answer_of(prediction) or prediction.strip()
    if unwrapped := re.fullmatch(r"\\text\{([^{}]*)\}", answer):
        answer = unwrapped[1]
    recorded = any(_recorded(answer, str(reference)) for reference in references)
    entry = extra.get("entry")
    if score := extra.get("score"):
        mark = float(score(answer, entry))
    elif entry is not None and extra.get("dataset"):
        mark = killable.gym_score(str(extra["dataset"]), answer, entry, float(extra.get("timeout", 10.0)))
    else:
        return float(recorded)
    return float(mark >= 1.0 or recorded) if rule == "strict" else min(1.0, max(0.0, mark))


def _tagged(text: str) -> str:
    before, _, _ = text.rpartition("</answer>")
    _, opened, inside = before.rpartition("<answer>")
    return inside.strip() if opened else ""


def _recorded(reply: str, reference: str) -> bool:
    ours, theirs = exact_value(reply), exact_value(reference)
    return normal(reply) == normal(reference) if ours is None or theirs is None else ours == theirs


def answer_of(reply: str, numeric: bool = False) -> str | None:
    """The final answer: the last balanced box, else what follows the last "####", "final answer" or "answer is",
    else the reply itself if it is one line without words, else the last number; None without any.

    numeric: a number is wanted, so "the answer is 42 apples, because 3 of them ..." gives "42".
    """
    if boxed := last_boxed(reply):
        return boxed
    stated = _last(r"####\s*(.+)", reply) or _last(r"(?i)\banswer(?:\s+is|\s*:|\s+is\s*:)[\s:*]*(.+)", reply)
    if stated:
        formula = re.search(r"\$(.+?)\$|\\\((.+?)\\\)", stated)
        stated = (formula[1] or formula[2]) if formula else stated.strip(" *.")
        if not numeric or exact_value(stated) is not None:
            return stated
    elif _is_formula(whole := reply.strip()) and (not numeric or exact_value(whole) is not None):
        return whole
    numbers = re.findall(_NUMBER, stated or reply)
    if not numbers:
        return stated
    return str(numbers[0] if stated else numbers[-1])


def _is_formula(text: str) -> bool:
    return bool(text) and "\n" not in text and not re.search(r"(?<![\\A-Za-z])[A-Za-z]{2}", text)


def _last(form: str, text: str) -> str | None:
    found = re.findall(form, text)
    return found[-1].strip() or None if found else None


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} whose braces balance; of nested boxes the inner one. Empty boxes are none."""
    openings = {match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*(?=\{)", text)}
    unclosed: list[int] = []
    last, content = -1, ""
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):  # an escaped brace is part of an escape
        if brace.group() == "{":
            unclosed.append(brace.start())
        elif brace.group() == "}" and unclosed:
            start = unclosed.pop()
            inside = text[start + 1 : brace.start()].strip() if start in openings and start > last else ""
            if inside:
                last, content = start, inside
    if content:
        return content
    bare = re.findall(r"\\boxed\s+([^\s{}$]+)", text)
    return bare[-1].rstrip(".,") if bare else None


def same(reply: str, gold: str, rule: RuleName = "official", timeout: float = 10.0) -> bool:
    """The equality ladder, cheapest rung first.

    1. The normal forms are the same text. 2. Both are numbers: official, within 1e-4 of the reference, or of
    100 times it or a hundredth; strict, exactly, and a hundredth only where a per cent sign says so. 3. math-verify:
    lists and intervals element by element, matrices cell by cell, equations, symbolic equality. A reply of more
    than LONGEST characters gets no further than 1: it is a loop, no answer.
    """
    if normal(reply) == normal(gold):
        return True
    if len(reply) > max(LONGEST, 10 * len(gold)):
        return False
    ours, theirs = exact_value(reply), exact_value(gold)
    if ours is None or theirs is None:
        return killable.equal(_latex(gold), _latex(reply), timeout)
    if rule == "strict":
        return theirs in _readings(reply, ours) or ours in _readings(gold, theirs)
    return any(_close(ours, theirs * factor) for factor in (1, Fraction(1, 100), 100))


def _close(a: Fraction, b: Fraction) -> bool:
    return abs(a - b) <= max(abs(a), abs(b)) / 10_000


def _readings(text: str, value: Fraction) -> tuple[Fraction, ...]:
    return (value, value / 100) if "%" in text else (value,)


def _latex(text: str) -> str:
    text = text.strip().replace(r"\$", "")
    inner = re.fullmatch(r"(?s)\$+(.*?)\$+|\\\((.*)\\\)|\\\[(.*)\\\]", text)
    return next(filter(None, inner.groups()), "") if inner else text


_DROPPED = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\\(|\\\)|\\\[|\\\]|\^\{?\\circ\}?|°|\\?[$%]|~")
_UNIT = re.compile(
    r"(?<=\d)\s*\\(?:text|mbox|mathrm)\{[^{}]*\}(?:\^\{?\d\}?)?$|(?<=\d)\s+(?!pi\b|sqrt\b)[A-Za-z]{2,}[A-Za-z ]*$"
)


def normal(answer: str) -> str:
    r"""One spelling for what is written in several: no spaces, case, dollar signs, \left and \right, degrees,
    per cents, units behind a number or a trailing full stop; one kind of fraction; no commas between thousands.
    """
    text = answer.strip().rstrip(".")
    text = _DROPPED.sub("", text.replace("{,}", ",")).strip()
    text = _UNIT.sub("", text)
    text = re.sub(r"\\(?:text|mbox|textbf|mathrm|mathbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<![\d.])(\d+)\s+(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"\s+", "", text).lower()
    return text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text) else text


def exact_value(answer: str) -> Fraction | None:
    r"""The exact value of 12, -3.5, 1,000, 3/4, \frac{3}{4} or 1\frac{1}{2}, per cent signs and units apart."""
    text = normal(answer)
    mixed = re.fullmatch(r"(-?)(\d*)\\frac\{(-?\d+)\}\{(\d+)\}", text)
    plain = re.fullmatch(r"[-+]?(?:\d+\.?\d*|\.\d+|\d+/\d+)", text)  # no exponents: 1e99999999 takes all memory
    try:
        if mixed:
            sign, whole, above, below = mixed.groups()
            value = Fraction(int(whole or 0)) + Fraction(int(above), int(below))
            return -value if sign else value
        return Fraction(text) if plain else None
    except (ValueError, ZeroDivisionError):  # ValueError: more digits than Python converts
        return None


_SOURCE = "Zefan-Cai/R-KV evaluation/grader.py in outline; huggingface/Math-Verify"
_EXACT = "numbers exactly: no tolerance of 1e-4, no factor of 100"

RULES = table(
    *(
        Rule(task, "reasoning", "last answer equal, by a ladder", _SOURCE, mathematics, _EXACT)
        for task in ("math500", "aime", "gsm8k")
    ),
    Rule(
        "reasoning_gym",
        "reasoning",
        "the data set's own score, or the recorded answer",
        "open-thought/reasoning-gym score_answer",
        reasoning_gym,
        "full marks, or the recorded number in another spelling; else nothing",
    ),
)
