"""How long the estimator takes on a model of the paper's shape, beside what the machine could do at best.

No such model is needed: signals are random, networks too, and the geometry is that of 48 recurrent layers with 48
heads and 16 attention layers with 4 KV heads, which makes 64 networks 867 -> 64 -> 1 (435 inputs in the first layer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from wakesight.bench.machine import versions
from wakesight.bench.pairs import alternate, median_ms, ratio
from wakesight.core import LayerIndex, ModelGeometry, Signals
from wakesight.estimator.features import FeatureSpec
from wakesight.estimator.net import Reader, empty_reader
from wakesight.models.load import find_device

LENGTHS = (4096, 16384, 65536)
CHUNK = 4096
STREAM = 16384  # tokens of signals that lie in memory; longer contexts go through them again and again
COPY_BYTES = 2**28
GEMM = 1024  # side of the square product whose rate bounds ours
REPEATS = 8  # copies and products per round: one of them alone is too short beside a scoring


def paper_geometry() -> ModelGeometry:
    """The paper's 27B model: 64 layers, every fourth attends."""
    attention = tuple(range(3, 64, 4))
    heads = (4,) * len(attention)
    recurrent = tuple(layer for layer in range(64) if layer not in attention)
    return ModelGeometry(
        family="qwen3_5", n_layers=64, attention_layers=tuple(map(LayerIndex, attention)),
        recurrent_layers=tuple(map(LayerIndex, recurrent)), query_heads=24, kv_heads=heads,
        key_dims=(256,) * len(heads), value_dims=(256,) * len(heads), itemsize=2, max_positions=262144,
        native_heads=(48,) * len(recurrent),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Stream:
    """Rows [token, head, 3] of a context of any length, of which `rows` are in memory; slices within one round only."""

    rows: Tensor

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def __getitem__(self, where: slice) -> Tensor:
        start = where.start % len(self.rows)
        return self.rows[start : start + where.stop - where.start]


def random_streams(geometry: ModelGeometry, tokens: int, device: torch.device, chunk: int = CHUNK) -> list[Stream]:
    """Random native signals, per recurrent layer, for contexts of up to `tokens` tokens read `chunk` at a time."""
    noise = torch.Generator(device).manual_seed(0)
    kept = min(tokens, max(STREAM // chunk, 1) * chunk)
    return [
        Stream(torch.rand(kept, heads, 3, generator=noise, device=device).mul_(2)) for heads in geometry.native_heads
    ]


def signals_of(geometry: ModelGeometry, tokens: int, streams: list[Stream]) -> Signals:
    """What a context of `tokens` tokens would have recorded; nothing is copied."""
    return Signals(tokens, 0, (1.0,) * len(geometry.kv_heads), {"native": cast("list[Tensor]", streams)})


def least_bytes(geometry: ModelGeometry, tokens: int) -> int:
    """What must pass through memory at least: every signal read once, every score written once, float32."""
    return 4 * tokens * (3 * sum(geometry.native_heads) + sum(geometry.kv_heads))


def least_flops(reader: Reader, tokens: int) -> int:
    """Two operations for every weight of every network and token; biases are not counted."""
    return 2 * tokens * sum(nets.first.numel() + nets.second.numel() for nets in reader.layers)


def bench_scoring(
    *, lengths: Sequence[int] = LENGTHS, rounds: int = 9, device: str | torch.device | None = None, chunk: int = CHUNK,
    geometry: ModelGeometry | None = None, on_round: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Scoring at several lengths, alternated with a large copy and a large product.

    Each round gives a limit of its own, the larger of bytes over copy bandwidth and operations over product rate, so
    that another load on the machine slows both sides. over_limit: scoring time over that limit.
    """
    shape, place = geometry or paper_geometry(), find_device(device)
    reader = empty_reader(FeatureSpec(("native", "age")), shape)
    streams = random_streams(shape, max(lengths), place, chunk)
    arms = {
        f"{tokens} tokens": _scoring(reader, signals_of(shape, tokens, streams), place, chunk) for tokens in lengths
    }
    source = torch.ones(COPY_BYTES // 4, device=place)
    target, square = torch.empty_like(source), torch.rand(GEMM, GEMM, device=place)
    product = torch.empty_like(square)
    limits = {
        "copy": _then_wait(lambda: [target.copy_(source) for _ in range(REPEATS)], place),
        "product": _then_wait(lambda: [torch.mm(square, square, out=product) for _ in range(REPEATS)], place),
    }
    seconds = alternate({**arms, **limits}, rounds, on_round)
    bandwidths = [REPEATS * 2 * COPY_BYTES / spent for spent in seconds["copy"]]
    rates = [REPEATS * 2 * GEMM**3 / spent for spent in seconds["product"]]
    rows = []
    for tokens in lengths:
        times, moved, flops = seconds[f"{tokens} tokens"], least_bytes(shape, tokens), least_flops(reader, tokens)
        by_memory = [moved / bandwidth for bandwidth in bandwidths]
        by_product = [flops / rate for rate in rates]
        limit = [max(pair) for pair in zip(by_memory, by_product, strict=True)]
        rows.append(
            {
                "tokens": tokens, "seconds": median_ms(times) / 1e3, "bytes": moved, "flops": flops,
                "memory_s": median_ms(by_memory) / 1e3, "product_s": median_ms(by_product) / 1e3,
                "limit_s": median_ms(limit) / 1e3, "over_limit": vars(ratio(times, limit)),
                "us_per_token": median_ms(times) * 1e3 / tokens,
            }
        )  # fmt: skip
    return {
        "bench": "scoring", "model": "the paper's 27B shape, random", "lengths": list(lengths), "chunk": chunk,
        "rounds": rounds, "device": str(place), "networks": sum(shape.kv_heads), "parameters": reader.parameters,
        "inputs": sorted({nets.inputs for nets in reader.layers}), "copy_bandwidth": float(np.median(bandwidths)),
        "product_rate": float(np.median(rates)), "versions": versions(), "rows": rows, "seconds": seconds,
    }  # fmt: skip


def _scoring(reader: Reader, signals: Signals, device: torch.device, chunk: int) -> Callable[[], None]:
    return _then_wait(lambda: reader.scores(signals, chunk), device)


def _then_wait(work: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """A device works on after the call returned; its time ends when the work does."""

    def run() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run
