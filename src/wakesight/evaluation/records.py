"""A run folder: config.json, records.jsonl (one row per question and arm), contexts/, and who may write it.

Rows of one question are one unit: they are appended together and flushed to disk. A unit that a killed run
left half-written is dropped when the run is resumed, and asked again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from wakesight.errors import RequestError, WakesightError, WorkError

Row = dict[str, Any]
LOCK = ".lock"
# errors of a name that cannot be written, whatever room there is; the others are the disk's
_NAMES = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
    errno.ENAMETOOLONG, errno.EINVAL,
}  # fmt: skip


def check_folder(folder: Path) -> None:
    """Raises RequestError where no run folder can be: `folder`, or what it would stand in, is no folder."""
    there = next((place for place in (folder, *folder.parents) if os.path.lexists(place)), None)
    if there is not None and not os.path.isdir(there):
        raise RequestError(f"{folder} cannot be a run folder: {there} is a file; give another folder with --out")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process writes a run folder, which is made if need be.

    Raises RequestError while another one does, or where no folder can be. If what is done inside fails before it
    wrote anything, the folder is as it was before.
    """
    check_folder(folder)
    made = not folder.exists()
    with writing(folder):
        file = _lock(folder)
    with file:
        try:
            yield
        except BaseException:
            _leave_nothing(folder, made)
            raise


def _lock(folder: Path) -> IO[str]:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "w")  # noqa: SIM115  (the lock is held while it is open)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(file, folder / LOCK):
                return file
        except BlockingIOError:
            file.close()
            raise RequestError(
                f"another process is writing {folder}; wait for it, or give another folder with --out"
            ) from None
        file.close()  # whoever held it before has removed it meanwhile


def _is_there(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _leave_nothing(folder: Path, made: bool) -> None:
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            if made:
                folder.rmdir()


@contextlib.contextmanager
def at_rest(folder: Path) -> Iterator[None]:
    """While it is entered, nobody writes the run folder `folder`. Raises RequestError while another process does."""
    with contextlib.ExitStack() as held:
        try:
            file = held.enter_context(open(folder / LOCK))
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(f"another process is still writing {folder}; wait until it is done") from None
        except OSError:
            pass  # a copy without the lock, or one of somebody else's: no process of ours writes there
        yield


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the operating system says against writing `path`, as one sentence.

    Raises RequestError for a place that cannot be written, WorkError for a full disk and the like.
    """
    try:
        yield
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: OSError) -> WakesightError:
    why = error.strerror or str(error)
    if error.errno in _NAMES:
        return RequestError(f"{path} cannot be written ({why}); give another folder with --out")
    return WorkError(f"the disk refuses {path} ({why}); free space, and type the command again (eval with --resume)")


def write_json(path: Path, value: Any) -> None:
    """Plain JSON with sorted keys, under a temporary name and renamed. Raises as `writing` does."""
    _replace(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def _replace(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        with writing(path):
            with open(scratch, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
    except WakesightError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def read_json(path: Path) -> Any:
    """Raises RequestError for a missing or damaged file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(
            f"{path.parent} is no run folder: it has no {path.name}; give a folder of wakesight eval"
        ) from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); give a folder of wakesight eval") from None
    except ValueError:
        raise RequestError(f"{path} is damaged and cannot be read; run the evaluation again") from None


class Records:
    """The rows of one run, appended unit by unit."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "records.jsonl"

    def append(self, rows: Sequence[Row]) -> None:
        """All rows of one question; on disk when this returns. Raises as `writing` does."""
        text = _lines(rows)
        with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Row]:
        """Every row that was written whole, in file order; a half-written last line is ignored.

        Raises RequestError, with the line, for what is no row, and for a row that is there twice.
        """
        return list(_rows(self.path))

    def keep_complete(self) -> set[tuple[str, str]]:
        """Drop units that lack rows; returns the (context, question) ids of the complete ones."""
        rows = complete(self.read())
        if self.path.exists():
            _replace(self.path, _lines(rows))
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


def _lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def _rows(path: Path) -> Iterator[Row]:
    if not path.exists():
        return
    first: dict[tuple[str, str, str], int] = {}
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return  # the process was killed while it wrote this line
                try:
                    row = _row(line)
                    before = first.setdefault((*unit(row), row["arm"]), number)
                    if before != number:
                        raise ValueError(f"it is the row of line {before} again")
                except ValueError as error:
                    raise RequestError(
                        f"{path} is damaged in line {number}: {error}; remove that line, or run again"
                    ) from None
                yield row
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); give a folder of wakesight eval") from None


# what every row holds, and what those hold besides that have an answer
_ALWAYS = {"task": str, "context": str, "question": str, "arm": str, "arms": int, "source": str, "grades": dict}
_SCORED = {"kept": int, "kv_bytes_full": int, "kv_bytes_kept": int}


def _row(line: bytes) -> Row:
    """Raises ValueError, saying why, for what is no row."""
    try:
        row = json.loads(line)
    except ValueError:
        raise ValueError("it is no JSON") from None
    if not isinstance(row, dict):
        raise ValueError("it is no object")
    if not isinstance(row.get("skipped", 0), str | None):
        raise ValueError("it does not say whether it was skipped")
    for name, kind in (_ALWAYS if row["skipped"] is not None else _ALWAYS | _SCORED).items():
        if not isinstance(row.get(name), kind):
            raise ValueError(f"its {name} is missing or of another kind")
    for rule, grade in row["grades"].items():
        if isinstance(grade, bool) or not isinstance(grade, int | float) or not math.isfinite(grade):
            raise ValueError(f"its {rule} grade is no number")
    return row
