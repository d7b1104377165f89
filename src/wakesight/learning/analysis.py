"""What the native signals are like, and what they have to do with utility: plain numbers from the labels alone.

Every function is pure: tensors in, numbers or plain dicts out. `analyze` goes through the documents and puts all of it
together; figures and text are made elsewhere. Ranks are taken over the entries beyond the protected prefix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wakesight.errors import RequestError
from wakesight.estimator.artifact import Artifact
from wakesight.estimator.features import FeatureSpec, Window
from wakesight.learning.dataset import Labels, body
from wakesight.learning.evaluate import always, evaluate
from wakesight.learning.heuristics import SIGNALS, Slow, slow_mean, window_mean
from wakesight.learning.labelled import LabelledDocument
from wakesight.learning.metrics import average_ranks, best_count, spearman, top_mask
from wakesight.learning.survey import LEAST_DECAY, SLOW_TOKENS, half_lives

CLEAR = 0.1  # of a correlation: what counts as one
SUMMARIES = ("beta", "forgetting", "norm_v", "write", "slow norm_v", "slow write", "retention")


def static_half_lives(a_log: Tensor, dt_bias: Tensor, limits: tuple[float, float] | None = None) -> Tensor:
    """Half-life at zero input, float64 [head] in tokens, on the CPU: ln 2 / (exp(A_log) * softplus(dt_bias)).

    limits: what softplus(dt_bias), Mamba-2's time step, is clamped to.
    """
    step = torch.nn.functional.softplus(dt_bias.double().cpu())
    if limits is not None:
        step = step.clamp(*limits)
    return math.log(2) / (a_log.double().cpu().exp() * step).clamp_min(LEAST_DECAY)


def jaccard(a: Tensor, b: Tensor) -> float:
    """|a and b| / |a or b| of two bool tensors; 1 if both are empty."""
    either = int((a | b).sum())
    return int((a & b).sum()) / either if either else 1.0


def slow_set(lives: Tensor, tokens: float = SLOW_TOKENS) -> dict[str, Any]:
    """From half-lives [document, head]: the heads whose median is at least `tokens`, and how firm that set is.

    jaccard: mean over documents of the overlap with the document's own set. always, never, between: heads that are slow
    in at least 95% of documents, in at most 5%, and the rest.
    """
    slow = lives >= tokens
    chosen = lives.quantile(0.5, dim=0) >= tokens
    share = slow.double().mean(dim=0)
    return {
        "tokens": tokens,
        "heads": lives.shape[1],
        "slow": int(chosen.sum()),
        "jaccard": math.fsum(jaccard(one, chosen) for one in slow) / len(slow),
        "always": int((share >= 0.95).sum()),
        "never": int((share <= 0.05).sum()),
        "between": int(((share > 0.05) & (share < 0.95)).sum()),
    }


def order_between_documents(values: Tensor, pairs: int = 200, seed: int = 0) -> dict[str, float]:
    """Rank correlation over heads of [document, head] values between random pairs of documents: min, median, max.

    Empty for one document alone.
    """
    count = len(values)
    if count < 2:
        return {}
    noise = torch.Generator().manual_seed(seed)
    first = torch.randint(count, (pairs,), generator=noise)
    second = (first + 1 + torch.randint(count - 1, (pairs,), generator=noise)) % count
    rho = spearman(values[first], values[second])
    return {"min": float(rho.min()), "median": float(rho.quantile(0.5)), "max": float(rho.max())}


def variance_split(native: Tensor) -> dict[str, float]:
    """Two-way split of L[token, head] = log(beta * ||v||) from [token, head, 3]: shares of the total sum of squares.

    head: of the head means, token: of the token means, rest: what neither explains. They add up to 1.
    """
    log_write = (native[..., 0].double() * native[..., 2].double()).clamp_min(1e-30).log()
    mean = log_write.mean()
    of_head, of_token = log_write.mean(dim=0) - mean, log_write.mean(dim=1) - mean
    total = float((log_write - mean).square().sum())
    if total == 0:
        return {"head": 0.0, "token": 0.0, "rest": 0.0}
    tokens, heads = log_write.shape
    head = tokens * float(of_head.square().sum()) / total
    token = heads * float(of_token.square().sum()) / total
    return {"head": head, "token": token, "rest": 1 - head - token}


def decile_lifts(signal: Tensor, utility: Tensor) -> tuple[float, float]:
    """How much likelier than chance the best (worst) tenth by `signal` [entry] is in the best (worst) tenth by utility.

    utility: [kv_head, entry]; means over heads. 1 is chance, 10 the most.
    """
    k = best_count(utility.shape[1], 0.1)
    share = k / utility.shape[1]
    lifts = []
    for sign in (1, -1):
        chosen = top_mask(sign * signal[None], k)
        both = (chosen & top_mask(sign * utility, k)).sum(dim=1).double() / k
        lifts.append(float((both / share).mean()))
    return lifts[0], lifts[1]


def cell_correlations(native: Sequence[Tensor], utility: Tensor) -> list[Tensor]:
    """Per recurrent layer float64 [kv_head, head, 3]: rank correlation of every cell's beta, -g, ||v|| with utility."""
    truth = _unit_ranks(utility)  # [kv_head, entry]
    found = []
    for layer in native:
        cells = torch.stack([SIGNALS[name](layer) for name in ("beta", "forgetting", "norm_v")], dim=-1)
        ranks = _unit_ranks(cells.flatten(1).T)  # [head * 3, entry]
        found.append((truth @ ranks.T).view(len(truth), layer.shape[1], 3))
    return found


