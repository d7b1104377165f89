"""Independent ways to compute what the engine must compute, for tests and plug-in authors.

Nothing here uses our attention function, slots or caches: the masked model below is transformers' own
module tree with an eager float32 attention that repeats KV heads, and a DynamicCache.
"""

from __future__ import annotations

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


def masked_logits(model: Any, context: Sequence[int], tokens: Sequence[int], kept: KeptSet) -> Tensor:
    """Logits [token, vocabulary] of `tokens` on the full cache with every entry outside `kept` masked out.

    model: a plain transformers model. The context pass itself sees everything, as a prefill does; layers
    with a sliding window keep it.
    """
    global _hidden
    before = model.config._attn_implementation
    AttentionInterface.register(_MASKED, _masked_attention)
    cache = DynamicCache(config=model.config)
    name = compat.cache_keyword(model)
    layers = [layer for layer in cache.layers if compat.kind(layer) in (*compat.HOLDS_SLOTS, "window")]
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    model.set_attn_implementation(_MASKED)
    try:
        _hidden = _Hidden([None] * len(layers), windows)
        model(input_ids=torch.tensor([list(context)]), **{name: cache, "use_cache": True})
        masks = iter(kept.positions)
        dropped = [_dropped(next(masks), len(context)) if window is None else None for window in windows]
        _hidden = _Hidden(dropped, windows)
        rows: list[Tensor] = []
        for part in torch.split(torch.tensor([list(tokens)]), _step(model, len(tokens)), dim=1):
            start = len(context) + sum(row.shape[0] for row in rows)
            positions = torch.arange(start, start + part.shape[1])[None]  # some models restart at 0 by themselves
            rows.append(model(input_ids=part, position_ids=positions, **{name: cache, "use_cache": True}).logits[0])
            assert _hidden.calls == len(layers), "an attention layer did not run through the masked attention"
            _hidden.calls = 0
        return torch.cat(rows)
    finally:
        model.set_attn_implementation(before)


def _step(model: Any, tokens: int) -> int:
    """Tokens that transformers can read at once behind a past."""
    return 1 if family_of(model.config).one_at_a_time else tokens


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
