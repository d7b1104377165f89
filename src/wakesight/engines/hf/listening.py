"""What the modules of a model say while they run: gates of recurrent layers, output gates, attention inputs.

Keys and queries pass through our attention function; these do not. While a recording wants them (`Ears.open`)

- a hook on every decoder layer notes which layer this thread is in (modules may be shared between layers);
- a hook on every attention module takes its input, one on its query projection the output gate;
- the recurrence kernels, plain functions of transformers' modeling file, are reached through a function that
  reads their arguments and calls them. So what is recorded is what the kernel got, and no model code is repeated.

Other passes, of other threads or without a recording, run through them untouched. The last recording to end
takes everything away again.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from wakesight.core import ModelGeometry
from wakesight.engines.recording import Recording
from wakesight.models.families import Family
from wakesight.signals import native

_local = threading.local()  # ear: the `_Ear` of the pass that runs in this thread
_lock = threading.Lock()
_swapped: dict[tuple[str, str], tuple[int, Any, Any]] = {}  # module, name -> recordings that use it, stock, ours

Reader = Callable[[tuple[Any, ...], dict[str, Any]], Tensor]  # a kernel's arguments -> [token, head, 3]


class Ears:
    """Of one model: where to listen, and the hooks while someone does."""

    def __init__(self, model: Any, family: Family, geometry: ModelGeometry) -> None:
        self._layers = list(model.get_decoder().layers)
        self._file = type(self._layers[0]).__module__
        self._kernels = KERNELS.get(family.native_signals or "", {})
        self._gated = family.output_gate
        self._query_heads = geometry.query_heads
        self.attention = {int(layer): at for at, layer in enumerate(geometry.attention_layers)}
        self.recurrent = {int(layer): at for at, layer in enumerate(geometry.recurrent_layers)}
        self._open = 0
        self._hooks: list[Any] = []

    @contextlib.contextmanager
    def open(self, recording: Recording) -> Iterator[contextlib.AbstractContextManager[Any]]:
        """Install what `recording` needs; gives what must be entered around each of its passes."""
        if not recording.overhears:
            yield contextlib.nullcontext()
            return
        with _lock:
            self._open += 1
            if self._open == 1:
                self._install()
        try:
            yield _Ear(self, recording)
        finally:
            with _lock:
                self._open -= 1
                if self._open == 0:
                    self._remove()

    def _install(self) -> None:
        for index, layer in enumerate(self._layers):
            self._hooks.append(layer.register_forward_pre_hook(_entering(index)))
        modules = {id(found): found for layer in self.attention for found in [attention_module(self._layers[layer])]}
        for module in modules.values():
            self._hooks.append(module.register_forward_pre_hook(_attending, with_kwargs=True))
            if self._gated:
                self._hooks.append(module.q_proj.register_forward_hook(self._gate))
        for name, reader in self._kernels.items():
            _swap(self._file, name, reader)

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for name in self._kernels:
            _put_back(self._file, name)

    def _gate(self, module: Any, args: Any, output: Tensor) -> None:
        ear = _ear()
        tap = None if ear is None else ear.recording.layers[self.attention[ear.layer]].gate
        if tap is not None:  # per head: its query, then its gate
            tap.add(output[0].reshape(len(output[0]), self._query_heads, 2, -1)[:, :, 1])


class _Ear:
    """One recording, listening to the pass it is entered around, in this thread."""

    def __init__(self, ears: Ears, recording: Recording) -> None:
        self.ears, self.recording = ears, recording
        self.layer = 0  # the model's own number of the layer that runs

    def __enter__(self) -> _Ear:
        _local.ear = self
        return self

    def __exit__(self, *error: object) -> None:
        _local.ear = None


def _ear() -> _Ear | None:
    found: _Ear | None = getattr(_local, "ear", None)
    return found


def attention_module(layer: nn.Module) -> Any:
    """The module of a decoder layer that attends. Raises RuntimeError if that cannot be told."""
    found = [module for module in layer.modules() if type(module).__name__.endswith("Attention")]
    if len(found) != 1:
        raise RuntimeError(f"{type(layer).__name__} has {len(found)} attention modules, where wakesight expects one")
    return found[0]


def _entering(index: int) -> Callable[..., None]:
    def entering(module: Any, args: Any) -> None:
        ear = _ear()
        if ear is not None:
            ear.layer = index

    return entering


def _attending(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    ear = _ear()
    rows = None if ear is None else ear.recording.layers[ear.ears.attention[ear.layer]].hidden
    if rows is not None:
        hidden: Tensor = args[0] if args else (kwargs or {})["hidden_states"]
        rows.add(hidden[0].clone())


def _swap(file: str, name: str, reader: Reader) -> None:
    """Let the function `name` of the module `file` be heard; counted, because engines share their modeling file."""
    users, stock, ours = _swapped.get((file, name), (0, None, None))
    if users == 0:
        stock = getattr(sys.modules[file], name)
        ours = _heard(stock, reader)
        setattr(sys.modules[file], name, ours)
    _swapped[file, name] = (users + 1, stock, ours)


def _put_back(file: str, name: str) -> None:
    users, stock, ours = _swapped.pop((file, name))
    if users > 1:
        _swapped[file, name] = (users - 1, stock, ours)
    elif getattr(sys.modules[file], name) is ours:  # else someone replaced it since; ours does nothing any more
        setattr(sys.modules[file], name, stock)


def _heard(stock: Any, reader: Reader) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        ear = _ear()
        if ear is not None and ear.recording.native:  # before the kernel, which may write into its arguments
            ear.recording.native[ear.ears.recurrent[ear.layer]].add(reader(args, kwargs))
        return stock(*args, **kwargs)

    return kernel


def _delta_rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """(query, key, value [1, token, head, dim], g=, beta=)."""
    return native.delta_rule(kwargs["beta"][0], kwargs["g"][0], args[2][0])


def _mamba2_chunk(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """(x [1, token, head, dim], dt [1, token, head], -A [head], ..., dt_bias=[head], dt_limit=)."""
    return native.mamba2(args[0][0], args[1][0], args[2], kwargs["dt_bias"], kwargs["dt_limit"])


def _mamba2_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """(state, x [1, head, dim], dt [1, head, dim], -A [head, dim, state], ..., dt_bias=[head, dim]), one token.

    transformers clamps no time step here.
    """
    return native.mamba2(args[1], args[2][..., 0], args[3][:, 0, 0], kwargs["dt_bias"][:, 0], None)


KERNELS: dict[str, dict[str, Reader]] = {
    "gated_delta": {"torch_chunk_gated_delta_rule": _delta_rule, "torch_recurrent_gated_delta_rule": _delta_rule},
    "kda": {"chunk_kimi_delta_attention": _delta_rule, "recurrent_kimi_delta_attention": _delta_rule},
    "mamba2": {"mamba2_chunk_scan": _mamba2_chunk, "mamba2_selective_state_update": _mamba2_step},
}  # Family.native_signals -> the functions of the modeling file that run the recurrence
