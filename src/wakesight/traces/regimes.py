"""What is recorded: a regime and its settings -> scripts, each a prompt with a needle and the question about it.

    niah       running text with one key and its value at a given depth, asked for at the end
    recall     a conversation in which facts are told, one per turn; one of them is asked for later
    reasoning  a problem to think about; the needle is its statement

Texts come from a `Language`: English here; a model that knows other words only brings its own.
Source: WakeKV, run matrix and needle spans of its regimes; all texts are ours, running text as in data/NOTICE.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Protocol

from wakesight.engines.base import Engine
from wakesight.errors import RequestError
from wakesight.registry import did_you_mean

DEPTHS = (0.25, 0.5, 0.75)
SEEDS = (0, 1, 2)
NEW_TOKENS = {"niah": 128, "recall": 128, "reasoning": 2048}  # the longest answers
LENGTH = 1024
FACTS = 4  # told in a conversation


@dataclass(frozen=True)
class Told:
    """A fact and how it is asked for. reply: how the reply begins, given to the model; "" for nothing."""

    sentence: str
    question: str
    reply: str
    answer: str


class Language(Protocol):
    """The texts of a regime, in words that a model knows."""

    name: ClassVar[str]
    example: ClassVar[str]  # a text that only a model of this language can encode
    between: ClassVar[str]  # stands between paragraphs

    def paragraphs(self, rng: random.Random) -> Iterator[str]:
        """Running text without end; none of it is about a fact."""
        ...

    def fact(self, rng: random.Random) -> Told:
        """A key and its value."""
        ...

    def facts(self, rng: random.Random, count: int) -> list[Told]:
        """What a user might tell; no two questions are alike."""
        ...

    def turn(self, told: str, reply: str) -> str:
        """One turn of a conversation; `told` occurs in it once, as it is."""
        ...

    def problem(self, rng: random.Random, index: int) -> Told:
        """A problem: its statement as `sentence`, and the request to solve it."""
        ...


@dataclass(frozen=True)
class Settings:
    """length: about how many tokens a prompt of niah and recall has. depths: where the needle of niah stands, from 0
    to 1. seeds: one script each (of niah: for every depth). chat: whether the chat template stands around.

    Raises RequestError for what cannot be.
    """

    regime: str = "niah"
    length: int = LENGTH
    depths: tuple[float, ...] = DEPTHS
    seeds: tuple[int, ...] = SEEDS
    chat: bool = True

    def __post_init__(self) -> None:
        if self.regime not in MAKERS:
            known = ", ".join(MAKERS)
            raise RequestError(f"unknown regime {self.regime!r}{did_you_mean(self.regime, MAKERS)}; regimes: {known}")
        if self.length < 1:
            raise RequestError(f"--length {self.length} must be at least 1; {LENGTH} is the default")
        if not self.depths or any(not 0 <= depth <= 1 for depth in self.depths):
            raise RequestError(
                f"--depths {_listed(self.depths)} must be numbers from 0 to 1, for example 0.25,0.5,0.75"
            )
        if not self.seeds or any(seed < 0 for seed in self.seeds):
            raise RequestError(f"--seeds {_listed(self.seeds)} must be whole numbers of at least 0, for example 0,1,2")
        for name, values in (("--depths", self.depths), ("--seeds", self.seeds)):
            if len(set(values)) < len(values):
                raise RequestError(f"{name} {_listed(values)} names one twice; give each once")


@dataclass(frozen=True)
class Script:
    """One run to record. needles: [start, end) characters of the context. reply: how the reply begins."""

    name: str
    regime: str
    context: str
    needles: tuple[tuple[int, int], ...]
    question: str
    reply: str
    answer: str
    seed: int
    language: str
    depth: float | None = None


@dataclass(frozen=True)
class Prompt:
    """Token ids as the model reads them, and the needles as [start, end) positions in them."""

    tokens: tuple[int, ...]
    needles: tuple[tuple[int, int], ...]


def scripts(settings: Settings, engine: Engine, languages: Sequence[Language]) -> list[Script]:
    """Every script of a regime, in the first of the languages that the model can read.

    Raises RequestError if it reads none, a length has no room for the needle, or a package is missing.
    """
    language = next((each for each in languages if _reads(engine, each)), None)
    if language is None:
        names = " or ".join(each.name for each in languages)
        raise RequestError(f"{engine.name} cannot read {names}; take another model with --model")
    return MAKERS[settings.regime](settings, engine, language)


def prompt_of(engine: Engine, script: Script, chat: bool = True) -> Prompt:
    """The ids: template, context, question, end of the turn, start of the reply.

    Needle positions follow the tokens that touch the needle's characters.
    """
    frame = engine.frame(None, chat)
    context = engine.encode(script.context)
    question = [*engine.encode(frame.separator + script.question), *frame.tail]
    reply = engine.encode(script.reply) if script.reply else []
    first = len(frame.head)
    spans = [_tokens(engine, script.context, context, span) for span in script.needles]
    needles = tuple((first + start, first + end) for start, end in spans)
    return Prompt((*frame.head, *context, *question, *reply), needles)


def _tokens(engine: Engine, text: str, ids: Sequence[int], span: tuple[int, int]) -> tuple[int, int]:
    """[start, end) of the ids of `text` that hold some of its characters start .. end - 1; no white space before."""
    start, _ = _common(engine.encode(text[: span[0]]), ids)
    end, whole = _common(engine.encode(text[: span[1]]), ids)
    end = end if whole else end + 1  # a token that goes on behind the needle holds its last characters
    while start + 1 < end and not engine.decode(ids[start : start + 1]).strip():
        start += 1
    return start, end


def _common(part: Sequence[int], ids: Sequence[int]) -> tuple[int, bool]:
    """How many ids are alike from the front, and whether that is the whole part."""
    alike = next((at for at, (a, b) in enumerate(zip(part, ids, strict=False)) if a != b), min(len(part), len(ids)))
    return alike, alike == len(part)


def _reads(engine: Engine, language: Language) -> bool:
    try:
        return bool(engine.encode(language.example))
    except RequestError:
        return False


def _niah(settings: Settings, engine: Engine, language: Language) -> list[Script]:
    made = []
    for seed in settings.seeds:
        rng = random.Random(f"niah/{seed}")
        told = language.fact(rng)
        room = (
            settings.length
            - _tokens_around(engine, told, settings.chat)
            - len(engine.encode(language.between + told.sentence))
        )
        filler, sizes = _filler(engine, language, rng, room)
        if not filler:
            raise RequestError(f"--length {settings.length} has no room for text around the needle; raise it")
        for depth in settings.depths:
            before = [0, *accumulate(sizes)]
            cut = min(range(len(before)), key=lambda at: abs(before[at] - depth * before[-1]))
            context, needle = _joined([*filler[:cut], told.sentence, *filler[cut:]], cut, language.between)
            name = f"niah-{settings.length}-d{depth:g}-s{seed}"
            made.append(
                Script(
                    name, "niah", context, (needle,), told.question, told.reply, told.answer, seed, language.name, depth
                )
            )
    return made


def _recall(settings: Settings, engine: Engine, language: Language) -> list[Script]:
    made = []
    for seed in settings.seeds:
        rng = random.Random(f"recall/{seed}")
        told = language.facts(rng, FACTS)
        asked = rng.choice(told)
        room = settings.length - _tokens_around(engine, asked, settings.chat)
        room -= sum(len(engine.encode(language.turn(each.sentence, ""))) for each in told)
        filler, _ = _filler(engine, language, rng, room)
        if len(filler) < FACTS:
            raise RequestError(f"--length {settings.length} has no room for {FACTS} turns; raise it")
        context, needle = "", (0, 0)
        for turn, each in enumerate(told):  # replies share the running text evenly
            reply = language.between.join(filler[turn * len(filler) // FACTS : (turn + 1) * len(filler) // FACTS])
            spoken = language.turn(each.sentence, reply)
            if each is asked:
                start = len(context) + spoken.index(each.sentence)
                needle = start, start + len(each.sentence)
            context += spoken
        name = f"recall-{settings.length}-s{seed}"
        made.append(
            Script(name, "recall", context, (needle,), asked.question, asked.reply, asked.answer, seed, language.name)
        )
    return made


def _reasoning(settings: Settings, engine: Engine, language: Language) -> list[Script]:
    made = []
    for seed in settings.seeds:
        told = language.problem(random.Random(f"reasoning/{seed}"), seed)
        name, whole = f"reasoning-s{seed}", ((0, len(told.sentence)),)
        made.append(
            Script(name, "reasoning", told.sentence, whole, told.question, told.reply, told.answer, seed, language.name)
        )
    return made


Maker = Callable[[Settings, Engine, Language], list[Script]]
MAKERS: dict[str, Maker] = {"niah": _niah, "recall": _recall, "reasoning": _reasoning}


def _tokens_around(engine: Engine, told: Told, chat: bool) -> int:
    """Tokens of template, question and given reply."""
    frame = engine.frame(None, chat)
    return len(frame.head) + len(frame.tail) + len(engine.encode(f"{frame.separator}{told.question}{told.reply}"))


def _filler(engine: Engine, language: Language, rng: random.Random, room: int) -> tuple[list[str], list[int]]:
    """Paragraphs of at most `room` tokens together, and the tokens of each with what stands behind it.

    The first paragraph that does not fit ends the text; one longer than a quarter of the room is passed over, so that
    a needle can stand near any depth.
    """
    filler: list[str] = []
    sizes: list[int] = []
    passed = 0
    for paragraph in language.paragraphs(rng):
        size = len(engine.encode(paragraph + language.between))
        if size > room // 4 and passed < 64:
            passed += 1
            continue
        if sum(sizes) + size > room:
            return filler, sizes
        filler.append(paragraph)
        sizes.append(size)
    return filler, sizes


def _joined(paragraphs: Sequence[str], at: int, between: str) -> tuple[str, tuple[int, int]]:
    """All of them as one text, and [start, end) of paragraph `at`."""
    start = sum(len(each) + len(between) for each in paragraphs[:at])
    return between.join(paragraphs), (start, start + len(paragraphs[at]))


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)
