"""wakesight bench: decode, prefill, sweep, arms."""

from __future__ import annotations

from typing import Any

import click

from wakesight.cli.common import model_options, print_json, progress, shared_options
from wakesight.errors import RequestError

KINDS = ("decode", "prefill", "sweep", "arms")


@click.command("bench")
@click.argument("kind")
@click.option("--model", default="smollm2", show_default=True, help="As for ask.")
@click.option("--tokens", type=int, default=4096, show_default=True, help="Context length.")
@click.option("--rounds", type=int, default=9, show_default=True, help="Alternations of all arms.")
@click.option("--steps", type=int, default=None, help="Tokens per arm and round. [decode: 8, arms: 64]")
@click.option("--keep", "keeps", type=float, multiple=True, help="decode: fractions to time. Default 1 and 0.1.")
@model_options
@shared_options
def command(
    kind: str, model: str, tokens: int, rounds: int, steps: int | None, keeps: tuple[float, ...], device: str | None,
    dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure speed: all arms alternated in one run, ratios round by round with a 95% interval.

    \b
    wakesight bench decode  --tokens 8000   one token after a long context, against transformers' DynamicCache
    wakesight bench prefill --tokens 4096   reading with taps, against a plain forward
    wakesight bench sweep   --tokens 4096   scoring and compaction of a sweep, as a share of its prefill
    wakesight bench arms    --tokens 2048   13 sessions answer as one batch, against one after another
    """
    if kind not in KINDS:
        raise RequestError(f"there is no bench {kind!r}; use one of {', '.join(KINDS)}")
    if rounds < 1 or (steps is not None and steps < 1) or tokens < 2:
        raise RequestError("--rounds and --steps must be at least 1, --tokens at least 2")
    from wakesight.bench import arms, decode, prefill
    from wakesight.engines.hf.engine import load

    engine = load(model, device=device, dtype=dtype)
    with progress(f"bench {kind}") as on_round:
        if kind == "decode":
            result = decode.bench_decode(
                engine, tokens=tokens, keeps=keeps or (1.0, 0.1), steps=steps or 8, rounds=rounds, on_round=on_round
            )
        elif kind == "prefill":
            result = prefill.bench_prefill(engine, tokens=tokens, rounds=rounds, on_round=on_round)
        elif kind == "arms":
            result = arms.bench_arms(engine, tokens=tokens, steps=steps or 64, rounds=rounds, on_round=on_round)
        else:
            result = prefill.bench_sweep(engine, tokens=tokens)
    if as_json:
        print_json(result)
    else:
        click.echo(_table(result))


def _table(result: dict[str, Any]) -> str:
    lines = [f"bench {result['bench']}: {result['model']}, {result['context_tokens']:,} tokens"]
    for row in result["rows"]:
        if result["bench"] == "decode":
            lines.append(
                f"  {row['arm']:<28} {row['step_ms']:7.1f} ms/step  {_ratio(row['speedup'])} transformers' speed; "
                f"must read {row['must_read_bytes'] / 1e6:,.0f} MB = {row['limit_ms']:.1f} ms at copy bandwidth"
            )
        elif result["bench"] == "arms":
            lines.append(f"  {row['arm']:<28} {row['seconds']:7.2f} s  {_ratio(row['speedup'])} one at a time")
        elif result["bench"] == "prefill":
            lines.append(f"  {row['arm']:<28} {row['seconds']:7.2f} s  ours takes {_ratio(row['ours_over_arm'])} of it")
        else:
            lines.append(
                f"  {row['scorer']:<10} scoring {row['score_s']:.3f} s, all fractions {row['total_s']:.2f} s, "
                f"{row['share']:.1%} of prefill"
            )
    if result["bench"] == "arms":
        lines.append(
            f"  same tokens in {result['same']} of {result['sessions']} sessions, {result['steps']} tokens each"
        )
    if result["bench"] == "sweep":
        lines.append(f"  all: {result['share']:.1%} of a prefill of {result['prefill_s']:.1f} s")
    if "copy_bandwidth" in result:
        lines.append(f"  copy bandwidth {result['copy_bandwidth'] / 1e9:.1f} GB/s (read + written)")
    lines.append("  " + ", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    return "\n".join(lines)


def _ratio(value: dict[str, Any]) -> str:
    return f"{value['mean']:.2f}x [{value['low']:.2f}, {value['high']:.2f}]"
