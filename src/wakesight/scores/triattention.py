"""TriAttention: how the model's usual queries will meet a key, from where they will stand later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from wakesight.core import Scores, Signals
from wakesight.errors import RequestError
from wakesight.scores.base import Group, at_least, by_kv_head, held_layers, one_of, only_held, over_group, widened
from wakesight.signals.query_bands import BandStatistics, bands

Aggregate = Literal["mean", "max"]
BLOCK = 4096  # tokens whose bands are in memory at a time
LEAST_SPREAD = 1e-6  # below which a head's scores are not divided by their spread
PARTS = ("mean", "abs", "omega", "scale", "rotary")  # of every layer, in an artifact's query statistics


@dataclass(frozen=True)
class TriAttention:
    """s_i = mean over offsets o of sum_f |q_f| |k_f| cos(omega_f (n + o - i) + arg(q_f conj k_f)), plus
    sum_f (a_f - |q_f|) |k_f|; then the maximum over the group's query heads.

    f: frequency bands of RoPE, pairs of dims as complex numbers; dims without RoPE are bands of frequency 0, dim x with
    x + half of their block. q_f: mean query before RoPE, a_f: mean of its absolute value, both measured once for the
    model on plain text (`artifact.query_stats`). k_f: the key before RoPE; the stored key is the same number turned
    by omega_f i, so it is not turned back. Offsets are 1, 2, 4, ... up to `reach`. Rotated bands carry the square of
    RoPE's attention factor (1 normally).

    aggregate: "max" over the offsets instead of their mean. group: "mean" over the query heads instead of the
    maximum. normalise: give every query head's scores mean 0 and spread 1 over its held entries beyond the
    protected prefix, before the group is reduced.
    Source: arXiv 2604.04921, WeianMao/triattention `pruning_utils.py`; one pass at the end of the context, group
    maximum and flat budgets as GateSight runs it. The pairing of dims without RoPE is ours.
    Raises RequestError without query statistics, or with those of another model.
    """

    aggregate: Aggregate = "mean"
    group: Group = "max"
    normalise: bool = False
    reach: int = 65_536
    reads: ClassVar[tuple[str, ...]] = ("keys",)
    natural_allocation: ClassVar[str] = "flat"
    needs_artifact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("triattention aggregate", self.aggregate, get_args(Aggregate))
        one_of("triattention group", self.group, get_args(Group))
        at_least("triattention reach", self.reach, 1, "it is how far behind the context queries are imagined")

    def resolved(self, artifact: Any) -> Self:
        """This scorer. Raises RequestError without query statistics, before anything is read."""
        _measured(artifact)
        return self

    def score(self, signals: Signals) -> Scores:
        layers = []
        for layer, (keys, held) in enumerate(zip(signals["keys"], held_layers(signals), strict=True)):
            known = _statistics(signals, layer, keys.shape)
            (keys,) = widened(keys)
            per_query_head = self._layer(only_held(keys, held), known, signals.tokens)
            if self.normalise:
                per_query_head = _standard(per_query_head, held, signals.prefix)
            layers.append(only_held(over_group(per_query_head, self.group), held))
        return Scores(tuple(layers))

    def _layer(self, keys: Tensor, known: BandStatistics, tokens: int) -> Tensor:
        """keys [kv_head, token, dim] -> [kv_head, group, token]."""
        (_, ahead, usual) = widened(keys, *self._weights(known, tokens))
        ahead, usual = by_kv_head(ahead, keys.shape[0]), by_kv_head(usual, keys.shape[0])
        blocks = []
        for first in range(0, keys.shape[1], BLOCK):
            pairs = bands(keys[:, first : first + BLOCK], 2 * known.rotary)
            met = torch.einsum("hgofc,htfc->hgot", ahead, pairs).amax(dim=2)
            blocks.append(met + torch.einsum("hgf,htf->hgt", usual, pairs.norm(dim=-1)))
        return torch.cat(blocks, dim=-1)

    def _weights(self, known: BandStatistics, tokens: int) -> tuple[Tensor, Tensor]:
        """What a stored key's bands and their absolute values are multiplied by, in float64:
        [query_head, offset, band, 2] (their mean is the one offset, for aggregate="mean") and [query_head, band].
        """
        offsets = torch.tensor([2.0**i for i in range(self.reach.bit_length())], dtype=torch.float64)
        angles = (tokens + offsets)[:, None] * known.omega.cpu().double()
        turns = torch.polar(torch.ones_like(angles), angles)  # [offset, band]
        if self.aggregate == "mean":
            turns = turns.mean(dim=0, keepdim=True)
        query = torch.view_as_complex(known.mean.cpu().double().contiguous())  # [query_head, band]
        # stored keys carry RoPE's attention factor once already
        factor = torch.ones(query.shape[1], dtype=torch.float64)
        factor[: known.rotary] = known.scale**0.5
        ahead = torch.view_as_real(query[:, None] * turns * factor)
        return ahead, (known.size.cpu().double() - query.abs()) * factor


def _standard(scores: Tensor, held: Tensor | None, prefix: int) -> Tensor:
    """[kv_head, group, token] with mean 0 and spread 1 over each head's held entries beyond the prefix."""
    counted = torch.ones_like(scores[:, :1], dtype=torch.bool) if held is None else held[:, None].clone()
    counted[..., :prefix] = False
    number = counted.sum(dim=-1, keepdim=True).clamp_min(1)
    mean = scores.masked_fill(~counted, 0.0).sum(dim=-1, keepdim=True) / number
    around = scores - mean
    variance = around.masked_fill(~counted, 0.0).square().sum(dim=-1, keepdim=True) / number
    return around / variance.sqrt().clamp_min(LEAST_SPREAD)


def _measured(artifact: Any) -> Mapping[str, Tensor]:
    stats: Mapping[str, Tensor] | None = artifact and artifact.query_stats
    if not stats:
        raise RequestError(
            "triattention needs statistics of this model's queries, which were not measured; measure them with: "
            "wakesight calibrate"
        )
    return stats


def _statistics(signals: Signals, layer: int, shape: torch.Size) -> BandStatistics:
    """Those of one layer, whose keys have `shape` [kv_head, token, dim]."""
    stats = _measured(signals.artifact)
    missing = [name for name in PARTS if f"{name}.{layer}" not in stats]
    if not missing:
        mean, size, omega, scale, rotary = (stats[f"{name}.{layer}"] for name in PARTS)
        known = BandStatistics(mean, size, omega, float(scale), int(rotary))
        pairs = known.rotary + (shape[2] - 2 * known.rotary + 1) // 2
        if mean.shape[0] % shape[0] == 0 and size.shape[1] == len(omega) == pairs and known.rotary <= pairs:
            return known
    have = f"lack its {missing[0]!r}" if missing else f"hold {list(mean.shape[:2])} query heads and bands"
    raise RequestError(
        f"the query statistics are of another model: layer {layer} has {shape[0]} KV heads of {shape[2]} dims, "
        f"and they {have}; measure them again with: wakesight calibrate"
    )
