"""Overlap with a reference summary: ROUGE-L as the package `rouge` has it (LongBench), rougeLsum (SCBench)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from wakesight.evaluation.graders.rules import optional

# Calls `rouge` can nest while it walks a table back before Python's default limit of 1000 frames stops it: measured
# with Python 3.11 under the frames of LongBench's eval.py. The Chinese metric stands one frame deeper.
NESTED_CALLS = 991


class TooDeep(Exception):
    """The official package would have hit Python's recursion limit here."""


def rouge_l(prediction: str, reference: str, limit: int | None = None) -> float:
    """Summary-level ROUGE-L F1 as `rouge` 1.0.1 has it. [pltrdy/rouge rouge_score.py, rouge_l_summary_level]

    Sentences end at full stops. Per pair of sentences a longest common subsequence is found; words count once,
    however often they occur. 0 where either text has no sentence. The 1e-8 in the mean keeps a perfect match
    just under 1. Raises TooDeep if walking back takes more than `limit` calls, which the package nests.
    """
    ours, theirs = _sentences(prediction), _sentences(reference)
    if not ours or not theirs:
        return 0.0
    shared: set[str] = set()
    for wanted in theirs:
        for said in ours:
            shared |= _common(wanted, said, limit)
    recall = len(shared) / len({word for sentence in theirs for word in sentence})
    precision = len(shared) / len({word for sentence in ours for word in sentence})
    return 2.0 * (precision * recall / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common(wanted: Sequence[str], said: Sequence[str], limit: int | None) -> set[str]:
    """Words of one longest common subsequence; ties go back along `said`, as in the package."""
    rows = [[0] * (len(said) + 1)]
    for word in wanted:
        above, row = rows[-1], [0]
        for column, other in enumerate(said):
            row.append(above[column] + 1 if word == other else max(above[column + 1], row[column]))
        rows.append(row)
    i, j, calls, words = len(wanted), len(said), 1, set()
    while i and j:
        if wanted[i - 1] == said[j - 1]:
            words.add(wanted[i - 1])
            i, j = i - 1, j - 1
        elif rows[i - 1][j] > rows[i][j - 1]:
            i -= 1
        else:
            j -= 1
        calls += 1
    if limit is not None and calls > limit:
        raise TooDeep
    return words


def rouge_lsum(prediction: str, reference: str) -> float:
    """F-measure of rougeLsum, sentences split at line ends, no stemming. [rouge_score, as `evaluate` calls it]"""
    return float(_scorer().score(reference, prediction)["rougeLsum"].fmeasure)


@functools.cache
def _scorer() -> Any:
    return optional("rouge_score.rouge_scorer", "rouge-score").RougeScorer(["rougeLsum"], use_stemmer=False)
