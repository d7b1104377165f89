"""What a model's queries look like in every frequency band of RoPE: measured once, for TriAttention.

A band is a pair of dims read as one complex number, front + i * back. RoPE turns band f of a row at position p by
omega_f * p. The rotated dims give the first bands, dim i with dim i + rotary_dim / 2; the dims without RoPE give the
last ones, of frequency 0, dim x with x + half of their block.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from wakesight.errors import WorkError
from wakesight.signals.chunk import Chunk
from wakesight.signals.rope import unrotate

BLOCK = 1024  # queries turned into float64 at a time
STRAY = 0.1  # radians that a rotation may lie off omega * position: float32 angles stay below 0.01


@dataclass(frozen=True, eq=False)
class BandStatistics:
    """Of one attention layer; R of its bands are rotated.

    mean: [query_head, band, 2], mean complex query before RoPE. size: [query_head, band], mean of its absolute value.
    omega: float64 [band], radians per position, 0 where nothing is rotated. scale: square of the factor that RoPE
    multiplies rotated dims with (YaRN's attention factor), 1 normally. rotary: R.
    """

    mean: Tensor
    size: Tensor
    omega: Tensor
    scale: float
    rotary: int


def bands(x: Tensor, rotary_dim: int) -> Tensor:
    """[..., dim] -> [..., band, 2], the pairs that RoPE turns together; an odd last dim is paired with 0."""
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    rest = F.pad(rest, (0, rest.shape[-1] % 2))
    front, back = zip(turned.chunk(2, dim=-1), rest.chunk(2, dim=-1), strict=True)
    return torch.stack([torch.cat(front, dim=-1), torch.cat(back, dim=-1)], dim=-1)


class QueryBands:
    """Sums over every query that passes by, of however many documents: one tap, watching them one after the other.

    RoPE is taken off with the chunk's own rotation (None: the layer has none). The frequencies come from the same
    rotation, so no config is read: a least-squares fit of its angle to omega * position, each new chunk unwrapped by
    the estimate so far. All sums are float64.

    Source: WeianMao/triattention `docs/calibration.md` and `pruning_utils.py` (mean complex query, mean absolute
    value); reading the frequencies off the rotation is ours.
    """

    wants_rotation: ClassVar[bool] = True

    def __init__(self) -> None:
        self.count = 0  # queries of each head
        self._sums: Tensor | None = None  # float64 [query_head, band, 2]
        self._sizes: Tensor | None = None  # float64 [query_head, band]
        self._turns = _Turns(0)

    def watch(self, chunk: Chunk) -> None:
        """Raises WorkError if the rotation does not turn in proportion to the position, or its width changes."""
        query_heads, new, dim = chunk.queries.shape
        rotary_dim = 0 if chunk.rotation is None else chunk.rotation.shape[-1]
        if self._sums is None or self._sizes is None:
            pairs = rotary_dim // 2 + (dim - rotary_dim + 1) // 2
            self._sums = torch.zeros(query_heads, pairs, 2, dtype=torch.float64, device=chunk.queries.device)
            self._sizes = self._sums.new_zeros(query_heads, pairs)
            self._turns = _Turns(rotary_dim // 2)
        elif self._turns.rotary * 2 != rotary_dim:
            raise WorkError(
                f"RoPE turned {self._turns.rotary * 2} dims of this layer and now {rotary_dim}; query statistics need "
                "one rotation throughout"
            )
        for first in range(0, new, BLOCK):
            rows = chunk.queries[:, first : first + BLOCK].double()
            if chunk.rotation is not None:
                cos, sin = chunk.rotation[:, first : first + BLOCK].to(rows.device, torch.float64)
                rows = unrotate(rows, cos, sin)
                self._turns.add(cos, sin, chunk.start + first)
            pairs_of_rows = bands(rows, rotary_dim)
            self._sums += pairs_of_rows.sum(dim=1)
            self._sizes += pairs_of_rows.norm(dim=-1).sum(dim=1)
            self.count += rows.shape[1]

    @property
    def statistics(self) -> BandStatistics:
        """mean and size in float32. Raises WorkError before the first query."""
        if self._sums is None or self._sizes is None or not self.count:
            raise WorkError("no query was seen yet; read some text before asking for query statistics")
        omega = self._turns.omega
        return BandStatistics(
            (self._sums / self.count).float(),
            (self._sizes / self.count).float(),
            F.pad(omega, (0, self._sizes.shape[1] - len(omega))).to(self._sums.device),
            self._turns.scale,
            self._turns.rotary,
        )

    def copy(self) -> QueryBands:
        """Sums of their own with the same content."""
        return copy.deepcopy(self)


class _Turns:
    """Frequencies of the rotated bands, read off the cosines and sines of ever more positions.

    angle(p) = omega * p for every band, so omega is the sum of p * angle over the sum of p^2 once angles are
    unwrapped. Neighbouring positions give the first estimate, positions ever farther apart refine it.
    """

    def __init__(self, rotary: int) -> None:
        self.rotary = rotary
        self._moment = torch.zeros(rotary, dtype=torch.float64)  # sum of p * unwrapped angle
        self._spread = 0.0  # sum of p^2
        self._squares, self._rows = 0.0, 0  # cos^2 + sin^2, meaned over bands

    @property
    def omega(self) -> Tensor:
        """float64 [band]; 0 while only position 0 was seen."""
        return self._moment / self._spread if self._spread else self._moment

    @property
    def scale(self) -> float:
        return self._squares / self._rows if self._rows and self.rotary else 1.0

    def add(self, cos: Tensor, sin: Tensor, start: int) -> None:
        """cos, sin: float64 [position, rotary_dim] of the positions start, start + 1, ..."""
        if not self.rotary or (len(cos) < 2 and not self._spread):
            return  # one row tells its angle, not how often it went round
        turned = torch.complex(cos[:, : self.rotary], sin[:, : self.rotary]).cpu()
        at = torch.arange(start, start + len(turned), dtype=torch.float64)
        guess = self.omega if self._spread else _first_estimate(turned)
        angles = guess * at[:, None] + _unwrapped(turned.angle() - guess * at[:, None])
        self._moment = self._moment + (at[:, None] * angles).sum(dim=0)
        self._spread += float(at.square().sum())
        self._squares += float(turned.abs().square().mean(dim=1).sum())
        self._rows += len(turned)
        stray = float(_unwrapped(turned.angle() - self.omega * at[:, None]).abs().max())
        if stray > STRAY:
            raise WorkError(
                f"RoPE of this layer is {stray:.2g} radians off before position {start + len(turned)}: its angle is "
                "not in proportion to the position (its frequencies change with the length); query statistics "
                "need shorter texts"
            )


def _first_estimate(turned: Tensor) -> Tensor:
    """Frequencies of complex [position, band], from products of rows 1, 2, 4, ... positions apart."""
    omega = torch.zeros(turned.shape[1], dtype=torch.float64)
    apart = 1
    while apart < len(turned):
        step = (turned[apart:] * turned[:-apart].conj()).sum(dim=0).angle()
        omega = omega + _unwrapped(step - omega * apart) / apart
        apart *= 2
    return omega


def _unwrapped(angles: Tensor) -> Tensor:
    """The same angles in [-pi, pi]."""
    return torch.remainder(angles + math.pi, 2 * math.pi) - math.pi
