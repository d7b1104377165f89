"""What a user gave -> what we use, or one sentence: what is wrong, why, and what to type instead.

Takes Python values, numpy arrays and tensors alike; gives plain Python ones. Nothing here knows a model.
"""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wakesight.errors import RequestError

_ENCODED = "a tokenizer's whole output; give enc['input_ids'] and attention_mask=enc['attention_mask'] to prefill_batch"


def shown(value: Any) -> str:
    """A value for a sentence: short ones as they are written, others by their kind and shape."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, list, tuple)):
        return reprlib.repr(value)
    if isinstance(value, (Tensor, np.ndarray)):
        return f"a {type(value).__name__} of shape {list(value.shape)} and dtype {value.dtype}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a {type(value).__name__}"


def as_whole(value: Any) -> int | None:
    """`value` as a Python int; None for what is no whole number (a bool is none)."""
    if isinstance(value, bool) or getattr(value, "ndim", None) or getattr(value, "dtype", None) is torch.bool:
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def whole_number(value: Any, name: str, least: int | None = None, usual: int | None = None) -> int:
    """`value` as a Python int, at least `least`: ints, numpy's, and integer tensors of no dimension.

    usual: named in the sentence of the RequestError that everything else raises.
    """
    number = as_whole(value)
    advice = "" if usual is None else f"; {usual} is the default"
    if number is None:
        raise RequestError(f"{name} must be a whole number, not {shown(value)}{advice}")
    if least is not None and number < least:
        raise RequestError(f"{name}={number} must be at least {least}{advice}")
    return number


def chunk_size(value: Any) -> int:
    """Tokens per forward pass. Raises RequestError unless it is a multiple of 64."""
    chunk = whole_number(value, "chunk", usual=512)
    if chunk < 64 or chunk % 64:
        raise RequestError(f"chunk={chunk} must be a multiple of 64, at least 64; 512 is the default")
    return chunk


def text_or_ids(value: Any, name: str) -> str | list[int]:
    """A text that can be encoded, or token ids. Raises RequestError for anything else."""
    if isinstance(value, str):
        check_text(value, name)
        return value
    if isinstance(value, os.PathLike):
        raise RequestError(f"{name} is a path, not a text; read the file first: path.read_text(encoding='utf-8')")
    return token_ids(value, name, "text or token ids")


def check_text(value: str, name: str = "the text") -> None:
    """Raise RequestError for a str that is no Unicode text, as a file read by another encoding may give it."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} holds a lone surrogate at character {error.start}; decode the file as UTF-8"
        ) from None


def token_ids(value: Any, name: str, wanted: str = "token ids") -> list[int]:
    """Ids as Python ints, from any iterable of whole numbers or a one-dimensional integer array or tensor.

    name: of the argument. wanted: what it takes, for the RequestError that everything else raises.
    """
    if type(value) is list and all(type(item) is int for item in value):
        return list(value)
    _check_iterable(value, name, wanted)
    if isinstance(value, (Tensor, np.ndarray)):
        value = _row(value, name)
    ids = []
    for place, item in enumerate(value):
        number = as_whole(item)
        if number is None:
            raise RequestError(f"{name} must be {wanted}, but item {place} is {shown(item)}, which is no whole number")
        ids.append(number)
    return ids


def _check_iterable(value: Any, name: str, wanted: str) -> None:
    if isinstance(value, Mapping):
        raise RequestError(f"{name} is {_ENCODED if 'input_ids' in value else f'{shown(value)}; give {wanted}'}")
    if isinstance(value, str):
        advice = "; engine.encode(text) gives its ids" if wanted == "token ids" else ""
        raise RequestError(f"{name} must be {wanted}, not the text {shown(value)}{advice}")
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise RequestError(f"{name} is {shown(value)}; decode bytes first: .decode('utf-8')")
    if isinstance(value, Set):
        raise RequestError(f"{name} is {shown(value)}, which has no order; give a list")
    if isinstance(value, type) or not (isinstance(value, Iterable) or hasattr(value, "__getitem__")):
        raise RequestError(f"{name} must be {wanted}, not {shown(value)}")


def _row(value: Tensor | np.ndarray[Any, Any], name: str) -> list[Any]:
    _check_integers(value, name)
    if value.ndim == 1:
        return list(value.tolist())
    if value.ndim == 0:
        advice = "put a single id into a list"
    else:
        advice = "one row is wanted" + (", take ids[0]" if value.ndim == 2 and value.shape[0] == 1 else "")
    raise RequestError(f"{name} has the shape {list(value.shape)}: {advice}")


