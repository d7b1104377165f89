"""StreamingLLM: a few first tokens (attention sinks) and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from wakesight.core import Scores, Signals


@dataclass(frozen=True)
class Streaming:
    """s_i = i / n with the first `sinks` positions always kept; keys keep their original RoPE.

    Source: StreamingLLM (mit-han-lab/streaming-llm, start 4), in the fixed-budget form of
    NVIDIA/kvpress `streaming_llm_press.py`. Sinks inside the protected prefix cost no budget.
    """

    sinks: int = 4
    reads: ClassVar[tuple[str, ...]] = ("keys",)

    def score(self, signals: Signals) -> Scores:
        layers = []
        for keys in signals["keys"]:
            age = torch.arange(signals.tokens, device=keys.device, dtype=torch.float32) / signals.tokens
            layers.append(age.expand(keys.shape[0], -1))
        first = torch.arange(signals.tokens, device=layers[0].device) < self.sinks
        return Scores(tuple(layers), must_keep=first)
