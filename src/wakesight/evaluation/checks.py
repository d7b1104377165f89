"""What is known to fail before the first context is read, and is refused then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wakesight.arguments import chunk_size
from wakesight.budget.resolve import check_allocation
from wakesight.engines.recording import needs, wanted_signals
from wakesight.engines.session import check_evictable
from wakesight.errors import RequestError
from wakesight.evaluation.arms import Arm
from wakesight.evaluation.problems import reason_to_skip
from wakesight.policy import Policy
from wakesight.scores.base import for_model, reads_of

DERIVED = ("output_gate_max",)  # a signal that comes with another one and is not recorded by its own name


def check_runnable(engine: Any, arms: Sequence[Arm], chunk: int) -> None:
    """Raises RequestError for a chunk that no context can be read in, and, by name, for an arm that this model never
    runs: it has no estimator, table or signal for it, or may lose no entry."""
    chunk_size(chunk)
    for arm in arms:
        if arm.policy is None:
            continue
        try:
            _check_policy(engine, arm.policy)
        except Exception as error:
            reason = reason_to_skip(error, "checking", arm.policy)
            raise RequestError(f"the arm {arm.id} cannot run: {reason}") from error


def _check_policy(engine: Any, policy: Policy) -> None:
    if policy.residency is not None:
        engine.check_demotable()
    check_evictable(engine, policy)
    reads = reads_of(for_model(policy.scorer_method, engine))
    wanted_signals([name for name in reads if name not in DERIVED], engine)
    engine.check_record(needs(policy.scorer_method, engine)["record"])
    rule = policy.allocation_rule
    if not isinstance(rule, tuple):  # explicit counts are checked against a context's length
        tables = getattr(engine.artifact, "tables", None) if hasattr(rule, "needs_table") else None
        check_allocation(rule, limit_bytes=policy.bytes, n_body=0, geometry=engine.geometry, tables=tables)


def reads_artifact(arm: Arm) -> bool:
    """Whether an arm's scorer or allocation looks at what was fitted or measured of the model."""
    return arm.policy is not None and arm.policy.reads_artifact


def check_length(engine: Any, length: int) -> None:
    """Raises RequestError for a length that the model cannot read."""
    most = engine.geometry.max_positions
    if length > most:
        raise RequestError(f"--length {length} is more than {engine.name} reads; use --length {most} or less")
