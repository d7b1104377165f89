"""The regimes' texts in English: the packaged running text, facts of our own, reasoning-gym's problems."""

from __future__ import annotations

import bz2
import functools
import importlib
import importlib.resources
import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from wakesight.errors import RequestError
from wakesight.traces.regimes import Told

_ADJECTIVES = ("amber", "brisk", "cobalt", "dusty", "hollow", "ivory", "lively", "narrow", "rustic", "silent")
_NOUNS = ("anchor", "beacon", "canyon", "falcon", "garnet", "lantern", "meadow", "orchard", "pebble", "turbine")
# (what is told, what is asked, whether the value is a name)
_TOLD = (
    ("My locker at the station has the number {}.", "Which number does my locker have?", False),
    ("The cat of my neighbours is called {}.", "What is the cat of my neighbours called?", True),
    ("My membership card ends in {}.", "In what does my membership card end?", False),
    ("I grew up in a small place called {}.", "How is the place called in which I grew up?", True),
    ("The plumber will come with van {}.", "With which van will the plumber come?", False),
    ("My daughter named her kite {}.", "How did my daughter name her kite?", True),
)
# of the kinds that the reasoning suite asks, those with the longest ways to an answer
PROBLEMS = (
    "gsm_symbolic", "chain_sum", "knights_knaves", "simple_equations", "number_sequence", "calendar_arithmetic",
    "time_intervals", "zebra_puzzles",
)  # fmt: skip
SOLVE = "Solve this problem. Think step by step, and put the final answer into \\boxed{}."


@dataclass(frozen=True)
class English:
    """For models of ordinary text."""

    name: ClassVar[str] = "English"
    example: ClassVar[str] = "The amber lantern hung in the orchard."
    between: ClassVar[str] = "\n\n"

    def paragraphs(self, rng: random.Random) -> Iterator[str]:
        """The text's paragraphs in their order from a random one on, from the front again at its end."""
        lines = _lines()
        start = rng.randrange(len(lines))
        while True:
            yield from lines[start:]
            yield from lines[:start]

    def fact(self, rng: random.Random) -> Told:
        """One key, and a UUID as its value. Source: WakeKV, needle span of NIAH; the sentence is ours."""
        key = f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}"
        value = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        sentence = f"The value stored for the key {key} is {value}."
        question = f"What is the value stored for the key {key}? Reply with the value alone."
        return Told(sentence, question, f"The value stored for the key {key} is", value)

    def facts(self, rng: random.Random, count: int) -> list[Told]:
        made = []
        for sentence, question, named in rng.sample(_TOLD, count):
            value = _name(rng) if named else str(rng.randrange(1000, 10000))
            made.append(Told(sentence.format(value), f"{question} Reply with the answer alone.", "", value))
        return made

    def turn(self, told: str, reply: str) -> str:
        return f"User: {told}\n\nAssistant: {reply}\n\n"

    def problem(self, rng: random.Random, index: int) -> Told:
        """Problem `index` of one endless row: the kinds in turn, each from its own generator.

        Raises RequestError if reasoning-gym is not installed.
        """
        try:
            gym: Any = importlib.import_module("reasoning_gym")
        except ImportError:
            raise RequestError(
                "the regime reasoning needs the package reasoning-gym; type: pip install 'wakesight[eval]'"
            ) from None
        kind = PROBLEMS[index % len(PROBLEMS)]
        item = gym.create_dataset(kind, size=1, seed=index // len(PROBLEMS))[0]
        return Told(item["question"], SOLVE, "", str(item["answer"]))


@functools.cache
def _lines() -> tuple[str, ...]:
    """Paragraphs of the packaged texts, in their order."""
    folder = importlib.resources.files("wakesight").joinpath("data")
    texts = [bz2.decompress(folder.joinpath(f"{kind}.txt.bz2").read_bytes()) for kind in ("expository", "narrative")]
    return tuple(line for text in texts for line in text.decode().splitlines() if line.strip())


def _name(rng: random.Random) -> str:
    return "".join(rng.choice("bdklmnrtv") + rng.choice("aeiou") for _ in range(3)).capitalize()
