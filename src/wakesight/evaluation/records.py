"""A run folder: config.json, records.jsonl (one row per question and arm), contexts/, and who may write it.

Rows of one question are one unit: they are appended together and flushed to disk. A unit that a killed run
left half-written is dropped when the run is resumed, and asked again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wakesight.errors import RequestError

Row = dict[str, Any]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process writes a run folder. Raises RequestError while another one does."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RequestError(
                f"another process is writing {folder}; wait for it, or give another folder with --out"
            ) from None
        yield


def write_json(path: Path, value: Any) -> None:
    """Plain JSON with sorted keys, under a temporary name and renamed."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    scratch = path.with_name(f".{path.name}.tmp")
    with open(scratch, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def read_json(path: Path) -> Any:
    """Raises RequestError for a missing or damaged file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise RequestError(
            f"{path.parent} is no run folder: it has no {path.name}; give a folder of wakesight eval"
        ) from None
    except ValueError:
        raise RequestError(f"{path} is damaged and cannot be read; run the evaluation again") from None


class Records:
    """The rows of one run, appended unit by unit."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "records.jsonl"

    def append(self, rows: Sequence[Row]) -> None:
        """All rows of one question; on disk when this returns."""
        text = "".join(json.dumps(row, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Row]:
        """Every row that was written whole, in file order; a half-written last line is ignored."""
        return list(_rows(self.path))

    def keep_complete(self) -> set[tuple[str, str]]:
        """Drop units that lack rows; returns the (context, question) ids of the complete ones."""
        rows = complete(self.read())
        if self.path.exists():
            scratch = self.path.with_name(".records.tmp")
            with open(scratch, "w", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(row, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(self.path)
        return {unit(row) for row in rows}


def complete(rows: Sequence[Row]) -> list[Row]:
    """Rows of questions that every arm has answered; a run that was killed, or goes on, may hold others."""
    counts = Counter(map(unit, rows))
    return [row for row in rows if counts[unit(row)] == row["arms"]]


def unit(row: Mapping[str, Any]) -> tuple[str, str]:
    """What a row belongs to: (context id, question id)."""
    return row["context"], row["question"]


def canonical(rows: Sequence[Row]) -> list[Row]:
    """Rows in the order of task, context, question and arm, whatever order they were written in."""
    return sorted(rows, key=lambda row: (row["task"], row["context"], row["question"], row["arm"]))


def _rows(path: Path) -> Iterator[Row]:
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # the process was killed while it wrote this line
            try:
                yield json.loads(line)
            except ValueError:
                raise RequestError(f"{path} is damaged in line {number}; remove that line, or run again") from None
