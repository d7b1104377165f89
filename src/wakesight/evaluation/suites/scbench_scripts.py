"""The SCBench tasks that come from scripts alone: kv, prefix_suffix, vt and mf, scaled to the length.

The official settings are upper bounds (2,500 pairs, 6,000 strings, 30,000 integers); as many are taken as fit.
Wording is ours, the structure is the official one.
Source: SCBench (Li et al. 2025) table of tasks; OpenBMB/InfiniteBench data/construct_synthetic_dataset.py;
NVIDIA/RULER scripts/data/synthetic/variable_tracking.py.
"""

from __future__ import annotations

import json
import random
import string
from itertools import pairwise

from wakesight.evaluation.items import Question, SuiteOptions
from wakesight.evaluation.suites import words
from wakesight.evaluation.suites.fitting import Draft, grow, item_random
from wakesight.evaluation.suites.scbench_turns import in_turns

TURNS = 5  # questions per context, the official mean for kv, prefix_suffix and vt
PAIRS, STRINGS, INTEGERS = 2500, 6000, 29999  # an odd list of integers has one median
NOISE = "Rain fell on the quay. A bell rang twice. The boats came home. Nets hung out to dry. Then it was evening."
FIND_VALUE = "Find the value that belongs to the given key in the JSON object below."