def summaries(document: LabelledDocument, window: Window, slow: Slow | None) -> dict[str, Tensor]:
    """The summary signals of a window, [token] each; slow-only ones where the window has slow heads."""
    found = {name: window_mean(document.signals, window, name) for name in SIGNALS}
    if slow is not None:
        found |= {f"slow {name}": slow_mean(document.signals, window, name, slow) for name in ("norm_v", "write")}
    there = {name: one for name, one in found.items() if one is not None}
    if "forgetting" in there:
        there["retention"] = -there["forgetting"]
    return there


def cell_map(correlations: Sequence[Tensor], windows: Sequence[Window], layers: Sequence[int]) -> dict[str, Any]:
    """From mean correlations per recurrent layer, [attention layer, head, 3]: what single cells tell.

    Per attention layer: share of window cells (each with three signals) with |rho| > 0.1, the largest |rho| inside, and
    the recurrent layer of the best cell anywhere. layers: depths of the recurrent layers.
    """
    rows = []
    for layer, window in enumerate(windows):
        peaks = [float(one[layer].abs().max()) for one in correlations]
        inside = [correlations[m][layer].abs().flatten() for m in window]
        best = max(range(len(peaks)), key=lambda m: peaks[m])
        cells = torch.cat(inside) if inside else torch.zeros(0)
        rows.append(
            {
                "cells": len(cells),
                "clear": float((cells > CLEAR).double().mean()) if len(cells) else None,
                "largest": float(cells.max()) if len(cells) else None,
                "best_layer": int(layers[best]),
                "best_layer_rho": peaks[best],
                "best_is_inside": best in window,
                "largest_by_recurrent_layer": peaks,
            }
        )
    return {"threshold": CLEAR, "layers": rows}


