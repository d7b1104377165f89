"""The engine protocol: what a session needs done, whatever runs the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wakesight.cache.pool import Pool
from wakesight.cache.state import SessionState
from wakesight.core import ModelGeometry
from wakesight.engines.recording import Recording


@dataclass(frozen=True)
class Thinking:
    """A model that thinks before it answers. close: ids of its closing tag. tokens: the most it may think; they and
    the tag do not count as answer."""

    close: tuple[int, ...]
    tokens: int


StateShape = tuple[tuple[int | None, ...], torch.dtype, torch.device]  # None: follows the context


@dataclass(frozen=True)
class Generation:
    """Generated ids (end-of-sequence id left out), why it stopped, and seconds spent.

    margin: the smallest lead of a chosen token over the next best logit; a lead near 0 may flip with rounding.
    question_s: reading this row's question. decode_s: the decode loop, shared by all rows. steps: decode
    steps this row took part in.
    """

    tokens: tuple[int, ...]
    finish: str
    question_s: float
    decode_s: float
    steps: int
    margin: float


class Engine(Protocol):
    """Runs one model. Every call but `extend` leaves the given states exactly as it found them."""

    name: str
    geometry: ModelGeometry
    dtype: torch.dtype
    layer_devices: tuple[torch.device, ...]  # where each attention layer keeps its entries
    state_shapes: dict[str, StateShape]  # what a session holds besides entries: recurrent states, windows
    growth: int  # slack slots that new storage gets
    pool: Pool
    only_whole: str | None  # why nothing can be evicted on this model; None where it can

    def generate(
        self, states: Sequence[SessionState], questions: Sequence[Sequence[int]], max_new_tokens: int,
        on_token: Callable[[int], None] | None = None, thinking: Thinking | None = None,
    ) -> list[Generation]:  # fmt: skip
        """Greedy continuation of every state after its question; rows decode together, weights are read once.

        on_token: called with each new id of a single row. With `thinking`, max_new_tokens counts what follows the
        closing tag, and a row that never closes it finishes as "thinking".
        """
        ...

    def logits(self, state: SessionState, tokens: Sequence[int]) -> Tensor:
        """Logits [token, vocabulary] for each of `tokens`, fed after `state`."""
        ...

    def extend(self, state: SessionState, tokens: Sequence[int], recording: Recording, chunk: int) -> Recording:
        """Read `tokens` into `state` for good; returns what was overheard. All or nothing."""
        ...

    def check_extension(self, state: SessionState, tokens: Sequence[int]) -> None:
        """Raise the RequestError that `extend` would, before anything is read."""
        ...

    def cache(self, states: Sequence[SessionState]) -> object:
        """A copy of the states, one row each, in the form the engine's own generation loop continues from."""
        ...

    def recording(self, window: int, record: tuple[str, ...]) -> Recording:
        """Fresh recorders for all attention layers: the last `window` queries, and the signals of `record`."""
        ...

    def check_open(self) -> None:
        """Raise RequestError if the engine was closed."""
        ...

    def fingerprint(self) -> str:
        """Equal for equal architecture, weights and dtype, whatever the device."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. Raises RequestError without a tokenizer."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of generated ids ("" without a tokenizer)."""
        ...
