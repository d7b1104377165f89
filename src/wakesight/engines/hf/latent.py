"""Queries and keys whose dot products are the attention logits, for plain and for latent attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wakesight.cache.slots import Slots


def as_stored(module: Any, query: Tensor, slots: Slots) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Plain attention: the stored keys, per KV head [held, dim], and the queries as they are."""
    return query, tuple(slots.strips("key"))


def absorbed(module: Any, query: Tensor, slots: Slots) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Latent attention (MLA): one shared head of keys [latent | rotary part].

    The cache holds c (as "key") and the rotary part r (as "value"); head h's key is [W_h c, r]. Then
    q . [W_h c, r] = (W_h^T q_c) . c + q_r . r, so the projection moves into the query and all heads share
    the stored row. query: [query_head, q, nope + rope] -> [query_head, q, latent + rope].
    Source: DeepSeek-V2 (arXiv 2405.04434), weight absorption.
    """
    heads = query.shape[0]
    nope = module.qk_nope_head_dim
    weight = module.kv_b_proj.weight.view(heads, -1, module.kv_lora_rank)[:, :nope]  # [head, nope, latent]
    latent = torch.einsum("hqn,hnl->hql", query[..., :nope], weight)
    return torch.cat([latent, query[..., nope:]], dim=-1), stored(slots)


def stored(slots: Slots) -> tuple[Tensor, ...]:
    """The shared keys of latent attention: [held, latent + rope]."""
    return (torch.cat([slots.strip("key", 0), slots.strip("value", 0)], dim=-1),)
