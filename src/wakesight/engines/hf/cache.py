"""Session states as a `transformers.Cache`: one row per sequence, our layers for attention and windows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from wakesight.cache.state import SessionState
from wakesight.engines.hf import compat
from wakesight.engines.hf.layers import IndexedLayer, OwnLayer, SlotLayer, build, join, row_of, states_of, take_pending
from wakesight.errors import RequestError


class SessionCache(Cache):
    """States in the form that a transformers model continues from.

    Lengths differ per row, layer, head and question; `get_seq_length()` is always the (longest) logical
    length. Recurrent states are clones, so the states behind it never change except for slots appended at
    their end.
    """

    stepwise: bool  # tokens behind a past are read one at a time

    def __init__(
        self, config: Any, states: Sequence[SessionState], *, latent: bool = False, stepwise: bool = False
    ) -> None:
        self.config = config  # of the model it belongs to
        self.tokens = [state.tokens for state in states]
        self.fresh = True  # nothing was appended yet
        self.stepwise = stepwise
        self._states = list(states)  # keeps the storage alive for as long as a user keeps the cache
        super().__init__(layers=_layers(config, states, latent))
        indexed = next((layer for layer in self.layers if isinstance(layer, IndexedLayer)), None)
        if indexed is not None and states[0].tokens:
            compat.restore_indexer_positions(self, indexed, len(states[0].tokens), indexed.rows[0].read("key").device)

    layers: list[Any]

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def attention(self) -> list[SlotLayer]:
        """The layers that hold slots, in order."""
        return [layer for layer in self.layers if isinstance(layer, SlotLayer)]

    @property
    def logical_lengths(self) -> list[int]:
        """Tokens seen, per row."""
        return list(self.attention[0].seen)

    def state_tensors(self) -> dict[str, Tensor]:
        """What does not grow: recurrent and conv states, sliding windows, by "layer/kind.index"; of a single row."""
        return {
            f"{index}/{key}": tensor
            for index, layer in enumerate(self.layers)
            for key, tensor in states_of(layer).items()
        }

    def row(self, index: int) -> SessionCache:
        """One row as a cache of its own, on the same slots; `take_rows` puts it back."""
        single = SessionCache.__new__(SessionCache)
        single.config = self.config
        single.tokens, single.fresh, single.stepwise = [self.tokens[index]], self.fresh, self.stepwise
        single._states = [self._states[index]]
        Cache.__init__(single, layers=[row_of(layer, index) for layer in self.layers])
        return single

    def take_rows(self, rows: Sequence[SessionCache]) -> None:
        """Continue with what these single-row caches hold now."""
        joined = SessionCache.joined(rows)
        self.layers, self.tokens, self._states = joined.layers, joined.tokens, joined._states
        self.fresh = joined.fresh

    @classmethod
    def joined(cls, rows: Sequence[SessionCache]) -> SessionCache:
        """Single-row caches side by side, in storage they keep sharing."""
        first = rows[0]
        if len(rows) == 1:
            return first
        whole = cls.__new__(cls)
        whole.tokens, whole.fresh = [row.tokens[0] for row in rows], all(row.fresh for row in rows)
        whole.config, whole.stepwise = first.config, first.stepwise
        whole._states = [state for row in rows for state in row._states]
        Cache.__init__(whole, layers=[join(parts) for parts in zip(*(r.layers for r in rows), strict=True)])
        return whole

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` rows, each with storage of its own."""
        self.repeat([index for index in range(self.rows) for _ in range(repeats)])

    def repeat(self, rows: list[int]) -> None:
        """Go on with these rows, each of them with storage of its own."""
        self._choose(rows)
        for layer in self.attention:
            layer.unshare()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Go on with these rows only."""
        self._choose(indices.tolist())

    def _choose(self, rows: list[int]) -> None:
        self.layers = [join([row_of(layer, index) for index in rows]) for layer in self.layers]
        self.tokens = [self.tokens[index] for index in rows]
        self._states = [self._states[index] for index in rows]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if any(self._states[to] is not self._states[source] for to, source in enumerate(beam_idx.tolist())):
            raise RequestError("a row of this cache cannot continue as a row of another session; take one cache each")
        super().reorder_cache(beam_idx)

    def reset(self) -> None:
        raise RequestError("a session's cache cannot be reset; take a new one with session.cache()")

    def crop(self, tokens_to_remove: int) -> None:
        raise RequestError(
            "a session's cache cannot be cropped: recurrent states do not roll back; "
            "take a new one with session.cache()"
        )

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Around one pass of the model: a layer that did not attend must not wait for the next pass's queries."""
        try:
            yield
            self.check_attended()
        finally:
            take_pending()

    def check_attended(self) -> None:
        """Every layer's new slots must have passed through our attention function.

        If a model hands its keys on in another way, masks would be wrong: fail instead.
        """
        own = [(i, layer) for i, layer in enumerate(self.layers) if isinstance(layer, OwnLayer)]
        if skipped := [i for i, layer in own if not layer.attended]:
            raise RuntimeError(f"layers {skipped} bypassed wakesight's attention function")
        if len({tuple(layer.seen) for _, layer in own}) > 1:
            raise RuntimeError("some attention layers of this model did not store their keys in the session's cache")


def _layers(config: Any, states: Sequence[SessionState], latent: bool) -> list[Any]:
    seen = [state.logical_length for state in states]
    attention = iter(range(len(states[0].slots)))
    layers = []
    for index, layer in enumerate(compat.empty_layers(config)):
        at = next(attention) if compat.kind(layer) in compat.HOLDS_SLOTS else None
        slots = [] if at is None else [state.slots[at] for state in states]
        layers.append(build(layer, slots, [_of_layer(state, index) for state in states], seen, latent))
    return layers


def _of_layer(state: SessionState, index: int) -> dict[str, Tensor]:
    mine = f"{index}/"
    return {name.removeprefix(mine): lease.tensor for name, lease in state.states.items() if name.startswith(mine)}


def is_question_only(context: Sequence[int], ids: Sequence[int]) -> bool:
    """False if `ids` starts with the whole context that the cache already holds."""
    return len(ids) < len(context) or tuple(ids[: len(context)]) != tuple(context)
