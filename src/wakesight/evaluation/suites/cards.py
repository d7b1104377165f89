"""Fact cards of an invented world: short documents about people and the houses they founded.

The substitute for qa documents. Every name is invented, stands for one thing, and is no part of another name: all
have a stem of their own of three syllables, and an ending that no other ending contains. So an answer stands on the
card of its own fact and nowhere else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_TOWNS = ("ford", "stead", "haven", "wick", "bury", "mere")
_SURNAMES = ("sen", "quist", "well", "hart", "lund", "croft")
_FIRST = (
    "Adela", "Bruno", "Clara", "Dorian", "Edith", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Leon", "Mabel",
    "Nils", "Olive", "Pavel", "Runa", "Silas", "Thea", "Viktor",
)  # fmt: skip
_TRADES = ("glazier", "botanist", "bookbinder", "surveyor", "clockmaker", "cellist", "potter", "chemist", "weaver")
_HOUSES = ("Museum", "Library", "Theatre", "Observatory", "Academy", "Archive", "Institute", "Gallery")
_THINGS = ("maps", "bells", "letters", "looms", "lenses", "coins", "globes", "organ pipes", "seed jars")


@dataclass(frozen=True)
class Person:
    name: str
    born_in: str
    teacher: str
    prize: str
    work: str
    card: str

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """(question, answer) about this person."""
        return (
            (f"In which town was {self.name} born?", self.born_in),
            (f"Who taught {self.name}?", self.teacher),
            (f"Which prize was {self.name} awarded?", self.prize),
        )


@dataclass(frozen=True)
class House:
    name: str
    founder: Person
    town: str
    director: str
    treasure: str
    card: str

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        """(question, answer) about this house."""
        return (
            (f"Who is the director of the {self.name}?", self.director),
            (f"In which town does the {self.name} stand?", self.town),
            (f"Which object is the best known of the {self.name}?", self.treasure),
        )

    @property
    def founder_facts(self) -> tuple[tuple[str, str], ...]:
        """(question, answer) that need this card and the founder's."""
        return (
            (f"In which town was the founder of the {self.name} born?", self.founder.born_in),
            (f"Who taught the founder of the {self.name}?", self.founder.teacher),
            (f"Which prize was the founder of the {self.name} awarded?", self.founder.prize),
        )


class World:
    """Cards in a fixed order: a larger world of the same seed begins with the smaller one."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._stems: set[str] = set()

    def house(self) -> House:
        """A new house and its founder."""
        rng, founder = self._rng, self._person()
        kind, things = rng.choice(_HOUSES), rng.choice(_THINGS)
        name, town, director = f"{self._stem()} {kind}", self._town(), self._full_name()
        treasure = f"{self._stem()} {rng.choice(('Chalice', 'Tapestry', 'Codex', 'Mosaic'))}"
        year = rng.randint(1780, 1960)
        card = (
            f"{name}\n"
            + rng.choice(
                (
                    f"The {name} was founded in {year} by {founder.name}.",
                    f"It was {founder.name} who founded the {name} in {year}.",
                    f"Founded by {founder.name}, the {name} opened its doors in {year}.",
                )
            )
            + f" It stands in {town}, in a former {rng.choice(('mill', 'convent', 'station', 'granary'))} of "
            f"{rng.randint(2, 6)} floors, and keeps about {rng.randint(2, 90) * 100} {things}. "
            + rng.choice(
                (
                    f"Its best known object is the {treasure}, bought at an auction.",
                    f"Visitors come above all for the {treasure}, its best known object.",
                )
            )
            + f" The present director is {director}, who had worked there for {rng.randint(3, 25)} years before."
        )
        return House(name, founder, town, director, treasure, card)

    def _person(self) -> Person:
        rng, name = self._rng, self._full_name()
        born_in, teacher, trade = self._town(), self._full_name(), rng.choice(_TRADES)
        prize = f"{self._stem()} {rng.choice(('Medal', 'Prize', 'Ribbon'))}"
        work = f"{self._stem()} {rng.choice(('Notebooks', 'Cycle', 'Atlas', 'Panels'))}"
        year = rng.randint(1730, 1900)
        card = (
            f"{name}\n"
            + rng.choice(
                (
                    f"{name} was born in {born_in} in {year}, the youngest of {rng.randint(3, 9)} children.",
                    f"Born in {born_in} in {year}, {name} grew up above a shop.",
                )
            )
            + rng.choice(
                (
                    f" The family wanted a lawyer, but {teacher} taught the child the work of a {trade}.",
                    f" A {trade} by trade, {name.split()[-1]} was taught by {teacher}.",
                )
            )
            + f" Of many works, the {work} is the one most often shown. The {prize} was awarded in "
            f"{year + rng.randint(30, 60)}, after {rng.randint(2, 7)} earlier refusals."
        )
        return Person(name, born_in, teacher, prize, work, card)

    def _town(self) -> str:
        return self._stem() + self._rng.choice(_TOWNS)

    def _full_name(self) -> str:
        return f"{self._rng.choice(_FIRST)} {self._stem()}{self._rng.choice(_SURNAMES)}"

    def _stem(self) -> str:
        while True:
            stem = "".join(self._rng.choice(_CONSONANTS) + self._rng.choice(_VOWELS) for _ in range(3))
            if stem not in self._stems:
                self._stems.add(stem)
                return stem.capitalize()
