"""Rotation and its inverse, against the angles written out and by round trip."""

from __future__ import annotations

import math

import pytest
import torch

from wakesight.signals.rope import rotate, unrotate

SHAPES = [(16, 16), (16, 8), (16, 2), (6, 0)]  # (dim, rotary_dim)


def angles(positions: int, rotary_dim: int, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [position, rotary_dim] in float64, both halves alike, times an attention factor."""
    half = rotary_dim // 2
    speeds = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / max(half, 1))
    turns = torch.arange(positions, dtype=torch.float64)[:, None] * speeds
    turns = torch.cat([turns, turns], dim=-1)
    return turns.cos() * factor, turns.sin() * factor


@pytest.mark.parametrize(("dim", "rotary_dim"), SHAPES)
def test_rotation_turns_every_pair_by_its_angle_and_leaves_the_rest(dim, rotary_dim):
    x = torch.randn(3, 5, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    half = rotary_dim // 2

    found = rotate(x, *angles(5, rotary_dim))

    for head in range(3):
        for position in range(5):
            row = x[head, position].tolist()
            for pair in range(half):
                turn = position * 10000.0 ** -(pair / half)
                a, b = row[pair], row[pair + half]
                row[pair] = a * math.cos(turn) - b * math.sin(turn)
                row[pair + half] = a * math.sin(turn) + b * math.cos(turn)
            assert found[head, position].tolist() == pytest.approx(row, abs=1e-12)


@pytest.mark.parametrize("factor", [1.0, 0.7, 1.35])
@pytest.mark.parametrize(("dim", "rotary_dim"), SHAPES)
def test_what_was_rotated_can_be_rotated_back(dim, rotary_dim, factor):
    x = torch.randn(2, 40, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cos, sin = angles(40, rotary_dim, factor)

    torch.testing.assert_close(unrotate(rotate(x, cos, sin), cos, sin), x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rotate(unrotate(x, cos, sin), cos, sin), x, rtol=1e-12, atol=1e-12)


def test_rounded_cosines_are_inverted_too():
    """A bfloat16 model rotates with cosines whose squares do not add up to 1."""
    x = torch.randn(2, 40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    cos, sin = (part.bfloat16().double() for part in angles(40, 16))

    torch.testing.assert_close(unrotate(rotate(x, cos, sin), cos, sin), x, rtol=1e-12, atol=1e-12)


def test_one_rotation_serves_all_rows():
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    cos, sin = angles(6, 4)

    assert torch.equal(rotate(x, cos[5], sin[5]), rotate(x, cos[5].expand(3, -1), sin[5].expand(3, -1)))
