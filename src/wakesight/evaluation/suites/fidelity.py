"""Passages and what really follows them, to compare a compacted cache with the full one.

Not answers but distributions are compared on the continuation: KL divergence, top-1 agreement, perplexity. A task is
a kind of text, so that results are split by it. The question of a context is the continuation itself, joined without
anything between (chat=False); nothing is generated, and `max_new_tokens` is the continuation's length. The passages
of one kind start at places spread over its text.

`options.extra`: see OPTIONS.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator, Sequence

from wakesight.errors import RequestError
from wakesight.evaluation.items import Context, Question, SuiteOptions
from wakesight.evaluation.suites import text
from wakesight.evaluation.suites.sizing import RESERVE, largest
from wakesight.evaluation.suites.table import pick

TASKS = text.KINDS
CONTINUATION = 128
OPTIONS = {"continuation": f"tokens to predict after each passage ({CONTINUATION})", "reserve": RESERVE}


def contexts(options: SuiteOptions) -> Iterator[Context]:
    """Raises RequestError for an unknown kind, or a length without room for a continuation."""
    tokens = options.whole("continuation", CONTINUATION)
    if not 0 < tokens < options.length:
        raise RequestError(f"continuation={tokens} must be above 0 and below length={options.length}")
    for kind in pick(TASKS, options):
        for index in range(options.items):
            yield _context(kind, index, tokens, options)


def _context(kind: str, index: int, tokens: int, options: SuiteOptions) -> Context:
    source, pieces, start = _from(kind, index, options.seed)
    count = options.count
    reserve = options.whole("reserve", 0)
    size = _fitting(pieces, start, options.length - tokens - reserve, count)
    passage = _joined(pieces, start, size).lstrip()
    after = _fitting(pieces, start + size, tokens, count)
    continuation = _joined(pieces, start + size, after)
    if not passage or not continuation:
        raise RequestError(
            f"length={options.length} with continuation={tokens} has no room for a word of {kind}; raise them"
        )
    name = f"fidelity_{kind}-{options.length}-s{options.seed}-{index}"
    meta = {"kind": kind, "length": options.length, "tokens": count(passage), "start": start}
    question = Question(f"{name}-q0", continuation, (), "fidelity", count(continuation))
    return Context(name, kind, passage, (question,), source=source, chat=False, meta=meta)


def _from(kind: str, index: int, seed: int) -> tuple[str, Sequence[str], int]:
    """(source, pieces, number of the first piece). Starts are at paragraphs, in code at files.

    Multiples of the golden ratio spread any number of items evenly, and the first ones stay the same with more.
    """
    share = (random.Random(f"fidelity/{kind}/{seed}").random() + index * (5**0.5 - 1) / 2) % 1
    pieces, starts = _pieces(kind)
    source, start = starts[int(share * len(starts))]
    return source, pieces, start


@functools.cache
def _pieces(kind: str) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """All words of a kind, each with the white space in front of it, and (source, place) of possible starts."""
    pieces: list[str] = []
    starts: list[tuple[str, int]] = []
    for source, document in text.passages(kind):
        words = re.findall(r"\s*\S+", "\n\n" + document)
        places = [0] if kind == "code" else [i for i, word in enumerate(words) if word.startswith("\n\n")]
        starts += [(source, len(pieces) + place) for place in places]
        pieces += words
    return tuple(pieces), tuple(starts)


def _joined(pieces: Sequence[str], start: int, size: int) -> str:
    """From the front again where the text ends."""
    return "".join(pieces[(start + i) % len(pieces)] for i in range(size))


def _fitting(pieces: Sequence[str], start: int, limit: int, count: Callable[[str], int]) -> int:
    size = largest(lambda n: count(_joined(pieces, start, n)), limit, least=0, guess=max(1, limit // 2))
    return size or 0
