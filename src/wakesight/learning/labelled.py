"""A label folder read back: what was found per document, as a scorer and a training run may read it.

    labels.json              what the run was asked for, and the model's fingerprint and geometry
    labels/<name>.safetensors  one document; its header's `about` is one JSON object
    skipped.jsonl            documents that could not be run, one line each with the reason

Tensors of a document, l an attention layer, m a recurrent one: `u.l` float32 [kv_head, token], raw utility;
`relative.l` of the same shape, the maximum of influence over the residual stream's norm;
`key.l` [kv_head, token, dim]; `value_norm.l` float32 [kv_head, token]; `native.m` float32 [token, head, 3];
`hidden.l` [token, hidden]; `tokens` int32, the context's ids. Keys and hidden states may be stored as float16.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from wakesight.core import Signals
from wakesight.errors import RequestError

FORMAT = "wakesight-labels-1"
UTILITY = {"u": "utility", "relative": "relative"}
STREAMS = {"key": "keys", "value_norm": "value_norms", "native": "native", "hidden": "hidden"}
AGAIN = "label it again with wakesight label --resume, after deleting the file"


@dataclass(frozen=True, eq=False)
class LabelledDocument:
    """One document's labels and signals.

    tokens: n. prefix: protected ones at the start. utility: per attention layer the raw U, float32 [kv_head, n].
    relative: the same where each influence was divided by the norm of the residual stream that enters the layer at
    the influenced token, before the maximum.
    signals: holds the streams `keys`, `value_norms` ([kv_head, n] per layer) and, where recorded, `native`, `hidden`.
    about: seed, continuation lengths, reconstruction error and more, as they were written.
    """

    id: str
    corpus: str
    tokens: int
    prefix: int
    utility: tuple[Tensor, ...]
    signals: Signals
    about: Mapping[str, Any] = field(default_factory=dict)
    relative: tuple[Tensor, ...] = ()

    def labels(self, exclude_prefix: bool = True) -> tuple[Tensor, ...]:
        """Per layer U / max U in [0, 1], float32 [kv_head, n]; see `normalised`."""
        return normalised(self.utility, self.prefix if exclude_prefix else 0)

    def first_label(self, exclude_prefix: bool = True) -> int:
        """The first position that has a label; those before it are 0 and belong to no training or metric."""
        return first_label(self.prefix if exclude_prefix else 0)


def first_label(prefix: int) -> int:
    """Position 0 is an attention sink and can own the maximum, so it never counts."""
    return max(prefix, 1)


def normalised(utility: tuple[Tensor, ...], prefix: int) -> tuple[Tensor, ...]:
    """U / max U per document, layer and KV head, over the positions behind the protected prefix; 0 before them.

    A head whose U is 0 everywhere has labels 0. Source: GateSight, section on utility; the prefix rule is a choice.
    """
    start, found = first_label(prefix), []
    for layer in utility:
        body = layer[:, start:]
        peak = body.amax(dim=1, keepdim=True) if body.shape[1] else body.sum(dim=1, keepdim=True)
        label = torch.zeros_like(layer)
        label[:, start:] = torch.where(peak > 0, body / peak.clamp(min=torch.finfo(body.dtype).tiny), 0)
        found.append(label)
    return tuple(found)


def file_name(document: str) -> str:
    """A file name for any id: readable, and never the same for two ids, also where case does not count."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", document).strip(".")[:80]
    return f"{plain}-{hashlib.sha256(document.encode()).hexdigest()[:12]}.safetensors"


def write_labelled(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """One document's file, under a temporary name and renamed; equal content gives equal bytes."""
    text = json.dumps({"format": FORMAT, **about}, sort_keys=True, ensure_ascii=False, allow_nan=False)
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, {"about": text})
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(scratch, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def read_labelled(path: Path) -> LabelledDocument:
    """Raises RequestError for a file that is damaged or no label file."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise RequestError(f"{path} is damaged and cannot be read ({error}); {AGAIN}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise RequestError(f"{path} holds no labels of this version of wakesight ({FORMAT}); {AGAIN}")
    layers = {name: _layers(tensors, short) for short, name in {**UTILITY, **STREAMS}.items()}
    count, prefix = int(about["tokens"]), int(about["prefix"])
    streams = {name: layers[name] for name in STREAMS.values() if layers[name]}
    signals = Signals(count, prefix, tuple(about["scaling"]), streams)
    return LabelledDocument(
        about["id"], about["corpus"], count, prefix, layers["utility"], signals, about, layers["relative"]
    )


def load_labels(folder: str | os.PathLike[str]) -> Iterator[LabelledDocument]:
    """Every labelled document of a folder, in the order of their file names, read one by one.

    Raises RequestError for a folder that holds none, and for a damaged file when it is reached.
    """
    for path in label_files(Path(folder)):
        yield read_labelled(path)


def label_files(folder: Path) -> list[Path]:
    """The finished documents of a label folder, in order. Raises RequestError if it is none or has none."""
    if not (folder / "labels.json").is_file():
        raise RequestError(f"{folder} is no label folder: it has no labels.json; make one with wakesight label")
    found = sorted((folder / "labels").glob("*.safetensors"))
    if not found:
        raise RequestError(f"{folder} holds no labelled document yet; go on with wakesight label --resume")
    return found


def read_skipped(folder: Path) -> list[dict[str, str]]:
    """Documents that could not be run: id, corpus, reason; sorted by id, the last reason of each."""
    path = folder / "skipped.jsonl"
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]
    return [row for _, row in sorted({row["id"]: row for row in rows}.items())]


def _layers(tensors: Mapping[str, Tensor], short: str) -> tuple[Tensor, ...]:
    """`short`.0, `short`.1, ... as float32 (float64 stays)."""
    found: list[Tensor] = []
    while (tensor := tensors.get(f"{short}.{len(found)}")) is not None:
        found.append(tensor if tensor.dtype == torch.float64 else tensor.float())
    return tuple(found)
