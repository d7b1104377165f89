"""Labelled documents -> sampled rows: what the readers are trained on.

Of every document the same random positions serve all attention layers and KV heads. Rows are kept as raw streams, one
file each, not as feature matrices: windows overlap and several readers look at the same numbers. A layer's inputs are
put together when that layer is trained, so memory holds one layer, not the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wakesight.core import ModelGeometry
from wakesight.errors import RequestError, WorkError
from wakesight.estimator.features import FeatureSpec, Window, ages
from wakesight.estimator.net import STD_FLOOR
from wakesight.learning.labelled import (
    LabelledDocument,
    folder_digest,
    label_files,
    load_labels,
    read_about,
    relative_only,
)

UTILITIES = ("raw", "relative")
ROWS = 500  # per document, as in the paper
# hidden states are wide: half precision keeps a model's rows on an ordinary disk, and no reader sees the difference
STORED = {"hidden": np.dtype(np.float16)}
RECORDED_AS = {"native": "native", "hidden": "hidden", "key_stats": "keys", "key": "keys"}  # part -> wakesight label
PIECE = 1 << 16  # rows whose sums are taken at a time


@dataclass(frozen=True, eq=False)
class Labels:
    """The labelled documents of one model. documents: starts from the first one each time it is called.

    about: what the labels were asked for, plain JSON. digest: changes with their content. utility: "raw", or
    "relative" to the norm of the residual stream.
    """

    geometry: ModelGeometry
    fingerprint: str
    documents: Callable[[], Iterator[LabelledDocument]]
    about: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    utility: str = "raw"


def open_labels(folder: str | os.PathLike[str], utility: str = "raw") -> Labels:
    """A label folder of wakesight label. Raises RequestError if it is none, or for an unknown utility."""
    if utility not in UTILITIES:
        raise RequestError(f"there is no utility {utility!r}; give --utility raw or --utility relative")
    path = Path(folder)
    label_files(path)
    geometry, fingerprint, about = read_about(path)

    def documents() -> Iterator[LabelledDocument]:
        return load_labels(path) if utility == "raw" else map(relative_only, load_labels(path))

    return Labels(geometry, fingerprint, documents, about, f"{utility} {folder_digest(path)}", utility)


def body(document: LabelledDocument, exclude_prefix: bool = True) -> slice:
    """The entries that are normalised, sampled and judged: without the protected prefix, and never the first token.

    Raises RequestError if nothing is left.
    """
    start = document.first_label(exclude_prefix)
    if start >= document.tokens:
        raise RequestError(
            f"document {document.id!r} has {document.tokens} tokens and a prefix of {document.prefix}, so nothing in "
            "it can be dropped; label longer documents"
        )
    return slice(start, document.tokens)


def positions(document: LabelledDocument, rows: int, seed: int, exclude_prefix: bool = True) -> Tensor:
    """int64, ascending: `rows` random positions without repetition, all if there are fewer.

    They depend on the seed and the document's id alone, not on the order in which documents come.
    """
    where = body(document, exclude_prefix)
    digest = hashlib.sha256(f"{seed}/{document.id}".encode()).digest()
    noise = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    drawn: Tensor = torch.randperm(where.stop - where.start, generator=noise)[:rows]
    return torch.sort(drawn + where.start).values


@dataclass(frozen=True, eq=False)
class LayerRows:
    """One layer's inputs and labels.

    shared: float32 [row, shared input]. own: float32 [kv_head, row, own input] or None. label: float32 [kv_head, row].
    """

    layer: int
    shared: Tensor
    own: Tensor | None
    label: Tensor

    @property
    def inputs(self) -> int:
        return self.shared.shape[1] + (0 if self.own is None else self.own.shape[2])

    def statistics(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the chosen rows: float32 [kv_head, input], the deviation at least 1e-6."""
        mean, std = _moments(self.shared, chosen)
        heads = len(self.label)
        mean, std = mean.expand(heads, -1), std.expand(heads, -1)
        if self.own is not None:
            pairs = [_moments(one, chosen) for one in self.own]
            mean = torch.cat([mean, torch.stack([pair[0] for pair in pairs])], dim=1)
            std = torch.cat([std, torch.stack([pair[1] for pair in pairs])], dim=1)
        return mean.float().contiguous(), std.clamp_min(STD_FLOOR).float().contiguous()


