"""Traces on disk: one zarr store per recording, a group per trace.

    run/zarr.json                  format, version, what was asked for
    run/<trace>/zarr.json          prompt, needle, heads, meta; `steps`: how many are complete; `finished`
    run/<trace>/scores-<scorer>    what a scorer said of the prompt, one chunk
    run/<trace>/<array>/c/<n>/...  steps n * CHUNK .. of all layers and heads, compressed, a crc32c behind each chunk

A store may be read while it grows (`writing.py`). A chunk that is missing or fails its checksum is named, and its
steps are left out. A store may also lie in a zip file.
"""

from __future__ import annotations

import importlib
import importlib.resources
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from wakesight.errors import RequestError, WorkError
from wakesight.traces.schema import STEP_ARRAYS, VERSION, Trace

FORMAT = "wakesight-traces"
SAMPLE = "sample:"
SCORES = "scores-"  # begins the name of an array of prompt scores
LARGE = ("topk_idx", "topk_val")  # read chunk by chunk, the others whole
Warn = Callable[[str], None]


def needed(package: str, what: str) -> Any:
    """The package, imported. Raises RequestError where it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise RequestError(f"{what} needs the package {package}; type: pip install 'wakesight[traces]'") from None


@dataclass(frozen=True)
class Damage:
    """Chunks that cannot be read: steps start .. stop - 1 of an array (0, 0: the whole of one without steps)."""

    trace: str
    array: str
    start: int
    stop: int
    reason: str

    def __str__(self) -> str:
        where = f", steps {self.start} to {self.stop - 1}" if self.stop else ""
        return f"the trace {self.trace}: array {self.array}{where}: {self.reason}"


class Rows(NDArrayOperatorsMixin):
    """A stored array that is read where it is indexed, chunk by chunk along its steps; elsewhere it acts as an array.

    steps: the stored steps that may be read, in order.
    """

    def __init__(self, array: Any, steps: NDArray[np.int64], chunk: int) -> None:
        self._array, self._steps, self._chunk = array, steps, chunk
        self._last: tuple[int, NDArray[Any]] | None = None  # a loop over steps decodes each chunk once
        self.shape: tuple[int, ...] = (len(steps), *array.shape[1:])
        self.dtype: np.dtype[Any] = array.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        first, *rest = key if isinstance(key, tuple) else (key,)
        if isinstance(first, slice):
            return self._read(self._steps[first])[(slice(None), *rest)]
        if isinstance(first, (int, np.integer)):
            return self._read(self._steps[np.array([first])])[(0, *rest)]
        return np.asarray(self)[key]

    def _read(self, steps: NDArray[np.int64]) -> NDArray[Any]:
        out = np.empty((len(steps), *self.shape[1:]), self.dtype)
        chunks = steps // self._chunk
        for number in np.unique(chunks):
            here = chunks == number
            out[here] = self._whole(int(number))[steps[here] - number * self._chunk]
        return out

    def _whole(self, number: int) -> NDArray[Any]:
        if self._last is None or self._last[0] != number:
            self._last = number, self._array[number * self._chunk : (number + 1) * self._chunk]
        return self._last[1]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        whole = self[:]
        return cast("NDArray[Any]", whole if dtype is None else whole.astype(dtype, copy=False))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
        given = [np.asarray(each) if isinstance(each, Rows) else each for each in inputs]
        return getattr(ufunc, method)(*given, **keywords)


class Traces(Sequence[Trace]):
    """The traces of one store, in the order of their names; each is opened when asked for, by number or by name."""

    def __init__(self, source: str, group: Any, files: Any, warn: Warn) -> None:
        self.source = source
        self.asked: Mapping[str, Any] = group.attrs.get("asked", {})
        self._group, self._files, self._warn = group, files, warn
        folders = [entry for entry in files.iterdir() if entry.is_dir() and entry.joinpath("zarr.json").exists()]
        self.names: tuple[str, ...] = tuple(sorted(entry.name for entry in folders))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return [self[name] for name in self.names[which]]
        if isinstance(which, str) and which not in self.names:
            raise RequestError(f"{self.source} has no trace {which!r}; it has {', '.join(self.names)}")
        trace, damage = self.open(which if isinstance(which, str) else self.names[which])
        for each in damage:
            self._warn(f"{each}; it is left out")
        return trace

    def finished(self, name: str) -> bool:
        """Whether the recording of a trace came to its end."""
        return bool(self._group[name].attrs.get("finished"))

    def open(self, name: str) -> tuple[Trace, list[Damage]]:
        """The trace without the steps that are damaged, and what is damaged.

        Raises RequestError for another schema version, WorkError where nothing can be read.
        """
        try:
            group = self._group[name]
            attributes = dict(group.attrs)
            _check_version(f"{self.source}, trace {name},", attributes)
            arrays = {array: group[array] for array in STEP_ARRAYS}
        except RequestError:
            raise
        except Exception as error:  # zarr raises many kinds for JSON that is broken or not there
            reason = f"{type(error).__name__}: {error}"
            raise WorkError(f"the trace {name} of {self.source} cannot be read ({reason}); record it again") from None
        chunk, steps = int(attributes["chunk"]), int(attributes["steps"])
        damage = [each for array in arrays for each in self._damage(name, array, arrays[array], steps, chunk)]
        numbers = _undamaged(steps, damage)
        rows = {array: Rows(arrays[array], numbers, chunk) for array in arrays}
        mass, broken = self._whole(name, group, "prompt_mass")
        scores = {}
        for array in sorted(array for array in group.array_keys() if array.startswith(SCORES)):
            found, worse = self._whole(name, group, array)
            broken += worse
            if found is not None:
                scores[array.removeprefix(SCORES)] = found
        values: dict[str, Any] = {array: rows[array] if array in LARGE else rows[array][:] for array in rows}
        trace = Trace(
            name=name,
            **values,
            prompt_len=int(attributes["prompt_len"]),
            needle_spans=tuple((int(start), int(end)) for start, end in attributes["needle_spans"]),
            kv_heads=tuple(attributes["kv_heads"]),
            page_size=int(attributes["page_size"]),
            prompt_mass=mass,
            prompt_scores=scores,
            meta=attributes["meta"],
            step=numbers.astype(np.int32),
        )
        return trace, [*damage, *broken]

    def _damage(self, trace: str, name: str, array: Any, steps: int, chunk: int) -> Iterator[Damage]:
        for number in range(-(-steps // chunk)):
            key = "/".join(map(str, (number, *[0] * (array.ndim - 1))))
            if reason := _broken(self._files.joinpath(trace, name, "c", *key.split("/"))):
                yield Damage(trace, name, number * chunk, min(steps, (number + 1) * chunk), reason)

    def _whole(self, trace: str, group: Any, array: str) -> tuple[NDArray[np.float32] | None, list[Damage]]:
        """An array without steps, [layer, head, position], that lies in one chunk; None where it is not there."""
        if array not in group:
            return None, []
        if reason := _broken(self._files.joinpath(trace, array, "c", "0", "0", "0")):
            return None, [Damage(trace, array, 0, 0, reason)]
        return group[array][...], []


def _broken(file: Any) -> str | None:
    """What is wrong with a chunk; its last 4 bytes are the crc32c of those before them."""
    try:
        data = file.read_bytes()
    except (OSError, KeyError):
        return "the chunk is missing"
    checksum = importlib.import_module("google_crc32c").value(data[:-4])
    return None if data[-4:] == int(checksum).to_bytes(4, "little") else "the chunk's checksum is wrong"


def _undamaged(steps: int, damage: Sequence[Damage]) -> NDArray[np.int64]:
    whole = np.ones(steps, dtype=bool)
    for each in damage:
        whole[each.start : each.stop] = False
    return np.flatnonzero(whole)


def _to_stderr(sentence: str) -> None:
    print(f"wakesight: {sentence}", file=sys.stderr)


def load_traces(source: str | os.PathLike[str], warn: Warn = _to_stderr) -> Traces:
    """Open a run folder, a zip file of one, or "sample:NAME" of those in the package.

    warn: told about every damaged chunk when a trace is opened. Raises RequestError for what holds no traces.
    """
    text = os.fspath(source)
    path = _sample(text.removeprefix(SAMPLE)) if text.startswith(SAMPLE) else Path(text)
    zarr = needed("zarr", "reading traces")
    if path.is_dir() and (path / "zarr.json").is_file():
        group, files = zarr.open_group(path, mode="r"), path
    elif path.is_file() and zipfile.is_zipfile(path):
        storage: Any = importlib.import_module("zarr.storage")
        group = zarr.open_group(storage.ZipStore(path, mode="r"), mode="r")
        files = cast("Path", zipfile.Path(path))
    else:
        known = f"; the package brings {', '.join(samples())}" if samples() else ""
        raise RequestError(f"{text} holds no traces; give a folder made by wakesight trace record{known}")
    check_format(text, group.attrs)
    return Traces(text, group, files, warn)


def samples() -> tuple[str, ...]:
    """Names of the recordings that come with the package, as `load_traces` takes them."""
    folder = _packaged()
    found = {entry.name.removesuffix(".zip") for entry in folder.iterdir()} if folder.is_dir() else set()
    return tuple(f"{SAMPLE}{name}" for name in sorted(found))


def _packaged() -> Path:
    return Path(str(importlib.resources.files("wakesight"))) / "data" / "traces"


def _sample(name: str) -> Path:
    folder = _packaged()
    for path in (folder / f"{name}.zip", folder / name):
        if name and path.exists():
            return path
    known = ", ".join(samples()) or "none"
    raise RequestError(f"the package has no sample {SAMPLE}{name}; it brings: {known}")


def check_format(source: str, attributes: Mapping[str, Any]) -> None:
    if attributes.get("format") != FORMAT:
        raise RequestError(f"{source} is no recording of traces; give a folder made by wakesight trace record")
    _check_version(source, attributes)


def _check_version(source: str, attributes: Mapping[str, Any]) -> None:
    if attributes.get("version") != VERSION:
        raise RequestError(
            f"{source} has the schema version {attributes.get('version')}, and this wakesight reads {VERSION}; "
            "record it again, or install the wakesight that wrote it"
        )
