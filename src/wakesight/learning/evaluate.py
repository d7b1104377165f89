"""Every predictor against raw utility, document by document.

A document is predicted by what was fitted without its corpus (leave one corpus out), so nothing is judged on what it
has seen; untrained signals need no such care. The oracle cell is chosen on the documents it is judged on: a bound, not
a rival. Numbers are averaged over KV heads, then documents, then layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wakesight.core import Signals
from wakesight.errors import RequestError
from wakesight.estimator.features import FeatureSpec, Window
from wakesight.estimator.net import Reader
from wakesight.learning.dataset import Labels, body
from wakesight.learning.heuristics import BestCells, Slow, untrained
from wakesight.learning.labelled import LabelledDocument
from wakesight.learning.metrics import measures
from wakesight.learning.ridge import Line

MEASURES = ("rho", "overlap", "coverage")
ORACLE = "best single cell (oracle)"

# per attention layer scores [kv_head, token] of a document, None where it gives none
Predictor = Callable[[LabelledDocument], Sequence[Tensor | None]]
Folds = Mapping[str, Any]  # corpus -> what was fitted without it


@dataclass(frozen=True, eq=False)
class RidgeReader:
    """Lines in the place of networks. lines: per attention layer one for all heads, or one per KV head."""

    features: FeatureSpec
    windows: tuple[Window, ...]
    lines: tuple[tuple[Line, ...], ...]

    def scores(self, signals: Signals) -> tuple[Tensor, ...]:
        """Per attention layer float64 [kv_head, token]."""
        found = []
        for layer, lines in enumerate(self.lines):
            x = self.features.matrix(signals, layer, self.windows[layer])
            found.append(torch.cat([line(inputs) for line, inputs in zip(lines, x, strict=True)]))
        return tuple(found)


def by_fold(folds: Mapping[str, Reader | RidgeReader]) -> Predictor:
    """Predicts every document by what was fitted without its corpus."""
    return lambda document: folds[document.corpus].scores(document.signals)


def always(reader: Reader | RidgeReader) -> Predictor:
    """Predicts every document by the same reader."""
    return lambda document: reader.scores(document.signals)


def evaluate(
    labels: Labels, predictors: Mapping[str, Predictor], windows: Sequence[Window], slow: Slow | None = None, *,
    k_frac: float = 0.1, exclude_prefix: bool = True, baselines: bool = True, every: int = 1,
    on_document: Callable[[int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """rho, overlap@k and coverage@k of the predictors, the untrained signals and the oracle, as plain JSON.

    windows: of the untrained signals. slow: per recurrent layer bool [head]; None leaves the slow-only signals out.
    baselines: False leaves untrained signals and the oracle out. every: judge each n-th document only.
    """
    board, cells, seen = _Board(), BestCells(k_frac), 0
    for index, document in enumerate(labels.documents()):
        if index % every:
            continue
        seen += 1
        inside = body(document, exclude_prefix)
        truth = [utility[:, inside] for utility in document.utility]
        for name, predictor in predictors.items():
            found = [None if one is None else one[:, inside] for one in predictor(document)]
            board.add(name, document.corpus, _measured(found, truth, k_frac))
        if baselines:
            _add_untrained(board, document, truth, inside, windows, slow, k_frac)
            if "native" in document.signals.streams:
                cells.add([native[inside] for native in document.signals["native"]], torch.cat(truth))
        if on_document is not None:
            on_document(seen)
    if not seen:
        raise RequestError("there are no labelled documents to judge on; make some with wakesight label")
    return {
        "k_frac": k_frac,
        "documents": seen,
        "predictors": board.table(),
        "oracle": _oracle(cells, labels.geometry.kv_heads) if cells.documents else None,
    }


def _add_untrained(
    board: _Board, document: LabelledDocument, truth: Sequence[Tensor], inside: slice, windows: Sequence[Window],
    slow: Slow | None, k_frac: float,
) -> None:  # fmt: skip
    rows: dict[str, list[Tensor | None]] = {}
    for layer, window in enumerate(windows):
        for name, scores in untrained(document.signals, layer, window, slow):
            rows.setdefault(name, [])
            if scores is not None:
                scores = scores.expand(len(truth[layer]), -1)[:, inside]
            rows[name].append(scores)
    for name, scores_of in rows.items():
        board.add(name, document.corpus, _measured(scores_of, truth, k_frac))


def _measured(
    predicted: Sequence[Tensor | None], truth: Sequence[Tensor], k_frac: float
) -> list[tuple[float, ...] | None]:
    """Per attention layer the means over KV heads of the three measures."""
    return [
        None if one is None else tuple(measures(one.to(utility.device), utility, k_frac).mean(dim=0).tolist())
        for one, utility in zip(predicted, truth, strict=True)
    ]


class _Board:
    """Measures per predictor, document and layer."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[str, list[tuple[float, ...] | None]]]] = {}

    def add(self, name: str, corpus: str, layers: list[tuple[float, ...] | None]) -> None:
        self._rows.setdefault(name, []).append((corpus, layers))

    def table(self) -> dict[str, Any]:
        return {name: self._about(rows) for name, rows in self._rows.items()}

    def _about(self, rows: list[tuple[str, list[tuple[float, ...] | None]]]) -> dict[str, Any]:
        corpora = sorted({corpus for corpus, _ in rows})
        every = [layers for _, layers in rows]
        return {
            "mean": _mean(every),
            "standard_error": _standard_error(every),
            "layers": [_named([layers[at] for layers in every]) for at in range(len(every[0]))],
            "corpora": {one: _mean([layers for corpus, layers in rows if corpus == one]) for one in corpora},
            "skipped": sum(one is None for layers in every for one in layers),
        }


def _named(cells: Sequence[tuple[float, ...] | None]) -> dict[str, float] | None:
    """Means of the cells that are there, by name."""
    there = [cell for cell in cells if cell is not None]
    if not there:
        return None
    return {name: math.fsum(cell[at] for cell in there) / len(there) for at, name in enumerate(MEASURES)}


def _mean(documents: Sequence[Sequence[tuple[float, ...] | None]]) -> dict[str, float] | None:
    """Means over documents, then over the layers that have any."""
    layers = [_named([document[at] for document in documents]) for at in range(len(documents[0]))]
    there = [layer for layer in layers if layer is not None]
    if not there:
        return None
    return {name: math.fsum(layer[name] for layer in there) / len(there) for name in MEASURES}


def _standard_error(documents: Sequence[Sequence[tuple[float, ...] | None]]) -> dict[str, float] | None:
    """Of the mean over documents of their layer means; None for fewer than two documents."""
    rows = [row for row in (_named(document) for document in documents) if row is not None]
    if len(rows) < 2:
        return None
    columns = {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in MEASURES}
    return {name: float(column.std() / math.sqrt(len(rows))) for name, column in columns.items()}


def _oracle(cells: BestCells, kv_heads: Sequence[int]) -> dict[str, Any]:
    best, at = cells.best(), 0
    means: list[float] = []
    layers: list[dict[str, Any]] = []
    for heads in kv_heads:
        mine = best[at : at + heads]
        at += heads
        means.append(math.fsum(mean for mean, _ in mine) / heads)
        chosen = [{"recurrent": m, "head": h, "signal": s, "sign": sign} for _, (m, h, s, sign) in mine]
        layers.append({"overlap": means[-1], "cells": chosen})
    return {"name": ORACLE, "overlap": math.fsum(means) / len(means), "layers": layers}
