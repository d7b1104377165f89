"""Training: all networks of a layer as one tensor program, one step for all of them at once.

The networks do not know of each other: each has its own first weights (drawn from the seed, its layer and its head),
its own gradient limit, and AdamW works number by number. So it makes no difference to a network which others are
trained beside it, and we take a layer at a time: its inputs are then needed once, shared by all heads, and the largest
matrix product of a step is one [rows, inputs] x [inputs, heads * hidden].

Between epochs, every few seconds, the state goes to the checkpoint. The order of rows in an epoch depends on seed and
epoch alone, so training that was killed and resumed gives the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from wakesight.errors import RequestError
from wakesight.estimator.net import LayerNets, initial
from wakesight.learning.dataset import LayerRows


@dataclass(frozen=True)
class Recipe:
    """The paper's numbers; batch and the constant rate are ours.

    clip: largest gradient norm of one network. epochs and hidden are what a smaller study may change.
    """

    hidden: int = 64
    epochs: int = 12
    batch: int = 4096
    lr: float = 2e-3
    weight_decay: float = 1e-2
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden", "epochs", "batch"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class Checkpoint:
    """Where the unfinished training of one unit is kept.

    unit: names it; a checkpoint of another one is ignored. every_s: seconds between two writings, which come after
    whole epochs.
    """

    path: Path
    unit: str
    every_s: float = 10.0


def train(
    rows: LayerRows,
    chosen: Tensor,
    recipe: Recipe,
    checkpoint: Checkpoint | None = None,
    on_epoch: Callable[[int], None] | None = None,
) -> LayerNets:
    """Fit the networks of one layer on the chosen rows (int64 indices). on_epoch: called with the epoch done, from 1.

    Binary cross-entropy on logits against the label, mean over the rows of a batch; the last batch may be smaller.
    """
    if not len(chosen):
        raise RequestError("there are no rows to train on; label more documents or more than one corpus")
    mean, std = rows.statistics(chosen)
    data = _Standardised(rows, mean, std)
    with torch.enable_grad():
        state = _State(rows, recipe)
        done = 0 if checkpoint is None else state.restore(checkpoint)
        written = time.monotonic()
        for epoch in range(done, recipe.epochs):
            noise = torch.Generator().manual_seed((recipe.seed * 1_000_003 + epoch) % 2**63)  # torch takes no more
            order = chosen[torch.randperm(len(chosen), generator=noise)]
            for batch in torch.split(order, recipe.batch):
                state.step(*data.batch(batch))
            due = checkpoint is not None and time.monotonic() - written >= checkpoint.every_s
            if checkpoint is not None and due and epoch + 1 < recipe.epochs:
                state.save(checkpoint, epoch + 1)
                written = time.monotonic()
            if on_epoch is not None:
                on_epoch(epoch + 1)
    return state.nets(mean, std)


class _Standardised:
    """Rows in units of the training rows' spread; whole if they were copied anyway, batch by batch otherwise."""

    def __init__(self, rows: LayerRows, mean: Tensor, std: Tensor) -> None:
        self.rows = rows
        shared = rows.shared.shape[1]
        self.mean, self.std = mean[0, :shared], std[0, :shared]
        self.own_mean, self.own_std = mean[:, None, shared:], std[:, None, shared:]

    def batch(self, where: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        shared = self.rows.shared[where].sub_(self.mean).div_(self.std)
        own = None if self.rows.own is None else (self.rows.own[:, where] - self.own_mean) / self.own_std
        return shared, own, self.rows.label[:, where]


class _State:
    """Weights and optimiser of one layer's networks.

    shared: [shared input, head * hidden], own: [head, own input, hidden], the rest as in `LayerNets`.
    """

    def __init__(self, rows: LayerRows, recipe: Recipe) -> None:
        self.recipe = recipe
        self.heads = len(rows.label)
        shared = rows.shared.shape[1]
        drawn = [
            initial(1, rows.inputs, recipe.hidden, torch.Generator().manual_seed(_seed(recipe.seed, rows.layer, head)))
            for head in range(self.heads)
        ]
        first, first_bias, second, second_bias = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        self.weights: dict[str, Tensor] = {
            "shared": first[:, :shared].transpose(0, 1).flatten(1).contiguous(),
            "own": first[:, shared:].contiguous(),
            "first_bias": first_bias,
            "second": second,
            "second_bias": second_bias,
        }
        for weight in self.weights.values():
            weight.requires_grad_()
        self.optimiser = torch.optim.AdamW(
            self.weights.values(), lr=recipe.lr, weight_decay=recipe.weight_decay, foreach=True
        )

    def logits(self, shared: Tensor, own: Tensor | None) -> Tensor:
        """[kv_head, row] from standardised inputs."""
        inner = (shared @ self.weights["shared"]).view(len(shared), self.heads, -1).transpose(0, 1)
        if own is not None:
            inner = torch.baddbmm(inner, own, self.weights["own"])
        inner = torch.relu(inner + self.weights["first_bias"][:, None])
        return (inner * self.weights["second"][:, None]).sum(dim=2) + self.weights["second_bias"][:, None]

    def step(self, shared: Tensor, own: Tensor | None, label: Tensor) -> None:
        losses = F.binary_cross_entropy_with_logits(self.logits(shared, own), label, reduction="none").mean(dim=1)
        self.optimiser.zero_grad(set_to_none=True)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        self._clip()
        self.optimiser.step()

    @torch.no_grad()
    def _clip(self) -> None:
        """Every network's gradient to a norm of at most `clip`."""
        squares = torch.zeros(self.heads)
        for name, weight in self.weights.items():
            if weight.grad is not None:
                squares += self._by_head(name, weight.grad).square().sum(dim=1)
        scale = (self.recipe.clip / (squares.sqrt() + 1e-6)).clamp_max(1.0)
        for name, weight in self.weights.items():
            if weight.grad is not None:
                per_column = scale.repeat_interleave(self.recipe.hidden) if name == "shared" else None
                weight.grad.mul_(scale.view(-1, *[1] * (weight.dim() - 1)) if per_column is None else per_column)

    def _by_head(self, name: str, tensor: Tensor) -> Tensor:
        """[head, numbers of that head's network]."""
        if name == "shared":
            return tensor.view(len(tensor), self.heads, -1).transpose(0, 1).reshape(self.heads, -1)
        return tensor.reshape(self.heads, -1)

    def nets(self, mean: Tensor, std: Tensor) -> LayerNets:
        plain = {name: weight.detach() for name, weight in self.weights.items()}
        shared = plain["shared"].view(-1, self.heads, self.recipe.hidden).transpose(0, 1)
        first = torch.cat([shared, plain["own"]], dim=1).contiguous()
        return LayerNets(
            mean, std, first, plain["first_bias"], plain["second"], plain["second_bias"], shared=shared.shape[1]
        )

    def save(self, checkpoint: Checkpoint, epoch: int) -> None:
        tensors = {name: weight.detach() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            tensors |= {f"{name}.{key}": value for key, value in self.optimiser.state[weight].items()}
        write(checkpoint.path, tensors, {"unit": checkpoint.unit, "epoch": str(epoch)})

    def restore(self, checkpoint: Checkpoint) -> int:
        """The epochs that are done already."""
        if not checkpoint.path.exists():
            return 0
        with safe_open(checkpoint.path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("unit") != checkpoint.unit:
                return 0
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        for name, weight in self.weights.items():
            weight.data.copy_(tensors[name])
            start = f"{name}."
            self.optimiser.state[weight] = {
                key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)
            }
        return int(about["epoch"])


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """A safetensors file under a temporary name, then renamed: a killed process leaves the old one or the new one."""
    scratch = path.with_name(f".{path.name}.tmp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, scratch, metadata=dict(about))
    scratch.replace(path)


def _seed(seed: int, layer: int, head: int) -> int:
    return ((seed * 1_000_003 + layer) * 1_009 + head) % 2**63  # torch takes no more
