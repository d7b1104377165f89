"""The grid of depths and lengths."""

from __future__ import annotations

import re

import pytest

from wakesight.errors import RequestError
from wakesight.evaluation.items import Context, SuiteOptions
from wakesight.evaluation.suites import niah


def count(text: str) -> int:
    return len(text.encode()) // 4 + 1


def make(length: int = 4096, items: int = 10, seed: int = 0, tasks: tuple[str, ...] = (), **extra: object):
    return list(niah.contexts(SuiteOptions(length, items, seed, count, tasks=tasks, extra=extra)))


def total(context: Context) -> int:
    return context.meta["tokens"] + context.questions[0].max_new_tokens


def test_rows_are_four_lengths_and_go_through_the_depths():
    contexts = make()

    assert list(dict.fromkeys(context.task for context in contexts)) == [
        "niah_1024", "niah_2048", "niah_3072", "niah_4096",
    ]  # fmt: skip
    assert {(context.meta["length"], context.meta["depth"]) for context in contexts} == {
        (length, round(i / 9, 4)) for length in (1024, 2048, 3072, 4096) for i in range(10)
    }


@pytest.mark.parametrize("haystack", ["essay", "noise"])
def test_the_needle_is_as_deep_as_asked_and_the_length_is_filled(haystack):
    for context in make(8192, lengths=[2048, 8192], haystack=haystack):
        (question,), (span,) = context.questions, context.meta["needles"]

        assert 0.95 * context.meta["length"] <= total(context) <= context.meta["length"]
        assert context.meta["depths"][0] == pytest.approx(context.meta["depth"], abs=0.06)  # to the nearest sentence
        assert question.references[0] in context.text[slice(*span)]
        assert context.text.count(question.references[0]) == 1
        assert question.text not in context.text


def test_fewer_items_than_depths_still_span_the_text():
    assert [context.meta["depth"] for context in make(items=3, lengths=[1024])] == [0.0, 0.5, 1.0]
    assert [context.meta["depth"] for context in make(items=1, lengths=[1024])] == [0.5]


def test_depths_repeat_with_other_needles():
    first, _, again, _ = make(items=4, lengths=[1024], depths=2)

    assert first.meta["depth"] == again.meta["depth"] == 0.0
    assert first.text != again.text


def test_a_row_is_asked_for_by_name():
    assert {context.task for context in make(tasks=("niah_2048",))} == {"niah_2048"}
    assert len(make(tasks=("niah",))) == 40
    with pytest.raises(RequestError, match="unknown task 'niah_999'"):
        make(tasks=("niah_999",))


@pytest.mark.parametrize(
    ("extra", "wrong"),
    [
        ({"depths": 0}, "at least 1"),
        ({"haystack": "hay"}, "known: essay, noise"),
        ({"lengths": [9999]}, "above length=4096"),
        ({"lengths": [40]}, "length=40 is too short"),
    ],
)
def test_bad_settings_are_refused(extra, wrong):
    with pytest.raises(RequestError, match=wrong):
        make(**extra)


def test_a_row_that_is_too_short_is_named_with_what_to_type():
    with pytest.raises(RequestError, match=r"niah_32 \(a quarter of --length 128\).*use --length \d+ or more") as error:
        make(128)
    proposed = int(re.search(r"--length (\d+) or more", str(error.value))[1])
    assert proposed % 64 == 0
    assert len(make(proposed)) == 40
    with pytest.raises(RequestError, match=r"niah_256 \(a quarter of .*, or --option lengths=1024"):
        list(niah.contexts(SuiteOptions(1024, 1, 0, len)))
    with pytest.raises(RequestError, match=r"niah_40 \(one of --option lengths\).*use lengths=\d+ or more there"):
        make(lengths=[40])


def test_ids_are_unique_and_seeds_differ():
    one, two = make(seed=1), make(seed=2)

    assert len({context.id for context in [*one, *two]}) == 80
    assert not {context.text for context in one} & {context.text for context in two}
