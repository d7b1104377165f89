"""Traces onto the disk: one writer per run folder, steps appended while a model decodes.

Whole chunks are written once, then the attribute `steps` is raised, so that a reader never sees a step that is not
there. What a killed recording leaves is a trace that is not `finished`; it is written anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wakesight.errors import RequestError
from wakesight.traces.schema import DTYPES, PAGE, STEP_ARRAYS, VERSION, Trace, check
from wakesight.traces.store import FORMAT, SCORES, check_format, needed

CHUNK = 64  # steps of a chunk: 4 MB of smollm2's log before compression
VAL_DTYPES = ("float32", "float16")
AXES = {"S": "step", "L": "layer", "H": "query_head", "K": "top"}


@dataclass(frozen=True)
class Step:
    """One decode step of a log: numpy arrays without the step axis, named as in the schema."""

    topk_idx: NDArray[np.int32]
    topk_val: NDArray[np.float32]
    needle: NDArray[np.float32]
    copy: NDArray[np.bool_]
    token: int
    ctx_len: int


class Run:
    """A recording that this process writes. Made by `writing`."""

    def __init__(self, folder: Path, group: Any) -> None:
        self.folder = folder
        self._group = group

    def finished(self, name: str) -> bool:
        """Whether the trace is there and complete."""
        return name in self._group and bool(self._group[name].attrs.get("finished"))

    def create(
        self, name: str, *, layers: int, query_heads: int, top: int, prompt_len: int, kv_heads: Sequence[int],
        needle_spans: Sequence[tuple[int, int]], page_size: int = PAGE, val_dtype: str = "float32",
        meta: Mapping[str, Any] | None = None,
    ) -> Writer:  # fmt: skip
        """A new trace to append steps to; one of that name that was never finished is removed first.

        Raises RequestError for a name no folder can have, one that is there already, or another dtype.
        """
        check_name(name)
        if val_dtype not in VAL_DTYPES:
            raise RequestError(f"val_dtype={val_dtype!r} is none of {', '.join(VAL_DTYPES)}; float32 is the default")
        if self.finished(name):
            raise RequestError(f"{self.folder} holds a trace {name!r} already; give the new one another name")
        shutil.rmtree(self.folder / name, ignore_errors=True)
        attributes = {
            "version": VERSION, "steps": 0, "finished": False, "chunk": CHUNK, "prompt_len": prompt_len,
            "needle_spans": [list(span) for span in needle_spans], "kv_heads": list(kv_heads), "page_size": page_size,
            "meta": dict(meta or {}),
        }  # fmt: skip
        sizes = {"L": layers, "H": query_heads, "K": top}
        return Writer(self._group.create_group(name, attributes=attributes), sizes, val_dtype)


class Writer:
    """Appends the steps of one trace."""

    def __init__(self, group: Any, sizes: Mapping[str, int], val_dtype: str) -> None:
        self._group = group
        self._arrays: dict[str, Any] = {}
        self._waiting: dict[str, NDArray[Any]] = {}
        self._held = 0  # steps waiting for their chunk to fill
        self._written = 0
        for name, (axes, _) in STEP_ARRAYS.items():
            shape = tuple(sizes[axis] for axis in axes[1:])
            dtype = DTYPES.get(name, val_dtype)
            self._waiting[name] = np.zeros((CHUNK, *shape), dtype)
            self._arrays[name] = _create(group, name, (0, *shape), (CHUNK, *shape), dtype, axes)

    def append(self, step: Step) -> None:
        """One more step; written when its chunk is full, or by `finish`."""
        at, waiting = self._held, self._waiting
        waiting["topk_idx"][at], waiting["topk_val"][at] = step.topk_idx, step.topk_val
        waiting["needle"][at], waiting["copy"][at] = step.needle, step.copy
        waiting["tokens"][at], waiting["ctx_len"][at] = step.token, step.ctx_len
        self._held += 1
        if self._held == CHUNK:
            self._flush()

    def prompt_mass(self, mass: NDArray[np.float32]) -> None:
        """float32 [L, H, prompt_len], written at once as one chunk."""
        self._whole("prompt_mass", mass)

    def prompt_scores(self, scorer: str, scores: NDArray[np.float32]) -> None:
        """float32 [L, KV head, P], written at once as one chunk."""
        self._whole(f"{SCORES}{scorer}", scores)

    def finish(self, facts: Mapping[str, Any] | None = None) -> None:
        """Write what waits; from now on the trace is complete and stays as it is. facts: added to its meta."""
        self._flush()
        self._group.update_attributes({"finished": True, "meta": {**self._group.attrs["meta"], **(facts or {})}})

    def _whole(self, name: str, values: NDArray[np.float32]) -> None:
        array = _create(self._group, name, values.shape, values.shape, "float32", None)
        array[...] = values

    def _flush(self) -> None:
        if not self._held:
            return
        start, stop = self._written, self._written + self._held
        for name, array in self._arrays.items():
            array.resize((stop, *array.shape[1:]))
            array[start:stop] = self._waiting[name][: self._held]
        self._written, self._held = stop, 0
        self._group.update_attributes({"steps": stop})  # last: readers go by it


def _create(group: Any, name: str, shape: Sequence[int], chunks: Sequence[int], dtype: str, axes: str | None) -> Any:
    codecs = importlib.import_module("zarr.codecs")
    compress = codecs.BloscCodec(cname="zstd", clevel=5, shuffle="bitshuffle")
    return group.create_array(
        name,
        shape=tuple(shape),
        chunks=tuple(max(1, size) for size in chunks),
        dtype=dtype,
        compressors=[compress, codecs.Crc32cCodec()],  # the checksum is of the bytes as they lie on the disk
        fill_value=0,
        dimension_names=None if axes is None else [AXES[axis] for axis in axes],
        config={"write_empty_chunks": True},  # a chunk that is not there is a damaged one
    )


@contextlib.contextmanager
def writing(folder: Path, asked: Mapping[str, Any], resume: bool = False) -> Iterator[Run]:
    """The only writer of `folder`, which is made, or with `resume` gone on with.

    asked: what the recording was asked for; a resumed one must be asked for the same. Raises RequestError while
    another process writes there, for a folder that holds something else, or traces without `resume`.
    """
    zarr = needed("zarr", "writing traces")
    _make(folder)
    with _lock(folder):
        if (folder / "zarr.json").exists():
            if not resume:
                raise RequestError(
                    f"{folder} holds traces already; type --resume to go on with them, or give another --out"
                )
            group = zarr.open_group(folder, mode="r+")
            _check_asked(folder, group.attrs, asked)
        else:
            about = {"format": FORMAT, "version": VERSION, "asked": dict(asked)}
            group = zarr.create_group(folder, attributes=about)
        yield Run(folder, group)


def _make(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file; give a folder with --out")
    if folder.is_dir() and not (folder / "zarr.json").exists() and any(p.name != ".lock" for p in folder.iterdir()):
        raise RequestError(f"{folder} holds other files; give a new folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"the folder {folder} cannot be made: {error.strerror}; give another with --out") from None


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RequestError(
                f"another process is writing into {folder}; wait for it, or give another folder with --out"
            ) from None
        yield


def _check_asked(folder: Path, attributes: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    check_format(str(folder), attributes)
    before, now = attributes["asked"], json.loads(json.dumps(dict(asked)))
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise RequestError(
                f"{folder} was recorded with {name}={before.get(name)!r}, and now {name}={now.get(name)!r} was asked "
                "for; resume with the same arguments, or give another folder with --out"
            )


def check_name(name: str) -> None:
    """Raise RequestError for a name that a trace cannot have."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name == "zarr.json":
        raise RequestError(f"{name!r} cannot name a trace; use letters, digits, dots, - and _, a letter or digit first")


