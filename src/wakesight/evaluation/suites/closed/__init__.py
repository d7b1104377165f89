"""Tasks in the 512 words of the bundled hybrid model: the same kinds as RULER's and SCBench's, in its closed language.

    closed_single     one needle in filler            closed_copy      prefix of a random string, its suffix asked for
    closed_multikey   4 to 12 needles                 closed_labels    many examples of a hidden rule
    closed_dense      every sentence a needle         closed_cwe       most common words, 1 to 3 of them
    closed_multivalue several values of a key         closed_fwe       most frequent codes, 1 to 3 of them
    closed_multiquery two keys in one question        closed_repeat    the context again, from a given place on
    closed_keyvalue   pairs of codes                  closed_tracking  chains of variables

Takes SuiteOptions (`extra`: see OPTIONS); gives Contexts. The texts are
words joined by single spaces; any model can be asked, but only the bundled one was trained on this language. Answers
are graded by containment, an answer of several parts by its share of them, in any order. Texts and lists are ours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from wakesight.evaluation.items import Context, Question, SuiteOptions
from wakesight.evaluation.suites.closed import tasks
from wakesight.evaluation.suites.closed.tasks import TASKS
from wakesight.evaluation.suites.sizing import RESERVE, TooShort, largest, room
from wakesight.evaluation.suites.table import pick

__all__ = ["OPTIONS", "TASKS", "contexts"]

QUESTIONS = 4
OPTIONS = {"questions": f"most questions about one context ({QUESTIONS})", "reserve": RESERVE}
SPARE = 4  # tokens of the chat template, and of the end of the answer


def contexts(options: SuiteOptions) -> Iterator[Context]:
    """Raises RequestError for an unknown task, a bad number of questions or a length too short."""
    questions = options.whole("questions", QUESTIONS, 1)
    for task in pick(TASKS, options):
        for index in range(options.items):
            yield _context(task, index, options, questions)


def _context(task: str, index: int, options: SuiteOptions, questions: int) -> Context:
    seed = f"closed/{task}/{options.seed}/{index}"

    def item(size: int) -> tasks.Item:
        return tasks.make(task, random.Random(seed), size)

    def tokens(size: int) -> int:
        return _tokens(item(size), options, questions)

    limit = room(options, SPARE)
    least = tasks.LEAST[task]
    size = largest(tokens, limit, least, max(least + 1, limit - 40))
    if size is None:
        raise TooShort(options, task, tokens(least) + options.length - limit)
    return _as_context(item(size), index, options, questions)


def _tokens(item: tasks.Item, options: SuiteOptions, questions: int) -> int:
    """Of the context and the longest of its questions with its answer."""
    asked = max(
        options.count(" ".join(each.question)) + options.count(" ".join((*each.prefix, *each.answer)))
        for each in item.asked[:questions]
    )
    return options.count(" ".join(item.instruction)) + options.count(" ".join(item.words)) + asked


def _as_context(item: tasks.Item, index: int, options: SuiteOptions, questions: int) -> Context:
    name = f"{item.task}-{options.length}-s{options.seed}-{index}"
    text = " ".join(item.words)
    spans = [_characters(item.words, span) for span in item.needles]
    return Context(
        id=name,
        task=item.task,
        text=text,
        questions=tuple(
            Question(
                id=f"{name}-q{number}", text=" ".join(asked.question), references=asked.parts, grader="niah",
                max_new_tokens=options.count(" ".join(asked.answer)) + 1, answer_prefix=" ".join(asked.prefix),
            )
            for number, asked in enumerate(item.asked[:questions])
        ),
        instruction=" ".join(item.instruction),
        source="generated:closed",
        meta={
            "length": options.length,
            "tokens": _tokens(item, options, questions),
            "needles": spans,
            "depths": [round(start / max(1, len(text) - (end - start)), 4) for start, end in spans],
        },
    )  # fmt: skip


def _characters(words: tasks.Words, span: tuple[int, int]) -> list[int]:
    start = len(" ".join(words[: span[0]])) + bool(span[0])
    return [start, start + len(" ".join(words[slice(*span)]))]
