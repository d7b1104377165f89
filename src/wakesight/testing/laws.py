"""Independent ways to compute what the engine must compute, for tests and plug-in authors.

Nothing here uses our attention function, slots or caches: the masked model below is transformers' own
module tree with an eager float32 attention that repeats KV heads, and a DynamicCache.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from wakesight.core import KeptSet, Scores
from wakesight.engines.hf import compat
from wakesight.models.families import family_of

_MASKED = "wakesight_testing_masked"


@dataclass
class _Hidden:
    """What the masked model hides: per attention layer, in the order they run, bool [kv_head, token] and window."""

    dropped: list[Tensor | None]
    windows: list[int | None]
    calls: int = 0


_hidden = _Hidden([], [])
Later = Sequence[tuple[KeptSet, Sequence[int]]]  # further parts of a context, and what was held while each was read


class Masked:
    """A plain transformers model with a full cache, on which dropping an entry means hiding it by a mask.

    The context pass sees everything, as a prefill does; layers with a sliding window keep it. One context
    serves any number of kept sets.
    """

    def __init__(self, model: Any, context: Sequence[int]) -> None:
        self.model = model
        self.tokens = len(context)
        self.cache = DynamicCache(config=model.config)
        layers = [layer for layer in self.cache.layers if compat.kind(layer) in (*compat.HOLDS_SLOTS, "window")]
        self.windows = [getattr(layer, "sliding_window", None) for layer in layers]
        self._pass(self.cache, 0, context, None)

    def logits(self, tokens: Sequence[int], kept: KeptSet | None, later: Later = ()) -> Tensor:
        """Logits [token, vocabulary] of `tokens` behind the context while only `kept` is seen (None: everything).

        later: (kept set, tokens) for each further part of the context, read in turn behind it; a kept set
        names positions of what was read before.
        """
        cache, seen = copy.deepcopy(self.cache), self.tokens
        for held, part in later:
            self._pass(cache, seen, part, held)
            seen += len(part)
        return self._pass(cache, seen, tokens, kept)

    def _pass(self, cache: Any, seen: int, tokens: Sequence[int], kept: KeptSet | None) -> Tensor:
        global _hidden
        model, before = self.model, self.model.config._attn_implementation
        AttentionInterface.register(_MASKED, _masked_attention)
        model.set_attn_implementation(_MASKED)
        masks = iter(kept.positions) if kept is not None else None
        dropped = [
            _dropped(next(masks), seen) if masks is not None and window is None else None for window in self.windows
        ]
        _hidden = _Hidden(dropped, self.windows)
        rows = []
        try:
            step = 1 if seen and family_of(model.config).one_at_a_time else len(tokens)
            for part in torch.split(torch.tensor([list(tokens)]), step, dim=1):
                positions = torch.arange(seen, seen + part.shape[1])[None]  # some models restart at 0 by themselves
                held = {compat.cache_keyword(model): cache, "use_cache": True, "position_ids": positions}
                rows.append(model(input_ids=part, **held).logits[0])
                seen += part.shape[1]
                assert _hidden.calls == len(self.windows), "an attention layer ran without the masked attention"
                _hidden.calls = 0
        finally:
            model.set_attn_implementation(before)
        return torch.cat(rows)


def masked_logits(
    model: Any, context: Sequence[int], tokens: Sequence[int], kept: KeptSet, later: Later = ()
) -> Tensor:
    """Logits [token, vocabulary] of `tokens` on the full cache with every entry outside `kept` masked out.

    model: a plain transformers model. later: as for `Masked.logits`.
    """
    return Masked(model, context).logits(tokens, kept, later)


def _dropped(positions: Sequence[Tensor], tokens: int) -> Tensor:
    dropped = torch.ones(len(positions), tokens, dtype=torch.bool)
    for head, kept in enumerate(positions):
        dropped[head, kept] = False
    return dropped


def _masked_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    dropped, window = _hidden.dropped[_hidden.calls], _hidden.windows[_hidden.calls]
    _hidden.calls += 1
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1).float(), value.repeat_interleave(group, dim=1).float()
    logits = query.float() @ key.transpose(2, 3) * scaling
    new, slots = logits.shape[2:]
    past = slots - new
    unseen = torch.ones(new, slots, dtype=torch.bool).triu(past + 1)
    if window is not None:
        unseen |= torch.ones(new, slots, dtype=torch.bool).tril(past - window)
    logits = logits.masked_fill(unseen, float("-inf"))
    if dropped is not None:
        per_query_head = dropped.repeat_interleave(query.shape[1] // dropped.shape[0], dim=0)[None, :, None, :]
        logits[..., : dropped.shape[-1]] = logits[..., : dropped.shape[-1]].masked_fill(per_query_head, float("-inf"))
    return (logits.softmax(dim=-1) @ value).to(query.dtype).transpose(1, 2).contiguous(), None


def relative_gap(found: Tensor, expected: Tensor) -> float:
    """max |found - expected| over max |expected|."""
    return float((found - expected).abs().max() / expected.abs().max())


def same_but_for_ties(one: KeptSet, other: KeptSet, scores: Scores, relative: float = 1e-5) -> bool:
    """True if two kept sets of equal size differ only in entries whose scores lie at the cut.

    scores: any one of the two runs'; at the cut = within `relative` (of the layer's largest score) of the
    smallest kept score of that head.
    """
    for a, b, layer in zip(one.positions, other.positions, scores.layers, strict=True):
        near = relative * float(layer.abs().max())
        for head in range(len(a)):
            if len(a[head]) != len(b[head]):
                return False
            different = set(a[head].tolist()) ^ set(b[head].tolist())
            cut = float(layer[head, sorted(different)].min()) if different else 0.0
            if any(abs(float(layer[head, i]) - cut) > 2 * near for i in different):
                return False
    return True


def greedy(model: Any, tokens: Sequence[int], count: int, *, chunk: int | None = None) -> tuple[list[int], Tensor]:
    """`count` greedy ids of a plain transformers loop after `tokens`, and the logits [count, vocabulary]."""
    name = compat.cache_keyword(model)
    cache = DynamicCache(config=model.config)
    seen = 0
    made: list[int] = []
    rows = []
    parts = [*torch.split(torch.tensor([list(tokens)]), chunk or len(tokens), dim=1)]
    while len(made) < count:
        for part in parts:
            positions = torch.arange(seen, seen + part.shape[1])[None]
            held = {name: cache, "use_cache": True, "position_ids": positions}
            logits = model(input_ids=part, logits_to_keep=1, **held).logits
            seen += part.shape[1]
        rows.append(logits[0, -1])
        made.append(int(rows[-1].argmax()))
        parts = [torch.tensor([[made[-1]]])]
    return made, torch.stack(rows)


def clear_margin(row: Tensor, least: float = 1e-4) -> bool:
    """True if the best logit of a row leads by `least`; closer races are counted apart."""
    best, second = row.topk(2).values
    return bool(best - second >= least)


def state_digest(state: Any) -> str:
    """sha256 over everything a session state holds."""
    import hashlib

    digest = hashlib.sha256(repr((state.tokens, state.prefix, state.physical_lengths)).encode())
    tensors = [strip for slots in state.slots for name in slots.names for strip in slots.strips(name)]
    tensors += [state.states[name].tensor for name in sorted(state.states)]
    for tensor in tensors:
        digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def cached(cache: Any) -> dict[str, Any]:
    """The keyword that hands `cache` to `generate`, as the installed transformers names it."""
    from transformers import LlamaForCausalLM

    return {compat.cache_keyword_of(LlamaForCausalLM): cache}
