"""A summary.json as a Markdown table: python benchmarks/results_table.py docs/results/ruler.json

Rows are curves (scorer, allocation), columns kept fractions; cells are the mean over tasks with its 95% interval, or
with --task NAME that task's. --tasks lists every task of the unpruned cache, and so what says anything about eviction.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SHOWN = ("mean", "low", "high")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summary", type=Path)
    parser.add_argument("--task", default="mean")
    parser.add_argument("--tasks", action="store_true")
    parser.add_argument("--measure", default="", help="kl or nll of a fidelity run, in place of the grade")
    given = parser.parse_args()
    rows = json.loads(given.summary.read_text())["arms"]
    print(whole_by_task(rows) if given.tasks else by_curve(rows, given.task, given.measure))


def by_curve(rows: list[dict[str, Any]], task: str, measure: str) -> str:
    mine = [row for row in rows if row["task"] == task]
    if not mine:
        raise SystemExit(f"there is no task {task}; tasks: {', '.join(dict.fromkeys(row['task'] for row in rows))}")
    whole = next((row for row in mine if row["method"] == "whole"), None)
    pruned = [row for row in mine if row["method"] != "whole"]
    keeps = sorted({row["keep"] for row in pruned})
    lines = ["| p = | " + " | ".join(f"{keep:g}" for keep in keeps) + " |", "|---" * (len(keeps) + 1) + "|"]
    for name in dict.fromkeys(curve(row) for row in pruned):
        found = {row["keep"]: row for row in pruned if curve(row) == name}
        lines.append(f"| {name} | " + " | ".join(cell(found.get(keep), measure) for keep in keeps) + " |")
    if whole is not None:
        lines.append(f"\nWhole cache: {cell(whole, measure)}, {whole['n']} questions.")
    return "\n".join(lines)


def whole_by_task(rows: list[dict[str, Any]]) -> str:
    lines = ["| task | whole cache | questions |", "|---|---|---|"]
    lines += [f"| {row['task']} | {cell(row, '')} | {row['n']} |" for row in rows if row["method"] == "whole"]
    return "\n".join(lines)


def curve(row: dict[str, Any]) -> str:
    name = str(row["method"])
    return name if row["allocation"] == "flat" else f"{name}, {row['allocation']}"


def cell(row: dict[str, Any] | None, measure: str) -> str:
    if row is None:
        return "-"
    value = row[measure] if measure else row
    mean, low, high = (value[name] for name in SHOWN)
    return f"{mean:.2f} [-]" if low is None else f"{mean:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
