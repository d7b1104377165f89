"""Prefill speed with taps on, and what scoring and a whole sweep of policies cost beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from wakesight.bench.machine import versions
from wakesight.bench.pairs import alternate, median_ms, ratio
from wakesight.bench.plain import plain_model, plain_prefill
from wakesight.bench.scorers import PREFILL, bench_lengths, scoring_arms, shares
from wakesight.bench.tokens import random_tokens
from wakesight.engines.hf.engine import HFEngine
from wakesight.policy import Policy

FRACTIONS = tuple(round(0.1 * i, 1) for i in range(1, 10))
SWEEP = ("streaming", "knorm", "keydiff", "snapkv")


def bench_prefill(
    engine: HFEngine, *, tokens: int, chunk: int = 512, rounds: int = 9, lengths: Sequence[int] = (),
    on_round: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Ours (chunked, taps on) against transformers' forward without logits, in one pass and in equal chunks.

    In the same rounds every scorer of `scorers.SCORERS` that runs on the model scores one session, KVzip's second pass
    among them: "scoring" holds their shares of prefill, and what is left out, by name. lengths: also score at these,
    one after the other.
    """
    context = random_tokens(engine, tokens)
    model = plain_model(engine)

    def ours() -> None:
        engine.prefill(context, chunk=chunk).close()

    arms = {
        PREFILL: ours,
        "transformers, one pass": lambda: _drop(plain_prefill(model, context)),
        "transformers, chunked": lambda: _drop(plain_prefill(model, context, chunk)),
    }
    with scoring_arms(engine, context, chunk=chunk) as (scorings, left_out):
        seconds = alternate({**arms, **scorings}, rounds, on_round)
    mine = seconds[PREFILL]
    rows = [
        {"arm": name, "seconds": median_ms(times) / 1e3, "ours_over_arm": vars(ratio(mine, times))}
        for name, times in seconds.items()
        if name in arms
    ]
    found = {
        "bench": "prefill", "model": engine.name, "context_tokens": tokens, "chunk": chunk, "rounds": rounds,
        "versions": versions(), "rows": rows, "seconds": seconds, "scoring": shares(seconds, list(scorings)),
        "left_out": left_out,
    }  # fmt: skip
    if lengths:
        found["lengths"] = bench_lengths(engine, lengths=lengths, chunk=chunk, rounds=rounds, on_round=on_round)
    return found


def bench_sweep(
    engine: HFEngine, *, tokens: int, scorers: tuple[str, ...] = SWEEP, fractions: tuple[float, ...] = FRACTIONS
) -> dict[str, Any]:
    """One prefill, then every scorer at every fraction: scoring and compaction as a share of that prefill."""
    whole = engine.prefill(random_tokens(engine, tokens))
    rows: list[dict[str, Any]] = []
    for name in scorers:
        start = time.perf_counter()
        score_s = 0.0
        for keep in fractions:
            child = whole.compact(Policy(scorer=name, keep=keep))
            score_s = child.score_s
            child.close()
        spent = time.perf_counter() - start
        rows.append({"scorer": name, "score_s": score_s, "total_s": spent, "share": spent / whole.prefill_s})
    prefill_s = whole.prefill_s
    whole.close()
    return {
        "bench": "sweep", "model": engine.name, "context_tokens": tokens, "fractions": list(fractions),
        "prefill_s": prefill_s, "share": sum(row["total_s"] for row in rows) / prefill_s, "rows": rows,
        "versions": versions(),
    }  # fmt: skip


def _drop(_cache: object) -> None:
    """Let the arm's cache go inside its own time, as ours does."""
