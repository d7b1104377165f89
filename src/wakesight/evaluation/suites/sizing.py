"""How much haystack fits: an item is drafted in several sizes, and the largest that fits is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.items import Context, Question, SuiteOptions

RESERVE = "tokens kept back for the model's chat template (0)"  # an OPTIONS row that every suite shares
Span = tuple[int, int]  # characters [start, end) of a context's text
STEP = 64  # lengths that are proposed are multiples of it: the next item may need some tokens more


class TooShort(RequestError):
    """Not even the smallest item of a task fits. need: tokens that this one takes."""

    def __init__(self, options: SuiteOptions, what: str, need: int) -> None:
        self.need = need
        super().__init__(
            f"length={options.length} is too short for {what}; it needs at least {need} tokens: use "
            f"--length {proposed(need)} or more"
        )


def proposed(need: int) -> int:
    """A length to try where `need` tokens are needed."""
    return -(-need // STEP) * STEP


@dataclass(frozen=True)
class Draft:
    """One item in one size. needles: where the evidence stands in `text`; answers: where the answers do."""

    instruction: str
    text: str
    question: str
    prefix: str
    references: tuple[str, ...]
    needles: Sequence[Span] = ()
    answers: Sequence[Span] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    def tokens(self, count: Callable[[str], int]) -> int:
        """Tokens of the prompt, counted in the pieces in which a session takes them (models/chat.py)."""
        start = self.instruction + "\n\n" if self.instruction else ""
        return sum(count(piece) for piece in (start, self.text, "\n\n" + self.question, self.prefix) if piece)


def largest(tokens_at: Callable[[int], int], limit: int, least: int, guess: int, most: int = 1 << 40) -> int | None:
    """The largest size in [least, most] whose tokens are within `limit`, or None if not even `least` is.

    Every size returned was measured. Tokens grow almost in proportion to size, so a straight line through the
    closest two measured sizes names the next; every third step halves the interval instead. The search stops a
    thousandth of the limit early. Source: NVIDIA/RULER scripts/data/synthetic/niah.py, which bisects.
    """
    first = low_tokens = tokens_at(least)
    if first > limit:
        return None
    low, high, high_tokens, step = least, most + 1, 0, 0
    probe = guess
    while low + 1 < high and limit - low_tokens > limit // 1000:
        probe = min(max(probe, low + 1), high - 1)
        tokens = tokens_at(probe)
        if tokens <= limit:
            low, low_tokens = probe, tokens
        else:
            high, high_tokens = probe, tokens
        step += 1
        if not high_tokens:
            slope = (low_tokens - first) / (low - least)
            probe = low + max(1, round((limit - low_tokens) / slope)) if slope > 0 else 2 * low + 1
        elif step % 3:
            probe = low + round((high - low) * (limit - low_tokens) / (high_tokens - low_tokens))
        else:
            probe = (low + high) // 2
    return low


def room(options: SuiteOptions, new_tokens: int) -> int:
    """Tokens a prompt may have. `extra={"reserve": n}` keeps n back for the model's chat template."""
    return options.length - new_tokens - options.whole("reserve", 0)


def largest_draft(
    build: Callable[[int], Draft], options: SuiteOptions, new_tokens: int, what: str, *,
    least: int, guess: int, most: int = 1 << 40,
) -> tuple[int, Draft]:  # fmt: skip
    """The size and the draft that fill `options.length`. Raises RequestError if the smallest is too long."""
    limit = room(options, new_tokens)
    size = largest(lambda n: build(n).tokens(options.count), limit, least, guess, most)
    if size is None:
        raise TooShort(options, what, build(least).tokens(options.count) + options.length - limit)
    return size, build(size)


def context_of(
    draft: Draft, options: SuiteOptions, *, task: str, index: int, new_tokens: int, source: str, grader: str
) -> Context:
    """The draft as a context with its one question; meta says where needles and answers are."""
    name = f"{task}-{options.length}-s{options.seed}-{index}"
    question = Question(
        id=f"{name}-q0", text=draft.question, references=draft.references, grader=grader, max_new_tokens=new_tokens,
        answer_prefix=draft.prefix,
    )  # fmt: skip
    return Context(
        id=name, task=task, text=draft.text, questions=(question,), instruction=draft.instruction or None,
        source=source, meta={**facts(draft, options), **draft.meta},
    )  # fmt: skip


def facts(draft: Draft, options: SuiteOptions) -> dict[str, Any]:
    """length: the limit asked for. tokens: of the prompt. depths: share of the text before each needle."""
    return {
        "length": options.length,
        "tokens": draft.tokens(options.count),
        "depths": [round(depth_of(span, draft.text), 4) for span in draft.needles],
        "needles": [list(span) for span in draft.needles],
        "answers": [list(span) for span in draft.answers],
    }


def depth_of(span: Span, text: str) -> float:
    """Characters before the needle over all characters beside it: 0 at the front, 1 at the end."""
    beside = len(text) - (span[1] - span[0])
    return span[0] / beside if beside else 0.0


def weave(parts: Iterable[tuple[str, bool]], separator: str) -> tuple[str, list[Span]]:
    """Join parts; the spans are those of the marked ones, in order."""
    pieces: list[str] = []
    spans: list[Span] = []
    at = 0
    for text, marked in parts:
        at += len(separator) if pieces else 0
        if marked:
            spans.append((at, at + len(text)))
        pieces.append(text)
        at += len(text)
    return separator.join(pieces), spans


def within(text: str, part: str, spans: Iterable[Span]) -> list[Span]:
    """Where `part` first stands inside one of the spans."""
    for start, end in spans:
        at = text.find(part, start, end)
        if at >= 0:
            return [(at, at + len(part))]
    return []
