"""A label folder read back: what was found per document, as a scorer and a training run may read it.

    labels.json              what the run was asked for, and the model's fingerprint and geometry
    labels/<name>.safetensors  one document; its header's `about` is one JSON object
    skipped.jsonl            documents that could not be run, one line each with the reason

Tensors of a document, l an attention layer, m a recurrent one: `u.l` float32 [kv_head, token], raw utility;
`relative.l` of the same shape, the maximum of influence over the residual stream's norm;
`key.l` [kv_head, token, dim]; `value_norm.l` float32 [kv_head, token]; `native.m` float32 [token, head, 3];
`hidden.l` [token, hidden]; `tokens` int32, the context's ids. Keys and hidden states may be stored as float16, or as
bytes: see `packed`.
The header's sha256 is that of the tensors; files without one, of older versions, are read by their shapes alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from wakesight.core import ModelGeometry, Signals
from wakesight.errors import RequestError
from wakesight.estimator.artifact import restored
from wakesight.estimator.features import CHANNELS

FORMAT = "wakesight-labels-2"
READ = ("wakesight-labels-1", FORMAT)  # the first had no bytes
SPAN = 32  # tokens that share a range
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


def relative_only(document: LabelledDocument) -> LabelledDocument:
    """The document with its relative utility in the place of the raw one. RequestError if it was not stored."""
    if not document.relative:
        raise RequestError(
            f"the labels of {document.id!r} hold no relative utility; label again, or take --utility raw"
        )
    return replace(document, utility=document.relative)


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
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"format": FORMAT, "sha256": _digest(plain), **about}
    text = json.dumps(header, sort_keys=True, ensure_ascii=False, allow_nan=False)
    content = save(plain, {"about": text})
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
    """Raises RequestError for a file that is damaged or no label file, or holds numbers that are not finite."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise RequestError(f"{path} is damaged and cannot be read ({error}); {AGAIN}") from None
    if not isinstance(about, dict) or about.get("format") not in READ:
        raise RequestError(f"{path} holds no labels of this version of wakesight ({FORMAT}); {AGAIN}")
    if about.get("sha256", digest := _digest(tensors)) != digest:
        raise RequestError(f"{path} is damaged (its numbers are not those that were written); {AGAIN}")
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):  # ranks would take it for the best entry
            raise RequestError(f"{path} holds numbers in {name} that are not finite; {AGAIN}")
    try:
        return _document(about, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"{path} is damaged (its header lacks or garbles {error}); {AGAIN}") from None


