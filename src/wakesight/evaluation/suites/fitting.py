"""Texts that fit: the largest that does, and the middle cut out of one that does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.items import Context, Question, SuiteOptions

BLANK_LINES = 4  # tokens of the blank lines between instruction, context and question


@dataclass(frozen=True)
class Draft:
    """A context before it has its name: what a generator or a loader makes. Its questions have no ids yet."""

    text: str
    questions: tuple[Question, ...]
    instruction: str | None = None
    chat: bool = True
    meta: dict[str, Any] = field(default_factory=dict)

    def context(self, task: str, item: str, source: str) -> Context:
        """The finished context; `item` tells it from the others of its task."""
        name = f"{task}/{item}"
        questions = tuple(replace(one, id=f"{name}/q{place}") for place, one in enumerate(self.questions))
        return Context(name, task, self.text, questions, self.instruction, source, self.chat, self.meta)


def item_random(options: SuiteOptions, task: str, index: int) -> random.Random:
    """The random numbers of one item: the same for the same seed, whatever else is asked for.

    A string seeds through SHA-512, so `PYTHONHASHSEED` has no part in it.
    """
    return random.Random(f"{options.seed}/{task}/{index}")


def beside(questions: Sequence[Question], instruction: str | None, options: SuiteOptions) -> int:
    """Tokens that instruction, longest question and its answer take."""
    asked = max(options.count(one.text + one.answer_prefix) + one.max_new_tokens for one in questions)
    return asked + (options.count(instruction) if instruction else 0) + BLANK_LINES


def room(questions: Sequence[Question], instruction: str | None, options: SuiteOptions, task: str) -> int:
    """Tokens left for the context.

    Raises RequestError if that is less than a quarter of the length: such an item would test nothing.
    """
    taken = beside(questions, instruction, options)
    if options.length - taken < options.length // 4:
        raise too_small(options, task, taken + taken // 3 + 1)
    return options.length - taken


def grow(build: Callable[[int], Draft], low: int, high: int, options: SuiteOptions, task: str) -> Draft:
    """`build(n)` for the largest n in low..high that keeps within the length.

    Raises RequestError if even `build(low)` is too long.
    """

    def fits(n: int) -> bool:
        draft = build(n)
        return options.count(draft.text) + beside(draft.questions, draft.instruction, options) <= options.length

    n = largest(fits, low, high)
    if n is None:
        raise too_small(options, task)
    return build(n)


def too_small(options: SuiteOptions, task: str, needed: int | None = None) -> RequestError:
    """The complaint that the length leaves no room for this task."""
    return RequestError(
        f"a length of {options.length} tokens is too small for {task}"
        + (f", which needs at least {needed}" if needed else "")
        + "; raise the length, or leave this task out"
    )


def largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest n in low..high for which `fits` holds, None if it fails for `low`. More n, less fit.

    Doubles its step first: a try at `high` may be a thousand times as long as the limit.
    """
    if high < low or not fits(low):
        return None
    step = 1
    while low < high and fits(min(low + step, high)):
        low, step = min(low + step, high), step * 2
    high = min(high, low + step)
    # fits(low) holds, and the answer lies in low..high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def cut_middle(text: str, limit: int, count: Callable[[str], int]) -> tuple[str, dict[str, Any]]:
    """The text's beginning and end, `limit` tokens at most, and what was done, for `Context.meta`.

    The official codes keep the first and the last half of the token ids. A count alone gives no ids, so
    the halves are cut by characters, each the longest whose count is within half of the limit.
    Source: microsoft/MInference scbench/run_scbench.py, THUDM/LongBench LongBench/pred.py.
    """
    if count(text) <= limit:
        return text, {}
    head = largest(lambda n: count(text[:n]) <= limit // 2, 0, len(text)) or 0
    tail = largest(lambda n: count(text[len(text) - n :]) <= limit - limit // 2, 0, len(text) - head) or 0
    # the seam may cost a token or two more than its two sides
    while tail and count(text[:head] + text[len(text) - tail :]) > limit:
        tail -= min(tail, 4)
    kept = text[:head] + text[len(text) - tail :]
    return kept, {"cut": "middle, by characters", "characters": len(text), "characters_kept": len(kept)}
