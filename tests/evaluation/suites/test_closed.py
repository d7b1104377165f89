"""Tasks in the closed vocabulary: sizes, answers that are there, filler that hides needles, the same bytes per seed."""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import pytest

from wakesight.errors import RequestError
from wakesight.evaluation.graders import grade
from wakesight.evaluation.items import Context, SuiteOptions
from wakesight.evaluation.suites import closed
from wakesight.evaluation.suites.closed import tasks as t
from wakesight.evaluation.suites.closed import vocabulary as v
from wakesight.evaluation.suites.table import suite

NEEDLES = ("closed_single", "closed_multikey", "closed_dense", "closed_multivalue", "closed_multiquery")


def count(text: str) -> int:
    return len(text.split())


def make(length: int = 512, items: int = 2, seed: int = 0, tasks: tuple[str, ...] = (), **extra: object):
    return list(closed.contexts(SuiteOptions(length, items, seed, count, tasks=tasks, extra=extra)))


def whole(context: Context) -> int:
    """Tokens of the prompt with the longest of its questions and answers."""
    longest = max(
        count(f"{question.text} {question.answer_prefix}") + question.max_new_tokens for question in context.questions
    )
    return count(f"{context.instruction} {context.text}") + longest


def class_of(word: str) -> str:
    return next(name for name, words in v.CLASSES.items() if word in words)


# ---- the vocabulary


def test_512_words_once_each_and_each_in_one_class():
    assert len(v.WORDS) == len(set(v.WORDS)) == v.SIZE == 512
    assert sum(map(len, v.CLASSES.values())) == 512
    assert {word for words in v.CLASSES.values() for word in words} == set(v.WORDS)
    assert [v.IDS[word] for word in v.WORDS] == list(range(512))


def test_words_are_letters_or_digits_so_that_punctuation_splits_them_off():
    for word in v.WORDS:
        assert word in v.SPECIAL + v.PUNCTUATION or word.isalnum()
        assert word == word.lower()


# ---- the suite


def test_the_table_knows_the_suite():
    assert suite("closed").TASKS == t.TASKS
    assert len(t.TASKS) == 12


@pytest.mark.parametrize("length", [128, 512, 2048])
def test_every_task_fills_the_length_with_words_of_the_list(length):
    for context in make(length, items=1):
        assert length - 24 <= whole(context) <= length
        said = " ".join((context.instruction or "", context.text))
        for question in context.questions:
            said += " ".join(("", question.text, question.answer_prefix, *question.references))
        assert set(said.split()) <= set(v.WORDS)
        assert "  " not in context.text


@pytest.mark.parametrize("task", t.TASKS)
def test_the_answers_can_be_read_from_the_context(task):
    for context in make(tasks=(task,), items=4):
        words = context.text.split()
        for question in context.questions:
            assert question.grader == "niah"
            for reference in question.references:
                assert f" {reference} " in f" {' '.join(words)} "
            assert grade("niah", " ".join(question.references[::-1]), question.references) == 1
            assert grade("niah", "pickle", question.references) == 0
            assert question.max_new_tokens > sum(count(reference) for reference in question.references)


@pytest.mark.parametrize("task", t.TASKS)
def test_no_question_is_asked_twice_of_one_context(task):
    for context in make(tasks=(task,), items=4):
        asked = {(question.text, question.answer_prefix) for question in context.questions}

        assert len(asked) == len(context.questions) > 0


@pytest.mark.parametrize("task", NEEDLES)
def test_needle_answers_stand_in_their_needle_and_the_key_nowhere_else(task):
    for context in make(tasks=(task,), items=4):
        needles = [context.text[start:end] for start, end in context.meta["needles"]]
        keys = [" ".join(needle.split()[2:4]) for needle in needles]
        assert all(needle.split()[1] == "for" and needle.endswith(" .") for needle in needles)
        for key in set(keys):
            assert context.text.count(key) == keys.count(key)
        for question in context.questions:
            for reference in question.references:
                assert any(reference in needle for needle in needles)


@pytest.mark.parametrize("task", ["closed_single", "closed_multikey", "closed_multivalue", "closed_tracking"])
def test_filler_holds_the_kinds_of_words_that_needles_hold(task):
    """Digits, codes, nouns, adjectives and variables are in filler many times, so that kind alone tells no needle."""
    inside: Counter[str] = Counter()
    outside: Counter[str] = Counter()
    for context in make(1024, tasks=(task,), items=6):
        spans = context.meta["needles"]
        at = 0
        for word in context.text.split():
            found = any(start <= at < end for start, end in spans)
            (inside if found else outside)[class_of(word)] += 1
            at += len(word) + 1

    for kind in ("digit", "code", "noun", "adjective", "variable"):
        assert outside[kind] > inside[kind]
        assert outside[kind] > 0.01 * outside.total()


def test_needles_stand_anywhere_in_the_text():
    depths = [depth for context in make(512, items=40, tasks=("closed_single",)) for depth in context.meta["depths"]]

    assert min(depths) < 0.15
    assert max(depths) > 0.85
    assert 0.35 < sum(depths) / len(depths) < 0.65