def _document(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LabelledDocument:
    layers = {name: _layers(tensors, short) for short, name in {**UTILITY, **STREAMS}.items()}
    count, prefix = int(about["tokens"]), int(about["prefix"])
    streams = {name: layers[name] for name in STREAMS.values() if layers[name]}
    signals = Signals(count, prefix, tuple(about["scaling"]), streams)
    return LabelledDocument(
        str(about["id"]), str(about["corpus"]), count, prefix, layers["utility"], signals, about, layers["relative"]
    )


def read_tokens(path: Path) -> list[int] | None:
    """The ids of the context that a file was made from; None for a file that does not hold them.

    Raises RequestError for a damaged file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor("tokens").tolist() if "tokens" in file.keys() else None  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise RequestError(f"{path} is damaged and cannot be read ({error}); {AGAIN}") from None


def load_labels(folder: str | os.PathLike[str]) -> Iterator[LabelledDocument]:
    """Every labelled document of a folder, in the order of their file names, read one by one.

    Raises RequestError for a folder that holds none, and for a damaged file or one of another model when it is reached.
    """
    paths = label_files(Path(folder))
    geometry, fingerprint, _ = read_about(Path(folder))
    for path in paths:
        document = read_labelled(path)
        _check_model(path, document, geometry, fingerprint)
        yield document


def read_about(folder: Path) -> tuple[ModelGeometry, str, dict[str, Any]]:
    """The model that labels.json names, its fingerprint, and all that the file says. RequestError if it is damaged."""
    path = folder / "labels.json"
    try:
        about: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return restored(about["geometry"]), str(about["fingerprint"]), about
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path} is damaged ({error}); make the labels again") from None


def folder_digest(folder: Path) -> str:
    """Changes with labels.json and with every label file; reads headers, no tensors.

    A header holds the tensors' sha256; a file of an older version, which has none, goes by its time of change.
    """
    digest = hashlib.sha256((folder / "labels.json").read_bytes())
    for path in label_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                about = (file.metadata() or {}).get("about", "")
        except (SafetensorError, OSError) as error:
            raise RequestError(f"{path} is damaged and cannot be read ({error}); {AGAIN}") from None
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {about} ".encode())
        if '"sha256"' not in about:
            digest.update(str(stat.st_mtime_ns).encode())
    return digest.hexdigest()


def _check_model(path: Path, document: LabelledDocument, geometry: ModelGeometry, fingerprint: str) -> None:
    """RequestError unless a file belongs to the model of its folder and has the shapes that this model gives."""
    if document.about.get("fingerprint", fingerprint) != fingerprint:
        raise RequestError(f"{path} belongs to another model than {path.parent.parent / 'labels.json'}; {AGAIN}")
    n, streams = document.tokens, document.signals.streams
    found: dict[str, Sequence[Tensor]] = {"utility": document.utility, "relative": document.relative}
    found.update({name: streams.get(name, ()) for name in STREAMS.values()})
    per_head = [(heads, n) for heads in geometry.kv_heads]
    wanted: dict[str, Sequence[tuple[int | None, ...]]] = {
        "utility": per_head,
        "relative": per_head,
        "keys": [(heads, n, dim) for heads, dim in zip(geometry.kv_heads, geometry.key_dims, strict=True)],
        "value_norms": per_head,
        "native": [(n, heads, len(CHANNELS)) for heads in geometry.native_heads],
        "hidden": [(n, None) for _ in geometry.kv_heads],
    }
    for name, shapes in wanted.items():
        must = name == "utility" or name in document.about.get("record", ())
        if (found[name] or must) and not _fits(found[name], shapes):
            raise RequestError(
                f"{path} is damaged (its {name} are not those of {n} tokens in all layers of the model); {AGAIN}"
            )


def _fits(layers: Sequence[Tensor], shapes: Sequence[tuple[int | None, ...]]) -> bool:
    """One tensor per shape; None stands for any length."""
    return len(layers) == len(shapes) and all(
        layer.dim() == len(shape) and all(b in (None, a) for a, b in zip(layer.shape, shape, strict=True))
        for layer, shape in zip(layers, shapes, strict=True)
    )


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


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


def packed(name: str, numbers: Tensor) -> dict[str, Tensor]:
    """Numbers [..., token, dim] as `name`, a byte each, and what turns bytes into numbers.

    256 steps lead from the least to the largest number that a dim has in a span of tokens: `name`.low and `name`.step,
    float16 [..., span, dim]. Spans run along tokens because dims of a hidden state differ by orders of magnitude from
    each other, and a small one would vanish beside a large one. Numbers beyond float16 stay as they are.
    """
    spans = _spans(numbers.float())
    low = spans.amin(dim=-2).half()
    step = ((spans.amax(dim=-2) - low.float()) / 254).half()  # a step to spare: low may have been rounded up
    if not bool((torch.isfinite(low) & torch.isfinite(step)).all()):
        return {name: numbers}
    wide, origin = step.float().unsqueeze(-2), low.float().unsqueeze(-2)
    steps = ((spans - origin) / torch.where(wide > 0, wide, 1)).round_().clamp_(0, 255)
    bytes_ = steps.to(torch.uint8).flatten(-3, -2)[..., : numbers.shape[-2], :]
    return {name: bytes_.contiguous(), f"{name}.low": low, f"{name}.step": step}


def unpacked(bytes_: Tensor, low: Tensor, step: Tensor) -> Tensor:
    """float32 of the same shape as the bytes."""
    spans = _spans(bytes_).float()
    spans = torch.addcmul(low.float().unsqueeze(-2), spans, step.float().unsqueeze(-2))
    return spans.flatten(-3, -2)[..., : bytes_.shape[-2], :]


def _spans(tensor: Tensor) -> Tensor:
    """[..., token, dim] -> [..., span, SPAN, dim], the last token repeated to fill the last span."""
    *before, tokens, dim = tensor.shape
    last = tensor[..., -1:, :].expand(*before, -tokens % SPAN, dim)
    return torch.cat([tensor, last], dim=-2).view(*before, -1, SPAN, dim)


def _layers(tensors: Mapping[str, Tensor], short: str) -> tuple[Tensor, ...]:
    """`short`.0, `short`.1, ... as float32 (float64 stays)."""
    found: list[Tensor] = []
    while (tensor := tensors.get(name := f"{short}.{len(found)}")) is not None:
        if tensor.dtype == torch.uint8:
            tensor = unpacked(tensor, tensors[f"{name}.low"], tensors[f"{name}.step"])
        found.append(tensor if tensor.dtype == torch.float64 else tensor.float())
    return tuple(found)
