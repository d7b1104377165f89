"""Contexts of the closed tasks as documents to label: python -m training.documents out/documents --each 50

One .jsonl file per task kind, which is its corpus. Their seeds are neither the training's nor the suites'.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from wakesight.evaluation.suites.closed import tasks

# nine kinds for leave-one-corpus-out; the counting tasks and `closed_repeat` stay unseen
KINDS = (
    "closed_single", "closed_multikey", "closed_dense", "closed_multivalue", "closed_multiquery", "closed_keyvalue",
    "closed_tracking", "closed_copy", "closed_labels",
)  # fmt: skip


def write(folder: Path, each: int, sizes: tuple[int, int], seed: int) -> int:
    """`each` documents of every kind, their words drawn between `sizes`; the number of documents."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        lines = []
        for index in range(each):
            rng = random.Random(f"documents/{kind}/{seed}/{index}")
            item = tasks.make(kind, rng, rng.randint(*sizes))
            row = {
                "id": f"{kind}-{seed}-{index}", "corpus": kind, "instruction": " ".join(item.instruction),
                "text": " ".join(item.words),
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
    given = parser.parse_args(arguments)
    count = write(given.folder, given.each, tuple(given.words), given.seed)
    print(f"{given.folder}: {count} documents of {len(KINDS)} kinds")


if __name__ == "__main__":
    main()
