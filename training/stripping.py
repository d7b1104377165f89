"""Markup to paragraphs: HTML pages, groff manual pages, the King James text, and source code at its blank lines.

Every function gives a list of paragraphs. Line breaks stay where they mean something: in listings and in code.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise

from benchmarks.make_essay import plain

from wakesight.errors import RequestError

# --- HTML ---

_BLOCKS = frozenset((
    "blockquote", "body", "br", "dd", "div", "dl", "dt", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol",
    "p", "pre", "section", "tr", "ul",
))  # fmt: skip
_LEFT_OUT = frozenset(("head", "nav", "script", "style", "table"))
_VOID = frozenset(("br", "hr", "img", "input", "link", "meta"))
# class names and ids of what is no text: page links, tables of contents, side bars, permalinks
_FURNITURE = frozenset((
    "banner", "book-navigation", "contents", "docnav", "footer", "headerlink", "related", "sphinxsidebar", "toc",
    "toctree-wrapper", "mobile-nav", "menu",
))  # fmt: skip


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._parts: list[str] = []
        self._mark = ""  # what the next paragraph of a list starts with
        self._closing: str | None = None  # the tag whose end ends what is left out
        self._depth = 0
        self._listing = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._closing is not None:
            self._depth += tag == self._closing
            return
        given = dict(attrs)
        names = {*(given.get("class") or "").split(), given.get("id") or ""}
        # the handbook calls its banner "title", and so it calls its headings, but those by class
        if tag not in _VOID and (tag in _LEFT_OUT or names & _FURNITURE or given.get("id") == "title"):
            self.flush()
            self._closing, self._depth = tag, 1
        elif tag in _BLOCKS:
            self.flush()
            self._listing = self._listing or tag == "pre"
            if tag == "li":
                self._mark = "- "

    def handle_endtag(self, tag: str) -> None:
        if self._closing is not None:
            self._depth -= tag == self._closing
            if self._depth == 0:
                self._closing = None
        elif tag in _BLOCKS:
            self.flush()
            self._listing = self._listing and tag != "pre"

    def handle_data(self, data: str) -> None:
        if self._closing is None:
            self._parts.append(data)

    def flush(self) -> None:
        text = "".join(self._parts)
        self._parts = []
        text = "\n".join(map(str.rstrip, text.strip("\n").split("\n"))) if self._listing else plain(text)
        if text.strip():
            self.paragraphs.append(self._mark + text)
            self._mark = ""


def html(page: str) -> list[str]:
    """The paragraphs of an HTML page: without tables, navigation and permalinks; list entries start with a dash."""
    parser = _Page()
    parser.feed(page)
    parser.close()
    parser.flush()
    return parser.paragraphs


# --- manual pages ---

_SIGNS = {
    "aq": "'", "cq": "'", "oq": "'", "dq": '"', "lq": '"', "rq": '"', "bu": "*", "em": "--", "en": "-", "ha": "^",
    "ti": "~", "rs": "\\", "ga": "`", "co": "(C)", "<=": "<=", ">=": ">=", "->": "->", "mu": "x", "+-": "+-",
    "mc": "u", "bv": "|", "or": "|", "ul": "_", "sl": "/", "at": "@", "sh": "#", "Do": "$", "lB": "[", "rB": "]",
}  # fmt: skip
_ESCAPE = re.compile(
    r"""\\(?:
        ".*                                         # a comment
      | [fFmMn*kgY](?:\[[^\]]*\]|\(..|[+-]?.)       # fonts, colours, registers, strings
      | s(?:\[[^\]]*\]|\(..|[+-]?\d{1,2}|'[^']*')   # sizes
      | [hvwlLoCNXZbADSHR]'[^']*'                   # movements and drawings
      | \[(?P<long>[^\]]*)\] | \((?P<two>..) | (?P<one>.)
    )""",
    re.VERBOSE,
)
_ONE = {"-": "-", "e": "\\", "\\": "\\", " ": " ", "~": " ", "0": " ", "'": "'", "`": "`", ".": ".", "t": "\t"}
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|((?:\\.|\S)+)')
_UNTIL = {"TS": ".TE", "EQ": ".EN", "de": "..", "de1": "..", "ig": "..", "am": ".."}


def _unescaped(text: str) -> str:
    def sign(found: re.Match[str]) -> str:
        name = found["long"] or found["two"]
        return _SIGNS.get(name, "") if name else _ONE.get(found["one"] or "", "")

    return _ESCAPE.sub(sign, text)


def _arguments(text: str) -> list[str]:
    """A macro's arguments; quotes hold together what has spaces."""
    return [_unescaped((quoted or bare).replace('""', '"')) for quoted, bare in _ARGUMENT.findall(text)]


