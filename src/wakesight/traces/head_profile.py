"""Which KV heads change their minds: FlexiCache's offline profile, from page sets of a calibration text.

Takes the pages that every head wanted, step by step; gives the heads that are to keep everything in fast memory.
Source: FlexiCache (https://arxiv.org/abs/2511.00868), `TopK-Analysis/stability.py` and `analyze_head_stability.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wakesight.errors import RequestError
from wakesight.traces.churn import stability
from wakesight.traces.overlap import Counts, Flags, Words

CHUNK = 16
SHARE = 0.25  # of all heads, FlexiCache's for the models it names


def unstable_heads(words: Words, pages: Counts, share: float = SHARE, chunk: int = CHUNK) -> Flags:
    """bool [head]: the M heads that are most often among the M most unstable of a chunk, M = share of them, rounded.

    words: uint64 [step, head, word], page sets as bits (`overlap.pack`). pages: int64 [step], pages in context. A head
    is as unstable in a chunk as 1 - mean RCO of its first page set with the later ones. Ours: equal counts go to the
    head that is more unstable on average, then to the lower one. Raises RequestError for fewer steps than a chunk has.
    """
    if len(words) < chunk:
        raise RequestError(
            f"a head profile needs at least {chunk} decode steps, and {len(words)} were recorded; decode more tokens"
        )
    if not 0 <= share <= 1:
        raise RequestError(f"share={share} is no share of the heads; give 0 to 1, {SHARE} is FlexiCache's")
    unsteady = 1 - stability(words, pages, chunk)  # [chunk, head]
    heads = unsteady.shape[1]
    count = int(share * heads + 0.5)
    votes = np.zeros(heads, np.int64)
    for row in unsteady:
        votes[_largest(row, count)] += 1
    order = np.lexsort((np.arange(heads), -unsteady.mean(axis=0), -votes))
    found = np.zeros(heads, np.bool_)
    found[order[:count]] = True
    return found


def _largest(row: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Ties to the lower head."""
    return np.argsort(-row, kind="stable")[:count]
