"""What the page's drill-down shows, packed: an index of all contexts, and one block per context.

A block holds only base64, so that no document and no answer is ever text of the page; page.js inflates the one
that is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any

from wakesight.evaluation.records import Row
from wakesight.report.arm_names import parse
from wakesight.report.folder import Run
from wakesight.report.palette import looks
from wakesight.report.safe_json import packed

MOST_BYTES = 64_000_000  # of all blocks of a page


@dataclass
class Items:
    """index: plain JSON per run. blocks: element id -> JSON of a context. left_out: contexts that did not fit."""

    index: list[dict[str, Any]] = field(default_factory=list)
    blocks: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: int = 0

    @property
    def size(self) -> int:
        return sum(len(block["text"]) + sum(len(x or "") for x in block["kept"]) for block in self.blocks.values())


def collect(runs: Sequence[Run], most_contexts: int) -> Items:
    """At most so many contexts of all runs, task by task in turn, so that every task is there."""
    items = Items()
    share = -(-most_contexts // len(runs))
    for place, run in enumerate(runs):
        chosen = list(islice(_in_turn(run), share))
        by_context: dict[str, list[Row]] = {}
        for row in run.rows:
            by_context.setdefault(row["context"], []).append(row)
        listed: list[dict[str, Any]] = []
        for task, context in run.contexts:
            if (task, context) in chosen and items.size < MOST_BYTES:
                name = f"item-{place}-{len(listed)}"
                rows = by_context[context]
                items.blocks[name] = _block(run, context, rows)
                questions = list(dict.fromkeys(row["question"] for row in rows))
                listed.append({"task": task, "id": context, "block": name, "questions": questions})
        items.left_out += len(by_context) - len(listed)
        items.index.append({"name": run.name, "arms": _arms(run), "contexts": listed})
    return items


def _arms(run: Run) -> list[dict[str, Any]]:
    styles = looks(run.comparison["arms"])
    names = map(parse, run.comparison["arms"])
    return [
        {"id": name.id, "label": name.label, "place": styles[name.curve].place if name.curve in styles else None}
        for name in names
    ]


def _in_turn(run: Run) -> Iterator[tuple[str, str]]:
    """(task, context): the first of every task, then the second of every task."""
    by_task: dict[str, list[tuple[str, str]]] = {}
    for task, context in run.contexts:
        by_task.setdefault(task, []).append((task, context))
    for group in zip_longest(*by_task.values()):
        yield from (one for one in group if one is not None)


def _block(run: Run, context: str, rows: Sequence[Row]) -> dict[str, Any]:
    about = run.context(context) or {}
    questions = {
        question: {**about.get("questions", {}).get(question, {}), "rows": _rows(run, rows, question)}
        for question in dict.fromkeys(row["question"] for row in rows)
    }
    text = {
        "source": rows[0]["source"],
        "meta": about.get("meta", {}),
        "heads": about.get("heads", 0),
        "pieces": about.get("pieces", []),
        "questions": questions,
    }
    kept = about.get("kept", {})
    return {"text": packed(text), "kept": [kept.get(arm) for arm in run.comparison["arms"]]}


def _rows(run: Run, rows: Sequence[Row], question: str) -> list[dict[str, Any] | None]:
    """Per arm, in the order of the index."""
    shown = ("output", "grades", "kept", "tokens", "kv_bytes_kept", "kept_per_layer", "finish", "skipped")
    found = {row["arm"]: row for row in rows if row["question"] == question}
    return [{name: found[arm].get(name) for name in shown} if arm in found else None for arm in run.comparison["arms"]]
