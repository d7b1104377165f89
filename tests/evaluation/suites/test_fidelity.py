"""Passages and their true continuations."""

from __future__ import annotations

import pytest

from wakesight.errors import RequestError
from wakesight.evaluation.items import SuiteOptions
from wakesight.evaluation.suites import fidelity, text


def count(text: str) -> int:
    return len(text.encode()) // 4 + 1


def make(length: int = 2048, items: int = 4, seed: int = 0, tasks: tuple[str, ...] = (), **extra: object):
    return list(fidelity.contexts(SuiteOptions(length, items, seed, count, tasks=tasks, extra=extra)))


@pytest.mark.parametrize("kind", fidelity.TASKS)
def test_the_continuation_is_what_follows_in_the_text(kind):
    whole = "\n\n".join(document for _, document in text.passages(kind))
    for context in make(tasks=(kind,)):
        (question,) = context.questions

        assert context.text + question.text in whole + "\n\n" + whole
        assert question.text[0].isspace()  # the passage ends with a word
        assert not context.text[-1].isspace()
        assert (context.chat, context.instruction, question.references) == (False, None, ())
        assert (question.grader, context.task, context.meta["kind"]) == ("fidelity", kind, kind)


@pytest.mark.parametrize("length", [512, 2048, 32768])
def test_passage_and_continuation_fill_the_length(length):
    for context in make(length, items=2):
        passage, continuation = count(context.text), count(context.questions[0].text)

        assert 128 - 8 <= continuation <= 128
        assert continuation == context.questions[0].max_new_tokens
        assert length - 128 - 40 <= passage <= length - 128
        assert context.meta["tokens"] == passage


def test_a_passage_longer_than_the_text_goes_round():
    (context,) = make(200_000, items=1, tasks=("narrative",))

    assert context.meta["tokens"] > 199_000


def test_passages_are_spread_and_keep_their_place_with_more_items():
    few, many = make(items=3, tasks=("narrative",)), make(items=8, tasks=("narrative",))
    starts = sorted(context.meta["start"] for context in many)

    assert many[:3] == few
    assert len(set(starts)) == 8
    assert starts[-1] - starts[0] > 0.6 * len(text.packaged("narrative").split())


def test_continuations_have_the_length_asked_for():
    (context,) = make(items=1, tasks=("expository",), continuation=32)

    assert 24 <= context.questions[0].max_new_tokens <= 32
    with pytest.raises(RequestError, match="continuation=2048"):
        make(continuation=2048)
    with pytest.raises(RequestError, match="no room for a word"):
        make(length=3, continuation=2)


def test_seeds_differ():
    assert len({context.text for seed in (0, 1, 2) for context in make(seed=seed, tasks=("code",))}) > 8
