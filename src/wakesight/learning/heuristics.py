"""Predictors that nobody trained: means of the signals, age, KeyDiff, and the best single cell.

Each gives one row of scores per context entry, or a row per KV head; larger means more useful. What the means run over
is the reader's window, so a trained reader and its untrained rivals see the same recurrent layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from wakesight.core import Signals
from wakesight.estimator.features import Window
from wakesight.learning.metrics import best_count, top, top_mask

Slow = Sequence[Tensor]  # per recurrent layer bool [head]: heads of a long half-life

# channels are (beta, g, ||v||)
SIGNALS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "beta": lambda native: native[..., 0],
    "forgetting": lambda native: -native[..., 1],
    "norm_v": lambda native: native[..., 2],
    "write": lambda native: native[..., 0] * native[..., 2],
}
SLOW_SIGNALS = ("norm_v", "write")
SIGNS = (1, -1)
CELL_SIGNALS = ("beta", "forgetting", "norm_v")


def window_mean(signals: Signals, window: Window, name: str) -> Tensor | None:
    """Mean of a signal over the window's layers and all their heads: [token]; None for an empty window."""
    if not window:
        return None
    rule = SIGNALS[name]
    return torch.cat([rule(signals["native"][m]) for m in window], dim=1).mean(dim=1)


def slow_mean(signals: Signals, window: Window, name: str, slow: Slow) -> Tensor | None:
    """The same over slow heads alone; None where the window has none."""
    rule = SIGNALS[name]
    columns = [rule(signals["native"][m])[:, slow[m].to(signals["native"][m].device)] for m in window]
    found = torch.cat(columns, dim=1) if columns else torch.empty(signals.tokens, 0)
    return found.mean(dim=1) if found.shape[1] else None


def older_first(signals: Signals) -> Tensor:
    """[token]: the first token is the most useful."""
    return -torch.arange(signals.tokens, dtype=torch.float32)


def keydiff(keys: Tensor) -> Tensor:
    """[kv_head, token] from keys [kv_head, token, dim]: minus the cosine to the unnormalised mean key."""
    keys = keys.float()
    return -F.cosine_similarity(keys, keys.mean(dim=1, keepdim=True), dim=-1)


def untrained(signals: Signals, layer: int, window: Window, slow: Slow | None) -> Iterator[tuple[str, Tensor | None]]:
    """(name, scores [token] or [kv_head, token], None where it cannot be taken) of every untrained predictor."""
    if "native" in signals.streams:
        for name in SIGNALS:
            yield f"mean {name}", window_mean(signals, window, name)
        if slow is not None:
            for name in SLOW_SIGNALS:
                yield f"slow {name}", slow_mean(signals, window, name, slow)
    yield "older first", older_first(signals)
    if "keys" in signals.streams:
        yield "keydiff", keydiff(signals["keys"][layer])


class BestCells:
    """The oracle: for every (attention layer, KV head) the recurrent (layer, head, signal, sign) that overlaps best.

    It is chosen on the documents it is judged on, so it bounds every rule that reads a single cell.
    """

    def __init__(self, k_frac: float = 0.1) -> None:
        self.k_frac = k_frac
        self.documents = 0
        self._sums: Tensor | None = None  # [attention row, cell]
        self._cells: list[tuple[int, int, str, int]] = []

    def add(self, native: Sequence[Tensor], utility: Tensor) -> None:
        """native: per recurrent layer [entry, head, 3]; utility: [row, entry], a row per (layer, KV head)."""
        k = best_count(utility.shape[1], self.k_frac)
        truth = top_mask(utility, k)
        pieces = []
        for layer in native:
            for name in CELL_SIGNALS:
                values = SIGNALS[name](layer).mT.contiguous()  # [head, entry]
                for sign in SIGNS:
                    chosen = top(sign * values, k)  # [head, k]
                    pieces.append(truth[:, chosen.flatten()].view(len(truth), *chosen.shape).sum(dim=-1))
        sums = torch.cat(pieces, dim=1).double() / k
        self._sums = sums if self._sums is None else self._sums + sums
        self.documents += 1
        if not self._cells:
            self._cells = [
                (m, head, name, sign)
                for m, layer in enumerate(native)
                for name in CELL_SIGNALS
                for sign in SIGNS
                for head in range(layer.shape[1])
            ]

    def best(self) -> list[tuple[float, tuple[int, int, str, int]]]:
        """Per row the mean overlap of its best cell and (recurrent layer, head, signal, sign)."""
        if self._sums is None:
            return []
        means, where = (self._sums / self.documents).max(dim=1)
        return [(float(mean), self._cells[int(cell)]) for mean, cell in zip(means, where, strict=True)]
