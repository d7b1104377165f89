"""Contexts of the closed tasks as documents to label: python -m training.documents out/documents --each 50

One .jsonl file per task kind, which is its corpus. Their seeds are neither the training's nor the suites'. Every row
has `continuations` for `wakesight label --given`: its questions with their answers, dealt out to four conversations in
which none is asked twice; or, with --repeat, the context itself, read back in parts (what KVzip looks at).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from wakesight.evaluation.suites.closed import tasks
from wakesight.evaluation.suites.closed import vocabulary as v

# nine kinds for leave-one-corpus-out; the counting tasks and `closed_repeat` stay unseen
KINDS = (
    "closed_single", "closed_multikey", "closed_dense", "closed_multivalue", "closed_multiquery", "closed_keyvalue",
    "closed_tracking", "closed_copy", "closed_labels",
)  # fmt: skip


CONVERSATIONS, LONGEST = 4, 128  # as many continuations as the paper samples, and as long


def conversations(item: tasks.Item) -> list[str]:
    """The item's questions and answers as up to four conversations of up to 128 words, as the suite asks them."""
    made = []
    for first in range(min(CONVERSATIONS, len(item.asked))):
        words: list[str] = []
        for asked in item.asked[first::CONVERSATIONS]:
            turn = [*([v.USER] if words else []), *asked.question, v.ASSISTANT, *asked.prefix, *asked.answer, v.EOS]
            if len(words) + len(turn) > LONGEST:
                break
            words += turn
        if words:
            made.append(" ".join(words))
    return made


def read_back(item: tasks.Item) -> list[str]:
    """The whole context, asked for and repeated."""
    return [" ".join((*tasks.WHOLE, v.ASSISTANT, *item.words, v.EOS))]


def write(folder: Path, each: int, sizes: tuple[int, int], seed: int, repeat: bool = False) -> int:
    """`each` documents of every kind, their words drawn between `sizes`; the number of documents.

    repeat: the continuation is the context itself, and not questions about it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        lines = []
        for index in range(each):
            rng = random.Random(f"documents/{kind}/{seed}/{index}")
            item = tasks.make(kind, rng, rng.randint(*sizes))
            row = {
                "id": f"{kind}-{seed}-{index}", "corpus": kind, "instruction": " ".join(item.instruction),
                "text": " ".join(item.words), "continuations": read_back(item) if repeat else conversations(item),
            }  # fmt: skip
            lines.append(json.dumps(row) + "\n")
        scratch = folder / f".{kind}.tmp"
        scratch.write_text("".join(lines), "utf-8")
        scratch.replace(folder / f"{kind}.jsonl")
    return each * len(KINDS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=50, help="documents of every kind")
    parser.add_argument("--words", type=int, nargs=2, default=(512, 1024), metavar=("LEAST", "MOST"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", action="store_true", help="continuations repeat the context")
    given = parser.parse_args(arguments)
    count = write(given.folder, given.each, tuple(given.words), given.seed, given.repeat)
    print(f"{given.folder}: {count} documents of {len(KINDS)} kinds")


if __name__ == "__main__":
    main()
