"""What prefill overheard of one sequence, and the `Signals` that scorers read from it.

A recorder sits at each attention layer and shows every chunk to its taps; rows of recurrent layers stand beside
them. A child shares its parent's
recording until it is continued; from then on it has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from torch import Tensor

from wakesight.arguments import shown
from wakesight.cache.slots import Slots
from wakesight.cache.state import SessionState
from wakesight.core import ModelGeometry, Signals
from wakesight.errors import RequestError
from wakesight.registry import did_you_mean
from wakesight.scores.base import AnyScorer, HasArtifact, for_model, reads_of
from wakesight.scores.table import SCORERS, scorer
from wakesight.signals.attention_sums import AttentionSums
from wakesight.signals.chunk import Chunk, Tap
from wakesight.signals.gates import OutputGate
from wakesight.signals.queries import QueryWindow
from wakesight.signals.query_moments import QueryMoments
from wakesight.signals.rows import Rows

Rotation = Callable[[int, int], Tensor | None]  # positions start .. stop -> [2, q, rotary_dim]
ALWAYS = ("keys", "values", "queries")
OVERHEARD = ("native", "output_gate", "hidden")  # told by the model's own modules, not by the attention function
ON_REQUEST = ("attention_sums", "query_mean", "query_covariance", "future_rotation", *OVERHEARD)
WINDOW = 64  # last queries that every prefill keeps
FUTURE = 512  # positions behind the context whose rotation `future_rotation` gives


def wanted_signals(names: Iterable[str], engine: HasArtifact | None = None) -> tuple[str, ...]:
    """Signal names for a `record=` list of signals and scorers ("attention_sums", "h2o"); a str is one name.

    engine: of the model, whose artifact some scorers need to know what they read. Raises RequestError for a name that
    is neither, and for a scorer that cannot run without an artifact.
    """
    if not isinstance(names, Iterable):
        raise RequestError(f"record must be a list of signals or scorers, not {shown(names)}; for example ['h2o']")
    wanted: set[str] = set()
    for name in (names,) if isinstance(names, str) else names:
        if not isinstance(name, str):
            raise RequestError(f"record holds {shown(name)}; give names of signals or scorers, for example ['h2o']")
        if name in ALWAYS + ON_REQUEST:
            wanted.add(name)
            continue
        try:
            method = scorer(name)
        except RequestError:
            known = ON_REQUEST + tuple(SCORERS)
            raise RequestError(
                f"record names {name!r}, which is no signal and no scorer{did_you_mean(name, known)}; "
                f"signals: {', '.join(ON_REQUEST)}"
            ) from None
        wanted.update(reads_of(for_model(method, engine)))
    return tuple(name for name in ON_REQUEST if name in wanted)


class Needs(TypedDict):
    """Keywords of `prefill` that a scorer needs."""

    record: tuple[str, ...]
    query_window: int


def needs(scorer: AnyScorer, engine: HasArtifact | None = None) -> Needs:
    """What to record for `scorer`: its signals, and at least as many queries as its own window.

    engine: of the model; RequestError for a scorer that cannot run without an artifact.
    """
    reads = reads_of(for_model(scorer, engine))
    return {
        "record": tuple(name for name in reads if name in ON_REQUEST),
        "query_window": max(WINDOW, getattr(scorer, "window", 0) if "queries" in reads else 0),
    }


@dataclass
class LayerRecorder:
    """The taps of one attention layer. held: per KV head the positions held when `begin` tokens had been seen.

    guests: taps of someone else, who go on watching whatever is read on from here; one with `wants_rotation = True`
    gets RoPE's rotation.
    """

    queries: QueryWindow
    sums: AttentionSums | None
    moments: QueryMoments | None
    rotation: Rotation
    held: tuple[Tensor, ...] | None = None
    begin: int = 0
    scaling: float = 1.0
    gate: OutputGate | None = None
    hidden: Rows | None = None  # inputs of the attention module
    guests: tuple[Tap, ...] = ()

    def hear(self, queries: Tensor, keys: tuple[Tensor, ...], start: int, scaling: float) -> None:
        """queries: [query_head, q, dim] at positions start, start + 1, ...; keys: per KV head [held, dim]."""
        stop = start + queries.shape[1]
        positions = None
        if self.held is not None:
            fresh = torch.arange(self.begin, stop, device=queries.device)
            positions = tuple(torch.cat([head, fresh]) for head in self.held)
        turned = self.moments or any(getattr(guest, "wants_rotation", False) for guest in self.guests)
        rotation = self.rotation(start, stop) if turned else None
        if rotation is not None:  # a model may be spread over devices
            rotation = rotation.to(queries.device)
        self.scaling = scaling
        chunk = Chunk(queries, keys, positions, start, scaling, rotation)
        for tap in (self.queries, self.sums, self.moments, *self.guests):
            if tap is not None:
                tap.watch(chunk)

    def continued(self, state: SessionState, layer: int) -> LayerRecorder:
        """A recorder of its own for the next tokens of `state`."""
        held = None if state.kept is None else state.kept.positions[layer]
        mask = None if held is None else _mask(held, state.logical_length)
        return LayerRecorder(
            self.queries.copy(),
            self.sums and self.sums.copy(mask),
            self.moments and self.moments.copy(),
            self.rotation,
            held,
            state.logical_length,
            self.scaling,
            self.gate and self.gate.copy(),
            None if self.hidden is None else self.hidden.copy(),
            self.guests,
        )


@dataclass
class Recording:
    """One recorder per attention layer. latent_keys: slots -> per KV head [held, dim] where keys are latent and
    shared, and values have no form of their own; else None. native: rows [token, head, 3] per recurrent layer,
    empty where they were not asked for."""

    layers: list[LayerRecorder]
    window: int
    record: tuple[str, ...]
    latent_keys: Callable[[Slots], tuple[Tensor, ...]] | None = None
    native: list[Rows] = field(default_factory=list)

    @classmethod
    def start(
        cls, rotations: Sequence[Rotation], window: int, record: tuple[str, ...],
        latent_keys: Callable[[Slots], tuple[Tensor, ...]] | None, geometry: ModelGeometry,
    ) -> Recording:  # fmt: skip
        """Fresh recorders. rotations: one function per attention layer. window: last queries to keep."""
        sums = "attention_sums" in record
        moments = "query_mean" in record or "query_covariance" in record
        layers = [
            LayerRecorder(
                QueryWindow(window),
                AttentionSums() if sums else None,
                QueryMoments() if moments else None,
                rotation,
                gate=OutputGate(kv_heads) if "output_gate" in record else None,
                hidden=Rows() if "hidden" in record else None,
            )
            for rotation, kv_heads in zip(rotations, geometry.kv_heads, strict=True)
        ]
        native = [Rows() for _ in geometry.native_heads] if "native" in record else []
        return cls(layers, window, record, latent_keys, native)

    @property
    def overhears(self) -> bool:
        """True if the model's own modules must be listened to."""
        return any(name in OVERHEARD for name in self.record)

    def check_heard(self, tokens: int) -> None:
        """Raise RuntimeError unless every token was overheard once at every layer.

        A model that runs its recurrence or attention in another way than we know must not pass unnoticed.
        """
        counts = [rows.count for rows in self.native]
        for layer in self.layers:
            counts += [tap.count for tap in (layer.gate, layer.hidden) if tap is not None]
        if any(count != tokens for count in counts):
            raise RuntimeError(f"of {tokens} tokens, wakesight overheard {min(counts)} to {max(counts)} in this model")

    def continued(self, state: SessionState) -> Recording:
        """The same, ready to hear the next tokens of `state`; this recording stays as it is."""
        layers = [recorder.continued(state, layer) for layer, recorder in enumerate(self.layers)]
        native = [rows.copy() for rows in self.native]
        return Recording(layers, self.window, self.record, self.latent_keys, native)

    def signals(self, state: SessionState) -> Signals:
        """What a scorer may read of `state`; dense streams of a child are made layer by layer, on access."""
        total = state.logical_length
        streams: dict[str, Sequence[Tensor]] = {
            "keys": _Dense(state, self.latent_keys or (lambda slots: tuple(slots.strips("key"))), "key"),
            "queries": tuple(layer.queries.rows for layer in self.layers if layer.queries.rows is not None),
        }
        if self.latent_keys is None:
            streams["values"] = _Dense(state, lambda slots: tuple(slots.strips("value")), "value")
        if sums := [layer.sums for layer in self.layers if layer.sums]:
            streams["attention_sums"] = tuple(tap.total(total) for tap in sums)
        if moments := [layer.moments for layer in self.layers if layer.moments]:
            streams["query_mean"] = tuple(tap.mean for tap in moments)
            streams["query_covariance"] = tuple(tap.covariance for tap in moments)
        if self.native:
            streams["native"] = tuple(rows.whole() for rows in self.native)
        if gates := [layer.gate for layer in self.layers if layer.gate]:
            streams["output_gate"] = tuple(gate.mean for gate in gates)
            streams["output_gate_max"] = tuple(gate.peak for gate in gates)
        if hidden := [layer.hidden for layer in self.layers if layer.hidden is not None]:
            streams["hidden"] = tuple(rows.whole() for rows in hidden)
        if "future_rotation" in self.record:
            streams["future_rotation"] = tuple(_future(layer.rotation, total) for layer in self.layers)
        return Signals(
            tokens=total,
            prefix=state.prefix,
            scaling=tuple(recorder.scaling for recorder in self.layers),
            streams=streams,
            held=None if state.kept is None else tuple(_mask(heads, total) for heads in state.kept.positions),
        )


