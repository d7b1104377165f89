"""What a reader sees of one entry: a row of numbers, always in the same order.

Parts come in the order of `PARTS`, whatever order they are named in. The shared ones are equal for all KV heads of a
layer, so they are built once per layer; the others belong to a head.

    native      beta, g, ||v|| of every head of the recurrent layers of the window: (s * heads + head) * 3 + channel
    hidden      the input of the attention module
    age         three ages in [0, 1]; i is the 1-based position in a context of n tokens:
                (n - i) / n,  log(1 + n - i) / log(1 + n),  log(i) / log(n)
    key_stats   cosine to the unnormalised mean key (KeyDiff), norm of the key, norm of the value
    key         the key as it is stored, after RoPE

Values are raw: standardisation belongs to the reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wakesight.core import ModelGeometry, Signals
from wakesight.errors import RequestError
from wakesight.registry import did_you_mean

SHARED = ("native", "hidden", "age")
OWN = ("key_stats", "key")
PARTS = SHARED + OWN
CHANNELS = ("beta", "g", "norm_v")
AGES = ("relative", "log_to_end", "log_to_start")
KEY_STATS = ("keydiff_cosine", "key_norm", "value_norm")
EPSILON = 1e-8  # the least length that a cosine divides by, as torch's own
PIECE = 4096  # tokens whose keys are summed at a time
RECORDED = ("native", "hidden")  # parts that are signals recorded on request

# the readers that have a name, and what each of them sees
READERS = {
    "signals": ("native", "age"),  # the paper's
    "signals+keys": ("native", "age", "key_stats", "key"),
    "hidden": ("hidden", "age"),  # for models without native signals
    "hidden+keys": ("hidden", "age", "key_stats", "key"),
    "age": ("age",),
}

Window = tuple[int, ...]  # recurrent layers, as indices into ModelGeometry.recurrent_layers, in depth


@dataclass(frozen=True)
class FeatureSpec:
    """parts: which of `PARTS`. window: most recurrent layers before an attention layer that "native" reads."""

    parts: tuple[str, ...] = ("native", "age")
    window: int = 6

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise RequestError(f"there is no feature part {part!r}; use some of {', '.join(PARTS)}")
        if not self.parts:
            raise RequestError(f"a reader needs at least one feature part; use some of {', '.join(PARTS)}")
        if self.window < 1:
            raise RequestError(f"window={self.window} must be at least 1; 6 is the default")
        object.__setattr__(self, "parts", tuple(part for part in PARTS if part in self.parts))

    @property
    def shared(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts if part in SHARED)

    @property
    def own(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts if part in OWN)

    @property
    def reads(self) -> tuple[str, ...]:
        """Signals that must be recorded for it; keys and values are always there."""
        return tuple(part for part in self.parts if part in RECORDED)

    def windows(self, geometry: ModelGeometry) -> tuple[Window, ...]:
        """W(l) per attention layer: the last `window` recurrent layers before it; () without "native"."""
        if "native" not in self.parts:
            return tuple(() for _ in geometry.attention_layers)
        if not geometry.recurrent_layers or not geometry.native_heads:
            raise RequestError(
                f"a {geometry.family} model has no native signals to read (it has no recurrent layers that give them); "
                "fit a reader of hidden states: wakesight fit --readers hidden"
            )
        return tuple(
            tuple(m for m, depth in enumerate(geometry.recurrent_layers) if depth < layer)[-self.window :]
            for layer in geometry.attention_layers
        )

    def blocks(self, geometry: ModelGeometry, layer: int, hidden: int = 0) -> list[dict[str, Any]]:
        """The order of a layer's inputs as plain data, one block per part. hidden: width of a hidden state."""
        window = self.windows(geometry)[layer]
        widths = {
            "native": sum(geometry.native_heads[m] for m in window) * len(CHANNELS) if window else 0,
            "hidden": hidden,
            "age": len(AGES),
            "key_stats": len(KEY_STATS),
            "key": geometry.key_dims[layer],
        }
        about: dict[str, dict[str, Any]] = {
            "native": {
                "recurrent_layers": [int(geometry.recurrent_layers[m]) for m in window],
                "heads": [geometry.native_heads[m] for m in window],
                "channels": list(CHANNELS),
            },
            "age": {"names": list(AGES)},
            "key_stats": {"names": list(KEY_STATS)},
        }
        return [{"part": part, "width": widths[part], **about.get(part, {})} for part in self.parts]

    def width(self, geometry: ModelGeometry, layer: int, hidden: int = 0) -> int:
        """Inputs of one network of a layer: 867 for the paper's model, 435 in its first attention layer."""
        return sum(block["width"] for block in self.blocks(geometry, layer, hidden))

    def names(self, geometry: ModelGeometry, layer: int, hidden: int = 0) -> list[str]:
        """A name for every input, in order: "native.2.head7.beta" is recurrent layer 2 of the model, head 7."""
        return [name for block in self.blocks(geometry, layer, hidden) for name in _names(block)]

    def open(self, signals: Signals, layer: int, window: Window) -> LayerFeatures:
        """One layer of one context, to be read in pieces."""
        return LayerFeatures(self, signals, layer, window)

    def matrix(
        self, signals: Signals, layer: int, window: Window, head: int | None = None, start: int = 0,
        stop: int | None = None,
    ) -> Tensor:  # fmt: skip
        """The inputs of tokens start .. stop - 1: float32 [kv_head, token, width], [1, ...] for one head.

        A spec of shared parts alone gives [1, ...] for all heads. For reading and for tests; `Reader.scores` never
        builds it.
        """
        opened = self.open(signals, layer, window)
        stop = signals.tokens if stop is None else stop
        shared, own = opened.shared(start, stop), opened.own(start, stop)
        if own is None:
            return shared[None]
        own = own if head is None else own[head : head + 1]
        return torch.cat([shared.expand(own.shape[0], -1, -1), own], dim=-1)


