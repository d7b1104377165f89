"""RULER: thirteen synthetic tasks of any length. Hsieh et al. 2024, https://arxiv.org/abs/2404.06654.

Parameters: NVIDIA/RULER scripts/synthetic.yaml, scripts/data/synthetic/constants.py; generators niah.py,
variable_tracking.py, common_words_extraction.py, freq_words_extraction.py, qa.py beside it. The structure of a prompt
(instruction, document, question, start of the answer) is theirs; the wording is ours, except for the words the
prefix-only split is made at. Draws differ from theirs: every item has streams of its own, named by seed, task and
index, so it is the same whatever else is generated. Keys of one item are distinct, which theirs need not be.

`options.data` may hold ready-made items (ruler_official.py), squad.json, hotpotqa.json, PaulGrahamEssays.json and
english_words.json. What is missing has a substitute: the packaged essays (named by `source`), and for qa generated
documents, under the names qa_1_synth and qa_2_synth.
"""

from __future__ import annotations

import itertools
import math
import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wakesight.errors import RequestError
from wakesight.evaluation.items import Context, SuiteOptions
from wakesight.evaluation.suites import ruler_official, ruler_qa, text, words
from wakesight.evaluation.suites.sizing import (
    RESERVE,
    Draft,
    Span,
    context_of,
    largest,
    largest_draft,
    room,
    weave,
    within,
)
from wakesight.evaluation.suites.table import pick

SMALL = 4096  # below it, cwe repeats its words less often. Source: common_words_extraction.py
NOISE = "The lake is wide. The wind is cold. The road is long. We walk on. Nobody stops here."
Build = Callable[[int], Draft]  # from a haystack size


@dataclass(frozen=True)
class Needles:
    """One row of synthetic.yaml. haystack: noise, essay or needle."""

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


