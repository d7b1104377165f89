"""Recall after a conversation: facts told in the first turn, unrelated turns, then questions about the facts.

A context is the transcript; its questions are independent of each other. Fillers are pairs of a request and an answer
of 100 to 200 tokens from the packaged expository text, at least four, and as many as `length` has room for.
Source: WakeKV's multi-turn regime, as far as its description goes; facts, requests and grading are ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from wakesight.evaluation.items import Context, Question, SuiteOptions
from wakesight.evaluation.suites import text, words
from wakesight.evaluation.suites.sizing import RESERVE, Draft, facts, largest_draft, weave, within
from wakesight.evaluation.suites.table import pick

FACTS = {"recall_1": 1, "recall_4": 4}
TASKS = tuple(FACTS)
OPTIONS = {"reserve": RESERVE}
NEW_TOKENS = 48
LEAST_TURNS = 4
ANSWER_TOKENS = (100, 200)

# (what the user says, what is asked later, who the value is for)
_TEMPLATES = (
    ("the code of my bicycle lock is {}", "What is the code of my bicycle lock?", "number"),
    ("my sister's new dog is called {}", "What is my sister's new dog called?", "name"),
    ("my train to the coast leaves from a village named {}", "From which village does my train leave?", "name"),
    ("the booking number of our cabin is {}", "What is the booking number of our cabin?", "number"),
    ("my landlord's surname is {}", "What is my landlord's surname?", "name"),
    ("the name of our choir is The {} Singers", "What is the name of our choir?", "name"),
    ("the serial number of my old camera is {}", "What is the serial number of my old camera?", "number"),
    ("the boat I learned to sail on was the {}", "On which boat did I learn to sail?", "name"),
)
_REQUESTS = (
    "Something else now: tell me a bit about hacker culture.",
    "Let us change the subject. Can you explain another term from the old computer labs?",
    "Give me one more paragraph of that kind, please.",
    "Go on. What else is there to say about the way programmers talk?",
    "Interesting. Is there another entry worth knowing?",
    "Please continue with something I would not expect.",
    "And what comes after that?",
    "I have some time left. Tell me more about these words.",
)


def contexts(options: SuiteOptions) -> Iterator[Context]:
    """Raises RequestError for an unknown task or a length without room for four turns."""
    for task in pick(TASKS, options):
        size = 0
        for index in range(options.items):
            rng = random.Random(f"recall/{task}/{options.seed}/{index}")
            told = _facts(FACTS[task], rng)
            build = _builder(told, _fillers(rng, options.count))
            size, draft = largest_draft(
                build, options, NEW_TOKENS, task, least=LEAST_TURNS, guess=size or options.length // 200
            )
            yield _context(draft, told, options, task, index)


def _facts(number: int, rng: random.Random) -> list[tuple[str, str, str]]:
    """(sentence, question, value), no two of one template."""
    told = []
    for sentence, question, kind in rng.sample(_TEMPLATES, number):
        value = words.number(rng, 6) if kind == "number" else _name(rng)
        told.append((sentence.format(value), question, value))
    return told


def _name(rng: random.Random) -> str:
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(4)).capitalize()


def _fillers(rng: random.Random, count: Callable[[str], int]) -> Callable[[int], list[tuple[str, str]]]:
    """The first n turns of one endless row: whole sentences of the text, from a place of this item's own."""
    sentences = text.sentences(text.packaged("expository"))
    turns: list[tuple[str, str]] = []
    requests: list[str] = []
    at = rng.randrange(len(sentences))
    low, high = ANSWER_TOKENS

    def first(number: int) -> list[tuple[str, str]]:
        nonlocal at
        while len(turns) < number:
            if not requests:
                requests.extend(rng.sample(_REQUESTS, len(_REQUESTS)))
            answer, tokens = "", 0
            while tokens < low:
                longer = f"{answer} {sentences[at % len(sentences)]}".strip()
                at += 1
                if count(longer) <= high:  # a sentence that alone is too long is passed over
                    answer, tokens = longer, count(longer)
            turns.append((requests.pop(), answer))
        return turns[:number]

    return first


def _builder(
    told: Sequence[tuple[str, str, str]], fillers: Callable[[int], list[tuple[str, str]]]
) -> Callable[[int], Draft]:
    def build(size: int) -> Draft:
        parts: list[tuple[str, bool]] = [("User: Before we start, please keep in mind: ", False)]
        for place, (sentence, _, _) in enumerate(told):
            parts += [("; ", False)] if place else []
            parts.append((sentence, True))
        parts.append((".\nAssistant: I will keep it in mind.", False))
        parts += [(f"\nUser: {request}\nAssistant: {answer}", False) for request, answer in fillers(size)]
        document, spans = weave(parts, "")
        longest = max((question for _, question, _ in told), key=len)
        return Draft(
            instruction="Below is a conversation between a user and an assistant.",
            text=document,
            question=_asked(longest),
            prefix="",
            references=tuple(value for _, _, value in told),
            needles=spans,
            answers=[span for _, _, value in told for span in within(document, value, spans)],
            meta={"turns": size},
        )

    return build


def _asked(question: str) -> str:
    return f"The user now asks: {question} Reply with the answer alone."


def _context(
    draft: Draft, told: Sequence[tuple[str, str, str]], options: SuiteOptions, task: str, index: int
) -> Context:
    name = f"{task}-{options.length}-s{options.seed}-{index}"
    questions = tuple(
        Question(f"{name}-q{number}", _asked(question), (value,), "recall", NEW_TOKENS)
        for number, (_, question, value) in enumerate(told)
    )
    return Context(
        name, task, draft.text, questions, draft.instruction, "generated:jargon-file-4.4.7",
        meta={**facts(draft, options), **draft.meta},
    )  # fmt: skip