def _names(block: dict[str, Any]) -> Iterator[str]:
    part = block["part"]
    if part == "native":
        for depth, heads in zip(block["recurrent_layers"], block["heads"], strict=True):
            yield from (f"native.{depth}.head{head}.{channel}" for head in range(heads) for channel in CHANNELS)
    elif "names" in block:
        yield from (f"{part}.{name}" for name in block["names"])
    else:
        yield from (f"{part}.{index}" for index in range(block["width"]))


class LayerFeatures:
    """The inputs of one attention layer of one context; rows of any stretch of tokens on demand.

    Only the mean key looks at the whole context, and it is taken once. What is stored where nothing is held counts
    as 0.
    """

    def __init__(self, spec: FeatureSpec, signals: Signals, layer: int, window: Window) -> None:
        self.spec, self.signals, self.layer, self.window = spec, signals, layer, window
        self.tokens = signals.tokens
        self._held = None if signals.held is None else signals.held[layer]
        self._made: dict[str, Tensor] = {}
        self._mean: Tensor | None = None
        if "key_stats" in spec.parts:
            self._mean = self._mean_key()

    @property
    def device(self) -> torch.device:
        """Where the layer's keys are, or what is read instead of them."""
        streams = self.signals.streams
        if self._held is not None:
            return self._held.device
        if "keys" in streams:
            return self._stream("keys").device
        if self.window:
            return self.signals["native"][self.window[-1]].device
        return streams["hidden"][self.layer].device if "hidden" in streams else torch.device("cpu")

    def shared(self, start: int, stop: int) -> Tensor:
        """float32 [token, width of the shared parts], a new tensor."""
        pieces: list[Tensor] = []
        for part in self.spec.shared:
            if part == "native":
                native = self.signals["native"]
                pieces += [native[m][start:stop].flatten(1) for m in self.window]
            elif part == "hidden":
                pieces.append(self.signals["hidden"][self.layer][start:stop])
            else:
                pieces.append(ages(start, stop, self.tokens))
        if not pieces:
            return torch.empty(stop - start, 0, device=self.device)
        made = torch.empty(stop - start, sum(piece.shape[1] for piece in pieces), device=self.device)
        at = 0
        for piece in pieces:
            made[:, at : at + piece.shape[1]] = piece  # copies across devices and dtypes without a second tensor
            at += piece.shape[1]
        return made

    def own(self, start: int, stop: int) -> Tensor | None:
        """float32 [kv_head, token, width of the heads' own parts], None without any."""
        if not self.spec.own:
            return None
        keys = self._keys(start, stop, torch.float32)
        pieces: list[Tensor] = []
        if self._mean is not None:
            norms = keys.norm(dim=-1)
            lengths = norms.clamp_min(EPSILON) * self._mean.norm(dim=1).clamp_min(EPSILON)  # of the mean: [kv_head, 1]
            cosine = (keys @ self._mean)[..., 0] / lengths
            pieces.append(torch.stack([cosine, norms, self._value_norms(start, stop)], dim=-1))
        if "key" in self.spec.parts:
            pieces.append(keys)
        return torch.cat(pieces, dim=-1)

    def _mean_key(self) -> Tensor:
        """float32 [kv_head, dim, 1], summed in float64: a mean near zero is the difference of large sums."""
        starts = range(0, self.tokens, PIECE)
        sums = [self._keys(at, min(at + PIECE, self.tokens), torch.float64).sum(dim=1) for at in starts]
        mean: Tensor = torch.stack(sums).sum(dim=0) / self.tokens
        return mean.float().unsqueeze(-1)

    def _keys(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return self._known(self._stream("keys")[:, start:stop].to(dtype), start, stop)

    def _stream(self, name: str) -> Tensor:
        """This layer's tensor, asked for once: on a compacted context each access makes it anew."""
        if name not in self._made:
            self._made[name] = self.signals[name][self.layer]
        return self._made[name]

    def _value_norms(self, start: int, stop: int) -> Tensor:
        streams = self.signals.streams
        if "values" not in streams and "value_norms" in streams:
            norms = self._stream("value_norms")[:, start:stop].to(self.device, torch.float32)
        else:
            values = self._stream("values")[:, start:stop]
            norms = values.to(self.device, torch.float32).norm(dim=-1)
        return self._known(norms, start, stop)

    def _known(self, numbers: Tensor, start: int, stop: int) -> Tensor:
        """Numbers [kv_head, token, ...] with 0 where nothing is held."""
        if self._held is None:
            return numbers
        held = self._held[:, start:stop].to(numbers.device)
        return numbers.masked_fill(~held.view(*held.shape, *[1] * (numbers.dim() - 2)), 0.0)


def ages(start: int, stop: int, tokens: int) -> Tensor:
    """The three age features of tokens start .. stop - 1 of `tokens`: float32 [token, 3], each in [0, 1]."""
    i = torch.arange(start + 1, stop + 1, dtype=torch.float64)
    columns = [
        (tokens - i) / tokens,
        torch.log1p(tokens - i) / math.log1p(tokens),
        i.log() / math.log(tokens) if tokens > 1 else torch.zeros_like(i),
    ]
    return torch.stack(columns, dim=1).float()


def reader_parts(name: str) -> tuple[str, ...]:
    """The parts that a named reader sees; RequestError for a name that is none."""
    if name not in READERS:
        raise RequestError(f"there is no reader {name!r}{did_you_mean(name, READERS)}; use one of {', '.join(READERS)}")
    return READERS[name]
