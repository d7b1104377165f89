"""The closing-heads study: attention heads switched off, and how much worse the model then foretells a text.

Query heads are ranked by their mean output gate on some documents, the lowest of them closed, and next-token accuracy
on the other documents compared with closing as many random heads, with closing each attention layer alone, the first
two, the first three and so on, and all of them. Source: GateSight, gate measurement; whole layers are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wakesight.arguments import whole_number
from wakesight.errors import RequestError
from wakesight.learning.calibrate import drawn, measure
from wakesight.learning.documents import Document

SHARE = 0.125  # of all query heads: 48 of 384
SEEDS = 5
TOKENS = 8192
CALIBRATION = 4  # every so manieth document measures gates, the others are foretold
WHOLE, LOWEST, RANDOM, ALL = "nothing closed", "lowest gates", "random heads", "all attention layers"
Closed = Mapping[int, Sequence[int]]  # attention layer -> query heads
Text = tuple[str, Sequence[int]]  # corpus, ids


@dataclass(frozen=True)
class Arm:
    """name: what is closed, in words. kind: WHOLE, LOWEST, RANDOM, "layer", "layers" or ALL."""

    name: str
    kind: str
    closed: Closed

    @property
    def heads(self) -> int:
        return sum(len(heads) for heads in self.closed.values())


def close_heads(
    engine: Any, documents: Iterable[Document], *, share: float = SHARE, seeds: int = SEEDS, tokens: int = TOKENS,
    seed: int = 0, chunk: int = 512, on_arm: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """All of it as plain JSON. share: of the query heads of all attention layers, at least one head.

    tokens: read in all, gates included. seeds: random choices of as many heads. seed: of the documents and of these.
    A model without output gates gets no arm of lowest gates, and all documents are foretold.
    Raises RequestError for a share that is none, or too few documents.
    """
    if not 0 < share <= 1:
        raise RequestError(
            f"--share {share} is no share of the heads; give more than 0 and at most 1, for example 0.125"
        )
    seeds, tokens = whole_number(seeds, "seeds", 1, usual=SEEDS), whole_number(tokens, "tokens", 4, usual=TOKENS)
    texts = list(drawn(engine, documents, tokens, seed))
    gated = bool(engine.has_output_gate) and engine.only_whole is None
    first = texts[::CALIBRATION] if gated else []
    judged = [(document.corpus, ids) for at, (document, ids) in enumerate(texts) if not gated or at % CALIBRATION]
    if not judged:
        raise RequestError(
            f"the closing study needs {2 if gated else 1} documents or more and has {len(texts)}: one measures the "
            "gates and another is foretold; give more, or raise --tokens"
        )
    gates = measure(engine, first, chunk=chunk).mean if gated else None
    plan = arms(len(engine.geometry.attention_layers), engine.geometry.query_heads, gates, share, seeds, seed)
    rows = []
    for done, arm in enumerate(plan, start=1):
        rows.append(_row(arm, accuracy(engine, arm.closed, judged, chunk)))
        if on_arm is not None:
            on_arm(done, len(plan))
    return {
        "model": engine.name,
        "settings": {"share": share, "seeds": seeds, "tokens": tokens, "seed": seed},
        "calibration_documents": len(first),
        "documents": len(judged),
        "foretold_tokens": sum(len(ids) - 1 for _, ids in judged),
        "query_heads": len(engine.geometry.attention_layers) * engine.geometry.query_heads,
        "attention_layers": [int(layer) for layer in engine.geometry.attention_layers],
        "gate_by_query_head": None if gates is None else [layer.tolist() for layer in gates],
        "no_gate": None if gated else f"{engine.geometry.family} models give no output gates to rank heads by",
        "arms": rows,
        "summary": summary(rows),
    }


def arms(
    layers: int, query_heads: int, gates: Sequence[Tensor] | None, share: float, seeds: int, seed: int
) -> list[Arm]:
    """What is compared. gates: per attention layer [query_head]; of equal ones the earlier head is lower."""
    total = layers * query_heads
    count = max(1, round(share * total))
    plan = [Arm(WHOLE, WHOLE, {})]
    if gates is not None:
        order = torch.cat(list(gates)).argsort(stable=True)
        plan.append(Arm(f"{LOWEST} ({count})", LOWEST, _heads(order[:count].tolist(), query_heads)))
    for number, chosen in enumerate(_choices(total, count, seeds, seed)):
        plan.append(Arm(f"{RANDOM} ({count}), choice {number}", RANDOM, _heads(chosen, query_heads)))
    every = range(query_heads)
    plan += [Arm(f"attention layer {layer}", "layer", {layer: every}) for layer in range(layers)]
    for last in range(1, layers - 1):  # one alone and all of them are arms of their own
        plan.append(Arm(f"attention layers 0 to {last}", "layers", {layer: every for layer in range(last + 1)}))
    return [*plan, Arm(ALL, ALL, {layer: every for layer in range(layers)})]


def accuracy(engine: Any, closed: Closed, texts: Sequence[Text], chunk: int = 512) -> dict[str, dict[str, float]]:
    """Per corpus, and "" for all: tokens, the share foretold right, and the mean loss in nats."""
    sums: dict[str, list[float]] = {}
    with engine.closing(closed):
        for corpus, ids in texts:
            found = engine.next_tokens(ids, chunk)
            row = (len(found.hits), float(found.hits.sum()), -float(found.log_probs.double().sum()))
            for name in ("", corpus):
                sums[name] = [a + b for a, b in zip(sums.get(name, [0.0] * 3), row, strict=True)]
    return {name: {"tokens": n, "accuracy": hits / n, "loss": loss / n} for name, (n, hits, loss) in sums.items()}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What closing costs: accuracy lost by each kind of arm, and how many times less the lowest gates lose."""
    (whole,) = (row["accuracy"] for row in rows if row["kind"] == WHOLE)
    lost = {kind: [whole - row["accuracy"] for row in rows if row["kind"] == kind] for kind in (LOWEST, RANDOM, ALL)}
    mean = {kind: math.fsum(one) / len(one) if one else None for kind, one in lost.items()}
    low, chance = mean[LOWEST], mean[RANDOM]
    ratio = chance / low if low is not None and chance is not None and low > 0 else None
    return {"accuracy": whole, "lost": mean, "random_over_lowest": ratio}


