"""Plain text -> what is measured of a model once: the table of its output gates, and its query statistics.

Documents are read from scratch, one after the other, by the normal chunked prefill; gates and queries are overheard in
the same pass, and nothing but sums is kept. The result goes into an artifact, whose readers and other tables stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wakesight.arguments import chunk_size, whole_number
from wakesight.core import Table
from wakesight.errors import RequestError
from wakesight.estimator.artifact import Artifact, check_target, described
from wakesight.learning import query_statistics
from wakesight.learning.documents import Document
from wakesight.learning.folder import write_json
from wakesight.learning.rollouts import document_seed

TOKENS = 32768  # TriAttention's authors take up to so many
FEW = 4096  # below, the numbers say more about the documents than about the model
REPORT = "calibrate.json"
REDUCTIONS = ("mean_then_max", "max_then_mean")
OnDocument = Callable[[int, int], None]  # tokens read, tokens in all


@dataclass(frozen=True, eq=False)
class Measured:
    """documents: (id, corpus, tokens read). mean: output gate per attention layer, float64 [query_head]; None for a
    model without one. peak: [kv_head], the group's largest at each token and dim, then the mean."""

    documents: tuple[tuple[str, str, int], ...]
    mean: tuple[Tensor, ...] | None
    peak: tuple[Tensor, ...] | None
    query_stats: dict[str, Tensor]

    @property
    def tokens(self) -> int:
        return sum(tokens for _, _, tokens in self.documents)

    def table(self, kv_heads: Sequence[int], reduce: str = "mean_then_max") -> Table | None:
        """One number per attention layer and KV head.

        mean_then_max: the largest of the group's means; max_then_mean: the mean of the group's largest. Source:
        GateSight, gate measurement; which order it takes is not stated, mean_then_max is what we infer.
        """
        if self.mean is None or self.peak is None:
            return None
        if reduce == "max_then_mean":
            return tuple(tuple(layer.tolist()) for layer in self.peak)
        grouped = [layer.view(heads, -1).amax(dim=1) for layer, heads in zip(self.mean, kv_heads, strict=True)]
        return tuple(tuple(layer.tolist()) for layer in grouped)


