"""Facts told in the first turn, asked for at the end."""

from __future__ import annotations

import re

import pytest

from wakesight.errors import RequestError
from wakesight.evaluation.items import SuiteOptions
from wakesight.evaluation.suites import recall


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


def make(length: int = 2048, items: int = 3, seed: int = 0, tasks: tuple[str, ...] = ()):
    return list(recall.contexts(SuiteOptions(length, items, seed, count, tasks=tasks)))


@pytest.mark.parametrize(("task", "facts"), recall.FACTS.items())
def test_every_fact_is_told_in_the_first_turn_and_asked_for(task, facts):
    for context in make(tasks=(task,)):
        first_turn = context.text.split("\nAssistant:")[0]

        assert len(context.questions) == facts == len({question.id for question in context.questions})
        for question, span, answer in zip(
            context.questions, context.meta["needles"], context.meta["answers"], strict=True
        ):
            (value,) = question.references
            assert value in first_turn
            assert value in context.text[slice(*span)]
            assert context.text[slice(*answer)] == value
            assert context.text.count(value) == 1
            assert question.text not in context.text
        assert max(context.meta["depths"]) < 0.1


def test_at_least_four_fillers_of_100_to_200_tokens_follow():
    for context in make():
        _, *turns = context.text.split("\nUser: ")
        answers = [turn.split("\nAssistant: ")[1] for turn in turns]

        assert len(turns) == context.meta["turns"] >= 4
        assert all(100 <= count(answer) <= 200 for answer in answers)
        assert len(set(answers)) == len(answers)


@pytest.mark.parametrize("length", [1024, 8192])
def test_the_length_is_filled_for_the_longest_question(length):
    for context in make(length):
        longest = max(count(question.text) for question in context.questions)
        total = count(f"{context.instruction} {context.text}") + longest + recall.NEW_TOKENS

        assert length - 240 <= total <= length + 2  # one more turn would not fit; questions differ by a token or two


def test_no_room_for_four_turns_is_refused():
    with pytest.raises(RequestError, match="length=400 is too short for recall_1"):
        make(400)


def test_seeds_and_items_differ():
    assert len({context.text for seed in (0, 1) for context in make(seed=seed, tasks=("recall_1",))}) == 6
