"""TriAttention's calibration: the statistics of every attention layer's queries, in the form that an artifact stores.

Let `QueryBands` taps, one per attention layer, overhear plain text (the method's authors take up to 32,768 tokens);
`collect` turns them into tensors by name, as `scores/triattention.py` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, tensor

from wakesight.signals.query_bands import QueryBands


def taps(layers: int) -> tuple[QueryBands, ...]:
    """Fresh taps for a model with `layers` attention layers; they may watch any number of texts, one by one."""
    return tuple(QueryBands() for _ in range(layers))


def collect(taps: Sequence[QueryBands]) -> dict[str, Tensor]:
    """`Artifact.query_stats`, on the CPU, for each attention layer l.

    "mean.<l>": float32 [query_head, band, 2]. "abs.<l>": float32 [query_head, band]. "omega.<l>": float64 [band].
    "scale.<l>": float64, one number. "rotary.<l>": int64, how many bands are rotated. See `BandStatistics`.
    Raises WorkError if a layer saw no query.
    """
    found: dict[str, Tensor] = {}
    for layer, tap in enumerate(taps):
        seen = tap.statistics
        found |= {
            f"mean.{layer}": seen.mean.cpu(),
            f"abs.{layer}": seen.size.cpu(),
            f"omega.{layer}": seen.omega.cpu(),
            f"scale.{layer}": tensor(seen.scale).double(),
            f"rotary.{layer}": tensor(seen.rotary),
        }
    return found
