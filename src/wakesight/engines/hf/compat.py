"""What differs between the transformers versions we support (5.16.1 to 5.24), in one place."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from wakesight.errors import RequestError

OLDEST, NEWEST = Version("5.16.1"), Version("5.25")  # NEWEST is the first one not supported


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


def is_full_attention(layer: Any) -> bool:
    """True for a plain growing K/V layer, the kind we replace by slots."""
    return type(layer) is DynamicLayer


def recurrent_snapshot(layer: Any) -> dict[str, Tensor]:
    """Clones of a recurrent layer's states: "conv.0", "recurrent.0", ..."""
    states: dict[str, Tensor] = {}
    for kind in ("conv", "recurrent"):
        for index, tensor in getattr(layer, f"{kind}_states").items():
            if tensor is not None:
                states[f"{kind}.{index}"] = tensor.clone()
    return states


def recurrent_restore(layer: Any, states: dict[str, Tensor]) -> None:
    """Fill a fresh recurrent layer with clones of a snapshot; the snapshot stays untouched."""
    for key, tensor in states.items():
        kind, _, index = key.partition(".")
        getattr(layer, f"{kind}_states")[int(index)] = tensor.clone()
        getattr(layer, f"is_{kind}_states_initialized")[int(index)] = True
        layer.has_previous_state[int(index)] = True
        if kind == "conv":
            layer.conv_kernel_size[int(index)] = tensor.shape[-1]
            layer.dtype, layer.device = tensor.dtype, tensor.device


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
