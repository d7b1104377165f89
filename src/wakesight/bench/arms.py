"""Arms of a comparison: decoded as rows of one batch, against one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wakesight.bench.machine import versions
from wakesight.bench.pairs import alternate, median_ms, ratio
from wakesight.bench.tokens import random_tokens
from wakesight.engines.hf.engine import HFEngine
from wakesight.engines.session import ask_together
from wakesight.policy import Policy

METHODS = ("random", "keydiff", "knorm", "streaming")
FRACTIONS = (0.1, 0.3, 0.5)
BATCH, ALONE = "one batch", "one at a time"


def bench_arms(
    engine: HFEngine, *, tokens: int, steps: int = 64, rounds: int = 9,
    on_round: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The whole session and 4 scorers x 3 fractions answer one question with up to `steps` tokens each.

    Both ways give the same tokens (`same` counts rows that do; a near tie may flip with rounding).
    """
    whole = engine.prefill(random_tokens(engine, tokens))
    children = [whole.compact(Policy(scorer=name, keep=keep)) for name in METHODS for keep in FRACTIONS]
    sessions = [whole, *children]
    question = random_tokens(engine, 12, seed=1)
    answers: dict[str, list[tuple[int, ...]]] = {}

    def batch() -> None:
        answers[BATCH] = [a.tokens for a in ask_together(sessions, [question] * len(sessions), steps)]

    def alone() -> None:
        answers[ALONE] = [session.ask(question, max_new_tokens=steps).tokens for session in sessions]

    seconds = alternate({BATCH: batch, ALONE: alone}, rounds, on_round)
    for session in sessions:
        session.close()
    rows = [
        {"arm": name, "seconds": median_ms(times) / 1e3, "speedup": vars(ratio(seconds[ALONE], times))}
        for name, times in seconds.items()
    ]
    return {
        "bench": "arms", "model": engine.name, "context_tokens": tokens, "sessions": len(sessions), "steps": steps,
        "same": sum(a == b for a, b in zip(answers[BATCH], answers[ALONE], strict=True)), "rounds": rounds,
        "versions": versions(), "rows": rows, "seconds": seconds,
    }  # fmt: skip
