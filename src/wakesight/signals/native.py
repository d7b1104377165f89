"""What a recurrent layer decides about every token: how much it writes, how much it forgets, how large the write is.

Rows are float32 [token, head, 3]. The gated delta rule updates its state by

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T

so its three numbers are the write gate beta, the log-decay g <= 0 and the norm of v, which is the value after
the short convolution. Mamba-2 updates by S <- exp(-A dt) S + dt x B^T: its numbers are the time step dt, the
log-decay -A dt (A > 0) and the norm of x.

Source: huggingface/transformers `modular_qwen3_next.py`, `modeling_kimi_linear.py`, `modeling_bamba.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from wakesight.signals.precision import working_dtype


def delta_rule(beta: Tensor, g: Tensor, value: Tensor) -> Tensor:
    """beta: [token, head]. g: [token, head], or per channel [token, head, dim] (KDA), then its mean over channels.
    value: [token, head, dim]. Gives float32 [token, head, 3]."""
    return _rows(beta, g.mean(dim=-1) if g.ndim > beta.ndim else g, value)


def mamba2(x: Tensor, dt: Tensor, decay: Tensor, bias: Tensor | None, limits: tuple[float, float] | None) -> Tensor:
    """x: [token, head, dim] after convolution and SiLU. dt: [token, head] before bias and softplus.
    decay: [head], the negative numbers -A. bias: [head]. limits: what the time step is clamped to, None for
    nothing. Gives float32 [token, head, 3]."""
    dtype = working_dtype(dt.dtype)
    step = dt.to(dtype) if bias is None else dt.to(dtype) + bias.to(dtype)
    step = F.softplus(step)
    if limits is not None:
        step = step.clamp(*limits)
    return _rows(step, step * decay.to(dtype), x)


def _rows(write: Tensor, decay: Tensor, vector: Tensor) -> Tensor:
    rows = torch.empty(*write.shape, 3, dtype=torch.float32, device=write.device)
    rows[..., 0], rows[..., 1] = write, decay
    rows[..., 2] = norms(vector)
    return rows


def norms(vector: Tensor) -> Tensor:
    """[token, head, dim] -> [token, head], in the working precision.

    Behind a convolution neighbouring numbers are of neighbouring tokens; summing with the tokens last is then about
    20 times faster on CPU than `vector_norm`, and a sum over neighbours is slow the other way round.
    """
    dtype = working_dtype(vector.dtype)
    found: Tensor
    if vector.stride(0) != 1:
        found = torch.linalg.vector_norm(vector, dim=-1, dtype=dtype)
    else:
        found = vector.permute(1, 2, 0).to(dtype).square().sum(dim=1).sqrt().T
    return found
