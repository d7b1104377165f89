"""RepoQA: which function did the reply repeat?"""

from __future__ import annotations

import math

import pytest

from wakesight.errors import RequestError
from wakesight.evaluation.graders import grade
from wakesight.evaluation.graders.code import LANGUAGES, first_function, reply_code, similarity

ADD = "def add(a, b):\n    total = a + b\n    return total"
SUB = "def sub(a, b):\n    total = a - b\n    return total"
NEEDLES = {"add": ADD, "sub": SUB}
TICKS = "```"


def both(prediction, reference=ADD, **extra):
    extra = {"needles": NEEDLES, "func_name": "add", "lang": "python"} | extra
    return tuple(grade("scbench_repoqa", prediction, reference, rule, **extra) for rule in ("official", "strict"))


@pytest.mark.parametrize(
    ("prediction", "official", "strict"),
    [
        (ADD, 1, 1),
        (f"Here:\n{TICKS}python\n{ADD}\n{TICKS}\nDone.", 1, 1),
        (f"{TICKS}\n{ADD}\n{TICKS}", 1, 1),
        (f"{TICKS}python\n{SUB}\n{TICKS}", 0, 0),
        (f"{TICKS}python\n{SUB}\n\n{ADD}\n{TICKS}", 0, 0),  # the first function counts
        (f"{TICKS}text\nthe function:\n{TICKS}\n{TICKS}python\n{ADD}\n{TICKS}", 1, 1),
        (f"I looked at all of the code. {TICKS}python\n{ADD}", 0, 0),
        (f"The function that you describe is this one here:\n{TICKS}python\n{ADD}", 0, 1),  # cut off
        ("def add(a, b): return a", 0, 0),
        ("", 0, 0),
    ],
)
def test_repoqa(prediction, official, strict):
    assert both(prediction) == (official, strict)
    mixed = grade(
        "scbench_repoqa_and_kv", prediction, ADD, part="scbench_repoqa", needles=NEEDLES, func_name="add", lang="python"
    )
    assert mixed == official


def test_a_list_of_needles_and_no_name_do_as_well():
    needles = [{"name": name, "needle": code} for name, code in NEEDLES.items()]

    assert both(ADD, needles=needles, func_name=None) == (1, 1)


def test_the_target_must_be_a_needle():
    with pytest.raises(RequestError, match="the target 'mul' is not among the 2 needles"):
        both(ADD, func_name="mul")
    with pytest.raises(RequestError, match="needs needles"):
        grade("scbench_repoqa", ADD, ADD)


def test_bleu_by_hand():
    assert similarity("a b c d e", "a b c d e") == pytest.approx(1)
    # 4/5, 3/4, 2/3, 1/2 of the n-grams
    assert similarity("a b c d x", "a b c d e") == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    # one token short: brevity penalty exp(1 - 5/4)
    assert similarity("a b c d", "a b c d e") == pytest.approx(math.exp(-0.25))
    assert similarity("x", "a b c d e") == 0
    assert similarity("", "a b c d e") == 0


@pytest.mark.parametrize(
    ("lang", "code", "expected"),
    [
        ("python", "x = 1\n@w\ndef f():\n  def g(): pass\n  return g\n", "def f():\n  def g(): pass\n  return g"),
        ("python", "class A:\n    def f(self):\n        return 1\n", "def f(self):\n        return 1"),
        ("python", "x = 1\n", None),
        ("java", "class A { int f(int x) { return x; } }", "int f(int x) { return x; }"),
        ("typescript", "const a = 1;\nfunction f(x: number) { return x; }", "function f(x: number) { return x; }"),
        ("rust", "struct A;\nfn f(x: i32) -> i32 { x }", "fn f(x: i32) -> i32 { x }"),
        ("cpp", "void A::g() {}\nint f(int x) { return x; }", "int f(int x) { return x; }"),  # plain names only
        ("go", "package a\nfunc f(x int) int { return x }", "func f(x int) int { return x }"),
    ],
)  # fmt: skip
def test_first_function(lang, code, expected):
    assert first_function(code, lang) == expected


def test_six_languages_and_no_other():
    assert len(LANGUAGES) == 6
    with pytest.raises(RequestError, match="no grammar for 'pyton', did you mean 'python'"):
        first_function("x", "pyton")


def test_an_info_string_that_is_no_word_opens_no_official_block():
    reply = f"{TICKS}c++\nint f(int x) {{ return x; }}\n{TICKS}"

    assert reply_code(reply, "cpp") == reply
    assert reply_code(reply, "cpp", "strict") == "int f(int x) { return x; }"


def test_bytes_and_characters_are_not_confused():
    assert first_function("# café\ndef f():\n    return 'é'\n", "python") == "def f():\n    return 'é'"
