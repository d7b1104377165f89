"""Local data files, one record a line: every complaint names the file, the line and the field.

Who reads a file of `SuiteOptions.data` says so with `note`: a run records what it was made from.

Hubs are never asked: a benchmark's files are downloaded once by hand and named by `SuiteOptions.data`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakesight.errors import RequestError

Scalar = str | int | float
_noted: ContextVar[set[Path] | None] = ContextVar("_noted", default=None)


@contextlib.contextmanager
def noting() -> Iterator[set[Path]]:
    """The data files that are read while it is entered."""
    found: set[Path] = set()
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def note(file: Path) -> None:
    """`file` is read now."""
    if (found := _noted.get()) is not None:
        found.add(file)


@dataclass(frozen=True)
class Record:
    """A JSON object and where it stands. `path` leads from the line to a nested object: "multi_turns[2]."."""

    file: Path
    line: int
    values: Mapping[str, Any]
    path: str = ""

    def __contains__(self, field: str) -> bool:
        return self.values.get(field) is not None

    def text(self, field: str) -> str:
        """A string; an empty one is allowed."""
        value = self._value(field)
        if not isinstance(value, str):
            raise self.wrong(field, "a string")
        return value

    def scalar(self, field: str) -> Scalar:
        """A string or a number."""
        value = self._value(field)
        if not _is_scalar(value):
            raise self.wrong(field, "a string or a number")
        scalar: Scalar = value
        return scalar

    def scalars(self, field: str) -> tuple[Scalar, ...]:
        """A string or a number, or a list of them that is not empty."""
        value = self._value(field)
        values = value if isinstance(value, list) else [value]
        if not values or not all(_is_scalar(one) for one in values):
            raise self.wrong(field, "a string, a number or a list of those")
        return tuple(values)

    def texts(self, field: str) -> tuple[str, ...]:
        """A list of strings that is not empty."""
        value = self._value(field)
        if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
            raise self.wrong(field, "a list of strings that is not empty")
        return tuple(value)

    def records(self, field: str) -> tuple[Record, ...]:
        """A list of objects that is not empty."""
        value = self._value(field)
        if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
            raise self.wrong(field, "a list of objects that is not empty")
        return tuple(
            Record(self.file, self.line, one, f"{self.path}{field}[{place}].") for place, one in enumerate(value)
        )

    def wrong(self, field: str, wanted: str) -> RequestError:
        """The complaint that `field` is not what the format asks for."""
        found = json.dumps(self.values.get(field), ensure_ascii=False)
        short = found if len(found) <= 60 else found[:57] + "..."
        return RequestError(
            f"{self.file}, line {self.line}: {self.path}{field} is {short}, and this format needs {wanted} there; "
            "use the benchmark's own file, or fix that line"
        )

    def _value(self, field: str) -> Any:
        if field not in self.values:
            raise RequestError(
                f"{self.file}, line {self.line}: {self.path}{field} is missing; "
                f"the line has {', '.join(self.values) or 'no fields'}; use the benchmark's own file, or add the field"
            )
        return self.values[field]


def find(folder: Path, name: str, what: str) -> Path:
    """`<folder>/<name>.jsonl`, `.json`, or the same in `<folder>/data/`, where hubs keep their files.

    Raises RequestError that says what belongs where; a parquet file of that name gets the line that converts it.
    """
    if not folder.is_dir():
        raise RequestError(f"{folder} is not a folder; --data names the folder that holds {name}.jsonl ({what})")
    places = (folder, folder / "data")
    for place in places:
        for suffix in (".jsonl", ".json"):
            if (file := place / (name + suffix)).is_file():
                return file
    for place in places:
        if packed := sorted(place.glob(f"{name}*.parquet")):
            raise RequestError(
                f"{packed[0]} is a parquet file, which is not read here; convert it once with "
                f"pandas.read_parquet(...).to_json({name + '.jsonl'!r}, orient='records', lines=True)"
            )
    raise RequestError(
        f"{folder} has no {name}.jsonl; put the file of {what} there, or name another folder with --data"
    )


def missing(folder: Path, names: Sequence[str]) -> list[str]:
    """Those of `names` for which `find` would find no file."""
    places = (folder, folder / "data")
    return [
        name
        for name in names
        if not any((place / (name + suffix)).is_file() for place in places for suffix in (".jsonl", ".json"))
    ]


def records(file: Path) -> Iterator[Record]:
    """The objects of a file, in order: one a line, or one JSON list. Blank lines are skipped.

    Of a JSON list, `line` is the object's place in it, from 1. Raises RequestError for a file without objects.
    """
    note(file)
    found = False
    for line, values in _listed(file) if file.suffix == ".json" else _lines(file):
        if not isinstance(values, dict):
            raise RequestError(
                f"{file}, line {line}: this is {type(values).__name__}, and a record is a JSON object {{...}}; "
                "use the benchmark's own file, or fix that line"
            )
        found = True
        yield Record(file, line, values)
    if not found:
        raise RequestError(f"{file} holds no records; download it again")


def _lines(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        with file.open(encoding="utf-8") as stream:
            for line, text in enumerate(stream, start=1):
                if text.strip():
                    try:
                        yield line, json.loads(text)
                    except json.JSONDecodeError as error:
                        raise RequestError(
                            f"{file}, line {line}: not JSON ({error.msg} at character {error.pos}); "
                            "the download may have been cut short: fetch it again, or fix that line"
                        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from error


def _listed(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        yield from _lines(file)  # some hubs name a file of lines .json
        return
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from error
    yield from enumerate(values if isinstance(values, list) else [values], start=1)


def _unreadable(file: Path, error: Exception) -> RequestError:
    return RequestError(f"{file} cannot be read as UTF-8 text ({error}); download it again, or name another folder")


def _is_scalar(value: object) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)
