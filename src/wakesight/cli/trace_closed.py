"""The regimes' texts in the closed language of the bundled hybrid, made by the closed suite's generators.

It stands here because the recorder comes before the suites: a regime is given its language from outside.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from wakesight.evaluation.suites.closed import tasks
from wakesight.traces.regimes import Told

ROOM = 256  # words that the needles are taken from; the suite decides how many there are
PROBLEM = 160  # words of a problem, filler included


@dataclass(frozen=True)
class Closed:
    """For models that know these 512 words and no other."""

    name: ClassVar[str] = "the closed language"
    example: ClassVar[str] = "ask number for amber otter ?"
    between: ClassVar[str] = " "

    def paragraphs(self, rng: random.Random) -> Iterator[str]:
        filler = tasks.Filler(rng)
        while True:
            yield " ".join(filler.sentence())

    def fact(self, rng: random.Random) -> Told:
        """The needle of closed_single."""
        return _told(tasks.make("closed_single", rng, ROOM))[0]

    def facts(self, rng: random.Random, count: int) -> list[Told]:
        """Needles of closed_multikey, which has at least four."""
        return _told(tasks.make("closed_multikey", rng, ROOM))[:count]

    def turn(self, told: str, reply: str) -> str:
        return f"{told} {reply} ".replace("  ", " ")

    def problem(self, rng: random.Random, index: int) -> Told:
        """closed_tracking: chains of variables. The statement is the whole context, as for other problems."""
        item = tasks.make("closed_tracking", rng, PROBLEM)
        asked = item.asked[0]
        return Told(" ".join(item.words), " ".join(asked.question), " ".join(asked.prefix), " ".join(asked.answer))


def _told(item: tasks.Item) -> list[Told]:
    """Each question with the needle sentence that answers it: the one that holds the question's key."""
    sentences = [item.words[slice(*span)] for span in item.needles]
    made = []
    for asked in item.asked:
        key = asked.prefix[:-1]  # the prefix is the key and "is"
        (sentence,) = (words for words in sentences if words[2 : 2 + len(key)] == key)
        made.append(Told(" ".join(sentence), " ".join(asked.question), " ".join(asked.prefix), " ".join(asked.answer)))
    return made
