"""wakesight bench: decode, prefill, sweep, arms, scoring, residency."""

from __future__ import annotations

from typing import Any

import click

from wakesight.cli.common import artifact_option, model_options, print_json, progress, shared_options
from wakesight.errors import RequestError

KINDS = ("decode", "prefill", "sweep", "arms", "scoring", "residency")


@click.command("bench")
@click.argument("kind")
@click.option("--model", default="smollm2", show_default=True, help="As for ask; scoring loads none.")
@click.option(
    "--tokens", default=None, help="Context length. [4096; residency: 8192; scoring: several, 4096,16384,65536]"
)
@click.option("--lengths", default=None, help="prefill: also score at these lengths, for example 2048,4096,8192.")
@click.option("--rounds", type=int, default=9, show_default=True, help="Alternations of all arms.")
@click.option("--steps", type=int, default=None, help="Tokens per arm and round. [decode: 8, arms, residency: 64]")
@click.option("--keep", "keeps", type=float, multiple=True, help="decode: fractions to time. Default 1 and 0.1.")
@artifact_option
@model_options
@shared_options
def command(
    kind: str, model: str, tokens: str | None, lengths: str | None, rounds: int, steps: int | None,
    keeps: tuple[float, ...], artifact: str | None, device: str | None, dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure speed: all arms alternated in one run, ratios round by round with a 95% interval.

    \b
    wakesight bench decode  --tokens 8000   one token after a long context, against transformers' DynamicCache
    wakesight bench prefill --tokens 4096   reading with taps, against a plain forward; scoring as a share of it
    wakesight bench sweep   --tokens 4096   scoring and compaction of a sweep, as a share of its prefill
    wakesight bench arms    --tokens 2048   13 sessions answer as one batch, against one after another
    wakesight bench scoring --tokens 4096,65536   the estimator at the paper's 27B shape, against the machine's limit
    wakesight bench residency --tokens 8192   a demoted cache at rerank intervals 1 to 16, beside flexicache and quest
    """
    if kind not in KINDS:
        raise RequestError(f"there is no bench {kind!r}; use one of {', '.join(KINDS)}")
    sizes = _numbers(tokens, "--tokens") if tokens is not None else ()
    if kind != "scoring" and len(sizes) > 1:
        raise RequestError(f"bench {kind} runs at one length; give one with --tokens")
    if rounds < 1 or (steps is not None and steps < 1) or any(size < 2 for size in sizes):
        raise RequestError("--rounds and --steps must be at least 1, --tokens at least 2")
    if lengths is not None and kind != "prefill":
        raise RequestError(f"--lengths belongs to bench prefill; leave it out for {kind}")
    if kind == "scoring" and dtype is not None:
        raise RequestError("estimators compute in float32; leave --dtype out for bench scoring")
    if kind == "scoring" and artifact is not None:
        raise RequestError("bench scoring runs networks of the paper's shape, not an estimator's; leave --artifact out")
    more = _numbers(lengths, "--lengths") if lengths is not None else ()
    if any(size < 2 for size in more):
        raise RequestError("--lengths must be at least 2 each")
    with progress(f"bench {kind}") as on_round:
        if kind == "scoring":
            from wakesight.bench import scoring

            result = scoring.bench_scoring(
                lengths=sizes or scoring.LENGTHS, rounds=rounds, device=device, on_round=on_round
            )
        else:
            length = sizes[0] if sizes else 8192 if kind == "residency" else 4096
            place: dict[str, Any] = {"device": device, "dtype": dtype, "artifact": artifact}
            result = _with_model(kind, model, length, more, rounds, steps, keeps, place, on_round)
    if as_json:
        print_json(result)
    else:
        click.echo(_table(result))


def _with_model(
    kind: str, model: str, tokens: int, lengths: tuple[int, ...], rounds: int, steps: int | None,
    keeps: tuple[float, ...], place: dict[str, Any], on_round: Any,
) -> dict[str, Any]:  # fmt: skip
    from wakesight.bench import arms, decode, prefill, residency
    from wakesight.engines.hf.engine import load

    engine = load(model, **place)
    longest = engine.geometry.max_positions
    if (most := max(tokens, *lengths, 0)) > longest:  # said before anything is measured
        option = "--tokens" if tokens > longest else "--lengths"
        raise RequestError(f"{option} {most} is more than {engine.name} reads; give at most {longest}")
    if kind == "decode":
        return decode.bench_decode(
            engine, tokens=tokens, keeps=keeps or (1.0, 0.1), steps=steps or 8, rounds=rounds, on_round=on_round
        )
    if kind == "prefill":
        return prefill.bench_prefill(engine, tokens=tokens, rounds=rounds, lengths=lengths, on_round=on_round)
    if kind == "arms":
        return arms.bench_arms(engine, tokens=tokens, steps=steps or 64, rounds=rounds, on_round=on_round)
    if kind == "residency":
        return residency.bench_residency(engine, tokens=tokens, steps=steps or 64, rounds=rounds, on_round=on_round)
    return prefill.bench_sweep(engine, tokens=tokens)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """ "4096,16384" -> (4096, 16384). Raises RequestError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise RequestError(f"{option} {text} is no length; write 4096, or several as 4096,16384")
    if len(set(parts)) < len(parts):
        raise RequestError(f"{option} names a length twice; give each once")
    return tuple(int(part) for part in parts)


def _table(result: dict[str, Any]) -> str:
    if result["bench"] == "scoring":
        return _scoring_table(result)
    if result["bench"] == "residency":
        return _residency_table(result)
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
    if result["bench"] == "prefill":
        lines += _shares(result)
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


def _shares(result: dict[str, Any]) -> list[str]:
    """Scoring over prefill, at the bench's own length and at further ones."""
    lines = [
        f"  {row['arm']:<28} {row['seconds']:7.3f} s  {_share(row['share'])} of ours with taps"
        for row in result["scoring"]
    ]
    lines += [f"  {name} left out: {why}" for name, why in result["left_out"].items()]
    if "lengths" in result:
        for row in result["lengths"]["rows"]:
            lines.append(
                f"  {row['tokens']:>7,} tokens  {row['arm']:<28} {row['seconds']:8.4f} s  "
                f"{row['us_per_token']:8.2f} us/token  {_share(row['share'])} of prefill"
            )
        for name, value in result["lengths"]["exponents"].items():
            if value is not None:
                lines.append(f"  {name:<28} grows as tokens^{value:.2f}")
        for tokens, missing in result["lengths"]["left_out"].items():
            lines += [f"  {int(tokens):,} tokens: {name} left out: {why}" for name, why in missing.items()]
    return lines


def _scoring_table(result: dict[str, Any]) -> str:
    inputs = ", ".join(map(str, result["inputs"]))
    lines = [
        f"bench scoring: {result['networks']} networks of {inputs} inputs, {result['parameters']:,} parameters, "
        f"on {result['device']}, {result['chunk']:,} tokens at a time"
    ]
    for row in result["rows"]:
        lines.append(
            f"  {row['tokens']:>8,} tokens  {row['seconds']:8.3f} s  {row['us_per_token']:7.2f} us/token  "
            f"{_ratio(row['over_limit'])} the limit of {row['limit_s']:.3f} s "
            f"(memory {row['memory_s']:.3f} s, products {row['product_s']:.3f} s)"
        )
    lines.append(
        f"  copy bandwidth {result['copy_bandwidth'] / 1e9:.1f} GB/s (read + written), "
        f"products {result['product_rate'] / 1e9:.0f} GFLOP/s"
    )
    lines.append("  " + ", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    return "\n".join(lines)


def _residency_table(result: dict[str, Any]) -> str:
    lines = [
        f"bench residency: {result['model']}, {result['context_tokens']:,} tokens, {result['attend']} pages of "
        f"{result['page_size']} read per KV head and step, {result['steps']} steps, {result['rounds']} rounds; "
        f"{result['unstable_heads']} of {result['heads']} heads unstable under flexicache"
    ]
    for row in result["rows"]:
        lines.append(
            f"  {row['arm']:<26} {row['tokens_per_s']:7.1f} tokens/s  {_ratio(row['speedup'])} transformers, "
            f"{_ratio(row['over_whole'])} ours whole"
        )
        if "recall" in row:
            lines.append(
                f"  {'':<26} {row['kv_bytes_kept'] / 1e6:7.1f} MB fast ({row['sketch_bytes'] / 1e6:.1f} sketches), "
                f"{row['reservoir_bytes'] / 1e6:.1f} reservoir; per step {row['fetches_per_step']:.1f} fetches, "
                f"{row['moved_bytes_per_step'] / 1e6:.2f} MB; {row['agreement']:.0%} of tokens alike, "
                f"recall {row['recall']:.2f}"
            )
    lines.append(f"  copy bandwidth {result['copy_bandwidth'] / 1e9:.1f} GB/s (read + written)")
    lines.append("  " + ", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    return "\n".join(lines)


def _share(value: dict[str, Any]) -> str:
    return f"{value['mean']:.2%} [{value['low']:.2%}, {value['high']:.2%}]"


def _ratio(value: dict[str, Any]) -> str:
    return f"{value['mean']:.2f}x [{value['low']:.2f}, {value['high']:.2f}]"
