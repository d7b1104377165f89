"""One model layer of a session's cache: our slots for attention, transformers' own object for recurrence.

A layer holds a list of *rows*, the sequences of a batch. Rows differ in length, per layer and per head, so
each row attends over storage of its own; everything else of the model runs on the whole batch.
`update` stores the newest keys and values and remembers itself as pending; the attention function, which the
model calls next, takes the pending layer and lets it attend.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from wakesight.cache.residency.paged import PagedSlots
from wakesight.cache.slots import GROWTH, Slots
from wakesight.cache.state import copied
from wakesight.engines.hf import compat
from wakesight.engines.hf.latent import absorbed, as_stored
from wakesight.engines.probe import Overhearing
from wakesight.engines.recording import LayerRecorder
from wakesight.errors import RequestError

Kernel = Callable[..., Tensor]  # (query, key, value, scaling, window) -> output, as in attention.attend
_local = threading.local()


class OwnMask(int):
    """A K/V length whose layer builds its own mask: the registered mask functions then build none."""


def take_pending() -> OwnLayer | None:
    """The layer that stored keys and has not attended yet; None for any cache that is not ours."""
    layer: OwnLayer | None = getattr(_local, "pending", None)
    _local.pending = None
    return layer


class OwnLayer(CacheLayerMixin):
    """What slot and window layers share: logical lengths per row, no mask from transformers."""

    is_sliding = False
    supports_early_init = False
    listener: Callable[[Tensor, Tensor, float], None] | None = None  # hears query, output and scaling

    def __init__(self, seen: Sequence[int]) -> None:
        CacheLayerMixin.__init__(self)
        self.seen = list(seen)  # logical length per row
        self.attended = True

    def _store(self, new: int) -> None:
        self.seen = [length + new for length in self.seen]
        self.attended = False
        _local.pending = self

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, kernel: Kernel) -> Tensor:
        """query [batch, query_head, q, dim] -> the same shape with the value's dim. module: the model's own."""
        rows = [
            self._attend_row(r, module, query[r : r + 1], key, value, scaling, kernel) for r in range(len(self.seen))
        ]
        self.attended = True
        output = rows[0] if len(rows) == 1 else torch.cat(rows)
        if self.listener is not None:
            self.listener(query, output, scaling)
        return output

    @abstractmethod
    def _attend_row(
        self, row: int, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, kernel: Kernel
    ) -> Tensor:
        """One row's query [1, query_head, q, dim] over that row's own entries."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: storage takes its shape from the first append."""

    def get_seq_length(self) -> int:
        return max(self.seen)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return OwnMask(self.get_seq_length() + query_length), 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # the name before 5.24
        return -1


