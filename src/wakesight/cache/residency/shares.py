"""One limit of fast memory, several demoted sessions: how many pages each layer of each of them may hold.

Takes what every session needs in any case and how it wants to grow; gives slots per layer. Pure arithmetic: storage
carries it out (`Pool` sees to it that nothing passes the limit whatever is planned here).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wakesight.errors import WorkError

ROUNDS = 80  # halvings of the common height: float64 has no more to tell apart


@dataclass(frozen=True)
class LayerNeed:
    """slot_bytes: one slot in every KV head of the layer. least: slots it cannot do without, its K pages.

    most: more are of no use (its closed pages). weight: its part relative to other layers, such as a gate table's.
    """

    slot_bytes: int
    least: int
    most: int
    weight: float = 1.0


@dataclass(frozen=True)
class SessionNeed:
    """fixed_bytes: what a session holds whatever its share: strip, tail, sketches, staging, states, dense layers."""

    fixed_bytes: int
    layers: tuple[LayerNeed, ...]

    @property
    def least_bytes(self) -> int:
        return self.fixed_bytes + sum(layer.slot_bytes * layer.least for layer in self.layers)


def shares(limit_bytes: int, sessions: Sequence[SessionNeed]) -> list[tuple[int, ...]]:
    """Slots per session and layer, at most `limit_bytes` in all.

    Every layer gets its weight times one common height, never below its least nor above its most; the height is the
    largest that fits. Equal weights are equal shares. Raises WorkError if not even what all need fits: the last session
    is then the one to refuse, and the shares of the others stand. Source: ours.
    """
    needed = sum(session.least_bytes for session in sessions)
    if needed > limit_bytes:
        others = limit_bytes - sum(session.least_bytes for session in sessions[:-1])
        raise WorkError(
            f"this session needs at least {sessions[-1].least_bytes:,} bytes of fast memory, and beside the "
            f"{len(sessions) - 1} others {max(0, others):,} of {limit_bytes:,} can be freed without taking pages that "
            "they read at every step; close a session, attend to fewer pages, or raise the limit"
        )
    low, high = 0.0, 1.0
    while high < 2.0**62 and _bytes(sessions, high) <= limit_bytes and _grows(sessions, high):
        high *= 2
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if _bytes(sessions, middle) <= limit_bytes else (low, middle)
    return _slots(sessions, high if _bytes(sessions, high) <= limit_bytes else low)


def _slots(sessions: Sequence[SessionNeed], height: float) -> list[tuple[int, ...]]:
    return [
        tuple(max(layer.least, min(layer.most, int(layer.weight * height))) for layer in session.layers)
        for session in sessions
    ]


def _bytes(sessions: Sequence[SessionNeed], height: float) -> int:
    return sum(
        session.fixed_bytes + sum(layer.slot_bytes * slots for layer, slots in zip(session.layers, own, strict=True))
        for session, own in zip(sessions, _slots(sessions, height), strict=True)
    )


def _grows(sessions: Sequence[SessionNeed], height: float) -> bool:
    """Whether a greater height gives anybody more."""
    return any(
        layer.weight > 0 and layer.weight * height < layer.most for session in sessions for layer in session.layers
    )
