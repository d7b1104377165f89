"""Facts about people who do not exist, each with its sentence, its question and its answer.

Names are drawn once per context, so a question has one answer, and it stands in the text word for word. No
model can have read it elsewhere. Sentences and lists are ours; chinese.py has the same in Chinese.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """kind: facts of one kind have answers that could be mistaken for each other."""

    kind: str
    sentence: str
    question: str
    answer: str


@dataclass(frozen=True)
class Kind:
    """Templates with {name} and {answer}; answers: what to draw from, none for a year or a sum of four digits."""

    sentence: str
    question: str
    answers: tuple[str, ...] = ()


FIRST = (
    "Alma", "Bertil", "Cora", "Dagny", "Edvin", "Frida", "Gustav", "Hedda", "Ivar", "Judit", "Knut", "Linnea",
    "Marit", "Nils", "Olga", "Petra", "Ragnar", "Signe", "Torsten", "Ulla", "Viggo", "Wilma", "Yngve", "Astrid",
    "Birger", "Disa", "Elof", "Gerda", "Holger", "Inga",
)  # fmt: skip
LAST = (
    "Ambrosius", "Brandvik", "Colling", "Dunmore", "Eklund", "Fosgate", "Grevling", "Hallam", "Isbister", "Jarrow",
    "Kestrel", "Lindqvist", "Morwen", "Northcote", "Ormsby", "Pellworm", "Quayle", "Rosvall", "Sundby", "Tarrant",
    "Underhill", "Vesterby", "Winslade", "Yarwood", "Zetterberg",
)  # fmt: skip
TOWNS = (
    "Eldmere", "Hartsund", "Brinkholm", "Kilcarra", "Oxney", "Saltby", "Thornholm", "Wexcombe", "Marrowdale", "Finsby",
    "Greyhythe", "Askvik",
)  # fmt: skip
TRADES = (
    "cooper", "glazier", "lamplighter", "bookbinder", "tanner", "clockmaker", "ropemaker", "surveyor", "beekeeper",
    "potter", "ferryman", "weaver",
)  # fmt: skip
DOGS = (
    "Biscuit", "Cinder", "Fennel", "Juniper", "Mosquito", "Pepper", "Rascal", "Sorrel", "Thistle", "Velvet", "Whisper",
    "Zephyr",
)  # fmt: skip
OBJECTS = (
    "a brass telescope", "a chest of maps", "a broken cello", "a pair of skates", "a stuffed owl", "a jar of buttons",
    "a sealed letter", "a ship in a bottle", "a copper kettle", "a box of fossils", "a red umbrella", "a chess set",
)  # fmt: skip
KINDS = {
    "town": Kind("{name} was born in the village of {answer}.", "In which village was {name} born?", TOWNS),
    "trade": Kind("For most of a long life {name} worked as a {answer}.", "As what did {name} work?", TRADES),
    "dog": Kind(
        "The dog that followed {name} everywhere was called {answer}.", "What was the dog of {name} called?", DOGS
    ),
    "object": Kind(
        "Under the bed of {name} there was always {answer}.", "What was always under the bed of {name}?", OBJECTS
    ),
    "year": Kind("{name} crossed the strait in the year {answer}.", "In which year did {name} cross the strait?"),
    "sum": Kind(
        "The debt of {name} to the miller came to {answer} crowns.", "How many crowns did {name} owe the miller?"
    ),
}


def english(rng: random.Random, n: int) -> list[Fact]:
    """n facts about n people, the kinds in turn: facts i and i + 6 are of one kind. Answers of a kind differ."""
    return drawn(rng, n, KINDS, [f"{first} {last}" for first in FIRST for last in LAST])


def drawn(rng: random.Random, n: int, kinds: Mapping[str, Kind], names: Sequence[str]) -> list[Fact]:
    """n facts about n of the names, the kinds in turn."""
    share = -(-n // len(kinds))
    answers = {
        name: rng.sample(kind.answers, share)
        if kind.answers
        else [str(one) for one in rng.sample(range(1701, 1990), share)]
        for name, kind in kinds.items()
    }
    order = list(kinds)
    found = []
    for place, name in enumerate(rng.sample(names, n)):
        kind = order[place % len(order)]
        answer = answers[kind][place // len(order)]
        found.append(
            Fact(
                kind,
                kinds[kind].sentence.format(name=name, answer=answer),
                kinds[kind].question.format(name=name),
                answer,
            )
        )
    return found