def new_tokens(official: int, options: SuiteOptions) -> int:
    """The official number of new tokens, but never more than a quarter of the length."""
    return min(official, max(1, options.length // 4))


def kv(options: SuiteOptions, index: int) -> Draft:
    """A JSON object of uuid pairs; the question names a key."""
    pairs = uuid_pairs(item_random(options, "kv", index), PAIRS)

    def build(n: int) -> Draft:
        asked = item_random(options, "kv questions", index).sample(range(n), min(TURNS, n))
        questions = [kv_question(*pairs[place], new_tokens(150, options)) for place in asked]
        answers = [pairs[place][1] for place in asked]
        text = "JSON data:\n" + json.dumps(dict(pairs[:n]))
        meta = {"pairs": n, "asked": asked}
        return Draft(text, in_turns(questions, answers, options), FIND_VALUE, meta=meta)

    return grow(build, options, "kv", low=2, guess=options.length // 50, high=PAIRS)


def uuid_pairs(rng: random.Random, n: int) -> list[tuple[str, str]]:
    """n keys and values, uuid4 by form."""
    return [(words.uuid4(rng), words.uuid4(rng)) for _ in range(n)]


def kv_question(key: str, value: str, max_new_tokens: int) -> Question:
    """The question for one pair; graded by the value standing in the reply."""
    ask = f'Key: "{key}"\nThe value of this key is:'
    return Question("", ask, (value,), "scbench_kv", max_new_tokens, extra={"key": key})


def prefix_suffix(options: SuiteOptions, index: int) -> Draft:
    """A dictionary of random strings; the question gives how one starts and ends.

    The official text of this task is not public in prose: letters, the length of prefix and suffix, and their being
    unique to one string are inferred.
    """
    rng = item_random(options, "prefix_suffix", index)
    edge = 8
    entries: list[str] = []
    taken: set[str] = set()
    while len(entries) < STRINGS:
        word = "".join(rng.choices(string.ascii_letters, k=rng.randint(65, 122)))
        edges = {"starts " + word[:edge], "ends " + word[-edge:]}
        if not edges & taken:
            taken |= edges
            entries.append(word)

    def build(n: int) -> Draft:
        asked = item_random(options, "prefix_suffix questions", index).sample(range(n), min(TURNS, n))
        questions = [
            Question(
                "",
                f'Which string of the dictionary starts with "{entries[place][:edge]}" and ends with '
                f'"{entries[place][-edge:]}"? Reply with the whole string.',
                (entries[place],),
                "scbench_prefix_suffix",
                new_tokens(150, options),
            )
            for place in asked
        ]
        text = "Below is a dictionary of strings. Later you are asked for one of them by its beginning and its end.\n\n"
        text += "\n".join(entries[:n])
        answers = [entries[place] for place in asked]
        return Draft(text, in_turns(questions, answers, options), meta={"strings": n, "asked": asked})

    return grow(build, options, "prefix_suffix", low=2, guess=options.length // 50, high=STRINGS)


def vt(options: SuiteOptions, index: int) -> Draft:
    """Two chains of three variables in noise; one question for each chain's value."""
    rng = item_random(options, "vt", index)
    chains, hops = 2, 2
    names: list[str] = []
    while len(names) < chains * (hops + 1):
        name = "".join(rng.choices(string.ascii_uppercase, k=5))
        if name not in names:
            names.append(name)
    values = [str(value) for value in rng.sample(range(10000, 100000), chains)]
    groups = [names[chain::chains] for chain in range(chains)]
    lines = [
        [f"VAR {group[0]} = {value}", *(f"VAR {later} = VAR {earlier}" for earlier, later in pairwise(group))]
        for group, value in zip(groups, values, strict=True)
    ]
    # a chain keeps its order: depths are drawn once, as fractions, and sorted within the chain
    depths = [sorted(rng.random() for _ in chain) for chain in lines]
    questions = [
        Question(
            "",
            f"Question: which variables hold the value {value}? Name all of them.",
            tuple(group),
            "scbench_vt",
            new_tokens(30, options),
        )
        for group, value in zip(groups, values, strict=True)
    ]
    asked = in_turns(questions, [", ".join(group) for group in groups], options)

    def build(n: int) -> Draft:
        planted = [
            (depth, line)
            for places, chain in zip(depths, lines, strict=True)
            for depth, line in zip(places, chain, strict=True)
        ]
        text = (
            "The text below hides assignments to variables between lines that do not matter. Remember who has what.\n\n"
        )
        text += "\n".join(woven([NOISE] * n, planted))
        return Draft(text, asked, meta={"noise": n, "chains": chains, "hops": hops})

    return grow(build, options, "vt", low=1, guess=options.length // 30)


def woven(lines: list[str], planted: list[tuple[float, str]]) -> list[str]:
    """`lines` with every planted line put in at its depth, a fraction of the lines from 0 to 1."""
    out = []
    waiting = sorted(planted)
    for place, line in enumerate(lines):
        while waiting and waiting[0][0] * len(lines) <= place:
            out.append(waiting.pop(0)[1])
        out.append(line)
    return out + [line for _, line in waiting]


RANKS = {
    "largest number": -1,
    "second largest number": -2,
    "third largest number": -3,
    "smallest number": 0,
    "second smallest number": 1,
    "third smallest number": 2,
}


def mf(options: SuiteOptions, index: int) -> Draft:
    """A list of integers below 1,000, the range narrowed at random; three of seven statistics are asked.

    Equal numbers count once for the ranks, and the text says so; the median is of the whole list.
    """
    rng = item_random(options, "mf", index)
    low, high = rng.randint(0, 300), rng.randint(600, 999)
    numbers = [rng.randint(low, high) for _ in range(INTEGERS)]
    targets = rng.sample([*RANKS, "median"], 3)

    def build(n: int) -> Draft:
        count = 2 * n + 1
        taken = sorted(numbers[:count])
        distinct = sorted(set(taken))
        found = [str(taken[n] if name == "median" else distinct[RANKS[name]]) for name in targets]
        questions = [
            Question(
                "",
                f"What is the {name}?\n\nReply with one number only. The {name} of the list is",
                (answer,),
                "scbench_mf",
                new_tokens(5, options),
            )
            for name, answer in zip(targets, found, strict=True)
        ]
        return Draft(
            str(numbers[:count]),
            in_turns(questions, found, options),
            "Below is a list of integers. Questions about it follow; where numbers are ranked, equal ones count once.",
            meta={"integers": count, "range": [low, high]},
        )

    return grow(build, options, "mf", low=8, guess=options.length // 8, high=(INTEGERS - 1) // 2)
