"""An attention layer's output projection, taken apart by query head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from wakesight.errors import RequestError

_IN = ("q_proj", "qkv_proj")  # what marks a module as attention
_OUT = ("o_proj", "out_proj")
_ADVICE = "label documents with a model of plain attention"


def output_projection(decoder: Any, index: int, value_dim: int, name: str) -> Tensor:
    """W_O of the model's own layer `index` as [hidden, query_head, value_dim], a view of the weights.

    name: of the model. Raises RequestError for a layer whose attention is not plain softmax, and for weights that
    are quantised, adapted or of a form we do not know, since their product would be another one.
    """
    module = attention_module(decoder.layers[index], index, name)
    softcap, sinks = getattr(module.config, "attn_logit_softcapping", None), getattr(module, "sinks", None)
    if softcap is not None or sinks is not None:
        what = "a softcap" if softcap is not None else "sinks"
        raise RequestError(f"the attention of {name} has {what}, so its utility has no closed form; {_ADVICE}")
    linear = output_linear(module)
    if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
        kind = type(linear).__name__
        raise RequestError(
            f"the output projection of layer {index} of {name} is a {kind} whose weights cannot be read; load plain "
            "weights (float32, bfloat16 or float16), adapters merged"
        )
    hidden, width = linear.weight.shape
    if width % value_dim:
        raise RequestError(
            f"the output projection of layer {index} of {name} reads {width} numbers, which are no heads of "
            f"{value_dim}; {_ADVICE}"
        )
    return linear.weight.detach().view(hidden, -1, value_dim)


def output_linear(module: Any) -> Any:
    """The module W_O of an attention module, whatever its form."""
    return next(getattr(module, out) for out in _OUT if hasattr(module, out))


def attention_module(layer: Any, index: int, name: str) -> Any:
    """The attention module inside decoder layer `index`, told by its projections. Raises RequestError if unclear."""
    found = [
        module
        for module in layer.modules()
        if any(hasattr(module, part) for part in _IN) and any(hasattr(module, part) for part in _OUT)
    ]
    if len(found) != 1:
        raise RequestError(
            f"layer {index} of {name} has {len(found)} modules that look like attention, not one; {_ADVICE}"
        )
    return found[0]
