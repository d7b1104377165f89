"""What a model gets so that `model.generate(question_ids, cache)` continues a session correctly.

All on this one instance and all undone by `detach`: our attention function in its config, a forward
pre-hook that sets logical positions, and a `prepare_inputs_for_generation` that does not cut the
question short. With any other cache each of them steps aside. On CPU the linear layers also get
`linear.py`'s one-token product.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from wakesight.engines.hf import attention, compat, linear
from wakesight.engines.hf.cache import SessionCache, is_question_only
from wakesight.errors import RequestError

_CACHE_NAMES = ("cache", "past_key_values")


def attach(model: Any, implementation: str) -> Callable[[], None]:
    """Prepare `model` (implementation: "sdpa" or "eager"); returns the function that undoes it."""
    attention.register()
    before = model.config._attn_implementation
    chosen = {"sdpa": attention.SDPA, "eager": attention.EAGER}.get(implementation)
    if chosen is None:
        raise RequestError(f"attention {implementation!r} is unknown; use sdpa or eager")
    model.set_attn_implementation(chosen)
    hook = model.register_forward_pre_hook(_logical_positions, with_kwargs=True)
    restore_linear = linear.split_one_token(model)
    own_method = "prepare_inputs_for_generation" in vars(model)
    stock = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = types.MethodType(_prepare(stock), model)

    def detach() -> None:
        hook.remove()
        restore_linear()
        if own_method:
            model.prepare_inputs_for_generation = stock
        else:
            del model.prepare_inputs_for_generation
        model.set_attn_implementation(before)

    return detach


def _session_cache(kwargs: dict[str, Any]) -> SessionCache | None:
    found = next((kwargs[name] for name in _CACHE_NAMES if isinstance(kwargs.get(name), SessionCache)), None)
    return found


def _logical_positions(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cache = _session_cache(kwargs)
    if cache is None:
        return None
    inputs = kwargs.get("input_ids", args[0] if args else None)
    if inputs is None:
        inputs = kwargs["inputs_embeds"]
    if inputs.shape[0] != 1:
        raise RequestError(
            f"this cache holds one sequence, not a batch of {inputs.shape[0]}; "
            "call generate with one question, or take one cache() for each"
        )
    start = cache.logical_length
    positions = torch.arange(start, start + inputs.shape[1], device=inputs.device)[None]
    return args, {**kwargs, "position_ids": positions, "attention_mask": None}


def _prepare(stock: Any) -> Any:
    def prepare_inputs_for_generation(
        self: Any, input_ids: Any, next_sequence_length: Any = None, **kwargs: Any
    ) -> Any:
        cache = _session_cache(kwargs)
        if cache is not None and kwargs.get("is_first_iteration"):
            if not is_question_only(cache, input_ids[0].tolist()):
                raise RequestError(
                    f"the ids given to generate start with the {len(cache.tokens)} context tokens that this cache "
                    "already holds; pass the question's ids only"
                )
            next_sequence_length = None
        return stock(input_ids, next_sequence_length=next_sequence_length, **kwargs)

    return prepare_inputs_for_generation


def forward_keywords(module: Any, cache: SessionCache) -> dict[str, Any]:
    """Arguments of a forward pass that continues `cache`, under the names this transformers knows."""
    return {compat.cache_keyword(module): cache, "use_cache": True}
