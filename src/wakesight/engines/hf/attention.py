"""The attention function we register with transformers.

transformers builds one mask for all layers. Ours comes from the layer's own slots: new tokens are the
last slots, everything before them is visible, among themselves they are causal (bottom-right):

    slots   0 .. past-1 | past .. past+q-1        query j sees slots 0 .. past+j

The layer that stored these keys a moment ago (`layers.take_pending`) attends row by row and head by head
where they differ; keys of any other cache are passed on to transformers' own function, so a model keeps
working with other caches.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from wakesight.engines.hf.layers import OwnMask, take_pending

SDPA, EAGER = "wakesight_sdpa", "wakesight_eager"
_UNKNOWN = ("softcap", "s_aux")  # changes to the softmax that our kernels do not make


def sdpa(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
    """transformers' attention interface on torch's fused kernel. KV heads are never repeated."""
    layer = take_pending()
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    _check(kwargs)
    return layer.attend(module, query, key, value, kwargs["scaling"], attend).transpose(1, 2).contiguous(), None


def eager(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
    """The same through plain matrix products, softmax in float32."""
    layer = take_pending()
    if layer is None:
        return eager_attention_forward(module, query, key, value, attention_mask, **kwargs)
    _check(kwargs)
    return layer.attend(module, query, key, value, kwargs["scaling"], attend_eager).transpose(1, 2).contiguous(), None


def _check(kwargs: dict[str, Any]) -> None:
    if changed := [name for name in _UNKNOWN if kwargs.get(name) is not None]:
        raise RuntimeError(f"this model's attention uses {changed[0]}, which wakesight's kernels do not know")


def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None = None) -> Tensor:
    """query [batch, query_head, q, dim], key and value [batch, kv_head, slot, dim] -> [batch, query_head, q, dim].

    window: a query sees its own slot and the window - 1 before it; None sees everything before it.
    One query token: the group's heads become query rows of their KV head, which is then read once.
    Several behind a past, on CPU: past and tail apart, merged by their log-sum-exp, because torch's CPU
    kernel skips hidden blocks only without a mask. Elsewhere: one call with the bottom-right mask.
    """
    new, slots = query.shape[2], key.shape[2]
    if window is not None and slots > window:
        mask = causal_tail(new, slots, query.device, query.dtype, window)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    if new == 1:
        packed = _packed(query, key.shape[1])
        return F.scaled_dot_product_attention(packed, key, value, scale=scaling).reshape(*query.shape[:3], -1)
    if new == slots:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    if query.device.type == "cpu" and key.shape[-1] == value.shape[-1]:
        return _past_and_tail(query, key, value, scaling)
    mask = causal_tail(new, slots, query.device, query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)


def _past_and_tail(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    flash = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    )  # gives the log-sum-exp, which the public call hides
    past = key.shape[2] - query.shape[2]
    before, weight = flash(_packed(query, key.shape[1]), key[:, :, :past], value[:, :, :past], scale=scaling)
    tail, tail_weight = flash(query, key[:, :, past:], value[:, :, past:], is_causal=True, scale=scaling)
    share = torch.sigmoid(weight.reshape(tail_weight.shape) - tail_weight)  # the past's part of the softmax
    return torch.lerp(tail, before.reshape(tail.shape), share.unsqueeze(-1).to(tail.dtype))


def _packed(query: Tensor, kv_heads: int) -> Tensor:
    """[batch, query_head, q, dim] -> [batch, kv_head, group * q, dim]: no KV head is repeated."""
    batch, _, _, dim = query.shape
    return query.reshape(batch, kv_heads, -1, dim)


def attend_eager(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None = None) -> Tensor:
    """Reference form of `attend`, grouped instead of repeated."""
    batch, heads, new, _ = query.shape
    logits = (_packed(query, key.shape[1]) @ key.transpose(2, 3) * scaling).view(batch, heads, new, -1)
    if new > 1 or window is not None:
        logits = logits + causal_tail(new, key.shape[2], query.device, query.dtype, window)
    weights = logits.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    output = weights.view(batch, key.shape[1], -1, key.shape[2]) @ value
    return output.view(batch, heads, new, -1)


def causal_tail(new: int, slots: int, device: torch.device, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Additive mask [new, slots]: 0 where query j sees the slot (slot <= slots - new + j), -inf elsewhere.

    window: slots at or below slots - new + j - window are hidden too.
    """
    hidden = torch.ones(new, new, dtype=torch.bool, device=device).triu(1)
    mask = torch.zeros(new, slots, dtype=dtype, device=device)
    mask[:, slots - new :].masked_fill_(hidden, float("-inf"))
    if window is not None:
        mask.masked_fill_(torch.ones_like(mask, dtype=torch.bool).tril(slots - new - window), float("-inf"))
    return mask


def _mask_function(stock: Any) -> Any:
    def build(*args: Any, **kwargs: Any) -> Any:
        return None if isinstance(kwargs.get("kv_length"), OwnMask) else stock(*args, **kwargs)

    return build


def register() -> None:
    """Make both functions known to transformers under our own names; nothing of its own is replaced."""
    AttentionInterface.register(SDPA, sdpa)
    AttentionInterface.register(EAGER, eager)
    AttentionMaskInterface.register(SDPA, _mask_function(sdpa_mask))
    AttentionMaskInterface.register(EAGER, _mask_function(eager_mask))
