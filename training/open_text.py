"""Nine kinds of open text as documents to label: python -m training.open_text out/open-text --each 60

One .jsonl file per kind, which is its corpus: the Bible, novels, a long FAQ, a handbook, manual pages, Python's
documentation and its source code, questions on invented facts, and exercises in mathematics. SOURCES.json says for
each where it is from. The documents are as long as the paper's, 750 to 1,250 tokens of smollm2, by an estimate.

The texts are taken from Debian packages, which apt-get fetches without root into FOLDER-packages, from the Python
that runs this, and from generators. A package that lies there already is not fetched again. The same packages and
the same seed give the same bytes. The running text of the needle suites is left out: it is measured on.

Source of the kinds: GateSight, section on data, has nine subsets of a pretraining sample; these stand in for them.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib
import importlib.metadata
import json
import platform
import random
import re
import struct
import subprocess
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.make_essay import plain, r_strings

from training import stripping
from wakesight.errors import RequestError, WakesightError
from wakesight.evaluation.suites.cards import World
from wakesight.evaluation.suites.reasoning import GYM

TOKENS = (800, 1150)  # by `estimate`, which is some percent off: the paper's range is 750 to 1,250
# tokens of smollm2 per unit of `estimate`, measured on 60 documents of each kind
DENSITY = {
    "bible": 1.05, "novels": 1.03, "faq": 1.0, "handbook": 1.07, "manuals": 1.14, "python_docs": 1.07, "code": 1.06,
    "questions": 1.31, "exercises": 1.09,
}  # fmt: skip
NOVELS = ("emma", "mansfieldpark", "northangerabbey", "prideprejudice", "sensesensibility")  # persuasion is measured on
DOCS = ("faq", "howto", "library", "reference", "tutorial")
NOT_CODE = ("test", "tests", "idlelib", "encodings", "pydoc_data", "turtledemo", "site-packages", "lib2to3")
LONGEST_PROBLEM = 1500  # characters: a document is to hold several


@dataclass(frozen=True)
class Section:
    """A chapter, page or file: no document reaches from one into another."""

    name: str
    paragraphs: list[str]


@dataclass(frozen=True)
class Source:
    """Where a kind is from. name, version, licence: as SOURCES.json has them; sha256: of the package file, if one."""

    name: str
    version: str
    licence: str
    sha256: str | None = None


@dataclass(frozen=True)
class Packaged:
    """A kind cut from Debian packages: sections(root) reads what they hold below `root`."""

    packages: tuple[str, ...]
    licence: str
    sections: Callable[[Path], Iterator[Section]]
    joint: str = "\n\n"


@dataclass(frozen=True)
class Made:
    """A kind that a generator writes: text(rng, limits) is one document, of a length that `estimate` gives."""

    source: Callable[[], Source]
    text: Callable[[random.Random, tuple[int, int]], str]


# --- cutting ---


def estimate(text: str) -> int:
    """A text's words, digits and signs, longer words as more than one: about as many as smollm2's tokens."""
    return sum(
        -(-len(found) // 9) if found[0].isalpha() else 1 for found in re.findall(r"[^\W\d_]+|\d|[^\w\s]+|_|\n\s*", text)
    )


def pieces(paragraphs: Iterable[str], joint: str, limits: tuple[int, int], rng: random.Random) -> Iterator[str]:
    """Stretches of whole paragraphs that follow on each other, of lengths drawn between `limits`, by `estimate`.

    None begins with an indented paragraph, which would lack its opening. What is too short at the end, or before a
    paragraph that is too long, is left out.
    """
    least, most = limits
    held: list[str] = []
    length, target = 0, rng.randint(least, most)
    for paragraph in paragraphs:
        added = estimate(paragraph + joint)
        if held and length + added > most:
            if least <= length <= most:
                yield joint.join(held)
            held, length, target = [], 0, rng.randint(least, most)
        if held or not paragraph[0].isspace():
            held.append(paragraph)
            length += added
        if target <= length <= most:
            yield joint.join(held)
            held, length, target = [], 0, rng.randint(least, most)
    if least <= length <= most:
        yield joint.join(held)


def spread(count: int, each: int, rng: random.Random) -> list[int]:
    """`each` different places among `count`, one drawn from each of as many equal parts. Needs count >= each."""
    edges = [index * count // each for index in range(each + 1)]
    return [rng.randrange(start, end) for start, end in pairwise(edges)]


# --- packages ---


def fetch(name: str, cache: Path) -> Path:
    """The .deb file of a package in `cache`, downloaded if it is not there.

    Raises RequestError if apt-get cannot fetch it, or `cache` holds several versions.
    """
    cache.mkdir(parents=True, exist_ok=True)
    by_hand = f"apt-get download {name}"
    if not list(cache.glob(f"{name}_*.deb")):
        try:
            done = subprocess.run(by_hand.split(), cwd=cache, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise RequestError(
                f"the package {name} cannot be fetched, as there is no apt-get; on a Debian machine type: {by_hand}, "
                f"and put the file into {cache}"
            ) from None
        if done.returncode:
            reason = " ".join((done.stderr.strip() or "no reason given").splitlines()[-1].split())
            raise RequestError(
                f"the package {name} cannot be fetched ({reason}); type: apt-get update, as root, and then run this "
                f"again, or put what {by_hand} gives into {cache}"
            )
    found = sorted(cache.glob(f"{name}_*.deb"))
    if len(found) != 1:
        raise RequestError(f"{cache} holds {len(found)} files of the package {name}; leave the one to use")
    return found[0]


def packaged(kind: str, what: Packaged, cache: Path, scratch: Path) -> tuple[list[Source], list[Section]]:
    """The sources and sections of a kind. Raises RequestError for a package that cannot be had, opened or read."""
    sources = []
    for name in what.packages:
        deb = fetch(name, cache)
        sources.append(
            Source(name, _dpkg("-f", deb, "Version"), what.licence, hashlib.sha256(deb.read_bytes()).hexdigest())
        )
        _dpkg("-x", deb, str(scratch / kind))
    try:
        sections = list(what.sections(scratch / kind))
    except WakesightError:
        raise
    # r_strings ends the program for what it does not know
    except (OSError, ValueError, LookupError, EOFError, struct.error, zlib.error, SystemExit) as error:
        versions = ", ".join(f"{source.name} {source.version}" for source in sources)
        raise RequestError(f"{versions} is not laid out as this script expects ({error!r}); try Debian 12's") from None
    return sources, sections


def _dpkg(action: str, deb: Path, *rest: str) -> str:
    try:
        done = subprocess.run(["dpkg-deb", action, str(deb), *rest], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise RequestError(f"{deb.name} cannot be opened without dpkg-deb; run this on a Debian machine") from None
    except subprocess.CalledProcessError as error:
        raise RequestError(f"{deb} cannot be opened ({error.stderr.strip()}); delete it, and run this again") from None
    return done.stdout.strip()


# --- what the packages hold ---


def _bible(root: Path) -> Iterator[Section]:
    for book, verses in stripping.bible((root / "usr/lib/bible.data").read_bytes()):
        yield Section(book, verses)


def _novels(root: Path) -> Iterator[Section]:
    for name in NOVELS:
        lines = r_strings(root / "usr/lib/R/site-library/janeaustenr/data", name)
        blocks = [plain(block.replace("_", "")) for block in "\n".join(map(str.rstrip, lines)).split("\n\n")]
        yield Section(name, list(_chapters(blocks)))


def _chapters(blocks: list[str]) -> Iterator[str]:
    """A novel's paragraphs from its first chapter on, without the headings."""
    heading = re.compile(r"(chapter|volume) [\divxlc]+\b.{0,20}|finis|the end", re.IGNORECASE)
    starts = [place for place, block in enumerate(blocks) if heading.fullmatch(block)]
    for block in blocks[starts[0] + 1 :]:
        if block and not heading.fullmatch(block):
            yield block


