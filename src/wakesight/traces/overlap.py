"""How alike two sets of pages are: sets packed as bits, and the measures of the churn study on their counts.

A set of pages is a row of uint64 words, bit p of the row standing for page p. Counts are integers; every measure is a
pure function of |A and B|, |A| and |B|, so that it can be read (and tested) without any bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Counts = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

BITS = 64  # of one word


def pack(pages: NDArray[np.integer], count: int) -> Words:
    """Page ids [..., k] below `count`, negative ones being padding, as bits uint64 [..., word]; duplicates merge."""
    width = BITS * -(-max(count, 1) // BITS)
    marks = np.zeros((*pages.shape[:-1], width + 1), bool)
    np.put_along_axis(marks, np.where(pages < 0, width, pages).astype(np.int64), True, axis=-1)  # padding: beyond
    packed: Words = np.packbits(marks[..., :width], axis=-1, bitorder="little").view(np.uint64)
    return packed


def size(words: Words) -> Counts:
    """Pages of every set: uint64 [..., word] -> int64 [...]."""
    counted: Counts = np.bitwise_count(words).sum(axis=-1, dtype=np.int64)
    return counted


def shared(first: Words, second: Words) -> Counts:
    """Pages that lie in both sets, int64 [...]."""
    return size(first & second)


def jaccard(both: Counts, first: Counts, second: Counts) -> Floats:
    """|A and B| / |A or B|; NaN where both sets are empty (the caller skips those). Source: WakeKV, churn."""
    either = first + second - both
    found: Floats = np.divide(both, either, out=np.full(np.shape(either), np.nan), where=either > 0)
    return found


def overlap(both: Counts, first: Counts, second: Counts) -> Floats:
    """|A and B| / min(|A|, |B|), HeteroCache's overlap coefficient. Ours: of an empty set 0, of two empty sets 1."""
    least = np.minimum(first, second)
    alone = np.where(first == second, 1.0, 0.0)
    found: Floats = np.divide(both, least, out=alone, where=least > 0)
    return found


def rco(both: Counts, first: Counts, second: Counts, pages: Counts) -> Floats:
    """Random-corrected overlap max(0, (|A and B| / K - K / N) / (1 - K / N)), K = min(|A|, |B|), N = `pages`.

    N: pages in context at the later of the two steps. 0 is what two random sets have, 1 is a set within the other.
    Ours, where the formula divides by zero: K = N gives 1 for equal sets and else 0; of an empty set 0, of two empty
    sets 1. Source: WakeKV, churn; FlexiCache's stability analysis.
    """
    least = np.minimum(first, second)
    equal = (both == first) & (both == second)
    plain = (least > 0) & (least < pages)
    chance = least / np.maximum(pages, 1)
    kept = np.where(equal, 1.0, 0.0)
    share = np.divide(both, least, out=np.zeros(np.shape(kept)), where=least > 0)
    corrected = np.divide(share - chance, 1 - chance, out=kept, where=plain)
    found: Floats = np.maximum(corrected, 0.0)
    return found
