# ruff: noqa: RUF001  (the look-alikes are what the official scorers drop)
"""Text helpers the graders share: normal forms, token F1, whole-word search, option letters, thinking."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence

_ASCII_PUNCTUATION = frozenset(string.punctuation)
# The set the official Chinese scorers drop. It lacks 《 and ．, which the official rule therefore counts as characters.
_CHINESE_PUNCTUATION = frozenset(
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】"
    "〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_FIRST_CJK = 0x2E80  # radicals; scripts from here on are written without spaces


def after_thinking(text: str, close: str = "</think>") -> str:
    """What a thinking model says once it has thought: the text behind the last closing tag.

    Without a closing tag the text is returned as it is, for a model that does not think, unless it holds the
    opening tag: then the budget ended within the thought, there is no answer, and the result is empty. A
    template that opens the thought itself hides that tag; put it in front of `text` to have it seen.
    """
    _, found, answer = text.rpartition(close)
    if found:
        return answer.lstrip()
    return "" if close.replace("/", "", 1) in text else text


def normal_english(text: str) -> str:
    """Lower case, no ASCII punctuation, no a/an/the, single spaces. [THUDM/LongBench metrics.py; SCBench alike]"""
    bare = "".join(character for character in text.lower() if character not in _ASCII_PUNCTUATION)
    return " ".join(re.sub(r"\b(?:an?|the)\b", " ", bare).split())


def normal_chinese(text: str) -> str:
    """Lower case, no punctuation of the official set, no white space. [THUDM/LongBench metrics.py; SCBench alike]"""
    dropped = _ASCII_PUNCTUATION | _CHINESE_PUNCTUATION
    return "".join("".join(character for character in text.lower() if character not in dropped).split())


def bare_chinese(text: str) -> str:
    """`normal_chinese` without the punctuation its set lacks, book-title marks above all."""
    return "".join(c for c in normal_chinese(text) if not unicodedata.category(c).startswith("P"))


def token_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over token counts; 0 when nothing is shared."""
    shared = (Counter(prediction) & Counter(reference)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def contains_whole(text: str, piece: str) -> bool:
    """Whether `piece` stands in `text` as something of its own, not as part of a longer word, number or uuid.

    Scripts without spaces between words join nothing: a number between Chinese characters stands on its own.
    """
    if not piece:
        return False
    return any(
        not _runs_on(text[start - 1 :: -1] if start else "", piece[0])
        and not _runs_on(text[start + len(piece) :], piece[-1])
        for start in _starts(text, piece)
    )


def _starts(text: str, piece: str) -> Iterator[int]:
    start = text.find(piece)
    while start >= 0:
        yield start
        start = text.find(piece, start + 1)


def _runs_on(beyond: str, edge: str) -> bool:
    """Whether the word goes on. beyond: the text outside an edge, read away from it."""
    if not beyond or not _in_word(edge):
        return False
    if _in_word(beyond[0]):
        return True
    following = beyond[1:2]
    if beyond[0] == ".":  # a decimal point
        return edge.isdigit() and following.isdigit()
    return beyond[0] == "-" and bool(following) and _in_word(following)


def _in_word(character: str) -> bool:
    return character == "_" or (character.isalnum() and ord(character) < _FIRST_CJK)


def explicit_option(reply: str, letters: str = "ABCD") -> str | None:
    """The option letter a reply states, or None where it states none, or several.

    Forms: `B`, `B. text`, `(B)`, `Option B`, `Answer: B`, `the answer is (B)`. A word that starts with the
    letter states nothing, and neither does the article in "the answer is A man".
    """
    forms = _option_forms(letters)
    lines = [line.strip() for line in reply.strip().splitlines() if line.strip()]
    if not lines:
        return None
    opening = [match and match.group(1) for match in map(forms["opening"].match, lines[:2])]
    listed = len(opening) == 2 and None not in opening and opening[0] != opening[1]
    bare = len(lines[0].strip("*_()[]\"'.:,; ")) == 1
    if opening[0] and (bare or not listed):
        return opening[0]
    if match := forms["answer"].search(reply):
        return match.group(1)
    for form in ("option", "parentheses"):
        found = set(forms[form].findall(reply))
        if len(found) == 1:
            return str(found.pop())
    return None


def _option_forms(letters: str) -> dict[str, re.Pattern[str]]:
    letter = f"([{letters}])"
    not_an_article = r"(?!(?<=A) +[a-z])"
    return {
        "opening": re.compile(
            rf"[*_\"'(\[ ]*{letter}(?:[*_\"')\]]*[.,:;)\]](?:[*_\"'.,:;)\]]*)(?=\s|$)|[*_\"')\]]*\s*$)"
        ),
        "answer": re.compile(
            rf"(?i:\banswer(?:\s+is)?(?:\s+(?:option|choice))?)\s*[:：]?\s*[*_\"'(\[]*{letter}"
            rf"(?![A-Za-z0-9'’-]){not_an_article}"
        ),
        "option": re.compile(rf"(?i:\b(?:option|choice))[\s:]*[*_\"'(\[]*{letter}(?![A-Za-z0-9'’-])"),
        "parentheses": re.compile(rf"\({letter}\)"),
    }
