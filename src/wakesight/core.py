"""The nouns. Values only: nothing here scores, selects, stores or runs a model.

An *entry* is (attention layer, KV head, position). Axis names used everywhere:
`batch layer kv_head query_head token slot dim`. Positions are 0-based logical
positions; slots are storage indices. `attention layer` always means an index
into `ModelGeometry.attention_layers`, not the model's own layer number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NewType

import torch
from torch import Tensor

from wakesight.errors import RequestError, WorkError

EntryPos = NewType("EntryPos", int)  # logical position of an entry
LayerIndex = NewType("LayerIndex", int)  # the model's own layer number


@dataclass(frozen=True)
class ModelGeometry:
    """What the rest of the library needs to know of a model.

    The per-layer tuples follow `attention_layers`; head counts and dims are read
    from the shapes a real cache takes, so latent or uneven attention is described
    as it is stored, not as its config spells it.
    """

    family: str
    n_layers: int
    attention_layers: tuple[LayerIndex, ...]
    recurrent_layers: tuple[LayerIndex, ...]
    query_heads: int
    kv_heads: tuple[int, ...]
    key_dims: tuple[int, ...]
    value_dims: tuple[int, ...]
    itemsize: int  # bytes of one stored number
    max_positions: int  # longest context plus answer the model accepts, in tokens
    index_dims: tuple[int, ...] = ()  # of a sparse indexer's raw key, one per token and layer; () without an indexer
    native_heads: tuple[int, ...] = ()  # heads per recurrent layer; () if their gates cannot be recorded

    def entry_bytes(self, layer: int) -> int:
        """Bytes of one entry (its K and its V, one KV head) of attention layer `layer`."""
        return (self.key_dims[layer] + self.value_dims[layer]) * self.itemsize

    @property
    def token_bytes(self) -> int:
        """KV bytes that one token costs over all attention layers and KV heads."""
        entries = sum(self.kv_heads[i] * self.entry_bytes(i) for i in range(len(self.kv_heads)))
        return entries + sum(self.index_dims) * self.itemsize


@dataclass(frozen=True)
class Signals:
    """What a scorer may read of one prefilled context; no question is in it.

    `streams` maps a name to one tensor per attention layer. Always there:

    - `keys`, `values`: [kv_head, token, dim], as stored (keys after RoPE), zeros where nothing is held;
    - `queries`: [query_head, window, dim], the last context queries after RoPE.

    Recorded on request (`prefill(record=...)`):

    - `attention_sums`: float32 [query_head, token], softmax weight each entry got from all context queries;
    - `query_mean` [query_head, dim], `query_covariance` [query_head, dim, dim]: moments of the context's
      queries before RoPE, the first 4 left out;
    - `future_rotation`: [2, position, rotary_dim], cosine and sine of RoPE at the positions after the context;
      dims beyond rotary_dim are not rotated, a layer without RoPE has rotary_dim 0;
    - `native`: float32 [token, head, 3] per **recurrent** layer: write gate beta, log-decay g, norm of v
      (Mamba-2: time step dt, -A dt, norm of x); `signals/native.py`;
    - `output_gate`: float32 [query_head], mean of sigmoid(gate) over tokens (prefix included) and head dims, and
      with it `output_gate_max` [kv_head], the same of the group's largest gate at each token and dim;
    - `hidden`: [token, hidden], what enters the attention module, behind its norm, in the model's dtype.

    held: per attention layer bool [kv_head, token], which entries exist; None when all do. A score where
    nothing is held is ignored.

    artifact: what was measured and fitted for this model offline (`estimator.artifact.Artifact`: tables, readers,
    query statistics); None if there is none. It is typed loosely because the nouns import nothing.
    """

    tokens: int  # n, the logical length
    prefix: int  # prot, tokens protected at the start
    scaling: tuple[float, ...]  # softmax scale per attention layer
    streams: Mapping[str, Sequence[Tensor]]
    held: tuple[Tensor, ...] | None = None
    artifact: Any = None

    def __getitem__(self, name: str) -> Sequence[Tensor]:
        try:
            return self.streams[name]
        except KeyError:
            have = ", ".join(sorted(self.streams))
            if name == "values":
                raise RequestError(
                    "this model stores latent keys and no values of their own, so a scorer that reads values cannot "
                    f"run on it (it has {have}); use --scorer keydiff, knorm, snapkv, tova or h2o"
                ) from None
            asked = "output_gate" if name == "output_gate_max" else name
            raise RequestError(
                f"the signal {name!r} was not recorded for this session (it has {have}); "
                f"prefill with record=[{asked!r}] (--record {asked}), or take a scorer that reads keys only: "
                "--scorer keydiff"
            ) from None


@dataclass(frozen=True)
class Scores:
    """Predicted utility of every entry; larger stays.

    layers: per attention layer a float32 tensor [kv_head, token], prefix included (and ignored); float64
        where the keys were float64.
    must_keep: bool [token] or None; entries a method keeps whatever their score (windows, sinks).
    """

    layers: tuple[Tensor, ...]
    must_keep: Tensor | None = None

    def checked(self, scorer: str) -> Scores:
        """Return self, or raise `WorkError` naming the first score that is NaN or infinite."""
        for layer, scores in enumerate(self.layers):
            bad = ~torch.isfinite(scores)
            if bad.any():
                head, position = (int(x) for x in bad.nonzero()[0])
                value = float(scores[head, position])
                raise WorkError(
                    f"scorer {scorer!r} gave {value} at attention layer {layer}, KV head {head}, position {position}; "
                    "scores must be finite: check the model's keys for overflow, or load it with dtype float32"
                )
        return self


@dataclass(frozen=True)
class Budget:
    """Integer entries to keep per (attention layer, KV head), the protected prefix not counted."""

    counts: tuple[tuple[int, ...], ...]

    @property
    def total(self) -> int:
        return sum(sum(heads) for heads in self.counts)


Table = tuple[tuple[float, ...], ...]  # [attention layer][KV head]


@dataclass(frozen=True)
class Tables:
    """Numbers that were measured once for a model, offline, and that allocations share budgets by.

    Each is [attention layer][KV head], finite and not negative; None where it was not measured. Lists are taken
    too, as JSON gives them. Raises RequestError for anything else.

    - gate: mean output gate of the head, the largest of its query heads;
    - utility_mass: mean over documents of the utility that the best 20% of the head's entries hold;
    - utility_peak: mean over documents of the largest utility in the head, the scale that normalised scores lost.

    Source: GateSight, gate measurement; the two utility tables are ours.
    """

    gate: Table | None = None
    utility_mass: Table | None = None
    utility_peak: Table | None = None

    def __post_init__(self) -> None:
        for name in ("gate", "utility_mass", "utility_peak"):
            if (table := getattr(self, name)) is not None:
                object.__setattr__(self, name, _table(name, table))


def _table(name: str, rows: Any) -> Table:
    try:
        table = tuple(tuple(float(value) for value in row) for row in rows)
    except (TypeError, ValueError):
        table = ()
    if not table or not all(row and all(math.isfinite(x) and x >= 0 for x in row) for row in table):
        raise RequestError(
            f"the table {name!r} must hold one finite number of at least 0 for every KV head of every attention layer; "
            "measure it again with: wakesight calibrate"
        )
    return table


@dataclass(frozen=True)
class KeptSet:
    """Which entries stay: positions[layer][head] is int64 [kept], ascending, prefix included; heads may differ."""

    positions: tuple[tuple[Tensor, ...], ...]

    @property
    def counts(self) -> list[list[int]]:
        """Kept entries per attention layer and KV head, prefix included."""
        return [[len(head) for head in layer] for layer in self.positions]

    def extended(self, start: int, stop: int) -> KeptSet:
        """This set and every entry of the positions start .. stop - 1."""
        return KeptSet(
            tuple(
                tuple(torch.cat([head, torch.arange(start, stop, device=head.device)]) for head in layer)
                for layer in self.positions
            )
        )

    def per_token(self, tokens: int) -> Tensor:
        """How many (layer, head) entries of each token stay: int64 [token]."""
        where = torch.cat([head.cpu() for layer in self.positions for head in layer])
        return torch.bincount(where, minlength=tokens)

    def per_layer_token(self, tokens: int) -> Tensor:
        """The share of a layer's heads that keep each token: float32 [layer, token]."""
        rows = [torch.bincount(torch.cat(layer).cpu(), minlength=tokens) / len(layer) for layer in self.positions]
        return torch.stack(rows)


@dataclass(frozen=True)
class Answer:
    """What one question brought back.

    tokens: generated ids without the end-of-sequence id. finish: "eos", "length" (the new-token
    limit) or "limit" (the model's own context limit). margin: smallest lead of a chosen token over the next
    best logit. misses, fetches: pages over all layers and KV heads that were wanted and not in fast memory, and that
    were brought there; moved_bytes: what crossed. All stay 0 without demotion.
    timings: seconds and rates (`question_s`, `decode_s`, `decode_tokens_per_s`).
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    timings: Mapping[str, float] = field(default_factory=dict)
    margin: float = float("inf")
    misses: int = 0
    fetches: int = 0
    moved_bytes: int = 0
