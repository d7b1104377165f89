"""The networks themselves: one per (attention layer, KV head), inputs -> 64 -> 1, ReLU, sigmoid.

A layer's networks are read together. Inputs that all heads share meet one matrix [inputs, heads * 64]; what belongs to
a head is a batched product beside it. Standardisation costs nothing but one subtraction: the scale is folded into the
first weights once, and so is what is left of the mean after the layer's common centre has been taken off.
`reference.py` computes the same with one network at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from wakesight.core import ModelGeometry, Signals
from wakesight.errors import RequestError
from wakesight.estimator.features import FeatureSpec, LayerFeatures, Window

STD_FLOOR = 1e-6
TENSORS = ("mean", "std", "first", "first_bias", "second", "second_bias")


@dataclass(frozen=True, eq=False)
class LayerNets:
    """The networks of one attention layer, float32, one row per KV head.

    mean, std: [kv_head, input], of the training rows. first: [kv_head, input, hidden], first_bias: [kv_head, hidden].
    second: [kv_head, hidden], second_bias: [kv_head]. Inputs are standardised: (x - mean) / std.
    shared: the first inputs that are the same for all heads.
    """

    mean: Tensor
    std: Tensor
    first: Tensor
    first_bias: Tensor
    second: Tensor
    second_bias: Tensor
    shared: int = 0

    def __post_init__(self) -> None:
        if self.first.dim() != 3:
            raise RequestError(f"the first weights have the shape {list(self.first.shape)}; give [head, input, hidden]")
        heads, inputs, hidden = self.first.shape
        wanted = ([heads, inputs], [heads, inputs], [heads, inputs, hidden], [heads, hidden], [heads, hidden], [heads])
        for name, shape in zip(TENSORS, wanted, strict=True):
            if list(getattr(self, name).shape) != shape:
                raise RequestError(f"{name} has the shape {list(getattr(self, name).shape)}, expected {shape}")

    @property
    def heads(self) -> int:
        return self.first.shape[0]

    @property
    def inputs(self) -> int:
        return self.first.shape[1]

    @property
    def parameters(self) -> int:
        """Trained numbers; mean and std are not counted."""
        return sum(getattr(self, name).numel() for name in TENSORS[2:])

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in TENSORS}


@dataclass(frozen=True, eq=False)
class Reader:
    """Predicts the utility of every entry from what a forward pass gave away.

    windows: per attention layer the recurrent layers it reads. layers: its networks, per attention layer.
    """

    features: FeatureSpec
    windows: tuple[Window, ...]
    layers: tuple[LayerNets, ...]
    _folded: dict[torch.device, tuple[_Folded, ...]] = field(default_factory=dict, repr=False)

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def reads(self) -> tuple[str, ...]:
        return self.features.reads

    def scores(self, signals: Signals, chunk: int = 4096) -> tuple[Tensor, ...]:
        """The predicted share of its head's largest utility: per attention layer float32 [kv_head, token] in [0, 1].

        chunk: tokens read at a time; what is needed besides the result grows with it, not with the context.
        Raises RequestError for a signal that was not recorded or that has another shape than in training.
        """
        if chunk < 1:
            raise RequestError(f"chunk={chunk} must be at least 1; 4096 is the default")
        return tuple(self.layer_scores(signals, layer, chunk) for layer in range(len(self.layers)))

    @torch.no_grad()
    def layer_scores(self, signals: Signals, layer: int, chunk: int = 4096) -> Tensor:
        """`scores` of one attention layer."""
        opened = self.features.open(signals, layer, self.windows[layer])
        folded = self._on(opened.device)[layer]
        made = torch.empty(self.layers[layer].heads, signals.tokens, device=opened.device)
        for start in range(0, signals.tokens, chunk):
            stop = min(start + chunk, signals.tokens)
            made[:, start:stop] = folded.logits(*_inputs(opened, start, stop, self.layers[layer], layer))
        return made.sigmoid_()

    def _on(self, device: torch.device) -> tuple[_Folded, ...]:
        if device not in self._folded:
            self._folded[device] = tuple(_fold(nets, device) for nets in self.layers)
        return self._folded[device]


class _Folded(NamedTuple):
    """A layer's networks with the standardisation inside.

    centre: [shared], taken off the shared inputs. shared: [shared, head * hidden] and own: [kv_head, own, hidden] are
    the first weights over the standard deviation. bias: [kv_head, hidden], with the rest of the means.
    second: [head * hidden, head], block-diagonal. second_bias: [head].
    """

    centre: Tensor
    shared: Tensor
    own: Tensor
    bias: Tensor
    second: Tensor
    second_bias: Tensor

    def logits(self, shared: Tensor, own: Tensor | None) -> Tensor:
        """[kv_head, token] from [token, shared], which is overwritten, and [kv_head, token, own]."""
        heads, hidden = self.bias.shape
        inner = torch.addmm(self.bias.flatten(), shared.sub_(self.centre), self.shared)  # [token, head * hidden]
        if own is not None:
            inner = torch.baddbmm(inner.view(-1, heads, hidden).transpose(0, 1), own, self.own)
            inner = inner.transpose(0, 1).reshape(-1, heads * hidden)
        return torch.addmm(self.second_bias, inner.relu_(), self.second).mT


def _fold(nets: LayerNets, device: torch.device) -> _Folded:
    """In float64, so that one rounding is all that folding costs."""
    mean, std, first = nets.mean.double(), nets.std.double(), nets.first.double()
    scaled = first / std[..., None]
    # heads are trained on the same rows, so their shared means are equal; their average is right even if they are not
    centre = mean[:, : nets.shared].mean(dim=0).float()
    rest = mean.clone()
    rest[:, : nets.shared] -= centre.double()
    bias = nets.first_bias.double() - torch.einsum("hi,hik->hk", rest, scaled)
    parts = (
        centre,
        scaled[:, : nets.shared].transpose(0, 1).flatten(1),
        scaled[:, nets.shared :],
        bias,
        torch.block_diag(*nets.second.double().unsqueeze(-1)),  # type: ignore[no-untyped-call]
        nets.second_bias,
    )
    return _Folded(*(part.to(device, torch.float32).contiguous() for part in parts))


def _inputs(opened: LayerFeatures, start: int, stop: int, nets: LayerNets, layer: int) -> tuple[Tensor, Tensor | None]:
    shared, own = opened.shared(start, stop), opened.own(start, stop)
    found = shared.shape[1], 0 if own is None else own.shape[2]
    heads = nets.heads if own is None else own.shape[0]
    if found != (nets.shared, nets.inputs - nets.shared) or heads != nets.heads:
        raise RequestError(
            f"the signals of attention layer {layer} give {sum(found)} inputs for {heads} KV heads, and the estimator "
            f"was fitted on {nets.inputs} for {nets.heads}; use the artifact of this very model"
        )
    return shared, own


def empty_reader(spec: FeatureSpec, geometry: ModelGeometry, hidden: int = 64, hidden_size: int = 0) -> Reader:
    """A reader of the right shape with random weights, for benches and tests. hidden_size: of a hidden state."""
    noise = torch.Generator().manual_seed(0)
    layers = []
    for layer, heads in enumerate(geometry.kv_heads):
        blocks = spec.blocks(geometry, layer, hidden_size)
        inputs = sum(block["width"] for block in blocks)
        shared = sum(block["width"] for block in blocks if block["part"] in spec.shared)
        nets = initial(heads, inputs, hidden, noise)
        mean, std = torch.zeros(heads, inputs), torch.ones(heads, inputs)
        layers.append(LayerNets(mean, std, *nets, shared=shared))
    return Reader(spec, spec.windows(geometry), tuple(layers))


def initial(heads: int, inputs: int, hidden: int, noise: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First weights of a network as torch.nn.Linear draws them: uniform in +-1 / sqrt(inputs of the step)."""

    def uniform(bound: float, *shape: int) -> Tensor:
        return (torch.rand(*shape, generator=noise) * 2 - 1) * bound

    near, far = max(inputs, 1) ** -0.5, hidden**-0.5
    return (
        uniform(near, heads, inputs, hidden), uniform(near, heads, hidden), uniform(far, heads, hidden),
        uniform(far, heads),
    )  # fmt: skip
