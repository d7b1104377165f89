"""The engine protocol: what a session needs done, whatever runs the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from wakesight.cache.state import SessionState
from wakesight.core import ModelGeometry


@dataclass(frozen=True)
class Generation:
    """Generated ids (end-of-sequence id left out), why it stopped, and seconds spent."""

    tokens: tuple[int, ...]
    finish: str
    question_s: float
    decode_s: float
    steps: int  # decode steps timed in decode_s


class Engine(Protocol):
    """Runs one model. Every call leaves the given state exactly as it found it."""

    name: str
    geometry: ModelGeometry
    growth: int  # slack slots that new storage gets

    def generate(
        self, state: SessionState, tokens: Sequence[int], max_new_tokens: int, on_token: Callable[[int], None] | None
    ) -> Generation:
        """Greedy continuation of `state` after `tokens`."""
        ...

    def logits(self, state: SessionState, tokens: Sequence[int]) -> Tensor:
        """Logits [token, vocabulary] for each of `tokens`, fed after `state`."""
        ...

    def cache(self, state: SessionState) -> object:
        """A copy of `state` in the form the engine's own generation loop continues from."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. Raises RequestError without a tokenizer."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of generated ids ("" without a tokenizer)."""
        ...
