"""SCBench's two ways to ask: every question alone, or after the questions and golden answers before it.

`extra={"turns": "alone"}`, the default, is the multi-request form: one context, every question on it
independently. `extra={"turns": "golden"}` is the multi-turn form: the text of question k is

    question 1, answer 1, question 2, answer 2, ..., question k

with blank lines between, all in the one user turn behind the context. The answers are the golden ones, as in
the official form without chat roles. Context and grade stay the same; only the question grows.
Source: microsoft/MInference scbench/eval_utils.py (follow-up templates, golden context).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wakesight.errors import RequestError
from wakesight.evaluation.items import Question, SuiteOptions
from wakesight.registry import did_you_mean

TURNS = ("alone", "golden")


def form(options: SuiteOptions) -> str:
    """The form asked for. Raises RequestError for one that does not exist."""
    turns = str(options.extra.get("turns", "alone"))
    if turns not in TURNS:
        raise RequestError(
            f"turns={turns!r} is not a way to ask{did_you_mean(turns, TURNS)}; take {' or '.join(TURNS)}"
        )
    return turns


def in_turns(questions: Sequence[Question], answers: Sequence[str], options: SuiteOptions) -> tuple[Question, ...]:
    """The questions in the form asked for. answers: the golden ones, as a reply would state them."""
    if form(options) == "alone":
        return tuple(questions)
    told = ""
    asked = []
    for question, answer in zip(questions, answers, strict=True):
        asked.append(replace(question, text=told + question.text))
        told += f"{question.text}\n\n{answer}\n\n"
    return tuple(asked)
