"""Listening to vLLM's own modules during a chunked prefill in a mixed batch.

Hooks sit on the model's modules once it is loaded; while no row of a step is recorded they do nothing. What they hear
goes into the same `Recording` as on transformers, a row's part of the batch at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wakesight.engines.recording import Recording, Rotation
from wakesight.engines.vllm.facts import Facts
from wakesight.errors import RequestError
from wakesight.signals import native


@dataclass(frozen=True)
class Row:
    """A recorded request's part of the batch: rows start .. stop - 1, of which the first is at `position`."""

    recording: Recording
    start: int
    stop: int
    position: int


class Taps:
    """The hooks of one model. rows: what is recorded in the step that runs; empty between steps."""

    def __init__(self, model: Any, facts: Facts, layers: dict[str, Any]) -> None:
        """layers: vLLM's attention and recurrent modules by name."""
        self.rows: list[Row] = []
        self._modules = dict(model.named_modules())
        self._facts = facts
        for at, name in enumerate(facts.layers):
            layers[name].register_forward_pre_hook(self._attending(at), with_kwargs=True)
        for at, name in enumerate(facts.recurrent):
            self._listen_to_recurrence(layers[name], at)

    def recording(self, window: int, record: tuple[str, ...]) -> Recording:
        """Fresh recorders. Native gates are recorded wherever the model has them and the tap can hear them."""
        rotations = [self._rotation(name) for name in self._facts.layers]
        if self._facts.geometry.native_heads and self._hears_native:
            record = (*record, "native")
        return Recording.start(rotations, window, tuple(dict.fromkeys(record)), None, self._facts.geometry)

    @property
    def _hears_native(self) -> bool:
        return all(hasattr(self._modules.get(name), "in_proj_ba") for name in self._facts.recurrent)

    def _attending(self, at: int) -> Any:
        heads, dim = self._facts.geometry.query_heads, self._facts.geometry.key_dims[at]

        def attending(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.rows:
                query: Tensor = args[0] if args else kwargs["query"]
                for row in self.rows:
                    part = query[row.start : row.stop].reshape(-1, heads, dim).transpose(0, 1)
                    row.recording.layers[at].hear(part, (), row.position, module.impl.scale)

        return attending

    def _listen_to_recurrence(self, module: Any, at: int) -> None:
        if not hasattr(module, "in_proj_ba") or getattr(module, "gqa_interleaved_layout", False):
            return
        heard: dict[str, Any] = {"value": []}

        def gates(inner: Any, args: Any, output: Any) -> None:
            if self.rows:
                heard["ba"] = output[0]

        stock = module.rearrange_mixed_qkv

        def rearrange(mixed: Any) -> Any:  # of the decoding rows, then of each prefilling one: the batch's order
            parts = stock(mixed)
            if self.rows:
                heard["value"].append(parts[2].reshape(-1, *parts[2].shape[-2:]))
            return parts

        def done(inner: Any, args: Any, output: Any) -> None:
            if self.rows and "ba" in heard:
                self._recurrence(module, at, heard.pop("ba"), torch.cat(heard["value"]))
            heard["value"] = []

        module.in_proj_ba.register_forward_hook(gates)
        module.rearrange_mixed_qkv = rearrange
        module.register_forward_hook(done)

    def _recurrence(self, module: Any, at: int, ba: Tensor, values: Tensor) -> None:
        b, a = ba.chunk(2, dim=-1)
        for row in self.rows:
            if row.recording.native:
                rows = slice(row.start, row.stop)
                decay = -module.A_log.float().exp() * F.softplus(a[rows].float() + module.dt_bias.float())
                row.recording.native[at].add(native.delta_rule(b[rows].sigmoid(), decay, values[rows]))

    def _rotation(self, name: str) -> Rotation:
        """RoPE of an attention layer, as transformers gives it: cosine and sine, both halves alike."""

        def rotation(start: int, stop: int) -> Tensor | None:
            rotary = getattr(self._modules.get(name.rpartition(".")[0]), "rotary_emb", None)
            if rotary is None or not getattr(rotary, "is_neox_style", False):
                raise RequestError(
                    f"the rotation of {name} is not one that wakesight can follow in vLLM; take a scorer that does "
                    "not look at positions, for example keydiff"
                )
            halves = rotary.cos_sin_cache[start:stop].float().chunk(2, dim=-1)
            return torch.stack([torch.cat([half, half], dim=-1) for half in halves])

        return rotation
