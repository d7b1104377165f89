"""Continuations that a model writes behind a context: what it will read its entries for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from wakesight.engines.base import Asked
from wakesight.errors import WakesightError


def document_seed(seed: int, document: str) -> int:
    """A seed of its own for every document of a run, whatever its place, its shard or what ran before it."""
    digest = hashlib.sha256(f"{seed}\n{document}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def rollouts(
    engine: Any, asked: Sequence[Asked], *, count: int, tokens: int, past_end: bool = False
) -> list[list[list[int]] | WakesightError]:
    """For every context `count` continuations of up to `tokens` ids, those that said something, each once.

    Two equal continuations would only be followed twice, and an empty one (the model stopped at once) has no token
    whose attention could be looked at. What one context cannot do is its own error, in its place.
    Source: GateSight, section on utility (M = 4, up to 128 tokens).
    """
    together = engine.sample_together(asked, count, tokens, past_end)
    found: list[list[list[int]] | WakesightError] = []
    for one, drawn in zip(asked, together, strict=True):
        try:
            rows = drawn or engine.sample(one.state, one.after, count, tokens, one.seed, past_end)
            found.append([list(ids) for ids in dict.fromkeys(tuple(row) for row in rows) if ids])
        except WakesightError as error:
            found.append(error)
    return found
