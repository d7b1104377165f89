"""Needle check: how often does the model still find one number, by scorer and kept fraction?

Twelve contexts, one needle each (see haystack.py); prefix-only: a context is read, scored and compacted
before its question exists. One prefill and one scoring per scorer serve all fractions of a context.

    .venv/bin/python benchmarks/needles.py --model smollm2 --out out/needles
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import wakesight as ws
from haystack import document, twelve
from wakesight.bench.machine import versions

SCORERS = ("random", "streaming", "knorm", "keydiff", "snapkv")
FRACTIONS = tuple(round(0.1 * i, 1) for i in range(1, 10))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", default="smollm2")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--out", type=Path, default=Path("out/needles"))
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    engine = ws.load(options.model)
    rows = []
    for index, (needle, tokens) in enumerate(twelve(options.seed)):
        text = document(engine.encode, needle, tokens, seed=options.seed * 100 + index)
        with engine.prefill(text) as whole:
            rows.append(row(whole, needle, "full", 1.0))
            for scorer in SCORERS:
                for keep in FRACTIONS:
                    with whole.compact(ws.Policy(scorer=scorer, keep=keep)) as child:
                        rows.append(row(child, needle, scorer, keep))
        print(f"{index + 1}/12 contexts", flush=True)
        write(options.out / "records.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    summary = {"model": options.model, "seed": options.seed, "versions": versions(), "accuracy": accuracy(rows)}
    write(options.out / "summary.json", json.dumps(summary, indent=1) + "\n")
    print(table(summary["accuracy"]))


def row(session: ws.Session, needle, scorer: str, keep: float) -> dict:
    answer = session.ask(needle.question, max_new_tokens=24)
    stats = session.stats
    return {
        "key": needle.key, "depth": round(needle.depth, 3), "tokens": stats.logical_length,
        "scorer": scorer, "keep": keep,
        "kept_per_head": stats.kept_entries[0][0], "kv_bytes_kept": stats.kv_bytes_kept, "answer": answer.text,
        "grade": int(needle.number in answer.text),
    }  # fmt: skip


def accuracy(rows: list[dict]) -> dict[str, dict[str, int]]:
    """Needles found of 12, by scorer and fraction."""
    found: dict[str, dict[str, int]] = {}
    for r in rows:
        cell = found.setdefault(r["scorer"], {})
        cell[str(r["keep"])] = cell.get(str(r["keep"]), 0) + r["grade"]
    return found


def table(found: dict[str, dict[str, int]]) -> str:
    lines = ["| found of 12 | " + " | ".join(str(f) for f in FRACTIONS) + " |", "|---|" + "---|" * len(FRACTIONS)]
    for scorer in SCORERS:
        lines.append(f"| {scorer} | " + " | ".join(str(found[scorer][str(f)]) for f in FRACTIONS) + " |")
    return "\n".join([*lines, f"full cache: {found['full']['1.0']} of 12"])


def write(path: Path, text: str) -> None:
    """Under a temporary name, then renamed: a reader never sees half a file."""
    scratch = path.with_suffix(".part")
    scratch.write_text(text)
    os.replace(scratch, path)


if __name__ == "__main__":
    main()
