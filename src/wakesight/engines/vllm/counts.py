"""How many entries each attention layer of a child holds: known before anything is scored.

Scheduler and worker both call this, so blocks are allotted and filled by one rule without a message between them.
"""

from __future__ import annotations

import torch

from wakesight.budget.base import Body
from wakesight.budget.resolve import check_allocation, entries_per_head, make_budget
from wakesight.core import Budget, ModelGeometry, Tables
from wakesight.errors import RequestError
from wakesight.policy import Policy


def child_budget(policy: Policy, tokens: int, prefix: int, geometry: ModelGeometry, tables: Tables | None) -> Budget:
    """Entries per (layer, KV head) beyond the protected prefix, of a whole context of `tokens` tokens.

    Raises RequestError for a policy that this context or model cannot meet.
    """
    rule, n_body = policy.allocation_rule, tokens - prefix
    if n_body < 0:
        raise RequestError(f"protect={prefix} is more than the context's {tokens} tokens; protect fewer")
    check_allocation(rule, limit_bytes=None, n_body=n_body, geometry=geometry, tables=tables)
    per_head = None
    if not isinstance(rule, tuple):
        per_head = entries_per_head(
            keep=policy.keep, entries=policy.entries, limit_bytes=None, n_body=n_body, prefix=prefix, fixed_bytes=0,
            token_bytes=geometry.token_bytes,
        )  # fmt: skip
    nothing = torch.zeros(())  # only its shape is read
    body = Body(tuple(nothing.expand(heads, n_body) for heads in geometry.kv_heads))
    return make_budget(rule, per_head, body, geometry, tables)


def child_counts(
    policy: Policy, tokens: int, prefix: int, geometry: ModelGeometry, tables: Tables | None
) -> tuple[int, ...]:
    """Entries per attention layer that every KV head of it holds, prefix included."""
    budget = child_budget(policy, tokens, prefix, geometry, tables)
    return tuple(prefix + heads[0] for heads in budget.counts)
