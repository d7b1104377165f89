"""What the scheduler tells the worker with each step, and what the worker tells back.

Values only. They ride on vLLM's own SchedulerOutput and ModelRunnerOutput, so both halves see the same steps in the
same order, in one process or in two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wakesight.engines.vllm.keys import SessionId


@dataclass(frozen=True)
class Gather:
    """Fill the first `counts[layer]` slots of each attention layer with what `policy` keeps of the parent.

    blocks: the parent's block ids per attention layer.
    """

    parent: SessionId
    policy: dict[str, Any]
    tokens: int
    prefix: int
    counts: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Start:
    """A request of ours runs its first step, or its first since it was preempted.

    offsets: per attention layer, logical minus physical length. record: signals to listen for; None for none.
    """

    offsets: tuple[int, ...]
    record: tuple[str, ...] | None = None
    gather: Gather | None = None


@dataclass
class Step:
    """To the worker. saved: requests that ended -> sessions that keep what was recorded for them."""

    started: dict[str, Start] = field(default_factory=dict)
    saved: dict[str, SessionId] = field(default_factory=dict)
    dropped: tuple[SessionId, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.started or self.saved or self.dropped)


@dataclass(frozen=True)
class Compacted:
    """kept: int32 positions per attention layer, [kv_head, count]. Seconds that scoring and gathering took."""

    kept: tuple[np.ndarray, ...]
    score_s: float
    gather_s: float


@dataclass
class Result:
    """From the worker. failed: requests whose compaction was refused -> the sentence."""

    compacted: dict[str, Compacted] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.compacted or self.failed)
