"""Session states as a `transformers.Cache`: our slots for attention, transformers' own layers for recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from wakesight.cache.slots import Slots
from wakesight.cache.state import SessionState
from wakesight.engines.hf import compat
from wakesight.engines.hf.attention import OwnMask
from wakesight.errors import RequestError
from wakesight.signals.queries import QueryWindow


class SlotLayer(CacheLayerMixin):
    """One attention layer. It tells transformers the *logical* length and stores into `slots`."""

    is_sliding = False

    def __init__(self, slots: Slots, logical_length: int) -> None:
        super().__init__()
        self.slots = slots
        self.ahead = logical_length - slots.length  # tokens seen but not held
        self.tap: QueryWindow | None = None
        self.seen_by_attention = slots.length
        self.scaling: float | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: slots take their shape from the first append."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.slots.append({"key": key_states, "value": value_states})
        keys = self.slots.read("key")
        keys.wakesight_layer = self  # type: ignore[attr-defined]
        return keys, self.slots.read("value")

    def attended(self, query: Tensor, scaling: float) -> None:
        """Called by our attention function with each chunk's queries."""
        self.seen_by_attention = self.slots.length
        self.scaling = scaling
        if self.tap is not None:
            self.tap.watch(query)

    def get_seq_length(self) -> int:
        return self.slots.length + self.ahead

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return OwnMask(self.get_seq_length() + query_length), 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # the name before 5.24
        return -1


class SessionCache(Cache):
    """A state in the form that a transformers model continues from.

    Lengths differ per layer and per question; `get_seq_length()` is always the logical length. Recurrent
    states are clones, so the state behind it never changes except for slots appended at its end.
    """

    def __init__(self, config: Any, state: SessionState) -> None:
        layers = compat.empty_layers(config)
        self.tokens = state.tokens
        self._recurrent: dict[int, Any] = {}
        self.attention: list[SlotLayer] = []
        self._state = state  # keeps the storage alive for as long as a user keeps the cache
        slots = iter(state.slots)
        for index, layer in enumerate(layers):
            if compat.is_full_attention(layer):
                layers[index] = SlotLayer(next(slots), state.logical_length)
                self.attention.append(layers[index])
            else:
                self._recurrent[index] = layer
                own = {k.split("/")[1]: v.tensor for k, v in state.recurrent.items() if k.startswith(f"{index}/")}
                compat.recurrent_restore(layer, own)
        super().__init__(layers=layers)

    @property
    def logical_length(self) -> int:
        return self.attention[0].get_seq_length()

    def recurrent_snapshot(self) -> dict[str, Tensor]:
        """Clones of all recurrent states, by "layer/kind.index"."""
        return {
            f"{index}/{key}": tensor
            for index, layer in self._recurrent.items()
            for key, tensor in compat.recurrent_snapshot(layer).items()
        }

    def reset(self) -> None:
        raise RequestError("a session's cache cannot be reset; take a new one with session.cache()")

    def crop(self, tokens_to_remove: int) -> None:
        raise RequestError(
            "a session's cache cannot be cropped: recurrent states do not roll back; "
            "take a new one with session.cache()"
        )

    def check_attended(self) -> None:
        """Every layer's new slots must have passed through our attention function.

        If a model hands its keys on in another way, masks would be wrong: fail instead.
        """
        skipped = [i for i, layer in enumerate(self.attention) if layer.seen_by_attention != layer.slots.length]
        if skipped:
            raise RuntimeError(f"attention layers {skipped} bypassed wakesight's attention function")


def is_question_only(cache: SessionCache, input_ids: Sequence[int]) -> bool:
    """False if `input_ids` starts with the whole context the cache already holds."""
    context = cache.tokens
    return len(input_ids) < len(context) or tuple(input_ids[: len(context)]) != context
