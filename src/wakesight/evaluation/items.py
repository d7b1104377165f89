"""The nouns of an evaluation: contexts, and the questions that are asked about them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from wakesight.errors import RequestError


@dataclass(frozen=True)
class Question:
    """One question about a context.

    text: what the user asks, put behind the context. answer_prefix: the start of the reply, fed as if the
    model had written it. references: acceptable answers, as the task's grader reads them. grader: the task
    name that `graders.grade` knows. extra: whatever that grader needs besides (options, language, needles).
    """

    id: str
    text: str
    references: tuple[str, ...]
    grader: str
    max_new_tokens: int
    answer_prefix: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """One document with its questions; the unit of prefill, of scoring and of the bootstrap's clusters.

    id: unique in the suite, and the same for the same seed. task: the name results are grouped by; a
    substitute carries its own ("qa_1_synth"). instruction: text before the document, the protected prefix.
    source: where the text is from, an official file's name or "generated:...".
    chat: whether the model's chat template is used. meta: facts about the item (needle depth, ...).
    """

    id: str
    task: str
    text: str
    questions: tuple[Question, ...]
    instruction: str | None = None
    source: str = "generated"
    chat: bool = True
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SuiteOptions:
    """What a suite is asked for.

    tasks: names, () for all. length: limit in tokens for context, question and answer together. items:
    contexts per task. seed: the same seed gives the same bytes. data: folder of official files, or None to
    generate offline. count: number of tokens of a text under the model's tokenizer. extra: a suite's own settings,
    by the names in its OPTIONS; from a command line they are text.
    """

    length: int
    items: int
    seed: int
    count: Callable[[str], int]
    tasks: tuple[str, ...] = ()
    data: Path | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def whole(self, name: str, usual: int, least: int = 0) -> int:
        """The setting `name` of `extra` as a whole number. Raises RequestError for anything else, or less."""
        value = self.extra.get(name, usual)
        try:
            number = int(value) if isinstance(value, str) else operator.index(value)
        except (TypeError, ValueError):
            raise RequestError(f"{name}={value} is no whole number; {name}={usual} is the default") from None
        if number < least:
            raise RequestError(f"{name}={number} must be at least {least}; {name}={usual} is the default")
        return number


class Suite(Protocol):
    """A module under `suites/`: TASKS names what it has, `contexts` yields them task by task, in a fixed order.

    OPTIONS, if it has any: what `SuiteOptions.extra` may hold, name -> what it is and how it is written.
    Raises RequestError for an unknown task or a missing or malformed data file.
    """

    TASKS: tuple[str, ...]

    def contexts(self, options: SuiteOptions) -> Iterator[Context]: ...