class SlotLayer(OwnLayer):
    """Full attention over `Slots`, one per row; a demoted row's `PagedSlots` choose for themselves what is read.

    latent: the model stores compressed keys (MLA) and expands them after `update`, which therefore returns
    every row's latents, padded to the longest.
    """

    def __init__(
        self, rows: Sequence[Slots], seen: Sequence[int], *, latent: bool = False,
        forked: Sequence[Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        OwnLayer.__init__(self, seen)
        self.rows = list(rows)
        self.latent = latent
        self.forked = list(forked or [slots.lengths for slots in rows])  # up to here, copies of a row are equal
        self.recorder: LayerRecorder | Overhearing | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for slots, key, value in zip(self.rows, key_states, value_states, strict=True):
            slots.append({"key": key, "value": value})
        self._store(key_states.shape[2])
        if self.latent:
            return self._padded("key"), self._padded("value")
        return key_states, value_states  # the attention function reads the rows itself

    def _attend_row(
        self, row: int, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, kernel: Kernel
    ) -> Tensor:
        slots = self.rows[row]
        if isinstance(slots, PagedSlots):
            if self.recorder is not None:
                raise RuntimeError("a demoted layer cannot be recorded: its keys are not in one piece")
            return slots.attend(query, scaling, kernel)
        if self.recorder is not None:
            queries, keys = (absorbed if self.latent else as_stored)(module, query[0], slots)
            self.recorder.hear(queries, keys, self.seen[row] - query.shape[2], scaling)
        if self.latent:
            held = slots.length
            return kernel(query, key[row : row + 1, :, :held], value[row : row + 1, :, :held], scaling)
        if slots.uniform:
            return kernel(query, slots.read("key")[None], slots.read("value")[None], scaling)
        groups = query.chunk(len(slots.lengths), dim=1)
        strips = zip(groups, slots.strips("key"), slots.strips("value"), strict=True)
        return torch.cat([kernel(group, k[None, None], v[None, None], scaling) for group, k, v in strips], dim=1)

    def _padded(self, name: str) -> Tensor:
        if len(self.rows) == 1:
            return self.rows[0].read(name)[None]
        strips = [slots.read(name)[0] for slots in self.rows]
        return torch.nn.utils.rnn.pad_sequence(strips, batch_first=True)[:, None]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i continues as row beam_idx[i]; rows are copies of each other up to `forked`, so only tails move."""
        moves = [(to, source) for to, source in enumerate(beam_idx.tolist()) if to != source]
        if moves and any(isinstance(slots, PagedSlots) for slots in self.rows):
            raise RequestError(
                "the beams of a demoted session cannot change places, since each has a reservoir of its own; "
                "generate with num_beams=1, or compact with --evicted drop"
            )
        tails = {to: tail(self.rows[source], self.forked[source]) for to, source in moves}
        for to, source in moves:
            self.rows[to].truncate(self.forked[to])
            self.rows[to].append(tails[to])
            self.seen[to] = self.seen[source]

    def unshare(self) -> None:
        """Give every repeated row storage of its own."""
        owned: list[Slots] = []
        for slots in self.rows:
            owned.append(copied(slots, GROWTH) if any(slots is other for other in owned) else slots)
        self.rows, self.forked = owned, [slots.lengths for slots in owned]


def tail(slots: Slots, start: Sequence[int]) -> dict[str, Tensor]:
    """Clones [kv_head, new, dim] of what lies behind `start`; equally much for every head."""
    return {
        name: torch.stack([strip[at:] for strip, at in zip(slots.strips(name), start, strict=False)])
        for name in slots.names
    }


class WindowLayer(OwnLayer):
    """Sliding-window attention: each row keeps its last window - 1 keys and values, as the model was trained to.

    Tensors are replaced, never written to, so a snapshot needs no copy.
    """

    is_sliding = True

    def __init__(self, window: int, rows: Sequence[tuple[Tensor, Tensor] | None], seen: Sequence[int]) -> None:
        super().__init__(seen)
        self.window = window
        self.rows = list(rows)  # per row (key, value) [kv_head, <= window - 1, dim]
        self._whole: list[tuple[Tensor, Tensor]] = []  # the window and the chunk, between update and attend

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._whole = [
            (key, value) if old is None else (torch.cat([old[0], key], dim=1), torch.cat([old[1], value], dim=1))
            for old, key, value in zip(self.rows, key_states, value_states, strict=True)
        ]
        self.rows = [(self._last(key), self._last(value)) for key, value in self._whole]
        self._store(key_states.shape[2])
        return key_states, value_states

    def _attend_row(
        self, row: int, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, kernel: Kernel
    ) -> Tensor:
        keys, values = self._whole[row]
        return kernel(query, keys[None], values[None], scaling, self.window)

    def _last(self, whole: Tensor) -> Tensor:
        return whole[:, max(0, whole.shape[1] - self.window + 1) :].clone()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i continues as row beam_idx[i]."""
        self.rows = [self.rows[source] for source in beam_idx.tolist()]
        self.seen = [self.seen[source] for source in beam_idx.tolist()]


class SlotAndStateLayer(SlotLayer, LinearAttentionAndFullAttentionLayer):
    """A layer that runs attention and recurrence side by side (Falcon-H1, Zamba2)."""

    def __init__(
        self, rows: Sequence[Slots], seen: Sequence[int], states: int, *, forked: Sequence[Sequence[int]] | None = None
    ) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=states)
        SlotLayer.__init__(self, rows, seen, forked=forked)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if kwargs:  # by keyword it is the recurrence that asks; slots need nothing
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        SlotLayer.reorder_cache(self, beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)


class IndexedLayer(SlotLayer):
    """Attention behind a sparse indexer: whole rows only. The model's own mask picks the entries by slot number, so
    transformers' attention runs on views of our slots; the indexer's raw keys are a payload of theirs."""

    indexer_position_ids: Tensor | None = None

    def update_indexer(self, raw_keys: Tensor) -> Tensor:
        """raw_keys [1, q, dim] -> all of them [1, held + q, dim]; stored with the keys that follow."""
        self._fresh = raw_keys
        held = self.rows[0]
        return torch.cat([held.read("index"), raw_keys], dim=1) if "index" in held.names else raw_keys

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        slots = self.rows[0]
        slots.append({"key": key_states[0], "value": value_states[0], "index": self._fresh})
        self.seen = [length + key_states.shape[2] for length in self.seen]
        return slots.read("key")[None], slots.read("value")[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


def states_of(layer: Any) -> dict[str, Tensor]:
    """Live tensors of a single-row layer that do not grow with the context, by "kind.index"."""
    if isinstance(layer, WindowLayer):
        return {"window.key": layer.rows[0][0], "window.value": layer.rows[0][1]} if layer.rows[0] else {}
    return compat.state_tensors(layer)


def build(
    layer: Any, slots: Sequence[Slots], states: Sequence[dict[str, Tensor]], seen: Sequence[int], latent: bool
) -> Any:
    """Our layer in place of transformers' empty one. slots (none without attention), states and seen: one per row."""
    kind = compat.kind(layer)
    if kind == "window":
        return WindowLayer(
            layer.sliding_window, [(s["window.key"], s["window.value"]) if s else None for s in states], seen
        )
    if kind == "indexed":
        _check_single(slots)
        return IndexedLayer(slots, seen)
    if kind == "full":
        return SlotLayer(slots, seen, latent=latent)
    own = SlotAndStateLayer(slots, seen, layer.number_of_states) if kind == "full+state" else layer
    if states[0]:
        compat.restore_states(own, {name: torch.cat([s[name] for s in states]) for name in states[0]})
    return own


def _check_single(rows: Sequence[Any]) -> None:
    if len(rows) > 1:
        raise RequestError("a model with a sparse indexer cannot run several sequences at once; ask row by row")


def row_of(layer: Any, index: int) -> Any:
    """One row of a layer as a layer of its own: slots are shared, recurrent states are clones."""
    if isinstance(layer, WindowLayer):
        return WindowLayer(layer.window, [layer.rows[index]], [layer.seen[index]])
    if isinstance(layer, IndexedLayer):
        return layer
    if type(layer) is SlotLayer:
        return SlotLayer([layer.rows[index]], [layer.seen[index]], latent=layer.latent, forked=[layer.forked[index]])
    if not isinstance(layer, LinearAttentionLayer):
        return layer
    if isinstance(layer, SlotAndStateLayer):
        one: Any = SlotAndStateLayer(
            [layer.rows[index]], [layer.seen[index]], layer.number_of_states, forked=[layer.forked[index]]
        )
    else:
        one = type(layer)(number_of_states=layer.number_of_states)
    compat.restore_states(one, {k: v[index : index + 1] for k, v in compat.state_tensors(layer).items()})
    return one


def join(parts: Sequence[Any]) -> Any:
    """Single-row layers as one layer of several rows."""
    first = parts[0]
    if isinstance(first, IndexedLayer):
        _check_single(parts)
    if isinstance(first, OwnLayer):
        rows, seen = [part.rows[0] for part in parts], [part.seen[0] for part in parts]
    if isinstance(first, WindowLayer):
        return WindowLayer(first.window, rows, seen)
    if type(first) is SlotLayer:
        return SlotLayer(rows, seen, latent=first.latent, forked=[part.forked[0] for part in parts])
    if isinstance(first, IndexedLayer) or not isinstance(first, LinearAttentionLayer):
        return first
    if isinstance(first, SlotAndStateLayer):
        whole: Any = SlotAndStateLayer(rows, seen, first.number_of_states, forked=[part.forked[0] for part in parts])
    else:
        whole = type(first)(number_of_states=first.number_of_states)
    states = [compat.state_tensors(part) for part in parts]
    compat.restore_states(whole, {name: torch.cat([s[name] for s in states]) for name in states[0]})
    return whole
