"""Small evaluations: made-up contexts, a grade that varies with the answer, plans on a tiny engine."""

from __future__ import annotations

from collections.abc import Iterator

from wakesight.evaluation.arms import make_arms
from wakesight.evaluation.items import Context, Question
from wakesight.evaluation.runner import Plan

WORDS = ["the", "keeper", "lit", "his", "lamp", "and", "wrote", "an", "hour", "into", "this", "book", "while", "tides"]


def contexts(count: int = 3, questions: int = 2) -> Iterator[Context]:
    for number in range(count):
        text = " ".join(WORDS[(number * 7 + i) % len(WORDS)] for i in range(30))
        yield Context(
            id=f"item {number}",
            task=("lamp", "tide")[number % 2],
            text=text,
            questions=tuple(
                Question(f"q{i}", f"What about {WORDS[i]}?", (WORDS[i],), "fake", 6, "Answer:")
                for i in range(questions)
            ),
            instruction="Read this.",
        )


def grade(task: str, prediction: str, references: list[str], rule: str = "official", **extra: object) -> float:
    """A grade that varies with the answer, so that arms and questions differ."""
    return len(set(prediction)) % 5 / 4 if rule == "official" else float(references[0] in prediction)


def clear(row) -> bool:
    """No chosen token of this row was a near tie; others may flip with rounding and are counted apart."""
    return row["margin"] is None or row["margin"] > 1e-4


ARMS = make_arms(["random", "keydiff", "h2o"], ["flat", "global"], [0.3, 1.0])


def plan(engine, *, arms=ARMS, source=contexts, **changes) -> Plan:
    values = {"arguments": {"suite": "fake", "seed": 1, "shard": changes.get("shard") and str(changes["shard"])}}
    return Plan(engine=engine, arms=tuple(arms), contexts=source, grade=grade, config=values, **changes)
