"""A run folder as values: what every table, figure and page is a function of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.comparison import compare
from wakesight.evaluation.config import arguments_of, planned_questions, read_config
from wakesight.evaluation.records import Records, Row, canonical, complete, read_json, unit
from wakesight.evaluation.runner import file_name
from wakesight.evaluation.scored import ALL, counted

DROPPED = "Questions left out, because records.jsonl has no row of some arms:"


@dataclass(frozen=True)
class Run:
    """One run folder. name: unique in a report. rows: complete questions only, in canonical order.

    comparison: worked out from the rows now, so that it can be neither missing nor stale. dropped: what is there of
    each question that has rows, but not one of every arm. planned: questions of the whole run; None if the folder,
    an older one, does not say.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    rows: list[Row]
    comparison: dict[str, Any]
    dropped: tuple[str, ...] = ()
    planned: int | None = None

    @property
    def progress(self) -> str:
        """How many questions were scored, of how many, and whether any are still to be run."""
        run, scored = self.comparison["questions"], self.comparison["scored_questions"]
        every = counted(max(run, self.planned or 0), "question")
        return f"{scored:,} of {every} scored" + (f", unfinished: {run:,} run so far" if self.unfinished else "")

    @property
    def unfinished(self) -> bool:
        return self.planned is not None and bool(self.comparison["questions"] < self.planned)

    @property
    def arguments(self) -> dict[str, Any]:
        return arguments_of(self.config)

    def apart(self, rule: str, family: str) -> dict[str, dict[str, Any]]:
        """Task -> arm -> its difference to the one arm that this family compares it with; the mean over tasks first."""
        found: dict[str, dict[str, Any]] = {}
        for cell in self.comparison["rules"][rule]["apart"][family]:
            found.setdefault(cell["task"], {})[cell["a"]] = cell
        return dict(sorted(found.items(), key=lambda item: item[0] != ALL))

    def context(self, context_id: str) -> dict[str, Any] | None:
        """What contexts/ holds about a context; None for one that could not be read by the model."""
        path = self.folder / "contexts" / f"{file_name(context_id)}.json"
        found: dict[str, Any] | None = read_json(path) if path.exists() else None
        return found

    @property
    def contexts(self) -> Iterator[tuple[str, str]]:
        """(task, context id), in the order of the rows."""
        yield from dict.fromkeys((row["task"], row["context"]) for row in self.rows)


def open_runs(folders: Sequence[Path]) -> list[Run]:
    """Raises RequestError for a folder without a run, without a finished question, damaged, or given twice."""
    resolved = [folder.resolve() for folder in folders]
    for number, folder in enumerate(resolved):
        if folder in resolved[:number]:
            raise RequestError(f"{folders[number]} is given twice; name every run folder once")
    return [_open(folder, name) for folder, name in zip(folders, _names(resolved), strict=True)]


def _open(folder: Path, name: str) -> Run:
    if not folder.is_dir():
        raise RequestError(f"{folder} is no folder; give a run folder of wakesight eval")
    config = read_config(folder)
    found = Records(folder).read()
    try:
        rows = canonical(complete(found))
        if rows:
            comparison = compare(rows, arguments_of(config))
            return Run(name, folder, config, rows, comparison, tuple(_dropped(found, rows)), planned_questions(config))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RequestError(f"{folder} holds no rows that wakesight eval has written ({error!r})") from None
    raise RequestError(f"{folder} has no finished question yet; run wakesight eval, with --resume if it was stopped")


def _dropped(found: Sequence[Row], rows: Sequence[Row]) -> Iterator[str]:
    """What is there of each question that is not among `rows`, the complete ones."""
    whole = set(map(unit, rows))
    counts = Counter((*unit(row), row["arms"]) for row in found if unit(row) not in whole)
    for (context, question, arms), count in sorted(counts.items()):
        yield f"{context}, {question}: {count} of {arms} rows are there"


def _names(folders: Sequence[Path]) -> list[str]:
    """Each folder's own name, with as much of its path as tells it apart from the others."""
    depth = 1
    while True:
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
        depth += 1
