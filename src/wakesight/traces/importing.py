"""A trace from somebody else's recorder: a .npz file with the schema's names, and every mistake in it by name."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wakesight.errors import RequestError
from wakesight.registry import did_you_mean
from wakesight.traces.schema import DTYPES, PAGE, STEP_ARRAYS, Trace, check

NEEDED = (*STEP_ARRAYS, "prompt_len", "kv_heads")
OPTIONAL = ("needle_spans", "page_size", "prompt_mass", "meta")  # meta: one text, a JSON object
Arrays = Mapping[str, NDArray[Any]]


def read_npz(file: Path, name: str | None = None) -> Trace:
    """The checked trace of a .npz file. name: of the trace; None for the file's.

    Raises RequestError for a file that is none (pickled objects are never read), and for the first thing wrong in it.
    """
    try:
        with np.load(file, allow_pickle=False) as found:
            arrays = {key: found[key] for key in found.files}
    except FileNotFoundError:
        raise RequestError(f"the file {file} does not exist; give a .npz file") from None
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())[:200]
        raise RequestError(
            f"{file} is no readable .npz file of plain arrays ({reason}); write it with numpy.savez"
        ) from None
    return from_arrays(arrays, name or file.stem)


def from_arrays(arrays: Arrays, name: str) -> Trace:
    """A checked trace. Arrays may have wider dtypes than the schema's, as long as every number fits."""
    known = (*NEEDED, *OPTIONAL)
    if missing := [key for key in NEEDED if key not in arrays]:
        raise RequestError(f"the trace {name} has no array {missing[0]!r}; it needs {', '.join(NEEDED)}")
    if unknown := [key for key in arrays if key not in known]:
        hint = did_you_mean(unknown[0], known)
        raise RequestError(f"the trace {name} has an unknown array {unknown[0]!r}{hint}; known: {', '.join(known)}")
    steps: dict[str, Any] = {key: _step_array(arrays[key], key, name) for key in STEP_ARRAYS}
    mass = arrays.get("prompt_mass")
    spans = _whole(arrays.get("needle_spans", np.zeros((0, 2), int)), "needle_spans", name)
    if spans.ndim != 2 or spans.shape[1] != 2:
        raise RequestError(f"the trace {name}: needle_spans has the shape {list(spans.shape)}; give [span, 2]")
    made: Any = Trace(
        name=name,
        **steps,
        prompt_len=_number(arrays["prompt_len"], "prompt_len", name),
        needle_spans=tuple((int(start), int(end)) for start, end in spans),
        kv_heads=tuple(int(count) for count in np.atleast_1d(_whole(arrays["kv_heads"], "kv_heads", name))),
        page_size=_number(arrays.get("page_size", np.array(PAGE)), "page_size", name),
        prompt_mass=None if mass is None else mass.astype(np.float32),
        meta=_meta(arrays.get("meta"), name),
    )
    return check(made)


def _step_array(array: NDArray[Any], key: str, name: str) -> NDArray[Any]:
    """In the schema's dtype where no number changes its kind; another kind is left for the check to name."""
    if key == "topk_val":
        return array if array.dtype == np.float16 or array.dtype.kind != "f" else array.astype(np.float32)
    wanted = np.dtype(DTYPES[key])
    if array.dtype.kind not in STEP_ARRAYS[key][1]:
        return array
    if wanted.kind == "i" and array.size and not -1 <= array.min() <= array.max() <= np.iinfo(wanted).max:
        raise RequestError(f"the trace {name}: {key} holds a number that is no {wanted}; give numbers from -1 on")
    return array.astype(wanted)


def _whole(array: NDArray[Any], key: str, name: str) -> NDArray[Any]:
    if array.dtype.kind not in "iu":
        raise RequestError(f"the trace {name}: {key} has the dtype {array.dtype}; it must hold whole numbers")
    return array


def _number(array: NDArray[Any], key: str, name: str) -> int:
    if array.size != 1:
        raise RequestError(f"the trace {name}: {key} has the shape {list(array.shape)}; give one whole number")
    return int(_whole(array, key, name).reshape(()))


def _meta(text: NDArray[Any] | None, name: str) -> dict[str, Any]:
    try:
        found = {} if text is None else json.loads(str(text.reshape(())))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RequestError(f"the trace {name}: meta is no JSON object; write json.dumps of a dict, or leave it out")
    return found
