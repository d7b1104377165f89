"""Rotary position embedding and its inverse, for the layout that pairs the front half with the back half.

cos and sin cover `rotary_dim` dims, twice the same numbers; of x, dims 0 .. rotary_dim are rotated, dim i
with dim i + rotary_dim / 2, and the dims beyond pass through (partial RoPE). A scaling factor s folded
into cos and sin (YaRN's attention factor: cos^2 + sin^2 = s^2) is applied by `rotate` and taken back by
`unrotate`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [..., token, dim]; cos, sin: [token, rotary_dim] or [rotary_dim]. Gives x as attention would see it.

    Linear in (cos, sin): with their mean over positions this is the mean rotation.
    """
    front, back, rest = _parts(x, cos.shape[-1])
    (cos_front, cos_back), (sin_front, sin_back) = cos.chunk(2, dim=-1), sin.chunk(2, dim=-1)
    return torch.cat([front * cos_front - back * sin_front, back * cos_back + front * sin_back, rest], dim=-1)


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The y with rotate(y, cos, sin) = x; shapes as in `rotate`.

    Divides by cos^2 + sin^2 of the very numbers given, so cosines rounded to bfloat16 are inverted too.
    """
    front, back, rest = _parts(x, cos.shape[-1])
    (cos_front, cos_back), (sin_front, sin_back) = cos.chunk(2, dim=-1), sin.chunk(2, dim=-1)
    squared = cos_front * cos_back + sin_front * sin_back
    return torch.cat(
        [(front * cos_back + back * sin_front) / squared, (back * cos_front - front * sin_back) / squared, rest],
        dim=-1,
    )


def _parts(x: Tensor, rotary_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    half = rotary_dim // 2
    return x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
