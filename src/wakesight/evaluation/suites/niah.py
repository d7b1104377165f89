"""One needle at every depth of several lengths: the grid of a heat map.

A row of the grid is a task ("niah_2048"); its items go through the depths in turn, so `items` should be a multiple of
their number. The needle is one sentence with a uuid, as WakeKV's needle test has it; keys are from our own lists.

`options.extra`: see OPTIONS.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from wakesight.errors import RequestError
from wakesight.evaluation.items import Context, SuiteOptions
from wakesight.evaluation.suites import text, words
from wakesight.evaluation.suites.ruler import NOISE
from wakesight.evaluation.suites.sizing import (
    RESERVE,
    Draft,
    Span,
    TooShort,
    context_of,
    largest_draft,
    proposed,
    weave,
    within,
)
from wakesight.evaluation.suites.table import pick

TASKS = ("niah",)  # the whole grid; a row is asked for by its own name
OPTIONS = {
    "depths": "number of depths a needle is put at (10)",
    "lengths": "lengths of the grid's rows in tokens, lengths=1024,4096 (quarters of --length)",
    "haystack": "essay or noise (essay)",
    "reserve": RESERVE,
}
NEW_TOKENS = 64


def names(options: SuiteOptions) -> tuple[str, ...]:
    """The rows of the grid."""
    return tuple(f"niah_{length}" for length in _lengths(options))


def contexts(options: SuiteOptions) -> Iterator[Context]:
    """Raises RequestError for an unknown row, a bad setting or a length too short."""
    depths = options.whole("depths", 10, least=1)
    haystack = options.extra.get("haystack", "essay")
    if haystack not in ("essay", "noise"):
        raise RequestError(f"unknown haystack {haystack!r}; known: essay, noise")
    text.folder(options.data)
    rows = names(options) if set(options.tasks) & set(TASKS) else pick(names(options), options, also=TASKS)
    for row in rows:
        length = int(row.removeprefix("niah_"))
        yield from _row(row, replace(options, length=length), haystack, depths, options)


def _lengths(options: SuiteOptions) -> tuple[int, ...]:
    asked = options.extra.get("lengths") or [options.length * quarter // 4 for quarter in (1, 2, 3, 4)]
    try:
        lengths = tuple(sorted({int(one) for one in (asked.split(",") if isinstance(asked, str) else asked)}))
    except (TypeError, ValueError):
        raise RequestError(f"lengths={asked} is no list of whole numbers; write lengths=1024,2048") from None
    if lengths[-1] > options.length:
        raise RequestError(f"lengths={lengths[-1]} is above length={options.length}; raise the length")
    return lengths


def _too_short(task: str, length: int, asked: SuiteOptions, need: int) -> RequestError:
    """Names what was typed: a row's length is a share of --length, or one of --option lengths."""
    if asked.extra.get("lengths"):
        row, instead = "one of --option lengths", f"use lengths={proposed(need)} or more there"
    else:
        shares = {1: "a quarter of ", 2: "half of ", 3: "three quarters of "}
        row = f"{shares.get(round(4 * length / asked.length), '')}--length {asked.length}"
        instead = f"use --length {proposed(need * asked.length // max(length, 1))} or more"
        if need <= asked.length:
            instead += f", or --option lengths={asked.length}"
    return RequestError(f"length={length} is too short for {task} ({row}); it needs at least {need} tokens: {instead}")


def _row(task: str, options: SuiteOptions, haystack: str, depths: int, whole: SuiteOptions) -> Iterator[Context]:
    """One row of the grid. options: with the row's length; whole: as they were asked for."""
    depths = min(depths, options.items)
    essay = text.essay(options.data)
    source = f"generated:{essay.name if haystack == 'essay' else 'noise'}"
    size = 0
    for index in range(options.items):
        depth = index % depths / (depths - 1) if depths > 1 else 0.5
        rng = random.Random(f"niah/{options.length}/{options.seed}/{index}")
        start = rng.randrange(len(essay.sentences))
        sentences = _essay_from(essay, start) if haystack == "essay" else _noise
        build = _builder(words.own_key(rng), words.uuid4(rng), depth, sentences)
        try:
            size, draft = largest_draft(build, options, NEW_TOKENS, task, least=0, guess=size or options.length // 2)
        except TooShort as error:
            raise _too_short(task, options.length, whole, error.need) from None
        yield context_of(draft, options, task=task, index=index, new_tokens=NEW_TOKENS, source=source, grader="niah")


def _essay_from(essay: text.Essay, start: int) -> Callable[[int], Sequence[str]]:
    return lambda size: essay.first(size, start)


def _noise(size: int) -> Sequence[str]:
    clauses = text.sentences(NOISE)
    return [clauses[i % len(clauses)] for i in range(size // 4)]


def _builder(key: str, value: str, depth: float, sentences: Callable[[int], Sequence[str]]) -> Callable[[int], Draft]:
    needle = f"The access code of the {key} archive is {value}."

    def build(size: int) -> Draft:
        around = sentences(size)
        before = [0, *accumulate(len(sentence) + 1 for sentence in around)]
        cut = min(range(len(before)), key=lambda i: abs(before[i] - depth * before[-1]))
        parts = [*((s, False) for s in around[:cut]), (needle, True), *((s, False) for s in around[cut:])]
        document, spans = weave(parts, " ")
        return Draft(
            instruction="A single access code is hidden in the text below. Read the text and remember the code.",
            text=document,
            question=f"What is the access code of the {key} archive? Reply with the code alone.",
            prefix=f"The access code of the {key} archive is",
            references=(value,),
            needles=spans,
            answers=_answer(document, value, spans),
            meta={"depth": round(depth, 4)},
        )

    return build


def _answer(document: str, value: str, spans: Sequence[Span]) -> list[Span]:
    return within(document, value, spans)
