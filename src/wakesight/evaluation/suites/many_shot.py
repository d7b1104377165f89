"""Label-mapping problems with lettered options, for contexts of many solved examples.

Three kinds in turn, after the three of the official task (dates, translation errors, seven tracked objects):
dates; seven tracked objects; and, as translation errors need data, a codebook whose labels only the examples
tell. Problems and wording are ours. Source of the form: SCBench table of tasks (BIG-bench Hard, about 150 shots).
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from dataclasses import dataclass

MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
PEOPLE = (
    "Asa", "Bea", "Cyd", "Dov", "Eli", "Fay", "Gil",
)  # fmt: skip
THINGS = (
    "the green hat", "the iron key", "the blue lamp", "the old map", "the silver spoon", "the red scarf",
    "the wooden flute", "the tin drum", "the white cup", "the torn book",
)  # fmt: skip
SYLLABLES = ("ba", "do", "fi", "gu", "ka", "lo", "mi", "nu", "pa", "ri", "so", "tu", "ve", "wo", "ze")
ASKED = 5  # problems of a context that are not solved
SHELVES = ("the north shelf", "the south shelf", "the east shelf", "the west shelf", "the top shelf", "the low shelf")


@dataclass(frozen=True)
class Problem:
    """options: in the order of their letters, from A. correct: the place of the right one."""

    text: str
    options: tuple[str, ...]
    correct: int

    @property
    def letter(self) -> str:
        return chr(ord("A") + self.correct)

    def ask(self) -> str:
        """The problem as a question, up to where the answer starts."""
        options = "\n".join(f"({chr(ord('A') + place)}) {option}" for place, option in enumerate(self.options))
        return f"{self.text}\nOptions:\n{options}\nAnswer:"

    def solved(self) -> str:
        """The problem with its answer, as an example."""
        return f"{self.ask()} ({self.letter})"


def kind(index: int) -> tuple[str, Callable[[random.Random, int], list[Problem]]]:
    """The kind of problem that item `index` is about: its name, and how to draw n of them.

    The last five can be answered from the first five and everything between, or from the problem itself.
    """
    return (("dates", _dates), ("tracking", _tracking), ("codebook", _codebook))[index % 3]


def _dates(rng: random.Random, n: int) -> list[Problem]:
    return [_date(rng) for _ in range(n)]


def _date(rng: random.Random) -> Problem:
    today = datetime.date(1950, 1, 1) + datetime.timedelta(days=rng.randrange(365 * 90))
    away = rng.choice([one for one in range(-60, 61) if abs(one) > 1])
    right = today + datetime.timedelta(days=away)
    options = [right]
    while len(options) < 6:
        other = right + datetime.timedelta(days=rng.choice((-365, -31, -30, -7, -2, -1, 1, 2, 7, 30, 31, 365)))
        if other not in options:
            options.append(other)
    rng.shuffle(options)
    text = (
        f"Today is {today.day} {MONTHS[today.month - 1]} {today.year}. Which date {'is' if away > 0 else 'was'} "
        f"{abs(away)} days {'ahead' if away > 0 else 'ago'}, written month/day/year?"
    )
    written = tuple(f"{one.month:02}/{one.day:02}/{one.year}" for one in options)
    return Problem(text, written, options.index(right))


def _tracking(rng: random.Random, n: int) -> list[Problem]:
    return [_track(rng) for _ in range(n)]


def _track(rng: random.Random) -> Problem:
    things = rng.sample(THINGS, len(PEOPLE))
    held = dict(zip(PEOPLE, things, strict=True))
    start = ", ".join(f"{person} has {thing}" for person, thing in held.items())
    swaps = []
    for _ in range(rng.randint(3, 7)):
        one, other = rng.sample(PEOPLE, 2)
        held[one], held[other] = held[other], held[one]
        swaps.append(f"{one} and {other} swap.")
    person = rng.choice(PEOPLE)
    options = sorted(things)
    text = f"At the start {start}. Then they trade. {' '.join(swaps)} What does {person} have now?"
    return Problem(text, tuple(options), options.index(held[person]))


def _codebook(rng: random.Random, n: int) -> list[Problem]:
    """Twenty invented words, each with a shelf of its own, again and again; the last five are the first five words."""
    invented: list[str] = []
    while len(invented) < 20:
        word = "".join(rng.choices(SYLLABLES, k=3))
        if word not in invented:
            invented.append(word)
    shelf = {word: rng.randrange(len(SHELVES)) for word in invented}
    words = list(invented)
    while len(words) < n - ASKED:
        words += rng.sample(invented, len(invented))
    problems = []
    for word in words[: n - ASKED] + rng.sample(invented[:ASKED], ASKED):
        order = rng.sample(range(len(SHELVES)), len(SHELVES))
        options = tuple(SHELVES[one] for one in order)
        problems.append(Problem(f"Where does the {word} belong?", options, order.index(shelf[word])))
    return problems
