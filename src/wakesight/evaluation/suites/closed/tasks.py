"""Generators of the closed-vocabulary tasks: a random stream and a size in words -> an Item.

Filler sentences hold numbers, codes, words and names of the same kinds as needles and answers, so that a key's
geometry alone does not tell a needle from filler. No question is asked twice about one context.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from wakesight.evaluation.suites.closed import vocabulary as v

Words = tuple[str, ...]
Key = tuple[str, str]  # adjective, noun


@dataclass(frozen=True)
class Asked:
    """One question in words. prefix: the start of the reply, given. parts: the strings an answer is graded by."""

    question: Words
    prefix: Words
    answer: Words
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Item:
    """One context in words. needles: [start, end) of the sentences that questions are about."""

    task: str
    instruction: Words
    words: Words
    asked: tuple[Asked, ...]
    needles: tuple[tuple[int, int], ...] = ()


Maker = Callable[[random.Random, int], Item]
SENTENCE = 9  # words of the longest filler sentence and of the longest single needle
REMEMBER = ("remember", "the", "text", ".")


def make(task: str, rng: random.Random, size: int) -> Item:
    """An item of `task` with a context of at most `size` words and at least size - 9, unless the task is that short.

    size: at least LEAST[task]. The same state of `rng` gives the same item.
    """
    return MAKERS[task](rng, size)


# ---- values and keys


def _digits(rng: random.Random, count: int) -> Words:
    return tuple(rng.choice(v.DIGITS) for _ in range(count))


def _value(rng: random.Random, kind: str, long: bool = True) -> Words:
    """number: 3 digits (2 when not long); code: 2 codes; word: 2 nouns (one when not long)."""
    if kind == "number":
        return _digits(rng, 3 if long else 2)
    return tuple(rng.sample(v.CODES if kind == "code" else v.NOUNS, 2 if long else 1))


def _kind(rng: random.Random) -> str:
    return rng.choice(("number", "number", "code", "word"))


def _keys(rng: random.Random, count: int, crossed: bool = False) -> list[Key]:
    """Different pairs; crossed: of few adjectives and few nouns, so that neither word alone names a key."""
    if crossed:
        side = min(len(v.ADJECTIVES), max(2, int((2 * count) ** 0.5) + 1))
        pairs = [(a, n) for a in rng.sample(v.ADJECTIVES, side) for n in rng.sample(v.NOUNS, side)]
        if len(set(pairs)) >= count:
            return rng.sample(sorted(set(pairs)), count)
    found: dict[Key, None] = {}
    while len(found) < count:
        found[rng.choice(v.ADJECTIVES), rng.choice(v.NOUNS)] = None
    return list(found)


def _needle(kind: str, key: Key, value: Words) -> Words:
    return (kind, "for", *key, "is", *value, ".")


def _lookup(kind: str, key: Key, value: Words) -> Asked:
    return Asked(("ask", kind, "for", *key, "?"), (*key, "is"), value, (" ".join(value),))


# ---- filler


class Filler:
    """An endless row of sentences, never about a key; `avoid` holds words not to be used.

    A third of them differ from a needle in one small word ("number for ... was ...", "number of ... is ..."), so that
    every word of a needle is common, and the others end in numbers, codes, words, names and labels too; things are
    drawn from as many words as keys are.
    """

    def __init__(self, rng: random.Random, keys: Iterable[Key] = (), avoid: Iterable[str] = ()) -> None:
        self.rng = rng
        self.keys = tuple(keys)
        banned = set(avoid)
        self.nouns = [*rng.sample([n for n in v.NOUNS if n not in banned], 40), *(noun for _, noun in self.keys[:6])]
        self.adjectives = [*rng.sample(v.ADJECTIVES, 20), *(adjective for adjective, _ in self.keys[:6])]
        self.verbs = rng.sample(v.VERBS, 8)
        self.variables = [variable for variable in v.VARIABLES if variable not in banned]
        self.subject = rng.choice(self.nouns)

    def sentence(self) -> Words:
        rng = self.rng
        form = rng.randrange(20)
        if form < 7:
            kind = _kind(rng)
            small = ("for", "was") if form < 4 else ("of", "is")
            return (kind, small[0], *self._pair(), small[1], *_value(rng, kind, long=rng.random() < 0.8), ".")
        self.subject = rng.choice((self.subject, rng.choice(self.nouns)))
        start = self._thing()
        if form < 10:
            middle: Words = (rng.choice(self.verbs), "the", *self._thing())
        elif form < 13:
            middle = (rng.choice(v.HOLDING), *_digits(rng, rng.choice((2, 3, 3))))
        elif form < 15:
            middle = (rng.choice(v.HOLDING), *rng.sample(v.CODES, 2))
        elif form < 17:
            middle = (rng.choice(v.HOLDING), *rng.sample(self.nouns, 2))
        elif form < 19:
            middle = ("uses", rng.choice(self.variables), "and", rng.choice(self.variables))
        else:
            middle = ("is", rng.choice(v.LABELS))
        return ("the", *start, *middle, ".")

    def _thing(self) -> Words:
        return (self.subject,) if self.rng.random() < 0.4 else self._pair(self.subject)

    def _pair(self, noun: str | None = None) -> Key:
        while True:
            pair = self.rng.choice(self.adjectives), noun or self.rng.choice(self.nouns)
            if pair not in self.keys:
                return pair


def _woven(
    rng: random.Random, filler: Filler, chunks: Sequence[Words], size: int
) -> tuple[Words, list[tuple[int, int]]]:
    """The chunks in their order at random places of filler, and where they stand; as long as fits into `size`."""
    room = size - sum(map(len, chunks))
    rows: list[Words] = []
    while room >= SENTENCE:
        rows.append(filler.sentence())
        room -= len(rows[-1])
    places = sorted(rng.randint(0, len(rows)) for _ in chunks)
    words: list[str] = []
    spans = []
    waiting = list(zip(places, chunks, strict=True))
    for index in range(len(rows) + 1):
        while waiting and waiting[0][0] == index:
            chunk = waiting.pop(0)[1]
            spans.append((len(words), len(words) + len(chunk)))
            words += chunk
        words += rows[index] if index < len(rows) else ()
    return tuple(words), spans


def _shuffled(rng: random.Random, asked: Sequence[Asked]) -> tuple[Asked, ...]:
    return tuple(rng.sample(list(asked), len(asked)))


# ---- needles


def _needles(task: str, rng: random.Random, size: int, count: int) -> Item:
    keys = _keys(rng, count, crossed=count > 1 and rng.random() < 0.5)
    kinds = [_kind(rng) for _ in keys]
    values = [_value(rng, kind) for kind in kinds]
    rows = list(zip(kinds, keys, values, strict=True))
    words, spans = _woven(rng, Filler(rng, keys), [_needle(*row) for row in rows], size)
    return Item(task, REMEMBER, words, _shuffled(rng, [_lookup(*row) for row in rows]), tuple(spans))


def single(rng: random.Random, size: int) -> Item:
    return _needles("closed_single", rng, size, 1)


def multikey(rng: random.Random, size: int) -> Item:
    return _needles("closed_multikey", rng, size, max(2, min(rng.randint(4, 12), size // 16)))


def dense(rng: random.Random, size: int) -> Item:
    """Every sentence is a needle."""
    rows: list[tuple[str, Key, Words]] = []
    room = size
    for key in _keys(rng, max(2, size // 8), crossed=True):
        kind = _kind(rng)
        row = kind, key, _value(rng, kind)
        if (room := room - len(_needle(*row))) < 0:
            break
        rows.append(row)
    words, spans = _joined(_needle(*row) for row in rows)
    return Item("closed_dense", REMEMBER, words, _shuffled(rng, [_lookup(*row) for row in rows]), spans)


def multivalue(rng: random.Random, size: int) -> Item:
    """Several values of one key, at places of their own; an answer lists them in any order."""
    many = rng.randint(1, max(1, min(6, size // 48)))
    keys = _keys(rng, many)
    kinds = [rng.choice(("number", "code")) for _ in keys]
    values: list[list[Words]] = []
    for kind in kinds:
        found: dict[Words, None] = {}
        wanted = rng.randint(2, 3)
        while len(found) < wanted:
            found[_value(rng, kind, long=False)] = None
        values.append(list(found))
    rows = [(i, value) for i, each in enumerate(values) for value in each]
    rng.shuffle(rows)
    chunks = [_needle(kinds[i], keys[i], value) for i, value in rows]
    words, spans = _woven(rng, Filler(rng, keys), chunks, size)
    asked = []
    for i, key in enumerate(keys):
        ordered = [value for j, value in rows if j == i]
        answer = [word for value in ordered for word in (",", *value)][1:]
        question = ("ask", "all", kinds[i] + "s", "for", *key, "?")
        asked.append(Asked(question, (*key, "is"), tuple(answer), tuple(" ".join(value) for value in ordered)))
    return Item("closed_multivalue", REMEMBER, words, _shuffled(rng, asked), tuple(spans))


def multiquery(rng: random.Random, size: int) -> Item:
    """Two keys in one question."""
    keys = _keys(rng, max(2, min(rng.randint(2, 6), size // 24)))
    kind = rng.choice(("number", "code"))
    values = {key: _value(rng, kind, long=kind == "code") for key in keys}
    words, spans = _woven(rng, Filler(rng, keys), [_needle(kind, *row) for row in values.items()], size)
    pairs = rng.sample([(a, b) for a in keys for b in keys if a != b], min(6, len(keys) * (len(keys) - 1)))
    asked = []
    for first, second in pairs:
        said = [(*key, "is", *values[key]) for key in (first, second)]
        question = ("ask", kind + "s", "for", *first, "and", *second, "?")
        asked.append(Asked(question, (), (*said[0], ",", *said[1]), tuple(" ".join(each) for each in said)))
    return Item("closed_multiquery", REMEMBER, words, tuple(asked), tuple(spans))


def keyvalue(rng: random.Random, size: int) -> Item:
    """Pairs of codes lead to two codes, digits or nouns."""
    found: dict[Words, None] = {}
    while len(found) < max(2, size // 6):
        found[rng.choice(v.CODES), rng.choice(v.CODES)] = None
    pool = rng.choice((v.CODES, v.CODES, v.DIGITS, v.NOUNS))
    rows = [(key, (rng.choice(pool), rng.choice(pool))) for key in found]
    words, spans = _joined((*key, ":", *value, ",") for key, value in rows)
    asked = [Asked(("ask", "value", *key, "?"), (*key, ":"), value, (" ".join(value),)) for key, value in rows]
    return Item("closed_keyvalue", ("remember", "the", "pairs", "."), words, _shuffled(rng, asked), spans)


def _joined(rows: Iterable[Words]) -> tuple[Words, tuple[tuple[int, int], ...]]:
    words: list[str] = []
    spans = []
    for row in rows:
        spans.append((len(words), len(words) + len(row)))
        words += row
    return tuple(words), tuple(spans)


# ---- variables, strings, labels, counts


def tracking(rng: random.Random, size: int) -> Item:
    """Which variables a value went to, through chains of moves in filler."""
    chains = rng.randint(1, max(1, min(6, size // 60)))
    hops = 3
    names = rng.sample(v.VARIABLES, chains * hops)
    numbers: dict[Words, None] = {}
    while len(numbers) < chains:
        numbers[_digits(rng, 2)] = None
    rows: list[list[Words]] = []
    for chain, number in enumerate(numbers):
        mine = names[chain * hops : (chain + 1) * hops]
        rows.append([(*number, "to", mine[0], "."), *((a, "to", b, ".") for a, b in pairwise(mine))])
    order = [chain for chain in range(chains) for _ in range(hops)]
    rng.shuffle(order)
    words, spans = _woven(rng, Filler(rng, avoid=names), [rows[chain].pop(0) for chain in order], size)
    asked = [
        Asked(("ask", "variables", "from", *number, "?"), (*number, "to"), _chain(mine), tuple(mine))
        for number, mine in zip(numbers, (names[c * hops : (c + 1) * hops] for c in range(chains)), strict=True)
    ]
    return Item("closed_tracking", ("remember", "the", "variables", "."), words, _shuffled(rng, asked), tuple(spans))


def _chain(names: Sequence[str]) -> Words:
    return tuple(word for name in names for word in ("to", name))[1:]


def copy(rng: random.Random, size: int) -> Item:
    """Strings of eight random words; the first three are given, the other five asked for."""
    pool = v.NOUNS + v.ADJECTIVES + v.CODES + v.DIGITS + v.VARIABLES
    found: dict[Words, Words] = {}
    while len(found) < max(2, size // 9):
        row = tuple(rng.choice(pool) for _ in range(8))
        found.setdefault(row[:3], row)
    words, spans = _joined(("|", *row) for row in found.values())
    asked = [Asked(("ask", "string", "?"), ("|", *row[:3]), row[3:], (" ".join(row[3:]),)) for row in found.values()]
    return Item("closed_copy", ("remember", "the", "strings", "."), words, _shuffled(rng, asked), spans)


def labels(rng: random.Random, size: int) -> Item:
    """Many examples of a hidden rule: each of the four categories of nouns has a label of its own."""
    chosen = rng.sample(v.LABELS, 4)
    rows = []
    for _ in range(size // 5):
        category = rng.randrange(4)
        rows.append((rng.choice(v.ADJECTIVES), rng.choice(v.CATEGORIES[category]), "-", chosen[category], "."))
    words, spans = _joined(rows)
    asked: dict[Words, Asked] = {}
    while len(asked) < 20:
        category = rng.randrange(4)
        prefix = (rng.choice(v.ADJECTIVES), rng.choice(v.CATEGORIES[category]), "-")
        asked[prefix] = Asked(("ask", "label", "?"), prefix, (chosen[category],), (chosen[category],))
    return Item("closed_labels", ("label", "the", "examples", "."), words, tuple(asked.values()), spans)


def _common(task: str, rng: random.Random, size: int, pool: Words, asks: Sequence[tuple[Words, int]]) -> Item:
    """A few words far more often than the many others."""
    words = rng.sample(pool, min(len(pool), 3 + max(6, size // 12)))
    base = size * rng.uniform(0.4, 0.6)
    bag = [word for word, share in zip(words, (0.5, 0.3, 0.2), strict=False) for _ in range(max(2, int(base * share)))]
    rare = words[3:]
    bag += [rare[i % len(rare)] for i in range(size - len(bag))]
    rng.shuffle(bag)
    asked = [Asked(question, (), tuple(words[:count]), tuple(words[:count])) for question, count in asks]
    return Item(task, ("count", "the", "words", "."), tuple(bag), _shuffled(rng, asked))


def common(rng: random.Random, size: int) -> Item:
    """The most common nouns among nouns."""
    asks = (
        (("ask", "most", "common", "word", "?"), 1),
        (("ask", "two", "most", "common", "words", "?"), 2),
        (("ask", "three", "most", "common", "words", "?"), 3),
    )
    return _common("closed_cwe", rng, size, v.NOUNS, asks)


def frequent(rng: random.Random, size: int) -> Item:
    """The most frequent codes among codes."""
    asks = (
        (("ask", "most", "frequent", "code", "?"), 1),
        (("ask", "two", "most", "frequent", "codes", "?"), 2),
        (("ask", "three", "most", "frequent", "codes", "?"), 3),
    )
    return _common("closed_fwe", rng, size, v.CODES, asks)


# ---- the context again

WHOLE = ("ask", "repeat", "the", "previous", "context", "exactly", ".")
PART = ("ask", "repeat", "the", "part", "of", "the", "previous", "context", "starting", "with")
GIVEN, REPEATED = 8, 16
REPEATABLE = ("closed_multikey", "closed_dense", "closed_keyvalue", "closed_tracking", "closed_copy", "closed_labels")


def repeat(rng: random.Random, size: int) -> Item:
    """Parts of a context of another task: eight words are given, the next sixteen are asked for."""
    inner = make(rng.choice(REPEATABLE), rng, size)
    words = inner.words
    starts = range(0, len(words) - GIVEN - REPEATED, GIVEN + REPEATED)
    asked = [repeated_part(words, start, REPEATED) for start in starts if _once(words, words[start : start + GIVEN])]
    return Item("closed_repeat", REMEMBER, words, _shuffled(rng, asked)[:8], inner.needles)


def repeated_part(words: Words, start: int, length: int) -> Asked:
    """The question for `length` words of a context behind the eight from `start` on, which begin the reply too."""
    given, answer = words[start : start + GIVEN], words[start + GIVEN : start + GIVEN + length]
    return Asked((*PART, *given, "."), given, answer, (" ".join(answer),))


def _once(words: Words, part: Words) -> bool:
    return sum(words[i : i + len(part)] == part for i in range(len(words) - len(part) + 1)) == 1


def story(rng: random.Random, size: int) -> Item:
    """Filler alone, without questions: for training."""
    return Item("story", ("read", "the", "story", "."), _woven(rng, Filler(rng), [], size)[0], ())


MAKERS: Mapping[str, Maker] = MappingProxyType(
    {
        "closed_single": single,
        "closed_multikey": multikey,
        "closed_dense": dense,
        "closed_multivalue": multivalue,
        "closed_multiquery": multiquery,
        "closed_keyvalue": keyvalue,
        "closed_tracking": tracking,
        "closed_copy": copy,
        "closed_labels": labels,
        "closed_cwe": common,
        "closed_fwe": frequent,
        "closed_repeat": repeat,
    }
)
TASKS = tuple(MAKERS)
LEAST = MappingProxyType({task: 48 if task == "closed_repeat" else 32 for task in TASKS})  # words of a context