def test_every_sentence_of_dense_is_a_needle():
    for context in make(tasks=("closed_dense",)):
        assert "".join(context.text[start:end] for start, end in context.meta["needles"]) == context.text.replace(
            " . number", " .number"
        ).replace(" . code", " .code").replace(" . word", " .word")


def test_numbers_of_keys_are_those_promised():
    for context in make(1024, items=10, tasks=("closed_multikey",)):
        assert 4 <= len(context.meta["needles"]) <= 12
    for context in make(1024, items=10, tasks=("closed_single",)):
        assert len(context.meta["needles"]) == 1


def test_values_of_a_key_count_in_any_order():
    for context in make(tasks=("closed_multivalue",), items=5):
        for question in context.questions:
            assert len(question.references) in (2, 3)
            assert grade("niah", " , ".join(reversed(question.references)), question.references) == 1
            part = grade("niah", question.references[0], question.references)
            assert part == pytest.approx(1 / len(question.references))


def test_variables_lead_to_the_value_and_long_texts_are_long():
    for context in make(1024, tasks=("closed_tracking",), items=6):
        value = {}
        for start, end in context.meta["needles"]:
            *source, _, name, _ = context.text[start:end].split()
            value[name] = value[source[0]] if len(source) == 1 else " ".join(source)  # moves come in order
        for question in context.questions:
            asked = question.text.removeprefix("ask variables from ").removesuffix(" ?")
            assert {name for name, number in value.items() if number == asked} == set(question.references)
        assert count(context.text) > 900


@pytest.mark.parametrize("task", ["closed_cwe", "closed_fwe"])
def test_the_words_asked_for_are_the_most_common_ones_in_order(task):
    for context in make(512, tasks=(task,), items=6):
        ranked = [word for word, _ in Counter(context.text.split()).most_common(4)]
        counts = [number for _, number in Counter(context.text.split()).most_common(4)]
        assert counts == sorted(set(counts), reverse=True)
        for question in context.questions:
            assert list(question.references) == ranked[: len(question.references)]


def test_labels_follow_the_category_of_the_noun():
    for context in make(tasks=("closed_labels",)):
        words = context.text.split()
        rule = {
            next(i for i, category in enumerate(v.CATEGORIES) if words[at + 1] in category): words[at + 3]
            for at in range(0, len(words), 5)
        }
        assert len(set(rule.values())) == 4
        for question in context.questions:
            noun = question.answer_prefix.split()[1]
            assert question.references == (rule[next(i for i, c in enumerate(v.CATEGORIES) if noun in c)],)


def test_repeat_asks_for_what_follows_a_place_that_is_there_once():
    for context in make(tasks=("closed_repeat",), items=6):
        for question in context.questions:
            start = question.text.removeprefix("ask repeat the part of the previous context starting with ")
            start = start.removesuffix(" .")
            assert f" {context.text} ".count(f" {start} ") == 1
            assert f"{start} {question.references[0]}" in context.text
            assert question.answer_prefix == start


def test_every_word_of_a_needle_is_common_in_filler():
    """Otherwise the rarity of a key alone would find the needles."""
    for context in make(1024, tasks=("closed_single",), items=3):
        ((start, end),) = context.meta["needles"]
        around = Counter(f"{context.text[:start]} {context.text[end:]}".split())
        assert min(around[word] for word in ("for", "is")) >= 8
        needle = context.text[start:end].split()
        assert f" {needle[0]} for " in context.text[:start] + context.text[end:]


# ---- the same bytes for the same seed


def test_the_same_seed_gives_the_same_contexts_and_another_one_others():
    assert make(256) == make(256)
    one, other = make(256, items=3), make(256, items=3, seed=1)
    assert len({context.text for context in (*one, *other)}) == 2 * 3 * len(t.TASKS)
    assert len({context.id for context in (*one, *other)}) == 2 * 3 * len(t.TASKS)


def test_the_bytes_do_not_depend_on_the_process():
    """Set order changes from process to process; the digest of these texts must not."""
    text = "\n".join(context.text for context in make(256, items=1))

    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "5c4b33e75844fe72"


@pytest.mark.parametrize("task", t.TASKS)
@pytest.mark.parametrize("size", [48, 100, 777])
def test_a_context_is_as_long_as_asked_or_less_by_one_sentence(task, size):
    for seed in range(12):
        item = t.make(task, random.Random(seed), size)

        assert size - 10 < len(item.words) <= size


# ---- refusals


@pytest.mark.parametrize(
    ("length", "extra", "wrong"),
    [
        (48, {}, "length=48 is too short for closed_"),
        (512, {"questions": 0}, "questions=0 must be at least 1"),
    ],
)
def test_bad_settings_are_refused(length, extra, wrong):
    with pytest.raises(RequestError, match=wrong):
        make(length, **extra)


def test_an_unknown_task_is_corrected():
    with pytest.raises(RequestError, match="did you mean 'closed_single'"):
        make(tasks=("closed_singel",))


def test_fewer_questions_on_request():
    assert {len(context.questions) for context in make(tasks=("closed_dense",), questions=2)} == {2}
