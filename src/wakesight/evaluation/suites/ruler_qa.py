"""Documents and questions for RULER's qa tasks: SQuAD, HotpotQA, or fact cards of our own.

Readers and the order of documents: NVIDIA/RULER scripts/data/synthetic/qa.py. Gold documents first, then others of
the same article, then any, as many as fit, shuffled. The instruction stands before and after the documents.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.items import SuiteOptions
from wakesight.evaluation.suites.cards import World
from wakesight.evaluation.suites.sizing import Draft, room, weave, within
from wakesight.evaluation.suites.text import load_json

FILES = {"qa_1": "squad.json", "qa_2": "hotpotqa.json"}
INSTRUCTION = (
    "Answer the question based on the given documents. Reply with the answer alone, in as few words as possible."
)
Streams = Callable[[str], random.Random]
Build = Callable[[int], Draft]


@dataclass(frozen=True)
class Asked:
    """A question, its answers, the documents it needs, and documents of the same article."""

    question: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    near: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """Questions in a fixed order over one collection of documents. name: for a context's source."""

    name: str
    official: bool
    questions: Sequence[Asked]
    documents: Sequence[str]

    def builds(self, options: SuiteOptions, streams: Streams) -> Iterator[tuple[Build, int, int]]:
        """(build, least, most) of the first `options.items` questions whose own documents fit."""
        made = 0
        for number, asked in enumerate(self.questions):
            if made == options.items:
                return
            build = self._build(asked, number, streams)
            if build(len(asked.gold)).tokens(options.count) > room(options, 32):
                continue
            made += 1
            yield build, len(asked.gold), len(self.documents)
        if made < options.items:
            raise RequestError(
                f"{self.name} has {made} questions whose documents fit in length={options.length}, and "
                f"{options.items} items were asked for; ask for fewer items or a larger length"
            )

    def _build(self, asked: Asked, number: int, streams: Streams) -> Build:
        order: list[str] = [*asked.gold]

        def ordered(size: int) -> list[str]:
            if size > len(order):
                rng = streams(f"{number}/documents")
                near = rng.sample(asked.near, len(asked.near))
                taken = {*asked.gold, *asked.near}
                others = [document for document in self.documents if document not in taken]
                order[:] = [*asked.gold, *near, *rng.sample(others, len(others))]
            return order[:size]

        def build(size: int) -> Draft:
            documents = ordered(size)
            streams(f"{number}/order").shuffle(documents)
            gold = set(asked.gold)
            text, spans = weave(
                ((f"Document {i}:\n{document}", document in gold) for i, document in enumerate(documents, 1)), "\n\n"
            )
            return Draft(
                instruction=f"{INSTRUCTION}\n\nThe documents follow.",
                text=text,
                question=f"{INSTRUCTION}\n\nQuestion: {asked.question}",
                prefix="Answer:",
                references=asked.answers,
                needles=spans,
                answers=next((found for answer in asked.answers if (found := within(text, answer, spans))), []),
                meta={"documents": len(documents)},
            )

        return build


def source(task: str, options: SuiteOptions) -> Source:
    """The official collection where its file is there, else fact cards; `qa_1_synth` is always the latter.

    Raises RequestError if the user named the task and a data folder that lacks its file.
    """
    hops = 1 if task.startswith("qa_1") else 2
    if task.endswith("_synth") or options.data is None:
        return cards(hops, options)
    file = options.data / FILES[task]
    if file.is_file():
        return squad(file) if task == "qa_1" else hotpot(file)
    if task in options.tasks:
        raise RequestError(f"{task} needs {file}, which does not exist; put it there, or ask for {task}_synth")
    return cards(hops, options)


def squad(file: Path) -> Source:
    """SQuAD v2.0: data[].paragraphs[] with context and qas[]; impossible questions are left out."""
    read = _Reader(file)
    questions: list[Asked] = []
    everything: dict[str, None] = {}
    for article in read.list(read.top(dict), "data"):
        paragraphs = [(read.text(p, "context"), p) for p in read.list(article, "paragraphs")]
        everything.update((context, None) for context, _ in paragraphs)
        for context, paragraph in paragraphs:
            near = tuple(dict.fromkeys(other for other, _ in paragraphs if other != context))
            for qa in read.list(paragraph, "qas"):
                if qa.get("is_impossible"):
                    continue
                answers = tuple(read.text(answer, "text") for answer in read.list(qa, "answers"))
                if not answers:
                    raise read.wrong("answers")
                questions.append(Asked(read.text(qa, "question"), answers, (context,), near))
    return Source(file.name, True, questions, sorted(everything))


def hotpot(file: Path) -> Source:
    """HotpotQA dev distractor v1: rows of question, answer, context = [[title, [sentence, ...]], ...].

    All ten documents of a row belong to its question, as in the official code.
    """
    read = _Reader(file)
    questions = []
    everything: dict[str, None] = {}
    for row in read.top(list):
        if not isinstance(row, dict):
            raise read.wrong("question")
        documents = []
        for pair in read.list(row, "context", dict_rows=False):
            if not (
                isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], list)
            ):
                raise read.wrong("context")
            documents.append(f"{pair[0]}\n{''.join(map(str, pair[1]))}")
        everything.update((document, None) for document in documents)
        questions.append(
            Asked(read.text(row, "question"), (read.text(row, "answer"),), tuple(dict.fromkeys(documents)))
        )
    return Source(file.name, True, questions, sorted(everything))


@dataclass(frozen=True)
class _Reader:
    """Fields of an official file; every complaint names the file and the field."""

    file: Path

    def top(self, kind: type) -> Any:
        found = load_json(self.file)
        if not isinstance(found, kind):
            raise self.wrong("data" if kind is dict else "question")
        return found

    def list(self, row: Any, field: str, dict_rows: bool = True) -> list[Any]:
        found = row.get(field) if isinstance(row, dict) else None
        if not isinstance(found, list) or (dict_rows and not all(isinstance(one, dict) for one in found)):
            raise self.wrong(field)
        return found

    def text(self, row: dict[str, Any], field: str) -> str:
        found = row.get(field)
        if not isinstance(found, str):
            raise self.wrong(field)
        return found

    def wrong(self, field: str) -> RequestError:
        return RequestError(
            f"{self.file} has no field {field!r} of the official format where one belongs; give the unchanged file"
        )


def cards(hops: int, options: SuiteOptions) -> Source:
    """Our substitute: fact cards of an invented world, one per seed. Every answer stands on one card only."""
    world = World(random.Random(f"cards/{hops}/{options.seed}"))
    # a card has more than 40 tokens under every tokenizer we met, and each house brings two
    houses = [world.house() for _ in range(max(100, options.items, options.length // 60))]
    questions = []
    for number, house in enumerate(houses):
        single = house.facts if number % 2 else house.founder.facts
        question, answer = (single if hops == 1 else house.founder_facts)[number // 2 % 3]
        own = house.card if number % 2 else house.founder.card
        gold = (own,) if hops == 1 else (house.card, house.founder.card)
        questions.append(Asked(question, (answer,), gold))
    documents = [card for house in houses for card in (house.card, house.founder.card)]
    return Source("generated:fact cards", False, questions, documents)
