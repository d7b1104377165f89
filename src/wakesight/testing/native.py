"""The native signals worked out again in float64, from the input of a recurrent module and its weights.

Shares nothing with the recording: whole sequences, no kernel, the convolution as a loop over its taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, softplus

from wakesight.models.families import family_of


def recurrent_module(layer: Any) -> Any:
    """The module of a decoder layer that holds a recurrence."""
    return next(module for module in layer.modules() if hasattr(module, "conv1d"))


def native(model: Any, module: Any, hidden: Tensor) -> Tensor:
    """hidden: [token, hidden], all that ever entered `module`. Gives float64 [token, head, 3]."""
    family = family_of(model.config)
    hidden = hidden.double()
    if family.native_signals == "mamba2":
        return _mamba2(module, hidden)
    if family.native_signals == "kda":
        gate, heads = module.forget_gate, module.num_heads
        raw = _times(gate.f_b_proj, _times(gate.f_a_proj, hidden)) + gate.dt_bias.double()
        rates = gate.A_log.double().reshape(heads).exp()
        decay = -(rates[:, None] * softplus(raw.view(-1, heads, module.head_dim))).mean(dim=-1)
        value = _convolved(module, _times(module.v_proj, hidden), 2 * module.qkv_dim)
        return _rows(torch.sigmoid(_times(module.b_proj, hidden)), decay, value)
    write, forget, value = _projected(module, hidden)
    beta = torch.sigmoid(write) * (2 if getattr(module, "allow_neg_eigval", False) else 1)
    g = -module.A_log.double().exp() * softplus(forget + module.dt_bias.double())
    return _rows(beta, g, _convolved(module, value, 2 * module.key_dim))


def _projected(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Raw write and forget gates [token, head] and values [token, channel] of a gated delta net."""
    if hasattr(module, "in_proj_qkvz"):  # fused by key head: q, k, v, z and b, a
        share = module.num_v_heads // module.num_k_heads
        qkvz = _times(module.in_proj_qkvz, hidden).view(len(hidden), module.num_k_heads, -1)
        first = 2 * module.head_k_dim
        value = qkvz[:, :, first : first + share * module.head_v_dim].flatten(1)
        gates = _times(module.in_proj_ba, hidden).view(len(hidden), module.num_k_heads, 2 * share)
        return gates[:, :, :share].flatten(1), gates[:, :, share:].flatten(1), value
    if hasattr(module, "in_proj_qkv"):
        value = _times(module.in_proj_qkv, hidden)[:, 2 * module.key_dim :]
        return _times(module.in_proj_b, hidden), _times(module.in_proj_a, hidden), value
    return tuple(_times(proj, hidden) for proj in (module.b_proj, module.a_proj, module.v_proj))  # type: ignore[return-value]


def _mamba2(module: Any, hidden: Tensor) -> Tensor:
    inner, heads = module.intermediate_size, module.num_heads
    hidden = hidden * getattr(module, "ssm_in_multiplier", 1.0)
    projected = _times(module.in_proj, hidden)
    if hasattr(module, "mup_vector"):
        projected = projected * module.mup_vector.double()[0]
    low, high = module.time_step_limit
    step = softplus(projected[:, -heads:] + module.dt_bias.double()).clamp(low, high)
    return _rows(step, -module.A_log.double().exp() * step, _convolved(module, projected[:, inner : 2 * inner], 0))


def _times(projection: Any, x: Tensor) -> Tensor:
    return linear(x, projection.weight.double(), None if projection.bias is None else projection.bias.double())


def _convolved(module: Any, x: Tensor, first: int) -> Tensor:
    """x: [token, channel], the convolution's channels from `first`; causal, then SiLU."""
    weight = module.conv1d.weight.double()[first : first + x.shape[1], 0]
    taps = weight.shape[1]
    padded = torch.cat([x.new_zeros(taps - 1, x.shape[1]), x])
    total = torch.stack([padded[tap : tap + len(x)] * weight[:, tap] for tap in range(taps)]).sum(dim=0)
    if module.conv1d.bias is not None:
        total = total + module.conv1d.bias.double()[first : first + x.shape[1]]
    return total * torch.sigmoid(total)


def _rows(write: Tensor, decay: Tensor, vector: Tensor) -> Tensor:
    vectors = vector.view(*write.shape, -1)
    return torch.stack([write, decay, vectors.square().sum(dim=-1).sqrt()], dim=-1)