def write(run: Run, trace: Trace) -> None:
    """A whole trace, checked first. Raises RequestError for what is wrong with it."""
    check(trace)
    val_dtype = "float16" if np.dtype(trace.topk_val.dtype) == np.float16 else "float32"
    writer = run.create(
        trace.name, layers=trace.layers, query_heads=trace.query_heads, top=trace.topk_idx.shape[3],
        prompt_len=trace.prompt_len, kv_heads=trace.kv_heads, needle_spans=trace.needle_spans,
        page_size=trace.page_size, val_dtype=val_dtype, meta=trace.meta,
    )  # fmt: skip
    if trace.prompt_mass is not None:
        writer.prompt_mass(np.asarray(trace.prompt_mass, np.float32))
    for scorer, scores in trace.prompt_scores.items():
        writer.prompt_scores(scorer, np.asarray(scores, np.float32))
    for at in range(trace.steps):
        idx, val = np.asarray(trace.topk_idx[at]), np.asarray(trace.topk_val[at])
        token, seen = int(trace.tokens[at]), int(trace.ctx_len[at])
        writer.append(Step(idx, val, trace.needle[at], trace.copy[at], token, seen))
    writer.finish()


def pack(folder: Path, file: Path) -> None:
    """A run folder as one zip file, uncompressed (its chunks are), under a temporary name and renamed."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(scratch, "w", zipfile.ZIP_STORED) as packed:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.name != ".lock":
                    packed.write(path, path.relative_to(folder).as_posix())
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)
