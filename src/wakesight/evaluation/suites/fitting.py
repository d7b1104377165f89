"""Contexts with several questions that fit the length, and the middle cut out of those that do not.

sizing.py does the same for contexts with one question; the search is its.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.items import Context, Question, SuiteOptions
from wakesight.evaluation.suites import sizing


@dataclass(frozen=True)
class Draft:
    """A context before it has its name: what a generator or a loader makes. Its questions have no ids yet."""

    text: str
    questions: tuple[Question, ...]
    instruction: str | None = None
    chat: bool = True
    meta: dict[str, Any] = field(default_factory=dict)

    def tokens(self, options: SuiteOptions) -> int:
        """Tokens of instruction, context, the longest question and its answer, and what `reserve` keeps back."""
        return options.count(self.text) + beside(self.questions, self.instruction, options)

    def context(self, task: str, index: int, source: str, options: SuiteOptions) -> Context:
        """The finished context. meta gains the limit it was made for and the tokens it takes without an answer."""
        name = f"{task}-{options.length}-s{options.seed}-{index}"
        questions = tuple(replace(one, id=f"{name}-q{place}") for place, one in enumerate(self.questions))
        prompt = options.count(self.text) + (options.count(self.instruction + "\n\n") if self.instruction else 0)
        meta = {"length": options.length, "tokens": prompt, **self.meta}
        return Context(name, task, self.text, questions, self.instruction, source, self.chat, meta)


def item_random(options: SuiteOptions, task: str, index: int) -> random.Random:
    """The random numbers of one item: the same for the same seed, whatever else is asked for.

    A string seeds through SHA-512, so `PYTHONHASHSEED` has no part in it.
    """
    return random.Random(f"{options.seed}/{task}/{index}")


def beside(questions: Sequence[Question], instruction: str | None, options: SuiteOptions) -> int:
    """Tokens that everything but the context takes, counted in the pieces in which a session takes them."""
    count = options.count
    asked = max(
        count("\n\n" + one.text) + (count(one.answer_prefix) if one.answer_prefix else 0) + one.max_new_tokens
        for one in questions
    )
    return asked + (count(instruction + "\n\n") if instruction else 0) + options.whole("reserve", 0)


def room(questions: Sequence[Question], instruction: str | None, options: SuiteOptions, task: str) -> int:
    """Tokens left for the context.

    Raises RequestError if that is less than a quarter of the length: such an item would test nothing.
    """
    taken = beside(questions, instruction, options)
    if options.length - taken < options.length // 4:
        raise too_small(options, task, taken + taken // 3 + 1)
    return options.length - taken


def grow(
    build: Callable[[int], Draft], options: SuiteOptions, task: str, *, low: int, guess: int, high: int = 1 << 40
) -> Draft:
    """`build(n)` for the largest n in low..high that keeps within the length.

    Raises RequestError if even `build(low)` is too long.
    """
    n = sizing.largest(lambda size: build(size).tokens(options), options.length, low, guess, high)
    if n is None:
        raise too_small(options, task, build(low).tokens(options))
    return build(n)


def too_small(options: SuiteOptions, task: str, needed: int) -> RequestError:
    """The complaint that the length leaves no room for this task."""
    return RequestError(
        f"length={options.length} is too short for {task}, which needs at least {needed} tokens; "
        "raise the length, or leave this task out"
    )


def cut_middle(text: str, limit: int, count: Callable[[str], int]) -> tuple[str, dict[str, Any]]:
    """The text's beginning and end, `limit` tokens at most, and what was done, for `Context.meta`.

    The official codes keep the first and the last half of the token ids. A count alone gives no ids, so
    the halves are cut by characters, each the longest whose count is within half of the limit.
    Source: microsoft/MInference scbench/run_scbench.py, THUDM/LongBench LongBench/pred.py.
    """
    if count(text) <= limit:
        return text, {}
    guess = 2 * limit
    head = sizing.largest(lambda n: count(text[:n]), limit // 2, 0, guess, len(text)) or 0
    end = len(text)
    tail = sizing.largest(lambda n: count(text[end - n :]), limit - limit // 2, 0, guess, end - head) or 0
    # the seam may cost a token or two more than its two sides
    while tail and count(text[:head] + text[end - tail :]) > limit:
        tail -= min(tail, 4)
    kept = text[:head] + text[end - tail :]
    return kept, {"cut": "middle, by characters", "characters": end, "characters_kept": len(kept)}
