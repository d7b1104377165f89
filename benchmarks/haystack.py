"""Running English from Python's own documentation (pydoc_data, in every Python), and needles to hide in it."""

from __future__ import annotations

import pydoc_data.topics
import random
import re
from dataclasses import dataclass

KEYS = (
    "amber-falcon", "quiet-meadow", "copper-anchor", "velvet-harbor", "silver-orchard", "hollow-bridge",
    "crimson-kettle", "gentle-glacier", "wooden-compass", "golden-thimble", "misty-canyon", "brave-lantern",
)  # fmt: skip


@dataclass(frozen=True)
class Needle:
    """One number for one key, and the depth (share of the text before it)."""

    key: str
    number: str
    depth: float

    @property
    def sentence(self) -> str:
        return f"The telephone number of the {self.key} hotel is {self.number}."

    @property
    def question(self) -> str:
        return f"What is the telephone number of the {self.key} hotel?"


def prose(seed: int) -> list[str]:
    """Sentences of documentation prose (no code, no tables), from a place that depends on `seed`."""
    paragraphs = [
        " ".join(block.split())
        for name in sorted(pydoc_data.topics.topics)
        for block in pydoc_data.topics.topics[name].split("\n\n")
        if re.match(r"[A-Z]", block) and "::=" not in block and ">>>" not in block and len(block) > 200
    ]
    sentences = [s for p in paragraphs for s in re.split(r"(?<=[.!?]) (?=[A-Z])", p) if 40 < len(s) < 400]
    start = random.Random(seed).randrange(len(sentences))
    return sentences[start:] + sentences[:start]


def document(encode, needle: Needle, tokens: int, seed: int) -> str:
    """About `tokens` tokens of prose with the needle after the sentence nearest its depth."""
    chosen: list[str] = []
    lengths: list[int] = []
    for sentence in prose(seed):
        if sum(lengths) >= tokens:
            break
        chosen.append(sentence)
        lengths.append(len(encode(" " + sentence)))
    target = needle.depth * sum(lengths)
    index = min(range(len(chosen)), key=lambda i: abs(sum(lengths[:i]) - target))
    return " ".join([*chosen[:index], needle.sentence, *chosen[index:]])


def twelve(seed: int = 0) -> list[tuple[Needle, int]]:
    """Twelve needles with their context lengths: depths 0.1 to 0.9, 2,000 to 4,000 tokens."""
    numbers = random.Random(seed)
    return [
        (
            Needle(key, str(numbers.randrange(1_000_000, 10_000_000)), 0.1 + 0.8 * i / 11),
            2000 + round(2000 * (i * 5 % 12) / 11),
        )
        for i, key in enumerate(KEYS)
    ]
