"""A report as a folder: the page, the tables and the figures, written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from wakesight.errors import RequestError, WorkError
from wakesight.report.figures import figure_files
from wakesight.report.folder import Run
from wakesight.report.page import MOST_CONTEXTS, page
from wakesight.report.tables import csv_tables, markdown, to_csv

PAGE = "report.html"
OURS = frozenset(
    {PAGE, "tables.md", "figures", "scores.csv", "differences.csv", "areas.csv", "costs.csv", "skipped.csv"}
)


def write_report(runs: Sequence[Run], out: Path, most_contexts: int = MOST_CONTEXTS) -> list[str]:
    """Write the report of `runs` into `out`; returns its files. An earlier report there is replaced.

    Everything is made under a temporary name beside `out` and renamed at the end. Raises RequestError if `out`
    holds anything but a report, or without matplotlib; WorkError if the disk refuses.
    """
    check_target(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            names = [_write(scratch, name, content) for name, content in contents(runs, most_contexts)]
            scratch.chmod(0o755)
            _swap(scratch, out)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise WorkError(f"the report could not be written to {out}: {error.strerror or error}") from error
    return sorted(names)


def contents(runs: Sequence[Run], most_contexts: int = MOST_CONTEXTS) -> Iterator[tuple[str, bytes]]:
    """(path in the report, content) of every file. The same runs give the same bytes."""
    yield PAGE, page(runs, most_contexts).encode()
    yield "tables.md", markdown(runs).encode()
    for table in csv_tables(runs):
        yield f"{table.name}.csv", to_csv(table).encode()
    for run in runs:
        folder = PurePosixPath("figures") if len(runs) == 1 else PurePosixPath("figures") / run.name.replace("/", "_")
        for name, content in figure_files(run):
            yield str(folder / name), content


def check_target(out: Path) -> None:
    """Raises RequestError if a report at `out` would replace something else."""
    if out.exists() and not out.is_dir():
        raise RequestError(f"{out} is a file; give a folder with --out")
    if out.is_dir() and (foreign := sorted(file.name for file in out.iterdir() if file.name not in OURS)):
        raise RequestError(f"{out} holds {foreign[0]}, which is no part of a report; give another folder with --out")


def _write(folder: Path, name: str, content: bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return name


def _swap(new: Path, out: Path) -> None:
    """Put `new` where `out` is; an earlier `out` is back if that fails."""
    old = new.with_name(f"{new.name}.old")
    if out.exists():
        os.replace(out, old)
    try:
        os.replace(new, out)
    except OSError:
        if old.exists():
            os.replace(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)
