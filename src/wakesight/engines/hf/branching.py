"""Continuations of several contexts, drawn as one batch.

A decode step of a few rows on a CPU waits for the weights to arrive from memory, so a step of eight documents' rows
costs little more than a step of one document's. The rows behind one context also share its entries: they are read once
for all of them, each row adds its own tail, and the two parts of a softmax are merged by their log-sum-exp.

    context   [kv_head, n, dim]          read once for the rows behind it
    tails     [row, kv_head, t, dim]     what each row has drawn so far

It is for models of plain attention and recurrent layers on a CPU (`possible`); others draw context by context, through
`Engine.sample`, whose ids these are up to rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from wakesight.cache.slots import Slots
from wakesight.engines.base import Asked
from wakesight.engines.hf import compat
from wakesight.engines.hf.attach import forward_keywords
from wakesight.engines.hf.cache import SessionCache
from wakesight.engines.hf.layers import Kernel, OwnLayer, SlotLayer
from wakesight.engines.hf.sampling import Sampling, draw


def possible(engine: Any, one: Asked, tokens: int) -> bool:
    """Whether `drawn_together` can run it: layers of the right kind, and room for all tokens."""
    if engine.device.type != "cpu" or compat.rope_switch(engine.model.config) is not None:
        return False
    vocabulary = engine.model.get_input_embeddings().weight.shape[0]
    room = engine.geometry.max_positions - one.state.logical_length - len(one.after)
    if not one.after or not all(0 <= token < vocabulary for token in one.after) or room < tokens:
        return False
    cache = engine.continuing([one.state])
    plain = all(type(layer) is SlotLayer or not isinstance(layer, OwnLayer) for layer in cache.layers)
    same = engine.geometry.key_dims == engine.geometry.value_dims
    return plain and same and not cache.stepwise and not any(layer.latent for layer in cache.attention)


@torch.no_grad()
def drawn_together(
    engine: Any, asked: Sequence[Asked], *, count: int, tokens: int, past_end: bool = False
) -> list[list[list[int]]]:
    """For every context `count` continuations of up to `tokens` ids; the states are left as they were.

    Each context draws from its own generator, in its own order, so its ids do not depend on what runs beside it, as
    far as the model's matrix products do not (on a CPU: from four rows on).
    """
    if not asked:
        return []
    held = [one.state.physical_lengths for one in asked]
    try:
        caches, first = [], []
        for one in asked:
            cache = engine.continuing([one.state])
            ids = torch.tensor([list(one.after)], device=engine.device)
            first.append(engine.forward(engine.model, ids, cache, one.state.logical_length, logits_to_keep=1).logits)
            caches.append(cache)
        ends = () if past_end else engine.end_tokens
        return _decoded(engine, _branched(caches, count), asked, torch.cat(first)[:, -1], count, tokens, ends)
    finally:
        for one, lengths in zip(asked, held, strict=True):
            one.state.truncate(lengths)


def _branched(caches: Sequence[SessionCache], count: int) -> SessionCache:
    """One cache of `count` rows behind each context."""
    rows = [cache.row(0) for cache in caches for _ in range(count)]
    whole = SessionCache.joined(rows)
    contexts = [cache.attention for cache in caches]
    behind = [at for at in range(len(caches)) for _ in range(count)]
    at = 0
    for index, layer in enumerate(whole.layers):
        if isinstance(layer, SlotLayer):
            whole.layers[index] = Branches([layers[at].rows[0] for layers in contexts], behind, layer.seen)
            at += 1
    return whole


def _decoded(
    engine: Any, cache: SessionCache, asked: Sequence[Asked], logits: Tensor, count: int, tokens: int,
    ends: Collection[int],
) -> list[list[list[int]]]:  # fmt: skip
    """logits: [context, vocabulary]; all rows of a context draw their first id from its own."""
    sampling = Sampling.of(getattr(engine.model, "generation_config", None))
    noise = [torch.Generator().manual_seed(one.seed) for one in asked]
    made: list[list[list[int]]] = [[[] for _ in range(count)] for _ in asked]
    active = [(context, row) for context in range(len(asked)) for row in range(count)]
    logits = logits.repeat_interleave(count, dim=0)
    while True:
        ids = _next_ids(logits, [context for context, _ in active], sampling, noise)
        going = [at for at, token in enumerate(ids) if token not in ends]
        for at in going:
            context, row = active[at]
            made[context][row].append(ids[at])
        active = [active[at] for at in going]
        if not active or len(made[active[0][0]][active[0][1]]) == tokens:
            return made
        if len(going) < len(ids):
            chosen = torch.tensor(going, device=engine.device)
            cache.batch_select_indices(chosen)
            for layer in cache.attention:
                layer.select(chosen)
        batch = torch.tensor([[made[context][row][-1]] for context, row in active], device=engine.device)
        logits = engine.model(input_ids=batch, logits_to_keep=1, **forward_keywords(engine.model, cache)).logits[:, -1]


def _next_ids(
    logits: Tensor, contexts: Sequence[int], sampling: Sampling, noise: Sequence[torch.Generator]
) -> list[int]:
    """One id per row; the rows of one context stand side by side and draw at once from its generator."""
    ids: list[int] = []
    while len(ids) < len(contexts):
        context = contexts[len(ids)]
        rows = contexts.count(context)
        ids += draw(logits[len(ids) : len(ids) + rows], sampling, noise[context])
    return ids


class Branches(SlotLayer):
    """Rows behind contexts that several of them share. behind: the context of each row, ascending.

    The contexts' slots are only read, and stay where they are as long as this is in use. A pass reads one new token per
    row.
    """

    def __init__(self, contexts: Sequence[Slots], behind: Sequence[int], seen: Sequence[int]) -> None:
        super().__init__([contexts[at] for at in behind], seen)
        self.behind = list(behind)
        self.contexts = [(slots.read("key")[None], slots.read("value")[None]) for slots in contexts]
        self.tails: list[Tensor] = []  # keys and values [row, kv_head, room, dim], of which `drawn` are written
        self.drawn = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        fresh = (key_states, value_states)
        if not self.tails or self.drawn == self.tails[0].shape[2]:
            self.tails = [self._grown(at, one) for at, one in enumerate(fresh)]
        for tail, one in zip(self.tails, fresh, strict=True):
            tail[:, :, self.drawn] = one[:, :, 0]
        self.drawn += 1
        self._store(1)
        return fresh

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, kernel: Kernel) -> Tensor:
        """query [row, query_head, 1, dim]; a group's heads are query rows of their KV head."""
        rows, heads, _, dim = query.shape
        kv_heads = key.shape[1]
        packed = query.reshape(rows, kv_heads, heads // kv_heads, dim)
        before = torch.empty_like(packed)
        weight = packed.new_empty(packed.shape[:3], dtype=torch.float32)
        at = 0
        for context, (keys, values) in enumerate(self.contexts):
            if mine := self.behind.count(context):
                together = packed[at : at + mine].transpose(0, 1).reshape(1, kv_heads, -1, dim)
                found, logsum = _attended(together, keys, values, scaling)
                before[at : at + mine] = found.view(kv_heads, mine, -1, dim).transpose(0, 1)
                weight[at : at + mine] = logsum.view(kv_heads, mine, -1).transpose(0, 1)
                at += mine
        own_keys, own_values = (tail[:, :, : self.drawn] for tail in self.tails)
        behind, tail_weight = _attended(packed, own_keys, own_values, scaling)
        share = torch.sigmoid(weight - tail_weight.reshape(weight.shape))  # the context's part of the softmax
        self.attended = True
        return torch.lerp(behind, before, share.unsqueeze(-1).to(behind.dtype)).reshape(query.shape)

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        self.tails = [tail[rows] for tail in self.tails]
        chosen = rows.tolist()
        self.behind, self.seen = [self.behind[at] for at in chosen], [self.seen[at] for at in chosen]
        self.rows = [self.rows[at] for at in chosen]

    def _grown(self, at: int, like: Tensor) -> Tensor:
        grown = like.new_empty(*like.shape[:2], max(32, 2 * self.drawn), like.shape[3])
        if self.tails:
            grown[:, :, : self.drawn] = self.tails[at]
        return grown


def _attended(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Full attention [batch, kv_head, q, dim] and the log of its softmax's sum; the public call hides the latter."""
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, scale=scaling
    )
    return found
