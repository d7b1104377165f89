"""What attention layers do with tokens behind a context: listeners for one pass, and the copies they keep."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from wakesight.cache.state import SessionState
from wakesight.engines.base import Followed
from wakesight.engines.hf.cache import SessionCache
from wakesight.engines.hf.layers import tail


class Follower:
    """Hears one attention layer: what its attention function got and gave, and the stream that enters the layer."""

    def __init__(self) -> None:
        self.queries: list[Tensor] = []  # [query_head, q, dim] per pass
        self.outputs: list[Tensor] = []
        self.residual: list[Tensor] = []  # [q]
        self.scaling = 1.0

    def attended(self, query: Tensor, output: Tensor, scaling: float) -> None:
        """query, output: [1, query_head, q, dim] of a single row."""
        self.queries.append(query[0].clone())
        self.outputs.append(output[0].clone())
        self.scaling = scaling

    def entered(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the decoder layer: its first argument is the residual stream [1, q, hidden]."""
        stream = args[0] if args else kwargs["hidden_states"]
        self.residual.append(stream[0].float().norm(dim=-1))

    def heard(self, keys: Tensor, values: Tensor) -> Followed:
        queries, outputs = torch.cat(self.queries, dim=1), torch.cat(self.outputs, dim=1)
        return Followed(queries, keys, values, outputs, torch.cat(self.residual), self.scaling)


@contextlib.contextmanager
def following(cache: SessionCache, layers: Sequence[Any]) -> Iterator[list[Follower]]:
    """One follower per attention layer of a single-row `cache`, for passes of this thread inside the block.

    layers: the decoder layers that hold them, in the same order.
    """
    followers = [Follower() for _ in layers]
    mine = threading.get_ident()

    def here(follower: Follower) -> Any:
        return lambda *heard: follower.entered(*heard) if threading.get_ident() == mine else None

    with contextlib.ExitStack() as stack:
        for attention, layer, follower in zip(cache.attention, layers, followers, strict=True):
            attention.listener = follower.attended
            hook = layer.register_forward_pre_hook(here(follower), with_kwargs=True)
            stack.callback(hook.remove)
        yield followers


def collected(
    followers: Sequence[Follower], state: SessionState, held: Sequence[Sequence[int]]
) -> tuple[Followed, ...]:
    """What was heard, with the keys and values that lie behind `held` entries per layer and head of the state."""
    made = []
    for follower, slots, lengths in zip(followers, state.slots, held, strict=True):
        fresh = tail(slots, lengths)
        made.append(follower.heard(fresh["key"], fresh["value"]))
    return tuple(made)
