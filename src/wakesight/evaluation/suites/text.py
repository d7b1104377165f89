"""Running text: the packaged English, Python's own source, official essays, and sentences of any of them.

Packaged texts and their licences: data/NOTICE.md. Source code is not packaged: it is read from the Python that
runs, so it is the same only under the same Python version, which its `source` names.
"""

from __future__ import annotations

import bz2
import functools
import importlib.resources
import importlib.util
import json
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.suites.files import note

KINDS = ("narrative", "expository", "code")
ESSAY_FILE = "PaulGrahamEssays.json"
MODULES = (
    "argparse", "ast", "bdb", "calendar", "cgitb", "codecs", "configparser", "csv", "dataclasses", "datetime",
    "difflib", "dis", "doctest", "enum", "fractions", "ftplib", "functools", "gettext", "heapq", "imaplib",
    "inspect", "ipaddress", "locale", "mailbox", "mimetypes", "optparse", "pathlib", "pdb", "pickle", "pickletools",
    "platform", "plistlib", "pprint", "random", "selectors", "shlex", "shutil", "smtplib", "socket", "ssl",
    "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize", "traceback",
    "typing", "urllib.parse", "urllib.request", "uuid", "weakref", "zipfile",
)  # fmt: skip
_ABBREVIATIONS = frozenset(
    [
        "mr",
        "mrs",
        "ms",
        "dr",
        "st",
        "prof",
        "rev",
        "capt",
        "col",
        "gen",
        "lt",
        "sir",
        "jr",
        "sr",
        "esq",
        "no",
        "vol",
        "vs",
        "etc",
        "e.g",
        "i.e",
        "cf",
        "al",
        "fig",
        "pp",
        "ca",
        "inc",
        "ltd",
        "dept",
    ]
)
_OPEN, _CLOSE = "\"'([\u201c\u2018", "\"')\\]\u201d\u2019"
_END = re.compile(rf"[.!?]+[{_CLOSE}]*\s+(?=[{_OPEN.replace('[', chr(92) + '[')}]*[A-Z0-9])")


@dataclass(frozen=True)
class Essay:
    """A haystack of sentences. name: for a context's `source`."""

    name: str
    sentences: tuple[str, ...]

    @functools.cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(len(sentence.split()) for sentence in self.sentences)

    def first(self, words: int, start: int = 0) -> list[str]:
        """Sentences from number `start` on, the last one cut, with that many words together.

        Sentences are in the order of the text, from its front again where it ends.
        """
        chosen: list[str] = []
        at = start
        while words > 0:
            sentence, size = self.sentences[at % len(self.sentences)], self._sizes[at % len(self.sentences)]
            chosen.append(sentence if size <= words else " ".join(sentence.split()[:words]))
            words -= size
            at += 1
        return chosen


@functools.cache
def packaged(kind: str) -> str:
    """The narrative or the expository text; a paragraph per line."""
    return bz2.decompress(importlib.resources.files("wakesight").joinpath(f"data/{kind}.txt.bz2").read_bytes()).decode()


@functools.cache
def passages(kind: str) -> tuple[tuple[str, str], ...]:
    """(source, text) of every document of a kind, in a fixed order."""
    if kind != "code":
        title = {"narrative": "persuasion", "expository": "jargon-file-4.4.7"}[kind]
        return ((f"generated:{title}", packaged(kind).strip().replace("\n", "\n\n")),)
    found = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec and spec.origin and spec.origin.endswith(".py"):
            text = Path(spec.origin).read_text("utf-8")
            found.append((f"generated:python-{platform.python_version()}/{name}", text.strip() + "\n"))
    return tuple(found)


def essay(data: Path | None) -> Essay:
    """The official essays where `data` has them, otherwise the packaged texts, expository first."""
    if data is None or not (data / ESSAY_FILE).is_file():
        return _packaged_essay()
    file = data / ESSAY_FILE
    note(file)  # it may have been parsed before
    return _official_essay(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _official_essay(file: Path, modified: int) -> Essay:
    found = load_json(file)
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise RequestError(f"{file} has no field 'text' with running text; give RULER's own file")
    return Essay(file.name, sentences(text))


@functools.cache
def _packaged_essay() -> Essay:
    return Essay("jargon-file-4.4.7+persuasion", sentences(packaged("expository") + packaged("narrative")))


def sentences(text: str) -> tuple[str, ...]:
    """Split running text by rules, white space collapsed; joined by spaces, the sentences are the text again.

    A sentence ends at . ! or ? with any closing quotes and brackets, before white space and an upper-case letter
    or a digit, but not after a known abbreviation, a single initial or a number with a dot ("J. Smith", "No. 3").
    RULER splits with NLTK's trained punkt, whose data is no package; the two differ at unusual abbreviations.
    """
    text = " ".join(text.split())
    found = []
    start = 0
    for match in _END.finditer(text):
        before = text[start : match.start()].rpartition(" ")[2].lstrip(_OPEN)
        initial = len(before) == 1 and before.isupper() and before != "I"
        if match.group().startswith(". ") and (initial or before.isdigit() or before.lower() in _ABBREVIATIONS):
            continue
        found.append(text[start : match.end()].rstrip())
        start = match.end()
    return (*found, text[start:]) if text[start:] else tuple(found)


def load_json(path: Path) -> Any:
    """Raises RequestError for a file that cannot be read or is no JSON."""
    note(path)
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{path} cannot be read as JSON ({error.__class__.__name__}); give the official file"
        ) from None


def folder(data: Path | None) -> Path | None:
    """`data`, checked. Raises RequestError if it is no folder."""
    if data is not None and not data.is_dir():
        raise RequestError(f"the data folder {data} does not exist; give the folder that holds the official files")
    return data