def _moments(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """float64 mean and (population) standard deviation of rows, in two passes and in pieces."""
    pieces = torch.split(chosen, PIECE)
    mean = torch.stack([x[piece].double().sum(dim=0) for piece in pieces]).sum(dim=0) / len(chosen)
    square = torch.stack([(x[piece].double() - mean).square().sum(dim=0) for piece in pieces]).sum(dim=0)
    return mean, (square / len(chosen)).sqrt()


@dataclass(frozen=True)
class Drawn:
    """A document's share of the rows."""

    id: str
    corpus: str
    rows: int


@dataclass(frozen=True, eq=False)
class Rows:
    """Sampled rows in a folder: `<stream>.bin`, row by row, and rows.json."""

    folder: Path
    documents: tuple[Drawn, ...]
    streams: Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape of one row

    @property
    def count(self) -> int:
        return sum(one.rows for one in self.documents)

    @property
    def corpora(self) -> list[str]:
        return sorted({one.corpus for one in self.documents})

    def of(self, wanted: Callable[[Drawn], bool]) -> Tensor:
        """int64: rows of the documents that are wanted, in order."""
        mask = [wanted(one) for one in self.documents]
        counts = torch.tensor([one.rows for one in self.documents])
        return torch.tensor(mask).repeat_interleave(counts).nonzero().flatten()

    def stream(self, name: str) -> Tensor:
        """float32 [row, ...] of one recorded stream, "native.3" for example."""
        dtype, shape = self.streams[name]
        flat = np.fromfile(self.folder / f"{name}.bin", dtype=np.dtype(dtype))
        return torch.from_numpy(flat).view(self.count, *shape).float()

    def layer(self, spec: FeatureSpec, layer: int, window: Window) -> LayerRows:
        """Everything a layer's networks are trained on."""
        shared = []
        for part in spec.shared:
            if part == "native":
                shared += [self.stream(f"native.{m}").flatten(1) for m in window]
            else:
                shared.append(self.stream("age" if part == "age" else f"hidden.{layer}"))
        own = [self.stream(f"{part}.{layer}").transpose(0, 1) for part in spec.own]
        return LayerRows(
            layer,
            torch.cat(shared, dim=1) if shared else torch.empty(self.count, 0),
            torch.cat(own, dim=2).contiguous() if own else None,
            self.stream(f"label.{layer}").T.contiguous(),
        )


def sample(
    labels: Labels, folder: Path, parts: Sequence[str], *, rows: int = ROWS, seed: int = 0, exclude_prefix: bool = True
) -> Rows:
    """Draw the rows of all documents into `folder`, or open them if they lie there already.

    parts: which feature parts will be asked for. The folder gets its name when it is complete.
    """
    if (folder / "rows.json").exists():
        return open_rows(folder)
    scratch = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    drawn: list[Drawn] = []
    streams: dict[str, tuple[str, tuple[int, ...]]] = {}
    for document in labels.documents():
        where = positions(document, rows, seed, exclude_prefix)
        drawn.append(Drawn(document.id, document.corpus, len(where)))
        for name, values in _streams(document, parts, where, exclude_prefix):
            array = values.float().contiguous().numpy().astype(STORED.get(name.partition(".")[0], np.dtype(np.float32)))
            if not np.isfinite(array).all():
                raise WorkError(f"the labels of {document.id!r} hold {name} values that are not finite; label it again")
            about = (array.dtype.name, array.shape[1:])
            if streams.setdefault(name, about) != about:
                raise RequestError(f"the labels of {document.id!r} have another shape in {name} than those before")
            with open(scratch / f"{name}.bin", "ab") as file:
                file.write(array.tobytes())
    if not drawn:
        raise RequestError("there are no labelled documents; make some with wakesight label")
    plain = {"documents": [vars(one) for one in drawn], "streams": streams}
    (scratch / "rows.json").write_text(json.dumps(plain), encoding="utf-8")
    scratch.replace(folder)
    return open_rows(folder)


def open_rows(folder: Path) -> Rows:
    plain: dict[str, Any] = json.loads((folder / "rows.json").read_text("utf-8"))
    return Rows(
        folder,
        tuple(Drawn(**one) for one in plain["documents"]),
        {name: (dtype, tuple(shape)) for name, (dtype, shape) in plain["streams"].items()},
    )


def _streams(
    document: LabelledDocument, parts: Sequence[str], where: Tensor, exclude_prefix: bool
) -> Iterator[tuple[str, Tensor]]:
    """(name, [row, ...]) of everything that is kept of one document."""
    signals = document.signals
    for part in parts:
        if part in RECORDED_AS and RECORDED_AS[part] not in signals.streams:
            raise RequestError(
                f"the labels of {document.id!r} hold no {RECORDED_AS[part]}, which a reader of {part!r} needs; label "
                f"again with --record {RECORDED_AS[part]}"
            )
    yield "age", ages(0, document.tokens, document.tokens)[where]
    if "native" in parts:
        for m, native in enumerate(signals["native"]):
            yield f"native.{m}", native[where]
    own = [part for part in parts if part in ("key_stats", "key")]
    for layer, label in enumerate(document.labels(exclude_prefix)):
        yield f"label.{layer}", label[:, where].T
        if "hidden" in parts:
            yield f"hidden.{layer}", signals["hidden"][layer][where]
        for part in own:
            opened = FeatureSpec((part,)).open(signals, layer, ())
            values = opened.own(0, document.tokens)
            assert values is not None
            yield f"{part}.{layer}", values[:, where].transpose(0, 1)