NIAH = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value="uuids"),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", key="uuids", value="uuids"),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", keys=4, queries=4),
}
NEW_TOKENS = {**dict.fromkeys(NIAH, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
TASKS = (*NIAH, "vt", "cwe", "fwe", "qa_1", "qa_2")
ALSO = ("qa_1_synth", "qa_2_synth")
OPTIONS = {"reserve": RESERVE}


def contexts(options: SuiteOptions) -> Iterator[Context]:
    """Raises RequestError for an unknown task, a length too short for one, or a bad file."""
    tasks = pick(TASKS, options, also=ALSO)
    data = text.folder(options.data)
    if data is not None and not ruler_official.any_file(data, TASKS, options.length):
        raise RequestError(
            f"the data folder {data} has none of RULER's files; it may hold <task>.jsonl, "
            f"{', '.join(ruler_official.SOURCES)}; leave it out to generate everything"
        )
    for task in tasks:
        file = ruler_official.find(data, task, options.length)
        if file is not None:
            yield from ruler_official.read(file, task, NEW_TOKENS[task], options)
        elif task.startswith("qa_"):
            yield from _qa(task, options)
        else:
            yield from _generated(task, options)


def _generated(task: str, options: SuiteOptions) -> Iterator[Context]:
    recipe = _niah if task in NIAH else {"vt": _vt, "cwe": _cwe, "fwe": _fwe}[task]
    size = 0
    for index in range(options.items):
        build, source, least, guess = recipe(task, options, _Streams(f"ruler/{task}/{options.seed}/{index}"))
        size, draft = largest_draft(build, options, NEW_TOKENS[task], task, least=least, guess=size or guess)
        yield context_of(
            draft, options, task=task, index=index, new_tokens=NEW_TOKENS[task], source=source, grader=task
        )


def _qa(task: str, options: SuiteOptions) -> Iterator[Context]:
    official = task.removesuffix("_synth")
    new_tokens = NEW_TOKENS[official]
    source = ruler_qa.source(task, options)
    name = official if source.official else f"{official}_synth"
    size = 0
    for index, (build, least, most) in enumerate(source.builds(options, _Streams(f"ruler/{name}/{options.seed}"))):
        size, draft = largest_draft(
            build, options, new_tokens, name, least=least, guess=size or options.length // 100, most=most
        )
        yield context_of(
            draft, options, task=name, index=index, new_tokens=new_tokens, source=source.name, grader=official
        )


@dataclass(frozen=True)
class _Streams:
    """Independent random streams of one item. A string seeds `Random` through SHA-512: the same on every machine."""

    base: str

    def __call__(self, name: str) -> random.Random:
        return random.Random(f"{self.base}/{name}")


Recipe = tuple[Build, str, int, int]  # build, source, least size, first guess


# needles


def _niah(task: str, options: SuiteOptions, streams: _Streams) -> Recipe:
    row = NIAH[task]
    rng = streams("needles")
    keys = _distinct(row.keys, lambda: _draw(row.key, rng))
    values = [_distinct(row.values, lambda: _draw(row.value, rng)) for _ in keys]
    needles = [(key, value) for key, its in zip(keys, values, strict=True) for value in its]
    rng.shuffle(needles)
    asked = rng.sample(range(row.keys), row.queries)
    lines = [_needle(row.value, key, value) for key, value in needles]
    place = _in_essay(lines, options, rng) if row.haystack == "essay" else _in_lines(lines, row, streams, keys)
    query = _listed([keys[i] for i in asked])
    answers = tuple(value for i in asked for value in values[i])
    many = len(answers) > 1
    kind = row.value if many else row.value[:-1]
    be, all_, some = ("are", "are all", "Several") if many else ("is", "is", "A")

    def build(size: int) -> Draft:
        document, spans = place(size)
        wanted = [span for span, (key, _) in zip(spans, needles, strict=True) if any(key == keys[i] for i in asked)]
        return Draft(
            instruction=f"{some} special magic {kind} {be} hidden in the text below. Keep {'them' if many else 'it'} "
            f"in mind: you will be asked for the {kind} afterwards.",
            text=document,
            question=f"What {all_} the special magic {kind} for {query} that the text above mentions?",
            prefix=f"The special magic {kind} for {query} that the text above mentions {be}",
            references=answers,
            needles=wanted,
            answers=[span for answer in answers for span in within(document, answer, wanted)],
            meta={"haystack": row.haystack},
        )

    essay = f"{text.essay(options.data).name}," if row.haystack == "essay" else ""
    guess = options.length // 2 if row.haystack == "essay" else options.length // 30
    return build, f"generated:{essay}{words.version()}", len(lines), guess


def _needle(kind: str, key: str, value: str) -> str:
    return f"Take note: the special magic {kind[:-1]} for {key} is {value}."


def _draw(kind: str, rng: random.Random) -> str:
    return {"words": words.key, "numbers": words.number, "uuids": words.uuid4}[kind](rng)


def _distinct(count: int, draw: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]


def _in_essay(
    lines: Sequence[str], options: SuiteOptions, rng: random.Random
) -> Callable[[int], tuple[str, list[Span]]]:
    """Needles behind sentences, at depths drawn from 40 even ones."""
    essay = text.essay(options.data)
    depths = sorted(rng.sample([round(100 * i / 39) for i in range(40)], len(lines)))

    def place(size: int) -> tuple[str, list[Span]]:
        around = essay.first(size)
        parts: list[tuple[str, bool]] = []
        last = 0
        for line, depth in zip(lines, depths, strict=True):
            cut = len(around) * depth // 100
            parts += [(sentence, False) for sentence in around[last:cut]]
            parts.append((line, True))
            last = cut
        parts += [(sentence, False) for sentence in around[last:]]
        return weave(parts, " ")

    return place


def _in_lines(
    lines: Sequence[str], row: Needles, streams: _Streams, keys: Sequence[str]
) -> Callable[[int], tuple[str, list[Span]]]:
    """Needles before lines drawn at random, among noise or among needles for other keys."""
    others = streams("haystack")
    drawn: list[str] = []

    def place(size: int) -> tuple[str, list[Span]]:
        while row.haystack == "needle" and len(drawn) < size:
            key = _draw(row.key, others)
            if key not in keys:
                drawn.append(_needle(row.value, key, _draw(row.value, others)))
        around = drawn[:size] if row.haystack == "needle" else [NOISE] * size
        return _inserted(lines, around, streams("places"))

    return place


def _inserted(lines: Sequence[str], around: Sequence[str], rng: random.Random) -> tuple[str, list[Span]]:
    """Lines in their order, before members of `around` drawn at random; with less room, several before one."""
    if len(around) > len(lines):
        places = sorted(rng.sample(range(len(around)), len(lines)))
    else:
        places = sorted(rng.randrange(len(around) + 1) for _ in lines)
    parts: list[tuple[str, bool]] = []
    last = 0
    for place, line in zip(places, lines, strict=True):
        parts += [(other, False) for other in around[last:place]]
        parts.append((line, True))
        last = place
    return weave([*parts, *((other, False) for other in around[last:])], "\n")


# variable tracking

HOPS = 4
EXAMPLE_TOKENS = 500


def _vt(task: str, options: SuiteOptions, streams: _Streams) -> Recipe:
    rng = streams("names")
    taken: set[str] = set()
    example_value, value = (str(rng.randrange(10000, 99999)) for _ in range(2))
    example_names = _fresh(rng, HOPS + 1, 3, taken)
    names = _fresh(rng, HOPS + 1, 5, taken)

    def chain(names: Sequence[str], value: str, size: int, stream: str) -> Draft:
        lines = [f"VAR {names[0]} = {value}"]
        lines += [f"VAR {name} = VAR {before}" for before, name in itertools.pairwise(names)]
        document, spans = _inserted(lines, [NOISE] * size, streams(stream))
        return Draft(
            instruction="Follow the chain of variable assignments that is hidden in the text below.",
            text=document,
            question=f"Question: Which variables have the value {value} after all assignments in the text above?",
            prefix=f"Answer: {len(names)} variables have the value {value} after all assignments in the text above:",
            references=tuple(names),
            needles=spans,
            answers=[span for name, line in zip(names, spans, strict=True) for span in within(document, name, [line])],
        )

    def example(size: int) -> Draft:
        return chain(example_names, example_value, size, "example")

    # the official example has 500 tokens, whatever the length; where that is too much, it gets a quarter
    budget = min(EXAMPLE_TOKENS, options.length // 4)
    noise = largest(lambda n: example(n).tokens(options.count), budget, least=0, guess=12) or 0
    shown = _shown(example(noise), " ".join(example_names))

    def build(size: int) -> Draft:
        draft = chain(names, value, size, "places")
        return _with_example(draft, shown, {"haystack": "noise"})

    return build, "generated:noise", 0, options.length // 30


def _fresh(rng: random.Random, count: int, letters: int, taken: set[str]) -> list[str]:
    """Upper-case names, none of them part of another one."""
    found: list[str] = []
    while len(found) < count:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if not any(name in other or other in name for other in taken):
            taken.add(name)
            found.append(name)
    return found


def _shown(example: Draft, answer: str) -> str:
    """An answered example, as it stands before the task."""
    return f"{example.instruction}\n\n{example.text}\n\n{example.question} {example.prefix} {answer}"


def _with_example(draft: Draft, shown: str, meta: dict[str, str]) -> Draft:
    instruction = f"{shown}\n\n{draft.instruction}" if shown else draft.instruction
    return Draft(
        instruction, draft.text, draft.question, draft.prefix, draft.references,
        draft.needles, draft.answers, meta,
    )  # fmt: skip


# common and frequent words

COMMON = 10


@dataclass(frozen=True)
class _Repeats:
    """How often common and other words stand in the list, and the same of the example."""

    common: int
    other: int
    example_words: int
    example_common: int
    example_other: int


REPEATS = {"official": _Repeats(30, 3, 40, 10, 3), "official, below 4096 tokens": _Repeats(6, 1, 20, 3, 1)}
TINY = _Repeats(3, 1, 0, 0, 0)  # ours, without an example, where the smaller official one does not fit (512 tokens)


def _cwe(task: str, options: SuiteOptions, streams: _Streams) -> Recipe:
    variant = "official" if options.length >= SMALL else "official, below 4096 tokens"
    least = COMMON + 2
    build = _word_lists(options, streams, variant, REPEATS[variant])
    if build(least).tokens(options.count) > room(options, NEW_TOKENS[task]):
        variant = "tiny, without example"
        build = _word_lists(options, streams, variant, TINY)
    return build, f"generated:{words.version()}", least, options.length // 20


def _word_lists(options: SuiteOptions, streams: _Streams, variant: str, repeats: _Repeats) -> Build:
    shuffled = _shuffled(words.pool(), streams("words"))
    more: list[str] = []

    def listed(chosen: Sequence[str], common: int, other: int, stream: str) -> tuple[str, list[str]]:
        entries = [*list(chosen[:COMMON]) * common, *list(chosen[COMMON:]) * other]
        streams(stream).shuffle(entries)
        return " ".join(f"{i}. {word}" for i, word in enumerate(entries, 1)), list(chosen[:COMMON])

    def draft(document: str, common: Sequence[str]) -> Draft:
        return Draft(
            instruction="The numbered list below repeats some words more often than others. Keep track of the most "
            "frequent ones.",
            text=document,
            question=f"Question: Which {COMMON} words are the most common ones in the list above?",
            prefix=f"Answer: The {COMMON} most common words in the list above are:",
            references=tuple(common),
            answers=[span for word in common for span in _entry(document, word)],
        )

    left = shuffled[repeats.example_words :]
    shown = ""
    if repeats.example_words:
        first = shuffled[: repeats.example_words]
        example, common = listed(first, repeats.example_common, repeats.example_other, "example")
        shown = _shown(draft(example, common), " ".join(f"{i}. {word}" for i, word in enumerate(common, 1)))

    def build(size: int) -> Draft:
        if size > len(left) and not more:
            more.extend(_shuffled(_more_words(options.data), streams("more words")))
        chosen = [*left, *more][:size] if size > len(left) else left[:size]
        return _with_example(
            draft(*listed(chosen, repeats.common, repeats.other, "order")), shown, {"variant": variant}
        )

    return build


def _entry(document: str, word: str) -> list[Span]:
    """Where a word first stands as an entry of the list."""
    at = f"{document} ".find(f". {word} ")
    return [(at + 2, at + 2 + len(word))] if at >= 0 else []


def _shuffled(pool: Sequence[str], rng: random.Random) -> list[str]:
    return rng.sample(pool, len(pool))


def _more_words(data: Path | None) -> list[str]:
    """What follows when the lists of wonderwords are used up: english_words.json, or words of the packaged texts."""
    known = set(words.pool())
    file = data and data / "english_words.json"
    if file and file.is_file():
        found = text.load_json(file)
        values = list(found.values()) if isinstance(found, dict) else []
        if not values or not all(isinstance(word, str) for word in values):
            raise RequestError(f"{file} must be an object of number -> word, in every field; give RULER's own file")
        return sorted({*values} - known)
    letters = set(string.ascii_lowercase)
    running = f"{text.packaged('expository')} {text.packaged('narrative')}".split()
    return sorted({word for word in running if len(word) > 3 and set(word) <= letters} - known)


def _fwe(task: str, options: SuiteOptions, streams: _Streams) -> Recipe:
    """count of rank k = int(N k^-2 / zeta(2)); rank 1 is the noise, ranks 2 to 4 are the answer."""
    rng = streams("vocabulary")
    vocabulary = _distinct(
        max(5, (options.length - NEW_TOKENS[task]) // 50), lambda: "".join(rng.choices(string.ascii_lowercase, k=6))
    )
    vocabulary[0] = "..."
    answer = tuple(vocabulary[1:4])

    def build(size: int) -> Draft:
        zeta = math.pi**2 / 6
        coded = [word for k, word in enumerate(vocabulary, 1) for _ in range(int(size / (k * k * zeta)))]
        streams("order").shuffle(coded)
        document = " ".join(coded)
        return Draft(
            instruction="The coded text below repeats some coded words more often than others. Find the three most "
            "frequent ones.",
            text=document,
            question="Question: Give no explanation and ignore the dots. Which three coded words are the most frequent "
            "ones in the text above?",
            prefix="Answer: The three most frequent coded words in the text above are:",
            references=answer,
            answers=[span for word in answer for span in within(document, word, [(0, len(document))])],
        )

    # from 60 words on, each of the four first counts is larger than the next
    return build, "generated:coded words", 60, options.length // 3
