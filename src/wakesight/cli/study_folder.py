"""What `trace churn`, `trace predict` and `simulate` share: reading runs, a folder whose files are whole or absent."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wakesight.cli.common import print_json
from wakesight.errors import RequestError, WorkError

if TYPE_CHECKING:
    from wakesight.traces.page_sets import Run

FILES = {  # of each study; both may lie in one folder
    "churn": ("churn.json", "churn.md", "heads.csv", "jaccard.*", "heads-*"),
    "predict": ("predict.json", "predict.md", "alarms-*", "events-*"),
    "simulate": ("simulate.json", "simulate.md", "rows.csv", "pareto.*"),
}


def runs_of(source: str) -> dict[str, list[Run]]:
    """Runs by model and regime. Damaged chunks are named on stderr by the store, which leaves them out."""
    from wakesight.traces.page_sets import by_combo
    from wakesight.traces.store import load_traces

    return by_combo(load_traces(source))


def check_numbers(**given: float) -> None:
    """Raises RequestError for an option that is negative or no number."""
    for name, value in given.items():
        if not 0 <= value < math.inf:
            raise RequestError(f"--{name} {value:g} must be a number of at least 0; leave it out for the default")


def check_target(out: str | None) -> None:
    """Raises RequestError where `out` is no place for results or matplotlib is missing, before any work."""
    if out is None:
        return
    from wakesight.report.drawing import style

    with style():  # raises without matplotlib
        pass
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file; give a folder with --out")
    if folder.is_dir() and (foreign := sorted(one.name for one in folder.iterdir() if not _ours(one, *FILES))):
        raise RequestError(f"{folder} holds other files ({foreign[0]}); give a new folder with --out")


def tell(
    name: str, found: Mapping[str, Any], text: str, out: str | None, files: Mapping[str, bytes], as_json: bool
) -> None:
    """Results on stdout, as text or as one JSON object; with `out`, NAME.json, NAME.md and `files` into that folder."""
    written = {}
    if out is not None:
        written = {f"{name}.json": _json(found), f"{name}.md": text.encode(), **files}
        write_files(Path(out), name, written)
    if as_json:
        print_json({name: found} | ({"folder": out, "files": sorted(written)} if out is not None else {}))
        return
    click.echo(text)
    if out is not None:
        click.echo(f"{out}: {', '.join(sorted(written))}", err=True)


def _ours(file: Path, *studies: str) -> bool:
    return any(file.match(pattern) for study in studies for pattern in FILES[study])


def write_files(folder: Path, study: str, files: Mapping[str, bytes]) -> None:
    """An earlier result's files that the new one does not have go: a figure of other traces would mislead."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            scratch = folder / f".{name}.{os.getpid()}.tmp"
            try:
                scratch.write_bytes(content)
                scratch.replace(folder / name)
            finally:
                scratch.unlink(missing_ok=True)
        for old in [one for one in folder.iterdir() if _ours(one, study) and one.name not in files]:
            old.unlink()
    except OSError as error:
        raise WorkError(f"the results could not be written to {folder}: {error.strerror or error}") from error


def _json(found: Mapping[str, Any]) -> bytes:
    return (json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()
