"""Continuations that a model writes behind a context: what it will read its entries for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from wakesight.cache.state import SessionState
from wakesight.engines.base import Engine


def document_seed(seed: int, document: str) -> int:
    """A seed of its own for every document of a run, whatever its place, its shard or what ran before it."""
    digest = hashlib.sha256(f"{seed}\n{document}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def rollouts(
    engine: Engine, state: SessionState, tokens_after: Sequence[int], *, count: int, tokens: int, seed: int,
    past_end: bool = False,
) -> list[list[int]]:  # fmt: skip
    """`count` continuations of up to `tokens` ids behind `tokens_after`, those that said something, each once.

    Two equal continuations would only be followed twice, and an empty one (the model stopped at once) has no token
    whose attention could be looked at. Source: GateSight, section on utility (M = 4, up to 128 tokens).
    """
    made = engine.sample(state, tokens_after, count, tokens, seed, past_end)
    return [list(ids) for ids in dict.fromkeys(tuple(row) for row in made) if ids]
