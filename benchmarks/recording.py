"""What recording costs: prefill with it over prefill without, in alternated rounds.

.venv/bin/python benchmarks/recording.py [--tokens 2048] [--layers 12] [--hidden 256] [--chunk 512] [--rounds 15]
    [--arms again,native]

A random model with Qwen3.5's layers (three gated delta nets, then one gated attention layer) reads the same tokens
without a recording, with the native signals, with native signals and output gates, and with all that can be
overheard. `again` is the first arm once more: its ratio says how far this machine lets two equal things differ.
Every arm is timed once per round, in turning order, by the clock and by this process's processor time, which other
processes disturb less; printed are the geometric means of the ratios inside rounds with their 95% intervals, and the
bytes that a recording of native signals holds. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from typing import TYPE_CHECKING, Any

import torch

from wakesight.bench.pairs import alternate, median_ms, ratio
from wakesight.testing import tiny

if TYPE_CHECKING:
    from wakesight.engines.hf.engine import HFEngine

ARMS = {
    "without": (),
    "again": (),
    "native": ("native",),
    "native_and_gate": ("native", "output_gate"),
    "all": ("native", "output_gate", "hidden"),
}


def made(given: argparse.Namespace) -> HFEngine:
    """A random model whose parts stand in the proportions of the real ones."""
    heads = given.hidden // 32
    shape: dict[str, Any] = {
        "num_hidden_layers": given.layers, "hidden_size": given.hidden, "intermediate_size": 3 * given.hidden,
        "num_attention_heads": heads, "num_key_value_heads": max(heads // 4, 1), "head_dim": 64,
        "linear_num_key_heads": max(heads // 4, 1), "linear_num_value_heads": heads,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "max_position_embeddings": given.tokens + 64,
    }  # fmt: skip
    return tiny.engine("qwen3_5", poison=False, **shape)


def compared(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Per arm: ratio to `without`, and its 95% interval."""
    ratios = {name: ratio(times, seconds["without"]) for name, times in seconds.items() if name != "without"}
    return {name: [round(x, 4) for x in (r.mean, r.low, r.high)] for name, r in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--arms", default=",".join(name for name in ARMS if name != "without"))
    given = parser.parse_args()
    arms = ["without", *given.arms.split(",")]
    engine, tokens = made(given), tiny.tokens(given.tokens)

    def read(record: tuple[str, ...]) -> None:
        engine.prefill(tokens, chunk=given.chunk, record=record).close()

    busy: dict[str, list[float]] = {name: [] for name in arms}

    def timed(name: str) -> None:
        start = time.process_time()
        read(ARMS[name])
        busy[name].append(time.process_time() - start)

    seconds = alternate({name: functools.partial(timed, name) for name in arms}, given.rounds)
    busy = {name: times[1:] for name, times in busy.items()}  # the first round is not counted
    with engine.prefill(tokens, chunk=given.chunk, record=["native"]) as session:
        held = sum(rows.nbytes for rows in session.signals()["native"])
    print(
        json.dumps(
            {
                "tokens": given.tokens,
                "layers": given.layers,
                "hidden": given.hidden,
                "chunk": given.chunk,
                "native_heads": list(engine.geometry.native_heads),
                "native_bytes": held,
                "prefill_ms": round(median_ms(seconds["without"]), 1),
                "clock_ratios": compared(seconds),
                "processor_ratios": compared(busy),
                "rounds": given.rounds,
                "threads": torch.get_num_threads(),
                "cpus": os.cpu_count(),
            }
        )
    )


if __name__ == "__main__":
    main()
