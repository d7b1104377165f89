"""Training sequences: a context, then as many of its questions as fit, none twice.

    <bos> <user> instruction context question <assistant> prefix answer <eos> <user> question <assistant> ...

The first question follows the context directly, as in one user turn; the others are later turns. Answers weigh 1 in
the loss and the rest a tenth, with the exceptions below, and less where a long context has few answers: filler that
nobody can predict would drown them. The warm-up sequences (echo, pairs) hold no language at all:
repeated blocks and repeated pairs, in which most tokens can be looked up.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from wakesight.evaluation.suites.closed import tasks as t
from wakesight.evaluation.suites.closed import vocabulary as v

BACKGROUND, FAINT = 0.1, 0.02
CONTEXT_WEIGHT = MappingProxyType(
    {"closed_cwe": 0.3, "closed_fwe": 0.3, "story": 0.3}
)  # where the context is to be learned
ANSWER_WEIGHT = MappingProxyType(
    {
        "closed_cwe": 4.0, "closed_fwe": 4.0, "closed_labels": 2.0, "closed_multivalue": 1.5, "closed_tracking": 1.5,
        "whole": 0.3,
    }
)  # fmt: skip
WARM_UP = ("echo", "pairs")
SHARES = MappingProxyType(
    {
        "closed_keyvalue": 0.12, "closed_dense": 0.11, "closed_multikey": 0.10, "closed_single": 0.05,
        "closed_multivalue": 0.13, "closed_multiquery": 0.06, "closed_tracking": 0.13, "closed_copy": 0.05,
        "closed_labels": 0.04, "closed_cwe": 0.03, "closed_fwe": 0.03, "closed_repeat": 0.06, "whole": 0.08,
        "story": 0.01, "echo": 0.0, "pairs": 0.0,
    }
)  # fmt: skip
# Attention is closed in this share of a task's sequences, so that the recurrence has to carry its statistics.
CLOSED = MappingProxyType({"story": 0.5, "closed_cwe": 0.3, "closed_fwe": 0.3, "closed_labels": 0.2})
# At up to 128 tokens: where a needle or two make one question, and where short lists teach best.
SHORT = MappingProxyType(
    {
        "closed_single": 0.5,
        "closed_cwe": 3.0,
        "closed_fwe": 3.0,
        "closed_tracking": 2.0,
        "closed_repeat": 0.0,
        "whole": 2.0,
    }
)
_EVERY = v.NOUNS + v.ADJECTIVES + v.CODES + v.DIGITS + v.VARIABLES + v.LABELS


@dataclass(frozen=True)
class Sequence:
    """ids: exactly as many tokens as asked for, padded at the end. weights: of predicting each token; the first has
    none. answers: [start, end) of each answer with its <eos>. context: tokens before the first question.
    """

    task: str
    ids: list[int]
    weights: list[float]
    answers: list[tuple[int, int]]
    context: int


@dataclass(frozen=True, eq=False)
class Batch:
    """ids: [B, T]. weights: [B, T - 1], as `fast.loss` takes them. scale: [B], 0 where attention is closed."""

    ids: Tensor
    weights: Tensor
    scale: Tensor
    sequences: tuple[Sequence, ...]


@dataclass(frozen=True)
class Mixture:
    """What to draw from. shares: of tasks, relative. warm_up: the warm-up sequences' share, per length.

    question: weight of a question's words; a model that is to ask about what it read needs more than the background.
    """

    shares: Mapping[str, float] = field(default_factory=lambda: SHARES)
    warm_up: Mapping[int, float] = field(
        default_factory=lambda: MappingProxyType({64: 0.5, 96: 0.4, 128: 0.2, 256: 0.06})
    )
    warm_up_rest: float = 0.02
    question: float = BACKGROUND

    def batch(self, rng: random.Random, tokens: int, length: int) -> Batch:
        """About `tokens` tokens in sequences of `length`."""
        names = list(self.shares)
        weights = self._weights(length)
        drawn = rng.choices(names, weights, k=max(1, tokens // length))
        return batch_of([sequence(task, rng, length, question=self.question) for task in drawn], rng)

    def _weights(self, length: int) -> list[float]:
        warm = self.warm_up.get(length, self.warm_up_rest)
        total = sum(self.shares.values())
        short = length <= 128
        factors = SHORT if short else {}
        return [
            warm / len(WARM_UP) if name in WARM_UP else (1 - warm) * share / total * factors.get(name, 1.0)
            for name, share in self.shares.items()
        ]


def batch_of(sequences: list[Sequence], rng: random.Random | None = None) -> Batch:
    """rng: decides which sequences have their attention closed; None: none."""
    closed = [rng is not None and rng.random() < CLOSED.get(each.task, 0.0) for each in sequences]
    return Batch(
        torch.tensor([each.ids for each in sequences]),
        torch.tensor([each.weights[1:] for each in sequences]),
        torch.tensor([0.0 if each else 1.0 for each in closed]),
        tuple(sequences),
    )


def sequence(
    task: str, rng: random.Random, length: int, share: float | None = None, most: int | None = None,
    question: float = BACKGROUND,
) -> Sequence:  # fmt: skip
    """One sequence of `length` tokens. share: of the context in it (None: random). most: questions at most.

    question: weight of a question's words.
    """
    if task in WARM_UP:
        return _warm_up(task, rng, length)
    if task == "story":
        return _assembled(task, t.story(rng, length - 7), length, 0, question)
    if task == "whole":
        return _whole(rng, length, question)
    if share is None:
        share = rng.uniform(0.35, 0.8) if rng.random() < 0.7 else rng.uniform(0.75, 0.93)
    size = max(12, int(length * share) - 8)
    seed = rng.random()
    item = t.make(task, random.Random(seed), size)
    asked = item.asked[: most or len(item.asked)]
    spare = length - 8 - len(item.words) - sum(_turn_size(each) for each in asked)
    if spare > 8:  # few questions: a longer context, not padding
        item = t.make(task, random.Random(seed), size + spare)
    return _assembled(task, item, length, most, question)


def _turn_size(asked: t.Asked) -> int:
    return len(asked.question) + len(asked.prefix) + len(asked.answer) + 3


def _whole(rng: random.Random, length: int, question: float) -> Sequence:
    """A context of any task, read back from its first word to its last."""
    size = max(8, (length - 16) // 2)
    size = rng.randint(size // 2, size) if rng.random() < 0.3 else size
    item = t.make(rng.choice(t.TASKS[:-1]), rng, size)
    asked = t.Asked(t.WHOLE, (), item.words, ())
    return _assembled("whole", t.Item("whole", item.instruction, item.words, (asked,)), length, None, question)


def _assembled(task: str, item: t.Item, length: int, most: int | None, question: float) -> Sequence:
    words = [v.BOS, v.USER, *item.instruction, *item.words][:length]
    start = min(2 + len(item.instruction), length)
    weights = [0.0] + [BACKGROUND] * (start - 1) + [CONTEXT_WEIGHT.get(task, BACKGROUND)] * (len(words) - start)
    context = len(words)
    answers = []
    for number, asked in enumerate(item.asked[: len(item.asked) if most is None else most]):
        turn = [v.USER] if number else []
        before = [*turn, *asked.question, v.ASSISTANT, *asked.prefix]
        asking = [BACKGROUND] * len(turn) + [question] * len(asked.question)
        answer = [*asked.answer, v.EOS]
        if len(words) + len(before) + len(answer) > length:
            break
        answers.append((len(words) + len(before), len(words) + len(before) + len(answer)))
        words += [*before, *answer]
        weights += asking + [BACKGROUND] * (len(before) - len(asking)) + [ANSWER_WEIGHT.get(task, 1.0)] * len(answer)
    if answers and task not in CONTEXT_WEIGHT:
        weights = _balanced(weights)
    rest = length - len(words)
    ids = [v.IDS[word] for word in words] + [v.IDS[v.PAD]] * rest
    return Sequence(task, ids, weights + [0.0] * rest, answers, context)


def _balanced(weights: list[float]) -> list[float]:
    """The background at most as heavy in all as the answers, but never below FAINT."""
    heavy = sum(weight for weight in weights if weight > BACKGROUND)
    light = sum(weight == BACKGROUND for weight in weights)
    background = min(BACKGROUND, max(FAINT, heavy / light))
    return [background if weight == BACKGROUND else weight for weight in weights]


def _warm_up(task: str, rng: random.Random, length: int) -> Sequence:
    words: list[str] = [v.BOS]
    weights = [0.0]
    while len(words) < length:
        more, known = _echo(rng, length) if task == "echo" else _pairs(rng, length)
        words += more
        weights += [1.0 if each else BACKGROUND for each in known]
    words, weights = words[:length], weights[:length]
    answers = [(i, i + 1) for i in range(1, length) if weights[i] == 1.0]
    return Sequence(task, [v.IDS[word] for word in words], weights, answers[-32:], length)


def _echo(rng: random.Random, length: int) -> tuple[list[str], list[bool]]:
    """A random block two or three times; known: what can be looked up."""
    block = [rng.choice(_EVERY) for _ in range(rng.randint(4, max(6, length // 3)))]
    times = rng.randint(2, 3)
    return block * times, [turn > 0 and place > 0 for turn in range(times) for place in range(len(block))]


def _pairs(rng: random.Random, length: int) -> tuple[list[str], list[bool]]:
    """Keys with a fixed value each, in random order."""
    pool = rng.choice((v.NOUNS, v.CODES, _EVERY))
    values = rng.choice((v.CODES, v.DIGITS, v.NOUNS))
    keys = rng.sample(pool, rng.randint(2, min(len(pool), max(4, length // 6))))
    value = {key: rng.choice(values) for key in keys}
    seen: set[str] = set()
    words, known = [], []
    for _ in range(int(len(keys) * rng.uniform(2, 4))):
        key = rng.choice(keys)
        words += [key, value[key]]
        known += [False, key in seen]
        seen.add(key)
    return words, known
