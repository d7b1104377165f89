"""StreamingLLM: a few first tokens (attention sinks) and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from wakesight.core import Scores, Signals
from wakesight.scores.base import at_least, held_layers, leading, only_held
from wakesight.signals.precision import working_dtype


@dataclass(frozen=True)
class Streaming:
    """s_i = i / n with the first `sinks` positions always kept; keys keep their original RoPE.

    Source: StreamingLLM (mit-han-lab/streaming-llm, start 4), in the fixed-budget form of
    NVIDIA/kvpress `streaming_llm_press.py`. Sinks inside the protected prefix cost no budget.
    """

    sinks: int = 4
    reads: ClassVar[tuple[str, ...]] = ("keys",)

    def __post_init__(self) -> None:
        at_least("streaming sinks", self.sinks, 0, "it counts the first tokens that are always kept")

    def score(self, signals: Signals) -> Scores:
        layers = []
        for keys, held in zip(signals["keys"], held_layers(signals), strict=True):
            age = torch.arange(signals.tokens, device=keys.device, dtype=working_dtype(keys.dtype)) / signals.tokens
            layers.append(only_held(age.expand(keys.shape[0], -1), held))
        return Scores(tuple(layers), must_keep=leading(signals.tokens, self.sinks, layers[0].device))
