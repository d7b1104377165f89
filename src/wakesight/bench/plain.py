"""The other side of our comparisons: transformers as it comes, on the same weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import DynamicCache

from wakesight.engines.hf import compat
from wakesight.engines.hf.engine import HFEngine


def plain_model(engine: HFEngine) -> Any:
    """A stock transformers model (sdpa attention, its own linear layers) that shares `engine`'s weights."""
    config = type(engine.model.config).from_dict(engine.model.config.to_dict())
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=engine.model.dtype)
    model.load_state_dict(engine.model.state_dict(), assign=True)
    model.tie_weights()
    return model.eval()


def plain_prefill(model: Any, tokens: list[int], chunk: int | None = None) -> DynamicCache:
    """The decoder alone (no logits) over `tokens`, in one pass or in chunks, into a DynamicCache."""
    decoder = model.get_decoder()
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([tokens], device=model.device)
    with torch.no_grad():
        for part in torch.split(ids, chunk or len(tokens), dim=1):
            decoder(input_ids=part, **{compat.cache_keyword(decoder): cache, "use_cache": True})
    return cache


def plain_steps(model: Any, cache: DynamicCache, steps: int) -> None:
    """`steps` greedy decode steps as a plain transformers loop makes them."""
    token = torch.tensor([[1]], device=model.device)
    with torch.no_grad():
        for _ in range(steps):
            keywords = {compat.cache_keyword(model): cache, "use_cache": True}
            logits = model(input_ids=token, logits_to_keep=1, **keywords).logits
            token = logits[:, -1].argmax(dim=-1, keepdim=True)


def rewind(cache: DynamicCache, held: list[tuple[Any, Any]]) -> None:
    """Put the K/V of every attention layer back to what `held` remembers."""
    for layer, kv in zip(cache.layers, held, strict=True):
        if kv is not None:
            layer.keys, layer.values = kv


def remember(cache: DynamicCache) -> list[Any]:
    """The K/V tensors of every attention layer, for `rewind`."""
    return [(layer.keys, layer.values) if compat.kind(layer) == "full" else None for layer in cache.layers]
