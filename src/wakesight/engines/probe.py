"""A second pass over a context that was read: what scorers with a `probe` method get, and nothing of any question."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wakesight.core import ModelGeometry, Scores
from wakesight.engines.recording import Rotation
from wakesight.scores.base import ProbeScorer, checked_form
from wakesight.signals.chunk import Chunk, Tap
from wakesight.signals.query_moments import QueryMoments

if TYPE_CHECKING:
    from wakesight.engines.session import Session

Instruction = Callable[[Sequence[int] | None], Sequence[int]]  # last ids of the part before, None at the start -> ids
REPEAT_ALL = "\n\nWrite the context above once more, word for word, from its beginning."
REPEAT_FROM = (
    "\n\nWrite the part of the context above that begins with the following words once more, exactly as it stands:"
)


@dataclass(frozen=True, eq=False)
class ProbeContext:
    """One context, and the means to read something behind it that leaves no trace.

    tokens: ids of the whole context. prefix: how many of them are protected. held: per attention layer bool
    [kv_head, token], None when every entry is. devices: of each attention layer's entries. tail: ids that end the
    user's turn; separator: text between context and a request (both empty for plain text and for ids).
    overhear(ids, taps): read `ids` behind the context with one tap per attention layer, and forget them again.
    instruct: how this model is asked to repeat, if not in English.
    """

    tokens: tuple[int, ...]
    prefix: int
    geometry: ModelGeometry
    scaling: tuple[float, ...]
    held: tuple[Tensor, ...] | None
    devices: tuple[torch.device, ...]
    tail: tuple[int, ...]
    separator: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    overhear: Callable[[Sequence[int], Sequence[Tap]], None]
    instruct: Instruction | None = None

    def repeat_instruction(self, previous: Sequence[int] | None) -> list[int]:
        """Ids that ask for the context again: from its start, or from `previous`, the ids before the part wanted.

        Raises RequestError if the tokenizer cannot take the words.
        """
        if self.instruct is not None:
            return list(self.instruct(previous))
        return self.encode(REPEAT_ALL) if previous is None else [*self.encode(REPEAT_FROM), *previous]


def score_by_probe(scorer: ProbeScorer, session: Session, prefix: int | None = None) -> Scores:
    """What `scorer` finds by its own pass behind the session's context, which stays bit for bit as it was.

    prefix: protected tokens; None for the session's own. Raises what `scores.base.score` does, and RequestError
    where the pass does not fit the model's limit.
    """
    signals, engine, state = session.signals(), session.engine, session.state
    context = ProbeContext(
        tokens=state.tokens,
        prefix=state.prefix if prefix is None else prefix,
        geometry=engine.geometry,
        scaling=signals.scaling,
        held=signals.held,
        devices=engine.layer_devices,
        tail=session.frame.tail,
        separator=session.frame.separator,
        encode=engine.encode,
        decode=engine.decode,
        overhear=functools.partial(engine.overhear, state),
        instruct=engine.repeat_instruction,
    )
    return checked_form(scorer.probe(context), type(scorer).__name__, signals.tokens, engine.geometry.kv_heads, "probe")


@dataclass
class Overhearing:
    """Shows one layer's chunks to one tap.

    held: per KV head the positions held when `begin` tokens had been seen; None when all were. A tap gets RoPE's
    rotation if it is a QueryMoments or has `wants_rotation = True`.
    """

    tap: Tap
    rotation: Rotation
    held: tuple[Tensor, ...] | None
    begin: int

    def hear(self, queries: Tensor, keys: tuple[Tensor, ...], start: int, scaling: float) -> None:
        """queries: [query_head, q, dim] at positions start, start + 1, ...; keys: per KV head [held, dim]."""
        stop = start + queries.shape[1]
        positions = None
        if self.held is not None:
            fresh = torch.arange(self.begin, stop, device=queries.device)
            positions = tuple(torch.cat([head, fresh]) for head in self.held)
        rotation = None
        if isinstance(self.tap, QueryMoments) or getattr(self.tap, "wants_rotation", False):
            rotation = self.rotation(start, stop)
        if rotation is not None:  # a model may be spread over devices
            rotation = rotation.to(queries.device)
        self.tap.watch(Chunk(queries, keys, positions, start, scaling, rotation))
