"""One token times a weight matrix, on every core.

Decoding reads all weights once per token and computes next to nothing. On CPU the float32 product behind
`torch.nn.Linear` does that on one core when there is one row; as a batch of row blocks it runs on all of
them. Every output is the same dot product, up to rounding. Not our subject, and only worth its few lines
because a decode step is otherwise half waiting (`wakesight bench decode` prints what it brings).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def one_token(weight: Tensor, bias: Tensor | None, blocks: int, x: Tensor) -> Tensor:
    """F.linear(x, weight, bias); for a single row, as `blocks` products side by side.

    weight: [out, in] with `out` a multiple of `blocks`. x: [..., in].
    """
    if x.numel() != weight.shape[1]:
        return F.linear(x, weight, bias)
    rows = x.reshape(1, 1, -1).expand(blocks, 1, -1)
    product = torch.bmm(rows, weight.view(blocks, -1, weight.shape[1]).transpose(1, 2)).view(*x.shape[:-1], -1)
    return product if bias is None else product + bias


def split_one_token(model: nn.Module) -> Callable[[], None]:
    """Give the float32 CPU linear layers of `model` the product above; returns the function that undoes it."""
    blocks = torch.get_num_threads()
    changed: list[Any] = []
    if blocks > 1:
        for module in model.modules():
            if type(module) is nn.Linear and _fits(module, blocks):
                module.forward = functools.partial(_forward, module, blocks)  # type: ignore[method-assign]
                changed.append(module)

    def restore() -> None:
        for module in changed:
            del module.forward

    return restore


def _forward(module: nn.Linear, blocks: int, x: Tensor) -> Tensor:
    return one_token(module.weight, module.bias, blocks, x)


def _fits(module: nn.Linear, blocks: int) -> bool:
    weight = module.weight
    return (
        "forward" not in vars(module)  # accelerate and others hook there
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and weight.shape[0] % blocks == 0
    )
