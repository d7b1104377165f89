"""What a recurrent layer forgets at zero input, read from its weights."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from wakesight.core import ModelGeometry
from wakesight.models.families import Family

ONE_RATE = ("gated_delta", "mamba2")  # one decay per head: KDA has one per channel


class DecayWeights(NamedTuple):
    """a_log, dt_bias: [head]. limits: what softplus(dt_bias) is clamped to (Mamba-2's time step), None for nothing."""

    a_log: Tensor
    dt_bias: Tensor
    limits: tuple[float, float] | None


def decay_weights(decoder: Any, geometry: ModelGeometry, family: Family) -> tuple[DecayWeights, ...] | None:
    """Per recurrent layer; None for a family without one decay per head."""
    if family.native_signals not in ONE_RATE:
        return None
    found = []
    for layer in geometry.recurrent_layers:
        module = _recurrence(decoder.layers[layer])
        limits = getattr(module, "time_step_limit", None) if family.native_signals == "mamba2" else None
        found.append(
            DecayWeights(
                module.A_log.detach(),
                module.dt_bias.detach(),
                None if limits is None else (float(limits[0]), float(limits[1])),
            )
        )
    return tuple(found)


def _recurrence(layer: Any) -> Any:
    return next(module for module in layer.modules() if hasattr(module, "A_log") and hasattr(module, "dt_bias"))
