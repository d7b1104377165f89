"""Answers of the reasoning sets: found, compared, and never waited for longer than asked."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from fractions import Fraction

import pytest

from wakesight.errors import WorkError
from wakesight.evaluation.graders import grade, killable
from wakesight.evaluation.graders.mathematics import answer_of, exact_value, last_boxed

ENDLESS = r"\boxed{x^{10^{10^{10}}} - (y+1)^{1000000}}"


def both(task, prediction, reference, **extra):
    return tuple(grade(task, prediction, reference, rule, **extra) for rule in ("official", "strict"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{5}", "5"),
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{4} and \boxed{\frac{1}{", "4"),  # the last one was cut off
        (r"\boxed{3} in the form \boxed{}", "3"),
        (r"\boxed {8}", "8"),
        (r"\boxed 9.", "9"),
        (r"} \boxed{6}", "6"),
        ("no box", None),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


def test_a_loop_of_open_boxes_is_read_in_one_pass():
    start = time.perf_counter()

    assert last_boxed(r"\boxed{" * 50_000) is None
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("reply", "numeric", "expected"),
    [
        ("We get 3, so the final answer is $\\frac{1}{2}$.", False, r"\frac{1}{2}"),
        ("The answer is: **42**", True, "42"),
        ("Final answer:\n\n17", True, "17"),
        ("The answer is 42 apples, because 3 of 45 are gone.", True, "42"),
        ("2 + 2 = 4\n#### 4", True, "4"),
        ("so 12 of them, or 1,250.50 in all.", True, "1,250.50"),
        ("that is 5-3", True, "3"),
        ("that is -3", True, "-3"),
        (r"$2\sqrt{2}$", False, r"$2\sqrt{2}$"),
        ("2 + 2 = 4", True, "4"),
        ("no idea", True, None),
        ("", False, None),
    ],
)
def test_answer_of(reply, numeric, expected):
    assert answer_of(reply, numeric) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", Fraction(12)),
        (r"-3.50", Fraction(-7, 2)),
        (r"\$1,000", Fraction(1000)),
        (r"10{,}080", Fraction(10080)),
        (r"\dfrac34", Fraction(3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        ("1 3/4", Fraction(7, 4)),
        (r"50\%", Fraction(50)),
        (r"90^\circ", Fraction(90)),
        (r"5\text{ cm}^2", Fraction(5)),
        ("18 dollars", Fraction(18)),
        ("1/0", None),
        (r"\frac{1}{0}", None),
        ("1e999999999", None),
        ("9" * 5000, None),
        (r"2\pi", None),
        ("2 pi", None),
        ("x", None),
        ("", None),
    ],
)
def test_exact_value(text, expected):
    assert exact_value(text) == expected


@pytest.mark.parametrize(
    ("reply", "reference", "official", "strict"),
    [
        # 1. spelling
        (r"\dfrac{1}{2}", r"\frac12", 1, 1),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", 1, 1),
        (r"\text{Friday}.", "friday", 1, 1),
        (r"12\text{ cm}", "12", 1, 1),
        # 2. numbers
        ("0.5", r"\frac{1}{2}", 1, 1),
        ("12346", "12345", 1, 0),  # within 1e-4
        ("12347", "12345", 0, 0),
        ("0.3333", r"\frac{1}{3}", 1, 0),  # 1e-4 of a third
        ("0.5", "50", 1, 0),
        ("50", "0.5", 1, 0),
        ("0.5", r"50\%", 1, 1),
        (r"50\%", "50", 1, 1),
        ("51", "50", 0, 0),
        # 3. math-verify
        (r"2\sqrt{2}", r"\sqrt{8}", 1, 1),
        ("(x+1)^2", "x^2+2x+1", 1, 1),
        ("5", "x=5", 1, 1),
        ("y = 2x+1", "2x-y+1=0", 1, 1),
        ("(2,1)", "(1,2)", 0, 0),
        (r"\{2,1\}", r"\{1,2\}", 1, 1),
        ("(1,2)", "[1,2)", 0, 0),
        (r"(1, 0.5)", r"(1, \frac{1}{2})", 1, 1),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", 1, 1),
        (r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", 0, 0),
        ("6.28", r"2\pi", 0, 0),
        ("x", "y", 0, 0),
        ("???", "y", 0, 0),
    ],
)
def test_the_ladder(reply, reference, official, strict):
    assert both("math500", rf"Therefore \boxed{{{reply}}}.", reference) == (official, strict)


@pytest.mark.parametrize(
    ("task", "prediction", "reference", "expected"),
    [
        ("gsm8k", "5 * 8 = 40.\n#### 40", "He has 5 * 8 = <<5*8=40>>40 eggs.\n#### 40", 1),
        ("gsm8k", "So she pays $1,250.", "... #### 1250", 1),
        ("gsm8k", "So she pays $1,251.", "... #### 1250", 0),
        ("aime", r"\boxed{33}", "033", 1),
        ("aime", "It must be 034.", "033", 0),
        ("aime", "", "033", 0),
        ("math500", r"\boxed{12}", r"Add them: \boxed{12}", 1),
    ],
)
def test_sets(task, prediction, reference, expected):
    assert both(task, prediction, reference)[1] == expected


def test_reasoning_gym_by_its_own_scorer():
    def score(answer, entry):
        return 1.0 if answer == entry["answer"] else 0.3 if entry["answer"] in answer else 0.0

    entry = {"answer": "17"}

    assert both("reasoning_gym", "so <answer>17</answer>", "17", score=score, entry=entry) == (1, 1)
    assert both("reasoning_gym", "so <answer>17 cats or dogs, 3</answer>", "17", score=score, entry=entry) == (0.3, 0)
    assert both("reasoning_gym", "so <answer>17.0</answer>", "17", score=score, entry=entry) == (0.3, 1)
    assert both("reasoning_gym", "", "17", score=score, entry=entry) == (0, 0)
    assert grade("reasoning_gym", "x", "17", score=lambda answer, entry: 7) == 1


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
def test_reasoning_gym_by_name():
    extra = {"dataset": "chain_sum", "entry": {"question": "9 + 8", "answer": "17", "metadata": {}}}

    assert both("reasoning_gym", r"\boxed{17}", "17", **extra) == (1, 1)
    # a text that contains the answer gets its share of the length: 2 of 4
    assert both("reasoning_gym", "<answer>=17=</answer>", "17", **extra) == (0.5, 0)
    assert both("reasoning_gym", r"\boxed{18}", "17", **extra) == (0, 0)
    with pytest.raises(WorkError, match="reasoning_gym failed with ValueError scoring '17' for chain_sums"):
        grade("reasoning_gym", "17", "17", dataset="chain_sums", entry=extra["entry"])


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        (r"\boxed{\text{17}}", 1),
        ("<answer>17.0</answer>", 1),
        (r"\boxed{17}", 1),
        ("17", 1),
        ("<answer>71</answer>", 0),
        ("<answer>3</answer> no, <answer> 17 </answer>.", 1),
        ("<answer>" * 20_000, 0),
        ("170", 0),
        ("", 0),
    ],
)
def test_reasoning_gym_by_the_recorded_answer(prediction, expected):
    assert both("reasoning_gym", prediction, "17") == (expected, expected)


def test_a_comparison_that_takes_too_long_is_given_up_and_the_next_one_works():
    start = time.perf_counter()
    with pytest.raises(WorkError, match=r"math_verify did not finish in 0\.5 s comparing .* no grade"):
        grade("math500", ENDLESS, "(y+1)^{999999}", timeout=0.5)

    assert time.perf_counter() - start < 60
    assert grade("math500", r"\boxed{2\sqrt{2}}", r"\sqrt{8}") == 1


def test_a_loop_is_wrong_without_asking_math_verify(monkeypatch):
    monkeypatch.setattr(killable, "equal", None)

    assert both("math500", r"\boxed{" + "1+" * 5000 + "1}", "5001") == (0, 0)


def test_threads_may_compare_at_once():
    outcomes = []

    def compare(reply):
        outcomes.append((reply, grade("math500", rf"\boxed{{{reply}}}", r"\sqrt{8}")))

    threads = [threading.Thread(target=compare, args=(reply,)) for reply in [r"2\sqrt{2}", r"\sqrt{7}"] * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(outcomes) == sorted([(r"2\sqrt{2}", 1.0), (r"\sqrt{7}", 0.0)] * 3)


def test_a_worker_that_dies_is_replaced():
    assert killable.equal(r"\sqrt{8}", r"2\sqrt{2}")
    killable._worker.process.kill()
    killable._worker.process.wait()

    assert killable.equal(r"\sqrt{8}", r"2\sqrt{2}")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_has_a_worker_of_its_own():
    code = r"""
import os
from wakesight.evaluation.graders import killable
assert killable.equal(r"\sqrt{8}", r"2\sqrt{2}")
mine = killable._worker.process.pid
if (child := os.fork()) == 0:
    right = killable.equal(r"\sqrt{8}", r"2\sqrt{2}") and killable._worker.process.pid != mine
    killable._stop()
    os._exit(0 if right else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert killable._worker.process.poll() is None and not killable.equal("x", r"\sqrt{2}")
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