def _pages(folder: str, pattern: str) -> Callable[[Path], Iterator[Section]]:
    def sections(root: Path) -> Iterator[Section]:
        for file in _files(root / folder, pattern):
            yield Section(file.name, stripping.html(file.read_text("utf-8")))

    return sections


def _python_docs(root: Path) -> Iterator[Section]:
    for part in DOCS:
        yield from _pages(f"usr/share/doc/python3.11/html/{part}", "*.html")(root)


def _manual(root: Path) -> Iterator[Section]:
    for file in _files(root / "usr/share/man", "man*/*.gz"):
        yield Section(file.name, stripping.manual(gzip.decompress(file.read_bytes()).decode("utf-8", "replace")))


def _code(root: Path) -> Iterator[Section]:
    for file in _files(root, "**/*.py"):
        if not set(file.relative_to(root).parts[:-1]) & set(NOT_CODE):
            yield Section(file.name, stripping.code(file.read_text("utf-8", "replace")))


def _files(folder: Path, pattern: str) -> list[Path]:
    found = sorted(path for path in folder.glob(pattern) if path.is_file() and not path.is_symlink())
    if not found:
        raise FileNotFoundError(f"no {pattern} in {folder.name}")
    return found


# --- what is made ---


def questions(rng: random.Random, limits: tuple[int, int]) -> str:
    """Cards of invented people and houses with questions on them: after each pair of cards, or all at the end."""
    while True:
        text = _cards(rng, rng.randint(*limits))
        if limits[0] <= estimate(text) <= limits[1]:
            return text


