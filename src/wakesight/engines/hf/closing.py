"""Attention heads switched off, to see what they were good for, and how well a model foretells a text."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wakesight.core import ModelGeometry
from wakesight.engines.hf.projection import attention_module, output_linear
from wakesight.errors import RequestError


class NextTokens(NamedTuple):
    """hits: bool [n - 1], whether the likeliest next token was the real one. log_probs: float32 [n - 1], of the
    real one."""

    hits: Tensor
    log_probs: Tensor


def foretold(logits: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """logits: [token, vocabulary]. real: [token], the ids that came next. Equal logits: the lower id is the guess."""
    log_probs = logits.float().log_softmax(dim=-1).gather(1, real[:, None])[:, 0]
    return logits.argmax(dim=-1) == real, log_probs


@contextlib.contextmanager
def closing(decoder: Any, geometry: ModelGeometry, closed: Mapping[int, Sequence[int]], name: str) -> Iterator[None]:
    """Passes of this thread run with the outputs of some heads set to 0 before the output projection.

    That is the same as an output gate of 0, and needs no gate. closed: attention layer -> query heads. An attention
    module that several layers share is closed in the named ones only. Raises RequestError for heads that are not there.
    """
    for layer, heads in closed.items():
        if not 0 <= layer < len(geometry.attention_layers) or any(not 0 <= h < geometry.query_heads for h in heads):
            raise RequestError(
                f"{name} has {len(geometry.attention_layers)} attention layers of {geometry.query_heads} query heads, "
                f"counted from 0, and no heads {list(heads)} in layer {layer}"
            )
    switch = _Switch({int(geometry.attention_layers[layer]): tuple(heads) for layer, heads in closed.items() if heads})
    with contextlib.ExitStack() as stack:
        hooked: set[int] = set()
        for index in map(int, geometry.attention_layers):
            layer = decoder.layers[index]
            stack.callback(layer.register_forward_pre_hook(switch.entering(index)).remove)
            linear = output_linear(attention_module(layer, index, name))
            if id(linear) not in hooked:
                hooked.add(id(linear))
                stack.callback(linear.register_forward_pre_hook(switch.shut(geometry.query_heads)).remove)
        yield


class _Switch:
    """Knows which layer of its thread's pass runs, and the heads to shut there."""

    def __init__(self, closed: Mapping[int, tuple[int, ...]]) -> None:
        self._closed = closed
        self._layer = -1
        self._thread = threading.get_ident()

    def entering(self, index: int) -> Callable[[Any, Any], None]:
        def note(module: Any, args: Any) -> None:
            if threading.get_ident() == self._thread:
                self._layer = index

        return note

    def shut(self, query_heads: int) -> Callable[[Any, tuple[Tensor, ...]], tuple[Tensor, ...] | None]:
        def silence(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            heads = self._closed.get(self._layer) if threading.get_ident() == self._thread else None
            if not heads:
                return None
            mixed = args[0].clone(memory_format=torch.contiguous_format)  # [..., query_head * dim]
            mixed.view(*mixed.shape[:-1], query_heads, -1)[..., torch.tensor(heads, device=mixed.device), :] = 0
            return (mixed, *args[1:])

        return silence
