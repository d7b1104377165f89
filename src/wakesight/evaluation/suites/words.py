"""Word lists: those of `wonderwords` that RULER uses, and small ones of our own.

RULER reads wonderwords' nounlist.txt, adjectivelist.txt and verblist.txt whole, in file order
(NVIDIA/RULER scripts/data/synthetic/niah.py and common_words_extraction.py); 3.0.1 has 6,782, 912 and 1,042 lines.
Other versions of wonderwords have other lists, so `version()` goes into a context's source.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import random
import uuid

from wakesight.errors import RequestError

OWN_ADJECTIVES = (
    "amber", "ancient", "bitter", "brisk", "bronze", "calm", "cobalt", "crooked", "dusty", "eager", "faded", "gentle",
    "hollow", "humble", "ivory", "jagged", "lively", "marble", "misty", "narrow", "patient", "quiet", "rustic",
    "silent", "sturdy", "sunlit", "tangled", "velvet", "weathered", "wistful",
)  # fmt: skip
OWN_NOUNS = (
    "anchor", "badger", "basin", "beacon", "canyon", "cellar", "compass", "cradle", "falcon", "ferry", "garnet",
    "glacier", "harbor", "heron", "kettle", "lantern", "ledger", "meadow", "orchard", "otter", "pebble", "quarry",
    "ribbon", "saddle", "sparrow", "summit", "thimble", "turbine", "walnut", "willow",
)  # fmt: skip


@functools.cache
def wonderwords(name: str) -> tuple[str, ...]:
    """The lines of a list: "noun", "adjective" or "verb". Raises RequestError if wonderwords is not installed."""
    try:
        lines = importlib.resources.files("wonderwords.assets").joinpath(f"{name}list.txt").read_text("utf-8")
    except (ModuleNotFoundError, FileNotFoundError):
        raise RequestError(
            "this suite needs the word lists of the package wonderwords; pip install 'wakesight[eval]'"
        ) from None
    return tuple(line.strip() for line in lines.splitlines() if line.strip())


def version() -> str:
    """For a context's source; asked only after a list was read."""
    return f"wonderwords-{importlib.metadata.version('wonderwords')}"


@functools.cache
def pool() -> tuple[str, ...]:
    """Nouns, adjectives and verbs, each word once, sorted: where cwe draws from."""
    return tuple(sorted({*wonderwords("noun"), *wonderwords("adjective"), *wonderwords("verb")}))


def key(rng: random.Random) -> str:
    """adjective-noun from wonderwords: the key of a RULER needle."""
    return f"{rng.choice(wonderwords('adjective'))}-{rng.choice(wonderwords('noun'))}"


def own_key(rng: random.Random) -> str:
    """adjective noun from our own lists."""
    return f"{rng.choice(OWN_ADJECTIVES)} {rng.choice(OWN_NOUNS)}"


def number(rng: random.Random, digits: int = 7) -> str:
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def uuid4(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
