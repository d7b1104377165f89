"""The engine protocol: what a session needs done, whatever runs the model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from wakesight.cache.pool import Pool
from wakesight.cache.state import SessionState
from wakesight.core import ModelGeometry
from wakesight.engines.probe import Instruction
from wakesight.engines.recording import Recording
from wakesight.estimator.artifact import Artifact
from wakesight.models.chat import Frame
from wakesight.signals.chunk import Tap


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
    steps this row took part in. misses, fetches, moved_bytes: of pages of a demoted session, question included.
    """

    tokens: tuple[int, ...]
    finish: str
    question_s: float
    decode_s: float
    steps: int
    margin: float
    misses: int = 0
    fetches: int = 0
    moved_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Asked:
    """A context to be continued behind `after` (at least one id), with a generator of its own."""

    state: SessionState
    after: Sequence[int]
    seed: int


@dataclass(frozen=True)
class Followed:
    """What one attention layer did with t tokens behind a context.

    queries: [query_head, t, dim] after RoPE. keys, values: [kv_head, t, dim] of these tokens, as stored.
    outputs: [query_head, t, value_dim], the head outputs as the model's kernel gave them, before an output gate and
    before the projection. residual: float32 [t], norm of the residual stream that enters the layer. scaling: softmax
    scale.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    outputs: Tensor
    residual: Tensor
    scaling: float


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
    repeat_instruction: Instruction | None  # how this model is asked to repeat its context; None: in English

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end a reply."""
        ...

    @property
    def artifact(self) -> Artifact | None:
        """What was learned about the model offline."""
        ...

    @property
    def artifact_folder(self) -> Path | None:
        """Where it is read from."""
        ...

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

    def overhear(self, state: SessionState, tokens: Sequence[int], taps: Sequence[Tap], chunk: int = 512) -> None:
        """Read `tokens` behind `state` and forget them; one tap per attention layer watches every chunk.

        A tap with `wants_rotation = True` also gets RoPE's rotation.
        """
        ...

    def stepping(self, state: SessionState, token: int, taps: Sequence[Tap]) -> Generator[int, None, None]:
        """Greedy decoding seen step by step: feeds `token` behind `state`, then every token chosen; yields each one.

        One tap per attention layer watches each step before its token is yielded. End-of-sequence ids are yielded too;
        closing the iterator leaves the state as it was.
        """
        ...

    def sample(
        self, state: SessionState, tokens_after: Sequence[int], count: int, max_new_tokens: int, seed: int,
        past_end: bool = False,
    ) -> list[list[int]]:  # fmt: skip
        """`count` continuations of `tokens_after` behind `state`, drawn as the checkpoint asks to be sampled.

        Their ids, end-of-sequence id left out; with `past_end` it is one like any other and ends nothing.
        The same seed on the same machine draws the same ids.
        """
        ...

    def sample_together(
        self, asked: Sequence[Asked], count: int, max_new_tokens: int, past_end: bool = False
    ) -> list[list[list[int]] | None]:
        """What `sample` draws for each context, drawn as one batch; None where a context must be drawn alone."""
        ...

    def follow(self, state: SessionState, tokens: Sequence[int]) -> tuple[Followed, ...]:
        """Read `tokens` behind `state` for once; what every attention layer did with them."""
        ...

    def output_projection(self, layer: int) -> Tensor:
        """W_O of attention layer `layer` by query head, [hidden, query_head, value_dim].

        Raises RequestError where attention is no plain softmax or the weights are fused or quantised.
        """
        ...

    def frame(self, instruction: str | None, chat: bool) -> Frame:
        """Ids around a context: the chat template's (chat), or the tokenizer's own start token."""
        ...

    def template_ids(self, text: str) -> list[int]:
        """Ids of text in which control tokens mean what they say."""
        ...

    def cache(self, states: Sequence[SessionState]) -> object:
        """A copy of the states, one row each, in the form the engine's own generation loop continues from."""
        ...

    def recording(self, window: int, record: tuple[str, ...]) -> Recording:
        """Fresh recorders for all attention layers: the last `window` queries, and the signals of `record`."""
        ...

    def check_demotable(self) -> None:
        """Raise RequestError if pages of this model cannot be demoted."""
        ...

    def check_open(self) -> None:
        """Raise RequestError if the engine was closed."""
        ...

    def fingerprint(self) -> str:
        """Equal for equal architecture, weights and dtype, whatever the device."""
        ...

    def weights_fingerprint(self) -> str:
        """Equal for equal architecture and weights, in whatever dtype they were loaded."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. Raises RequestError without a tokenizer."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of generated ids ("" without a tokenizer)."""
        ...
