"""What differs between the transformers versions we support (5.16.1 to 5.24), in one place."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from wakesight.errors import RequestError

OLDEST, NEWEST = Version("5.16.1"), Version("5.25")  # NEWEST is the first one not supported

_KINDS = {
    DynamicLayer: "full",
    DynamicSlidingWindowLayer: "window",
    LinearAttentionLayer: "state",
    LinearAttentionAndFullAttentionLayer: "full+state",
    DynamicIndexedLayer: "indexed",
    getattr(cache_utils, "DummyLayer", None): "none",  # not in 5.16
}
HOLDS_SLOTS = ("full", "full+state", "indexed")  # the kinds whose entries grow with the context


def check_version() -> None:
    """Refuse a transformers outside the tested range, by name."""
    have = Version(transformers.__version__)
    if not OLDEST <= have < NEWEST:
        raise RequestError(
            f"transformers {have} is outside the supported range; type: pip install 'transformers>={OLDEST},<{NEWEST}'"
        )


@functools.cache
def _names_cache(forward: Any) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def cache_keyword(module: Any) -> str:
    """The forward argument that takes the cache: `cache` since 5.24, `past_key_values` before."""
    return cache_keyword_of(type(module))


def cache_keyword_of(module_class: Any) -> str:
    """The same for a class of modules."""
    return _names_cache(module_class.forward)


def empty_layers(config: Any) -> list[Any]:
    """The layer objects that transformers itself would use for this model, one per layer."""
    return list(DynamicCache(config=config.get_text_config(decoder=True)).layers)


def kind(layer: Any) -> str:
    """What transformers' own layer object is for: "full" attention (a plain growing K/V layer, which we replace
    by slots), "window", recurrent "state", "full+state" side by side, "none", or another, by its class name."""
    return _KINDS.get(type(layer), type(layer).__name__)


def check_kinds(kinds: list[str], name: str) -> None:
    """Refuse a model with a kind of cache layer that we do not know, by name."""
    if unknown := sorted(set(kinds) - set(_KINDS.values())):
        raise RequestError(f"{name} keeps a cache of kind {unknown[0]}, which wakesight cannot compact or restore")


def state_tensors(layer: Any) -> dict[str, Tensor]:
    """The live states of a layer that do not grow with the context: "conv.0", "recurrent.0", "window.key", ..."""
    states: dict[str, Tensor] = {}
    for name in ("conv", "recurrent"):
        for index, tensor in getattr(layer, f"{name}_states", {}).items():
            if tensor is not None:
                states[f"{name}.{index}"] = tensor
    return states


def restore_states(layer: Any, states: dict[str, Tensor]) -> None:
    """Fill a fresh recurrent layer with clones of a snapshot; the snapshot stays untouched."""
    for key, tensor in states.items():
        name, _, index = key.partition(".")
        getattr(layer, f"{name}_states")[int(index)] = tensor.clone()
        getattr(layer, f"is_{name}_states_initialized")[int(index)] = True
        layer.has_previous_state[int(index)] = True
        if name == "conv":
            layer.conv_kernel_size[int(index)] = tensor.shape[-1]
            layer.dtype, layer.device = tensor.dtype, tensor.device


def restore_indexer_positions(cache: Any, indexed: Any, tokens: int, device: Any) -> None:
    """Sparse-indexer models keep the positions of all tokens, [3, 1, token]: on the cache before 5.24, since then on
    its first indexed layer."""
    positions = torch.arange(tokens, device=device).expand(3, 1, -1)
    if hasattr(DynamicIndexedLayer(), "indexer_position_ids"):
        indexed.indexer_position_ids = positions
    else:
        cache.position_ids = positions


def rope_switch(config: Any) -> tuple[int, bool] | None:
    """Where RoPE changes its frequencies with the length of a pass ("longrope", "dynamic"): the original limit in
    tokens, and whether they go on changing beyond it. None for every other RoPE."""
    text = config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or {}
    kind = parameters.get("rope_type")
    if kind not in ("longrope", "dynamic"):
        return None
    limit = parameters.get("original_max_position_embeddings")
    limit = limit or getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings
    return int(limit), kind == "dynamic"


def is_latent(config: Any) -> bool:
    """True for latent attention (MLA), whose cache holds one compressed head."""
    return getattr(config.get_text_config(decoder=True), "kv_lora_rank", None) is not None


def rotation(model: Any, layer: int, start: int, stop: int) -> Tensor | None:
    """Cosine and sine [2, q, rotary_dim] of RoPE at positions start .. stop - 1 in this layer; None without RoPE."""
    decoder = model.get_decoder()
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        return None
    positions = torch.arange(start, stop, device=model.device)[None]
    like = torch.empty(1, 1, dtype=torch.float32, device=model.device)
    keywords = {}
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        keywords["layer_type"] = decoder.config.layer_types[layer]
    cos, sin = rotary(like, positions, **keywords)
    return torch.stack([cos[0], sin[0]])


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer, from the generation config and the tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, (list, tuple)) else [configured]
    return frozenset(i for i in [*ids, getattr(tokenizer, "eos_token_id", None)] if i is not None)


def position_limit(config: Any) -> int:
    """The longest sequence the model was made for, in tokens."""
    return int(config.get_text_config(decoder=True).max_position_embeddings)


def no_grad() -> Any:
    """Gradients off. Not inference mode: its tensors could not be updated by a user's own loop later."""
    return torch.no_grad()
