"""Ridge regression on the same rows: what a straight line can do.

Closed form from sums that can be added: count, sums of x and y, products x x^T and x y. A leave-one-corpus-out table so
needs one pass over the rows for all folds, and a held-out loss is a formula, no second pass. All in float64, on inputs
shifted by a common point so that the products do not cancel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wakesight.errors import RequestError
from wakesight.estimator.net import STD_FLOOR

LAMBDAS = (1e-1, 1e0, 1e1, 1e2, 1e3, 1e4)
PIECE = 1 << 14  # rows in float64 at a time


@dataclass(frozen=True, eq=False)
class Sums:
    """What ridge needs of some rows. x: [input], y: [head], xx: [input, input], xy: [input, head], yy: [head]."""

    count: int
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.count + other.count, self.x + other.x, self.y + other.y, self.xx + other.xx, self.xy + other.xy,
            self.yy + other.yy,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Line:
    """y = x @ weights + bias on raw inputs: weights float64 [input, head], bias [head]. penalty: per head."""

    weights: Tensor
    bias: Tensor
    penalty: tuple[float, ...]

    def __call__(self, inputs: Tensor) -> Tensor:
        """[head, row] from raw inputs [row, input]."""
        return (inputs.double() @ self.weights + self.bias).T


def sums(inputs: Tensor, labels: Tensor, chosen: Tensor, shift: Tensor) -> Sums:
    """Of the chosen rows of inputs [row, input] and labels [head, row]. shift: float64 [input], off the inputs."""
    width, heads = inputs.shape[1], len(labels)
    shapes = ((width,), (heads,), (width, width), (width, heads), (heads,))
    x_sum, y_sum, xx, xy, yy = (torch.zeros(*shape, dtype=torch.float64) for shape in shapes)
    for piece in torch.split(chosen, PIECE):
        x, y = inputs[piece].double() - shift, labels[:, piece].double().T
        x_sum += x.sum(dim=0)
        y_sum += y.sum(dim=0)
        xx += x.T @ x
        xy += x.T @ y
        yy += y.square().sum(dim=0)
    return Sums(len(chosen), x_sum, y_sum, xx, xy, yy)


def fit(train: Sums, held_out: Sums, shift: Tensor, lambdas: Sequence[float] = LAMBDAS) -> Line:
    """The penalty of every head is the one with the least squared error on `held_out`; then all rows are used.

    Inputs are standardised by the statistics of the rows in use; the intercept is not penalised.
    """
    if train.count < 2 or held_out.count < 1:
        raise RequestError("ridge needs training and held-out documents; label more than one document per corpus")
    errors = torch.stack([_error(held_out, *_solve(train, [lam] * len(train.y))) for lam in lambdas])
    penalty = [lambdas[int(at)] for at in errors.argmin(dim=0)]
    weights, bias = _solve(train + held_out, penalty)
    return Line(weights, bias - shift @ weights, tuple(penalty))


def held_out_tenth(ids: Sequence[str], seed: int = 0) -> list[bool]:
    """Which documents choose the penalty: a tenth, at least one, by a hash of seed and id; never all of them."""
    keys = [hashlib.sha256(f"{seed}/held-out/{one}".encode()).digest() for one in ids]
    count = min(max(1, len(ids) // 10), len(ids) - 1)
    chosen = set(sorted(range(len(ids)), key=lambda index: keys[index])[:count])
    return [index in chosen for index in range(len(ids))]


def _solve(rows: Sums, penalty: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Weights [input, head] and bias [head] on shifted inputs."""
    mean, target = rows.x / rows.count, rows.y / rows.count
    covariance = rows.xx - rows.count * torch.outer(mean, mean)
    cross = rows.xy - rows.count * torch.outer(mean, target)
    std = (covariance.diagonal() / rows.count).clamp_min(0).sqrt().clamp_min(STD_FLOOR)
    gram, cross = covariance / torch.outer(std, std), cross / std[:, None]
    weights = torch.empty_like(cross)
    identity = torch.eye(len(std), dtype=torch.float64)
    for lam in sorted(set(penalty)):
        heads = torch.tensor([one == lam for one in penalty])
        weights[:, heads] = torch.linalg.solve(gram + lam * identity, cross[:, heads])
    weights = weights / std[:, None]
    return weights, target - mean @ weights


def _error(rows: Sums, weights: Tensor, bias: Tensor) -> Tensor:
    """Mean squared error per head, from the sums alone."""
    quadratic = (weights * (rows.xx @ weights)).sum(dim=0) + 2 * bias * (rows.x @ weights) + rows.count * bias.square()
    linear = (weights * rows.xy).sum(dim=0) + bias * rows.y
    return (quadratic - 2 * linear + rows.yy) / rows.count