def calibrate(
    engine: Any, documents: Iterable[Document], out: str | Path, *, tokens: int = TOKENS, seed: int = 0,
    reduce: str = "mean_then_max", chunk: int = 512, on_document: OnDocument | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure gate table and query statistics on about `tokens` tokens, write them into the artifact `out`.

    An artifact of this model that is there keeps its readers, utility tables and metrics. seed: which documents are
    taken, and in what order; the same seed on the same machine gives the same bytes. Returns what calibrate.json says.

    Raises RequestError for an `out` that holds something else or another model's artifact, for a model whose attention
    cannot be watched, and if there is no text to read.
    """
    wanted, seed = whole_number(tokens, "tokens", 2, usual=TOKENS), whole_number(seed, "seed", 0)
    chunk = chunk_size(chunk)
    if reduce not in REDUCTIONS:
        raise RequestError(f"reduce={reduce!r} is unknown; use {' or '.join(REDUCTIONS)}")
    target, fingerprint = Path(out), engine.weights_fingerprint()
    before = _before(target, engine, fingerprint)
    found = measure(engine, drawn(engine, documents, wanted, seed), chunk=chunk, tokens=wanted, on_document=on_document)
    gate = found.table(engine.geometry.kv_heads, reduce)
    settings = {"tokens": wanted, "seed": seed, "reduce": reduce, "chunk": chunk}
    about = {**settings, "documents": len(found.documents), "read_tokens": found.tokens}
    before.replaced(
        tables=dataclasses.replace(before.tables, gate=gate),
        query_stats=found.query_stats,
        training={**before.training, "calibrate": about},
    ).save(target)
    report = _report(engine, found, settings, gate, fingerprint)
    write_json(target / REPORT, report)
    return report


def measure(
    engine: Any, texts: Iterable[tuple[Document, Sequence[int]]], *, chunk: int = 512, tokens: int = 0,
    on_document: OnDocument | None = None,
) -> Measured:  # fmt: skip
    """Read the ids of every document from position 0. tokens: how many there will be, for `on_document`.

    Raises RequestError if there are none, or for a model whose attention cannot be watched.
    """
    if engine.only_whole is not None:
        raise RequestError(f"{engine.name} cannot be calibrated: {engine.only_whole}")
    taps = query_statistics.taps(len(engine.geometry.attention_layers))
    gated: bool = engine.has_output_gate
    sums: list[Tensor] | None = None
    read: list[tuple[str, str, int]] = []
    done = 0
    for document, ids in texts:
        recording = engine.recording(1, ("output_gate",) if gated else ())
        for recorder, tap in zip(recording.layers, taps, strict=True):
            recorder.guests = (tap,)
        state = engine.empty_state(len(ids))
        try:
            heard = engine.extend(state, ids, recording, chunk)
        finally:
            state.release()
        if gated:
            mine = [torch.cat([one.gate.mean, one.gate.peak]).double().cpu() * len(ids) for one in heard.layers]
            sums = mine if sums is None else [a + b for a, b in zip(sums, mine, strict=True)]
        read.append((document.id, document.corpus, len(ids)))
        done += len(ids)
        if on_document is not None:
            on_document(done, tokens)
    if not read:
        raise RequestError("there is no text to measure on; give documents of at least 2 tokens")
    mean = peak = None
    if sums is not None:
        queries = engine.geometry.query_heads
        mean = tuple(layer[:queries] / done for layer in sums)
        peak = tuple(layer[queries:] / done for layer in sums)
    return Measured(tuple(read), mean, peak, query_statistics.collect(taps))


def drawn(
    engine: Any, documents: Iterable[Document], tokens: int, seed: int
) -> Iterator[tuple[Document, tuple[int, ...]]]:
    """Documents with the ids to read until `tokens` ids were given; the last document is cut.

    Plain text behind the tokenizer's own start token, no chat template; a document longer than the model's limit is cut
    there, and one of fewer than 2 tokens left out. The order depends on the seed and the documents' ids, not on the
    order they come in.
    """
    head = tuple(engine.frame(None, False).head) if engine.tokenizer is not None else ()
    longest, left = engine.geometry.max_positions - 1, tokens
    for document in sorted(documents, key=lambda one: (document_seed(seed, one.id), one.id)):
        ids = (*head, *(document.ids or engine.encode(document.text)))[: min(longest, left)]
        if len(ids) >= 2:
            yield document, ids
            left -= len(ids)
        if left < 2:
            return


def _before(target: Path, engine: Any, fingerprint: str) -> Artifact:
    """The artifact that is there, or an empty one. Raises RequestError for another model's."""
    check_target(target)
    if not target.is_dir() or not any(target.iterdir()):
        return Artifact(fingerprint=fingerprint, geometry=described(engine.geometry))
    found = Artifact.load(target)
    found.check(engine.geometry, fingerprint)
    return found


def _report(
    engine: Any, found: Measured, settings: dict[str, Any], gate: Table | None, fingerprint: str
) -> dict[str, Any]:
    weights = None if gate is None else [sum(layer) / len(layer) for layer in gate]
    without = None if gate is not None else f"{engine.geometry.family} models have no gate on their attention output"
    return {
        "model": engine.name,
        "fingerprint": fingerprint,
        "settings": settings,
        "documents": [{"id": name, "corpus": corpus, "tokens": count} for name, corpus, count in found.documents],
        "tokens": found.tokens,
        "attention_layers": [int(layer) for layer in engine.geometry.attention_layers],
        "gate": gate,
        "gate_by_layer": weights,
        "gate_by_query_head": None if found.mean is None else [layer.tolist() for layer in found.mean],
        "no_gate": without,
        "query_stats": sorted(found.query_stats),
    }