def _future(rotation: Rotation, total: int) -> Tensor:
    found = rotation(total, total + FUTURE)
    return torch.zeros(2, FUTURE, 0) if found is None else found


def _mask(positions: Sequence[Tensor], tokens: int) -> Tensor:
    """bool [kv_head, token], true where held."""
    mask = torch.zeros(len(positions), tokens, dtype=torch.bool, device=positions[0].device)
    for head, where in enumerate(positions):
        mask[head, where] = True
    return mask


class _Dense(Sequence[Tensor]):
    """[kv_head, token, dim] per attention layer: views of a whole state, or a child's entries among zeros.

    A child's tensors are made on access and not kept, so that scoring needs one layer at a time.
    """

    def __init__(self, state: SessionState, strips: Callable[[Slots], tuple[Tensor, ...]], name: str) -> None:
        self._state, self._strips, self._name = state, strips, name

    def __len__(self) -> int:
        return len(self._state.slots)

    def __getitem__(self, layer: int) -> Tensor:  # type: ignore[override]
        if not -len(self) <= layer < len(self):
            raise IndexError(layer)
        slots, tokens = self._state.slots[layer], self._state.logical_length
        strips = self._strips(slots)
        if self._state.kept is None:
            return slots.read(self._name) if len(strips) > 1 else strips[0][None]
        dense = strips[0].new_zeros(len(strips), tokens, strips[0].shape[1])
        for head, (where, strip) in enumerate(zip(self._state.kept.positions[layer], strips, strict=True)):
            dense[head, where] = strip
        return dense
