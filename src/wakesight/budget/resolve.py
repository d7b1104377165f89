"""A policy's size (fraction, entries or bytes) and allocation -> the `Budget` of one session."""

from __future__ import annotations

from wakesight.budget.base import Allocation, BudgetRequest
from wakesight.budget.rounding import keep_to_count
from wakesight.core import Budget, ModelGeometry
from wakesight.errors import RequestError


def entries_per_head(
    *, keep: float | None, entries: int | None, limit_bytes: int | None, n_body: int, prefix: int, fixed_bytes: int,
    token_bytes: int,
) -> int:  # fmt: skip
    """R, the mean entries per (layer, KV head) beyond the prefix, from whichever size was given.

    limit_bytes covers prefix, kept entries and `fixed_bytes` (recurrent states, growth slack);
    a limit above the full cache keeps everything. Raises RequestError when the size cannot be met.
    """
    if keep is not None:
        return keep_to_count(keep, n_body)
    if entries is not None:
        if not 1 <= entries <= n_body:
            raise RequestError(
                f"entries={entries} cannot be kept: this context has {n_body} entries per KV head beyond its "
                f"protected prefix; give --entries 1 to {n_body}"
            )
        return entries
    assert limit_bytes is not None
    count = (limit_bytes - fixed_bytes) // token_bytes - prefix
    if count < 1:
        least = fixed_bytes + (prefix + 1) * token_bytes
        raise RequestError(
            f"{limit_bytes} bytes are too few: one entry per KV head, the protected prefix, the recurrent states and "
            f"the growth slack already take {least}; raise --fit to at least {least}"
        )
    return int(min(count, n_body))


def make_budget(
    rule: Allocation | tuple[int, ...], per_head: int | None, n_body: int, geometry: ModelGeometry
) -> Budget:
    """Integers per (layer, KV head). Raises RequestError for an explicit tuple that does not fit the model."""
    layers = len(geometry.attention_layers)
    if isinstance(rule, tuple):
        counts = rule
        if len(counts) != layers:
            raise RequestError(
                f"the allocation names {len(counts)} layers, but this model has {layers} attention layers; "
                "give one number of entries for each"
            )
        for layer, count in enumerate(counts):
            if not 0 <= count <= n_body:
                raise RequestError(
                    f"the allocation asks for {count} entries in attention layer {layer}; "
                    f"this context has 0 to {n_body} beyond its protected prefix"
                )
    else:
        assert per_head is not None
        counts = rule.per_layer(BudgetRequest(per_head, n_body, layers))
    return Budget(tuple((count,) * heads for count, heads in zip(counts, geometry.kv_heads, strict=True)))