def _check_integers(value: Tensor | np.ndarray[Any, Any], name: str) -> None:
    if isinstance(value, Tensor):
        whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    else:
        whole = value.dtype.kind in "iu" or not value.size
    if not whole:
        raise RequestError(f"{name} has the dtype {value.dtype}, but whole numbers are wanted; give integers")


def several_contexts(value: Any, padded: bool) -> list[Any]:
    """The contexts of a batch, each a text or ids; as lists of ids where the caller gave a mask (`padded`) too."""
    if isinstance(value, str):
        raise RequestError("prefill_batch reads several contexts; give a list of texts, or use prefill for one")
    if isinstance(value, (Tensor, np.ndarray)) and value.dtype != object and getattr(value.dtype, "kind", "") != "U":
        return padded_ids(value, "texts")
    if isinstance(value, Mapping) and "input_ids" in value:
        raise RequestError(f"texts is {_ENCODED}")
    if isinstance(value, (bytes, Mapping, Set, type)) or not isinstance(value, Iterable):
        raise RequestError(f"prefill_batch reads a list of contexts, each a text or token ids, not {shown(value)}")
    contexts = list(value)
    if contexts and as_whole(contexts[0]) is not None:
        raise RequestError("prefill_batch reads a list of contexts; for one list of token ids use prefill")
    if not padded:
        return contexts
    if any(isinstance(context, str) for context in contexts):
        raise RequestError("attention_mask belongs to a tensor of padded ids; leave it out for a list of texts")
    return padded_ids(contexts, "texts")


def padded_ids(value: Any, name: str) -> list[list[int]]:
    """Ids [batch, token] of a tensor, an array, or rows of equal length."""
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim != 2:
            advice = "give one context to prefill" if value.ndim == 1 else "give [batch, token]"
            raise RequestError(f"{name} has the shape {list(value.shape)}: {advice}")
        _check_integers(value, name)
        return [list(row) for row in value.tolist()]
    rows = [token_ids(row, f"row {at} of {name}") for at, row in enumerate(value)]
    if len({len(row) for row in rows}) > 1:
        raise RequestError(
            f"attention_mask belongs to a tensor or to rows of padded ids, but {name} has rows of several lengths; "
            "leave it out for a list of contexts"
        )
    return rows


def mask_of(value: Any, name: str = "attention_mask") -> Tensor:
    """A mask of 0 and 1 as a bool tensor of any shape, from a tensor, an array or nested lists."""
    if isinstance(value, Mapping):
        raise RequestError(f"{name} is {shown(value)}; give rows of 0 and 1, as a tokenizer makes them")
    try:
        mask = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        seen = mask.bool()
        plain = bool((mask == seen).all())
    except (TypeError, ValueError, RuntimeError):
        raise RequestError(
            f"{name} is {shown(value)}; give rows of 0 and 1 of equal length, as a tokenizer makes them"
        ) from None
    if not plain:
        raise RequestError(f"{name} holds other numbers than 0 and 1; give 1 for a token and 0 for a pad")
    return seen


def one_per_row(value: Any, rows: int, name: str) -> list[Any]:
    """A list of `rows` items, one for each row of a batch. name: plural, "questions"."""
    if isinstance(value, (str, bytes, Mapping, Set, type)) or not isinstance(value, Iterable):
        raise RequestError(f"{name} must be a list with one per row of the batch ({rows}), not {shown(value)}")
    if getattr(value, "ndim", 1) == 0:
        raise RequestError(f"{name} must be a list with one per row of the batch ({rows}), not {shown(value)}")
    given = list(value)
    if len(given) != rows:
        raise RequestError(f"the batch has {rows} rows, but {len(given)} {name} were given")
    return given


def file_path(value: Any, name: str = "the path") -> str:
    """A path that a file can have. Raises RequestError for what is none."""
    if not isinstance(value, (str, os.PathLike)):
        raise RequestError(f"{name} must be a str or a Path, not {shown(value)}")
    path = os.fsdecode(value)
    if not path or "\0" in path:
        raise RequestError(f"{name} {path!r} names no file; give one, for example 'session.wks'")
    return path
