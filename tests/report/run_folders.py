"""Small run folders made by hand: what a report is a function of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from wakesight.evaluation.arms import WHOLE, make_arms
from wakesight.evaluation.folders import finish
from wakesight.evaluation.records import Records, Row, write_json
from wakesight.evaluation.runner import file_name, pack

ARMS = [arm.id for arm in make_arms(["keydiff", "snapkv:window=8"], ["flat", "ada"], [0.1, 0.3, 0.5])]
PIECES = [
    "Read",
    " this",
    ".",
    "\n",
    "The",
    " code",
    " is",
    " 41",
    "7",
    ".",
    " Tides",
    " turn",
    " <b>",
    "now",
    "</b>",
    "é",
]
HEADS = 6
EVIL = "</script><script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'>\u2028$title & \"quotes\""


def make_run(
    folder: Path, *, suite: str = "niah", tasks: tuple[str, ...] = ("niah_64", "niah_128"), items: int = 3,
    output: str = "417", skip: str | None = None, rules: tuple[str, ...] = ("official", "strict"), copies: int = 1,
) -> Path:  # fmt: skip
    """A finished run. skip: a context of this name could not be read. copies: how often the text is repeated."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {"suite": suite, "model": "tiny"}
    named = {"methods": "keydiff,snapkv:window=8", "allocations": "flat,ada", "evicted": "drop"}
    defaults = {"seed": 3, "keep": "0.1,0.3,0.5", "data": None, "options": {}, **named}
    versions = {"wakesight": "0.1.0", "torch": "2"}
    write_json(folder / "config.json", {"given": given, "defaults": defaults, "versions": versions})
    (folder / "contexts").mkdir(exist_ok=True)
    for task in tasks:
        for number in range(items):
            _context(folder, task, number, PIECES * copies, output, skip, rules)
    finish(folder)
    return folder


def _context(
    folder: Path, task: str, number: int, pieces: list[str], output: str, skip: str | None, rules: tuple[str, ...]
) -> None:
    name = f"{task}-{number}"
    kept = {arm: _counts(arm, len(pieces), number) for arm in ARMS if arm != WHOLE}
    questions = {f"q{i}": _question(i) for i in range(2)}
    if name != skip:
        about = {
            "context": name, "task": task, "source": f"generated:{task}", "pieces": pieces, "heads": HEADS,
            "meta": {"depth": number / 2, "length": int(task.rpartition("_")[2])}, "questions": questions,
            "kept": {arm: pack(counts) for arm, counts in kept.items()},
        }  # fmt: skip
        write_json(folder / "contexts" / f"{file_name(name)}.json", about)
    for place, question in enumerate(questions):
        rows = [_row(task, name, question, arm, len(ARMS)) for arm in ARMS]
        for row in rows:
            if name == skip:
                row.update(skipped="the model reads at most 8 tokens | <i>and</i> this has 16", grades={})
                continue
            held = kept.get(row["arm"], np.full(len(pieces), HEADS))
            _answer(row, held, len(pieces), output, rules, luck=(number + place) % 3)
        Records(folder).append(rows)


def _question(number: int) -> dict[str, Any]:
    return {"text": f"What is code {number}?", "answer_prefix": "The code is", "references": ["417"]}


def _counts(arm: str, tokens: int, number: int) -> np.ndarray:
    """Some tokens whole, some in part, some not at all, different in every arm."""
    noise = np.random.default_rng([number, ARMS.index(arm)])
    return np.where(noise.random(tokens) < float(arm.rpartition("/")[2]), noise.integers(1, HEADS + 1, tokens), 0)


def _row(task: str, context: str, question: str, arm: str, arms: int) -> Row:
    return {
        "task": task, "context": context, "question": question, "arm": arm, "arms": arms,
        "source": f"generated:{task}", "grades": {}, "skipped": None,
    }  # fmt: skip


def _answer(row: Row, held: np.ndarray, tokens: int, output: str, rules: tuple[str, ...], luck: int) -> None:
    keep = 1.0 if row["arm"] == WHOLE else float(row["arm"].rpartition("/")[2])
    grade = 1.0 if keep == 1 else round(keep * (luck + 1) / 2, 3)
    row.update(
        output=output, output_ids=[1], finish="stop", margin=0.5, tokens=tokens, prefix=2, kept=int(held.sum()),
        kept_per_layer=[int(held.sum())], kv_bytes_full=tokens * HEADS * 64, kv_bytes_kept=int(held.sum()) * 64,
        state_bytes=0, grades={rule: grade if rule == rules[0] else float(grade > 0.5) for rule in rules},
        seconds={"prefill": 1.0, "score": 0.25, "compact": 0.125 * keep},
    )  # fmt: skip
