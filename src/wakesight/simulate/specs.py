"""Policies as users type them: "reactive", "rkv:buffer=8", "reactive:snapkv" (a first resident set by that scorer)."""

from __future__ import annotations

from wakesight.cache.residency.policies import Policy
from wakesight.registry import resolve
from wakesight.scores.table import scorer as scorer_of

_HOME = "wakesight.cache.residency.policies:"
POLICIES = {
    "full": _HOME + "Full",
    "reactive": _HOME + "Reactive",
    "evict": _HOME + "Evict",
    "frozen": _HOME + "Frozen",
    "frozen_tail": _HOME + "FrozenTail",
    "snapkv": _HOME + "SnapKV",
    "rkv": _HOME + "RKV",
    "reasonalloc": _HOME + "ReasonAlloc",
    "belady": _HOME + "Belady",
    "arc": _HOME + "Arc",
}
STARTING = ("reactive", "evict", "belady", "arc")


def policy_of(spec: str) -> Policy:
    """The policy a text names. Raises RequestError for an unknown policy, setting or scorer of the first set."""
    name, _, rest = spec.partition(":")
    start, _, settings = rest.partition(",")
    if name in STARTING and start and "=" not in start:
        rest = f"start={start}" + (f",{settings}" if settings else "")
    policy: Policy = resolve(f"{name}:{rest}" if rest else name, POLICIES, "residency policy")
    chosen = getattr(policy, "start", "")
    if chosen:
        scorer_of(chosen)  # whether a trace holds its scores, only the trace can say
    return policy