def _cards(rng: random.Random, target: int) -> str:
    """At least `target` long: the last pair of cards may lead past it."""
    world, at_end = World(rng), rng.random() < 0.5
    cards: list[str] = []
    asked: list[str] = []
    while estimate("\n\n".join(cards + asked)) < target:
        house = world.house()
        facts = rng.sample(house.facts + house.founder.facts + house.founder_facts, rng.randint(1, 6))
        new = [f"Question: {question}\nAnswer: {answer}" for question, answer in facts]
        cards += rng.sample([house.card, house.founder.card], 2)
        if at_end:
            asked += new
        else:
            cards += new
    rng.shuffle(asked)
    return "\n\n".join(cards + asked)


def exercises(rng: random.Random, limits: tuple[int, int]) -> str:
    """Problems of four of reasoning-gym's generators in turn, each with its answer.

    Raises RequestError if reasoning-gym is not installed.
    """
    gym = _gym()
    drawn = [gym.create_dataset(name, size=24, seed=rng.getrandbits(31)) for name in rng.sample(GYM, 4)]
    target = rng.randint(*limits)
    done: list[str] = []
    for place in range(24 * len(drawn)):
        item = drawn[place % len(drawn)][place // len(drawn)]
        text = f"Problem: {item['question'].strip()}\nAnswer: {str(item['answer']).strip()}"
        size = estimate("\n\n".join([*done, text]))
        if len(text) <= LONGEST_PROBLEM and size <= limits[1]:
            done.append(text)
            if size >= target:
                break
    return "\n\n".join(done)


def _gym() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError:
        raise RequestError(
            "the exercises come from reasoning-gym, which is not installed; type: pip install 'wakesight[eval]'"
        ) from None


def _gym_source() -> Source:
    _gym()
    return Source("reasoning-gym", importlib.metadata.version("reasoning-gym"), "Apache-2.0")


def _own_source() -> Source:
    return Source("wakesight.evaluation.suites.cards", importlib.metadata.version("wakesight"), "Apache-2.0")


PACKAGED = {
    "bible": Packaged(("bible-kjv-text",), "text in the public domain", _bible, "\n"),
    "novels": Packaged(("r-cran-janeaustenr",), "text in the public domain; the package is MIT", _novels),
    "faq": Packaged(("anarchism",), "GPL-2", _pages("usr/share/doc/anarchism/html", "sec*.html")),
    "handbook": Packaged(
        ("debian-handbook",), "GPL-2.0+ or CC-BY-SA-3.0", _pages("usr/share/doc/debian-handbook/html/en-US", "*.html")
    ),
    "manuals": Packaged(
        ("manpages", "manpages-dev"), "GPL-2+, BSD and others: page by page, see their copyright files", _manual
    ),
    "python_docs": Packaged(("python3.11-doc",), "PSF-2.0", _python_docs),
}
CODE = "code"
MADE = {"questions": Made(_own_source, questions), "exercises": Made(_gym_source, exercises)}
KINDS = (*PACKAGED, CODE, *MADE)


# --- writing ---


def texts(kind: str, each: int, seed: int, cache: Path, scratch: Path) -> tuple[list[Source], list[str]]:
    """`each` documents of a kind. Raises RequestError for a source that is missing or has not as many places."""
    limits = (round(TOKENS[0] / DENSITY[kind]), round(TOKENS[1] / DENSITY[kind]))
    if kind in MADE:
        made = MADE[kind]
        found = [made.text(random.Random(f"{kind}/{seed}/{index}"), limits) for index in range(each)]
        return [made.source()], found
    joint = "\n\n"
    if kind == CODE:
        sources = [Source("CPython's standard library", platform.python_version(), "PSF-2.0")]
        sections = list(_code(Path(sysconfig.get_path("stdlib"))))
    else:
        joint = PACKAGED[kind].joint
        sources, sections = packaged(kind, PACKAGED[kind], cache, scratch)
    rng = random.Random(f"{kind}/{seed}")
    found = [text for section in sections for text in pieces(section.paragraphs, joint, limits, rng)]
    found = list(dict.fromkeys(found))
    if len(found) < each:
        raise RequestError(f"{kind} has only {len(found)} places of that length; ask for --each {len(found)} or fewer")
    return sources, [found[place] for place in spread(len(found), each, rng)]


def write(folder: Path, each: int, seed: int, cache: Path) -> dict[str, int]:
    """Writes the documents of every kind and SOURCES.json; kind -> number of words.

    Nothing is written unless every kind can be had. Raises RequestError as `texts` does, and for each < 1.
    """
    if each < 1:
        raise RequestError(f"--each {each} asks for no document; give 1 or more")
    with tempfile.TemporaryDirectory() as scratch:
        made = {kind: texts(kind, each, seed, cache, Path(scratch)) for kind in KINDS}
    folder.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, object] = {}
    for kind, (sources, found) in made.items():
        rows = ({"id": f"{kind}-{seed}-{index}", "corpus": kind, "text": text} for index, text in enumerate(found))
        _replace(folder / f"{kind}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        kinds[kind] = {"documents": len(found), "sources": [asdict(source) for source in sources]}
    _replace(
        folder / "SOURCES.json",
        json.dumps({"seed": seed, "each": each, "tokens": TOKENS, "kinds": kinds}, indent=2) + "\n",
    )
    return {kind: sum(len(text.split()) for text in found) for kind, (_, found) in made.items()}


def _replace(path: Path, content: str) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(content, "utf-8")
    scratch.replace(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=60, help="documents of every kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", type=Path, help="folder for the .deb files (FOLDER-packages)")
    given = parser.parse_args(arguments)
    cache = given.packages or given.folder.with_name(f"{given.folder.name}-packages")
    try:
        words = write(given.folder, given.each, given.seed, cache)
    except WakesightError as error:
        raise SystemExit(f"open_text: {error}") from None
    for kind, count in words.items():
        print(f"{kind}: {given.each} documents, {count // given.each} words each")


if __name__ == "__main__":
    main()