def markdown(found: Mapping[str, Any]) -> str:
    """closing.md."""
    corpora = sorted({corpus for row in found["arms"] for corpus in row["corpora"]})
    whole = found["arms"][0]["accuracy"]
    head = ["closed", "heads", "accuracy", "lost", "loss, nats", *corpora]
    lines = [head, ["---", *["--:"] * (len(head) - 1)]]
    for row in found["arms"]:
        by_corpus = [f"{row['corpora'][corpus]['accuracy']:.1%}" for corpus in corpora]
        lines.append(
            [
                row["name"], str(row["heads"]), f"{row['accuracy']:.1%}", f"{whole - row['accuracy']:+.1%}",
                f"{row['loss']:.3f}", *by_corpus,
            ]
        )  # fmt: skip
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    ratio = found["summary"]["random_over_lowest"]
    if ratio is not None:
        told = (
            f"Random heads cost {ratio:.1f} times the accuracy that the lowest gates cost (paper, its 27B model: 2-4)."
        )
    elif found["no_gate"]:
        told = f"No arm of lowest gates: {found['no_gate']}."
    else:
        told = "Closing the lowest gates cost no accuracy, so it has no ratio to what random heads cost."
    return (
        f"# Closing attention heads\n\nNext-token accuracy on {found['foretold_tokens']:,} tokens of "
        f"{found['documents']} documents; gates measured on {found['calibration_documents']} others. Attention layers "
        f"are counted from 0; in the model they are layers {', '.join(map(str, found['attention_layers']))}.\n\n"
        f"{table}\n\n{told}\n"
    )


def _choices(total: int, count: int, wanted: int, seed: int) -> list[tuple[int, ...]]:
    """Different random sets of `count` out of `total`: `wanted` of them, or as many as there are."""
    noise = torch.Generator().manual_seed(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < min(wanted, math.comb(total, count)):
        found[tuple(sorted(torch.randperm(total, generator=noise)[:count].tolist()))] = None
    return list(found)


def _heads(flat: Iterable[int], query_heads: int) -> dict[int, list[int]]:
    closed: dict[int, list[int]] = {}
    for head in sorted(flat):
        closed.setdefault(head // query_heads, []).append(head % query_heads)
    return closed


def _row(arm: Arm, found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    return {
        "name": arm.name,
        "kind": arm.kind,
        "heads": arm.heads,
        "closed": {str(layer): list(heads) for layer, heads in arm.closed.items()},
        "accuracy": found[""]["accuracy"],
        "loss": found[""]["loss"],
        "corpora": {corpus: dict(one) for corpus, one in found.items() if corpus},
    }
