"""Decode speed: one token after a long context, ours against transformers with DynamicCache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wakesight.bench.machine import copy_bandwidth, versions, weight_bytes
from wakesight.bench.pairs import alternate, median_ms, ratio
from wakesight.bench.plain import plain_model, plain_prefill, plain_steps, remember, rewind
from wakesight.bench.tokens import random_tokens
from wakesight.engines.hf.engine import HFEngine
from wakesight.engines.hf.linear import split_one_token
from wakesight.engines.session import Session
from wakesight.policy import Policy

PLAIN = "transformers DynamicCache"


def bench_decode(
    engine: HFEngine, *, tokens: int, keeps: tuple[float, ...] = (1.0, 0.1), steps: int = 8, rounds: int = 9,
    on_round: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Rows {arm, step_ms, must_read_bytes, limit_ms} and each arm's speed-up over transformers.

    Every arm decodes `steps` tokens from the same context per round and is put back afterwards. The
    arm "torch linear" is ours at the first fraction without the one-token product of `linear.py`, so
    that what the cache brings and what the product brings can be told apart. "uneven heads" is the last fraction
    under the allocation global: attention then loops over KV heads.
    """
    context = random_tokens(engine, tokens)
    whole = engine.prefill(context)
    children = {f"ours p={keep:g}": whole.compact(Policy(keep=keep)) for keep in keeps}
    children[f"ours p={keeps[-1]:g}, uneven heads"] = whole.compact(Policy(keep=keeps[-1], allocation="global"))
    model = plain_model(engine)
    cache = plain_prefill(model, context, chunk=512)
    held = remember(cache)

    def plain() -> None:
        plain_steps(model, cache, steps)
        rewind(cache, held)

    arms: dict[str, Callable[[], None]] = {PLAIN: plain}
    for name, child in children.items():
        arms[name] = lambda child=child: _ours(engine, child, steps)  # type: ignore[misc]
    first = next(iter(children))
    arms[f"{first}, torch linear"] = lambda: _with_torch_linear(engine, children[first], steps)
    seconds = alternate(arms, rounds, on_round)

    bandwidth = copy_bandwidth(engine.device)
    weights, full = weight_bytes(engine.model), whole.stats.kv_bytes_full
    read = {PLAIN: weights + full, **{n: weights + c.stats.kv_bytes_kept for n, c in children.items()}}
    read[f"{first}, torch linear"] = read[first]
    rows = [
        {
            "arm": name,
            "step_ms": median_ms(times, steps),
            "speedup": vars(ratio(seconds[PLAIN], times)),
            "must_read_bytes": read[name],
            "limit_ms": read[name] / bandwidth * 1e3,
        }
        for name, times in seconds.items()
    ]
    for child in children.values():
        child.close()
    whole.close()
    return {
        "bench": "decode", "model": engine.name, "context_tokens": tokens, "steps": steps, "rounds": rounds,
        "copy_bandwidth": bandwidth, "versions": versions(), "rows": rows, "seconds": seconds,
    }  # fmt: skip


def _ours(engine: HFEngine, session: Session, steps: int) -> None:
    """The engine's own decode loop without its stop at end-of-sequence, so that all arms do equal work."""
    state = session.state
    held = state.physical_lengths
    cache = engine.continuing([state])
    token = torch.tensor([[1]], device=engine.device)
    for step in range(steps):
        logits = engine.forward(engine.model, token, cache, state.logical_length + step, logits_to_keep=1).logits
        token = logits[:, -1].argmax(dim=-1, keepdim=True)
    state.truncate(held)


def _with_torch_linear(engine: HFEngine, session: Session, steps: int) -> None:
    for module in engine.model.modules():
        if isinstance(module, torch.nn.Linear):
            vars(module).pop("forward", None)
    try:
        _ours(engine, session, steps)
    finally:
        split_one_token(engine.model)
