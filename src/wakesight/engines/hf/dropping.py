"""Decoding that forgets as it goes (R-KV, decode-time SnapKV), for comparison with a cache that forgets nothing.

    with Dropping(engine, session.state, RKV(budget=512)) as decoding:
        logits = decoding.read(question_ids)
        logits = decoding.read([token])          # and so on; every 128 tokens the cache is cut

It works on a copy: what it drops is gone, and the session is as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from wakesight.cache.compaction.gather import gather
from wakesight.cache.residency.dropping import DecodeDrop
from wakesight.cache.slots import Slots
from wakesight.cache.state import SessionState
from wakesight.core import Answer
from wakesight.engines.hf.engine import HFEngine
from wakesight.engines.session import Session
from wakesight.errors import RequestError


class Dropping:
    """One continuation of a session under a rule. Close it, or use it in a `with` block.

    page_size: cut by whole pages of so many entries, counted from the start of the cache; None cuts by entry. Raises
    RequestError for a demoted session and for models whose entries cannot be evicted, WorkError on lack of memory.
    """

    def __init__(self, engine: HFEngine, state: SessionState, rule: DecodeDrop, page_size: int | None = None) -> None:
        if engine.only_whole is not None:
            raise RequestError(f"nothing can be dropped from {engine.name}: {engine.only_whole}")
        if state.demoted or not all(isinstance(slots, Slots) and slots.uniform for slots in state.slots):
            raise RequestError(
                "decode-time dropping starts from a cache in one piece, equally long in all heads; take the whole "
                "session"
            )
        self.rule, self.page_size = rule, page_size
        self.position, self.generated, self.cuts = state.logical_length, 0, 0
        self._engine = engine
        self._state = state.copy(engine.growth)
        self._cache = engine.continuing([self._state])
        self._windows: list[Tensor | None] = [None] * len(self._cache.attention)  # [query_head, <= window, dim]
        self._scaling = [1.0] * len(self._windows)
        for index, layer in enumerate(self._cache.attention):
            layer.listener = functools.partial(self._hear, index)

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Logits [vocabulary] behind `tokens`. A single one counts as generated, and a cut may follow it."""
        ids = torch.tensor([list(tokens)], device=self._engine.device)
        output = self._engine.forward(self._engine.model, ids, self._cache, self.position, logits_to_keep=1)
        self.position += len(tokens)
        if len(tokens) == 1:
            self.generated += 1
            if self.rule.due(self.generated):
                self.cut()
        logits: Tensor = output.logits[0, -1]
        return logits

    def cut(self) -> None:
        """Drop down to the budget now, layer by layer. Raises RuntimeError before `window` tokens were read."""
        for index in range(len(self._windows)):
            self._cut_layer(index)
        self.cuts += 1

    @property
    def lengths(self) -> list[tuple[int, ...]]:
        """Held entries per attention layer and KV head."""
        return self._state.physical_lengths

    @property
    def held_bytes(self) -> int:
        return sum(slots.held_bytes for slots in self._state.slots)

    def close(self) -> None:
        """Return the copy's memory."""
        self._state.release()

    def __enter__(self) -> Dropping:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hear(self, index: int, query: Tensor, output: Tensor, scaling: float) -> None:
        """query: [1, query_head, q, dim], rotated, of the tokens just read."""
        before, fresh = self._windows[index], query[0]
        joined = fresh if before is None else torch.cat([before, fresh], dim=1)
        self._windows[index], self._scaling[index] = joined[:, -self.rule.window :].clone(), scaling

    def _cut_layer(self, index: int) -> None:
        slots, window = self._state.slots[index], self._windows[index]
        assert isinstance(slots, Slots)
        if window is None or window.shape[1] < self.rule.window:
            raise RuntimeError(f"a cut needs the queries of the last {self.rule.window} tokens")
        key = slots.read("key")
        query = window.view(key.shape[0], -1, *window.shape[1:])
        kept = self._kept(query, key, self._scaling[index])
        if kept is None:
            return
        smaller = gather(slots, list(kept), self._engine.growth)
        self._cache.attention[index].rows[0] = smaller
        self._state.slots = (*self._state.slots[:index], smaller, *self._state.slots[index + 1 :])
        slots.release()

    def _kept(self, query: Tensor, key: Tensor, scaling: float) -> Tensor | None:
        """int64 [kv_head, kept]"""
        if self.page_size is None:
            return self.rule.kept(query, key, scaling)
        pages = self.rule.kept_pages(query, key, scaling, self.page_size)
        if pages is None:
            return None
        inside = torch.arange(self.page_size, device=key.device)
        entries = (pages[..., None] * self.page_size + inside).flatten(1)
        rest = torch.arange(key.shape[1] // self.page_size * self.page_size, key.shape[1], device=key.device)
        return torch.cat([entries, rest.expand(len(entries), -1)], dim=1)


def ask_dropping(
    session: Session, text: str | Sequence[int], rule: DecodeDrop, *, max_new_tokens: int = 128,
    page_size: int | None = None,
) -> Answer:  # fmt: skip
    """`Session.ask` under a rule that drops while it decodes; the session is left as it was. For an `HFEngine`."""
    engine = session.engine
    if not isinstance(engine, HFEngine):
        raise RequestError(
            "decode-time dropping runs on the transformers engine only; load the model with wakesight.load"
        )
    made: list[int] = []
    with session.exclusively(), Dropping(engine, session.state, rule, page_size) as decoding:
        logits = decoding.read(session.question_ids(text))
        while (token := int(logits.argmax())) not in engine.end_tokens:
            made.append(token)
            if len(made) == max_new_tokens:
                break
            logits = decoding.read([token])
    finish = "length" if len(made) == max_new_tokens else "eos"
    return Answer(engine.decode(made), tuple(made), finish, {})
