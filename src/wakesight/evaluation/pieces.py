"""A text as the pieces that its tokens stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"  # what a tokenizer decodes a part of a character to
LONGEST = 8  # tokens that are looked at for one character's end; more of them are no text


def pieces(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[str]:
    """One text per token. A character made by several tokens stands with the first of them, the others are empty."""
    found: list[str] = []
    while len(found) < len(tokens):
        at = len(found)
        texts = ((size, decode(tokens[at : at + size])) for size in range(1, min(LONGEST, len(tokens) - at) + 1))
        size, text = next(((size, text) for size, text in texts if not text.endswith(BROKEN)), (1, None))
        found += [decode(tokens[at : at + 1]) if text is None else text, *[""] * (size - 1)]
    return found