class _Manual:
    """Reads the man macros; what it does not know, it leaves out."""

    def __init__(self) -> None:
        self.paragraphs: list[str] = []
        self._lines: list[str] = []
        self._head: str | None = None  # the tag of a tagged paragraph; "" while the next line is the tag
        self._as_is = False

    def read(self, lines: Iterator[str]) -> None:
        for line in lines:
            while line.endswith("\\") and not line.endswith("\\\\"):
                line = line[:-1] + next(lines, "")
            if line[:1] in (".", "'"):
                name, _, rest = line[1:].strip().partition(" ")
                if end := _UNTIL.get(name):
                    self.flush()
                    while next(lines, end).strip() != end:
                        pass
                else:
                    self._macro(name, rest)
            elif line or self._as_is:
                self._say(_unescaped(line))
            else:
                self.flush()
        self.flush()

    def _macro(self, name: str, rest: str) -> None:
        if name in ("B", "I", "SM", "SB", "UE", "ME"):
            self._say(" ".join(_arguments(rest)))
        elif name in ("BR", "RB", "BI", "IB", "IR", "RI"):
            self._say("".join(_arguments(rest)))
        elif name in ("UR", "MT"):
            self._say("".join(_arguments(rest)[:1]))
        elif name in ("SH", "SS"):
            self.flush()
            self._as_is = False
            self.paragraphs.append(" ".join(_arguments(rest)))
        elif name == "TH":
            self.paragraphs.append("{}({})".format(*(*_arguments(rest), "", "")[:2]))
        elif name in ("nf", "EX", "fi", "EE"):
            self.flush()
            self._as_is = name in ("nf", "EX")
        elif name in ("PP", "P", "LP", "IP", "TP", "HP", "RS", "RE", "sp", "br"):
            self.flush()
            if name == "TP":
                self._head = ""
            elif name == "IP" and (tag := "".join(_arguments(rest)[:1])):
                self._head = tag
        elif name == "TQ":  # one more tag of the same paragraph
            self._lines, self._head = [], f"{self._head}\n" if self._head else ""

    def _say(self, text: str) -> None:
        if self._head == "" or (self._head or "").endswith("\n"):
            self._head = f"{self._head}{plain(text)}"
        else:
            self._lines.append(text)

    def flush(self) -> None:
        listing = "\n".join(line.rstrip() for line in self._lines).strip("\n")
        text = listing if self._as_is else plain(" ".join(self._lines))
        self._lines = []
        head, self._head = self._head, None
        if not text.strip():
            text = head or ""  # a tag with nothing behind it
        elif head:
            text = f"{head} {text}" if len(head) < 3 else f"{head}\n{text}"
        if len(text.strip()) > 2:
            self.paragraphs.append(text)


def manual(source: str) -> list[str]:
    """The paragraphs of a manual page written with the man macros; [] for one that only names another, or in mdoc."""
    if re.search(r"^\.(so|Dd) ", source, re.MULTILINE):
        return []
    page = _Manual()
    page.read(iter(source.split("\n")))
    return page.paragraphs


# --- code ---


def code(source: str) -> list[str]:
    """A source file at its blank lines; what stands at the left margin again begins a paragraph that can open one."""
    blocks = re.split(r"\n(?:[ \t]*\n)+", source.replace("\r\n", "\n").strip("\n"))
    return [block.rstrip() for block in blocks if block.strip()]


# --- the King James text ---

_VERSE = re.compile(r"(\w+?)(\d+:\d+) (.+)")


def bible(data: bytes) -> list[tuple[str, list[str]]]:
    """(book, verses) of bible-kjv-text's bible.data, each verse with its chapter and number in front.

    The file holds a table of places, big endian, and blocks that Unix `compress` wrote, without their first bytes.
    Raises RequestError for another layout.
    """
    wrong = RequestError("bible.data is no file of bible-kjv-text 4.38; take that version of the package")
    if data[:4] != b"EC02" or len(data) < 0x5C:
        raise wrong
    (count,) = struct.unpack_from(">I", data, 0x58)
    if len(data) < 0x60 + 4 * count:
        raise wrong
    places = struct.unpack_from(f">{count + 1}I", data, 0x5C)
    text = "".join(_uncompressed(data[start:end]) for start, end in pairwise(places))
    books: dict[str, list[str]] = {}
    for line in text.split("\n"):
        if found := _VERSE.fullmatch(line.strip()):
            books.setdefault(found[1], []).append(f"{found[2]} {found[3]}")
    if not books:
        raise wrong
    return list(books.items())


def _uncompressed(block: bytes) -> str:
    try:
        done = subprocess.run(["gzip", "-dc"], input=b"\x1f\x9d\x90" + block, capture_output=True, check=True)
    except FileNotFoundError:
        raise RequestError("gzip is missing, and bible.data needs it; type: apt-get install gzip") from None
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode("utf-8", "replace").strip()
        raise RequestError(f"bible.data cannot be decompressed: {reason}; fetch its package again") from None
    return done.stdout.decode("ascii", "replace")