def analyze(
    labels: Labels, *, window: int = 6, slow_tokens: float = SLOW_TOKENS, static: Sequence[Tensor] | None = None,
    artifact: Artifact | None = None, every: int = 1, exclude_prefix: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """All of it as plain JSON. static: half-lives at zero input per recurrent layer, where the weights were read.

    artifact: its readers are judged on these documents (transfer to another corpus or length). every: use each n-th
    document. Raises RequestError for labels without native signals.
    """
    windows = FeatureSpec(("native",), window).windows(labels.geometry)
    lives, writes, splits = _signal_pass(labels, every)
    slow_info = slow_set(lives, slow_tokens)
    widths = list(labels.geometry.native_heads)
    slow = list(torch.split(lives.quantile(0.5, dim=0) >= slow_tokens, widths))
    relation = _utility_pass(labels, windows, slow, every, exclude_prefix)
    found: dict[str, Any] = {
        "documents": len(lives),
        "half_life": _half_life(lives, writes, widths, static),
        "slow_set": slow_info,
        "variance": splits,
        **relation,
    }
    if artifact is not None:
        artifact.check(labels.geometry, labels.fingerprint)
        predictors = {name: always(reader) for name, reader in artifact.readers.items()}
        found["transfer"] = evaluate(labels, predictors, windows, slow, exclude_prefix=exclude_prefix, every=every)
    return found


def _documents(labels: Labels, every: int) -> Any:
    for index, document in enumerate(labels.documents()):
        if index % every == 0:
            if "native" not in document.signals.streams:
                raise RequestError(
                    f"the labels of {document.id!r} hold no native signals; label again with --record native"
                )
            yield document


def _signal_pass(labels: Labels, every: int) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Half-lives and mean writes [document, head of all layers], and the mean variance split."""
    lives, writes, splits = [], [], []
    for document in _documents(labels, every):
        native = document.signals["native"]
        lives.append(torch.cat([half_lives(one) for one in native]))
        writes.append(torch.cat([(one[..., 0] * one[..., 2]).double().mean(dim=0) for one in native]))
        splits += [variance_split(one) for one in native]
    if not lives:
        raise RequestError("there are no labelled documents; make some with wakesight label")
    mean = {name: math.fsum(split[name] for split in splits) / len(splits) for name in ("head", "token", "rest")}
    return torch.stack(lives), torch.stack(writes), mean


def _half_life(lives: Tensor, writes: Tensor, widths: Sequence[int], static: Sequence[Tensor] | None) -> dict[str, Any]:
    medians = lives.quantile(0.5, dim=0)
    by_layer = torch.split(medians, list(widths))
    per_layer = zip(by_layer, torch.split(writes.mean(dim=0), list(widths)), strict=True)
    against_write = [float(spearman(a[None], b[None])) for a, b in per_layer]
    return {
        "median": float(medians.quantile(0.5)),
        "by_layer": [one.tolist() for one in by_layer],
        "order_between_documents": order_between_documents(lives),
        "write_order_between_documents": order_between_documents(writes),
        "against_mean_write_within_layers": math.fsum(against_write) / len(against_write),
        "static": None if static is None else [one.tolist() for one in static],
        "static_against_measured": None
        if static is None
        else float(spearman(torch.cat(list(static))[None], medians[None])),
    }


def _utility_pass(
    labels: Labels, windows: Sequence[Window], slow: Slow, every: int, exclude_prefix: bool
) -> dict[str, Any]:
    """Summaries against utility by corpus and depth, decile lifts, the cell map."""
    rho: dict[str, dict[str, list[list[float]]]] = {}  # summary -> corpus -> attention layer -> documents
    lifts: list[list[tuple[float, float]]] = [[] for _ in windows]
    cells: list[Tensor] = []
    count = 0
    for document in _documents(labels, every):
        inside, count = body(document, exclude_prefix), count + 1
        native = [one[inside] for one in document.signals["native"]]
        for layer, window in enumerate(windows):
            utility = document.utility[layer][:, inside]
            found = summaries(document, window, slow)
            for name, signal in found.items():
                by_layer = rho.setdefault(name, {}).setdefault(document.corpus, [[] for _ in windows])
                by_layer[layer].append(float(spearman(signal[inside].expand_as(utility), utility).mean()))
            if "slow write" in found:
                lifts[layer].append(decile_lifts(found["slow write"][inside], utility))
        maps = [cell_correlations(native, document.utility[layer][:, inside]) for layer in range(len(windows))]
        stacked = [torch.stack([one[m].mean(dim=0) for one in maps]) for m in range(len(native))]
        cells = [a + b for a, b in zip(cells, stacked, strict=True)] if cells else stacked
    depths = [int(layer) for layer in labels.geometry.recurrent_layers]
    return {
        "summaries": {name: _by_corpus(found) for name, found in rho.items()},
        "decile_lifts": _lifts(lifts),
        "cells": cell_map([one / count for one in cells], windows, depths),
        "attention_layers": [int(layer) for layer in labels.geometry.attention_layers],
        "recurrent_layers": depths,
    }


def _by_corpus(found: Mapping[str, list[list[float]]]) -> dict[str, Any]:
    """Mean over everything, per corpus and per attention layer (None where a summary could not be taken)."""
    layers = [[x for one in found.values() for x in one[at]] for at in range(len(next(iter(found.values()))))]
    by_layer = [_mean(one) for one in layers]
    corpora = {corpus: _mean([_mean(one) for one in rows]) for corpus, rows in found.items()}
    return {"mean": _mean(by_layer), "layers": by_layer, "corpora": corpora}


def _lifts(layers: Sequence[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    rows = [{"top": _mean([a for a, _ in one]), "bottom": _mean([b for _, b in one])} for one in layers]
    mean = {name: _mean([row[name] for row in rows]) for name in ("top", "bottom")}
    return {**mean, "layers": rows}


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return math.fsum(there) / len(there) if there else None


def _unit_ranks(values: Tensor) -> Tensor:
    """Ranks of [row, entry], centred and of length 1: their products are rank correlations; 0 for a constant row."""
    centred = average_ranks(values) - (values.shape[1] + 1) / 2
    length: Tensor = centred.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return centred / length
