"""wakesight calibrate: plain text -> gate table and query statistics of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from wakesight.cli.common import model_options, print_json, progress, shared_options


@click.command("calibrate", short_help="Measure gate table and query statistics of a model.")
@click.argument("docs")
@click.option("--model", required=True, help="As for ask.")
@click.option("--out", required=True, help="Folder of the artifact; one that is there keeps its readers.")
@click.option("--tokens", type=int, default=32768, show_default=True, help="About so many tokens are read.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which documents; same seed, same result.")
@click.option(
    "--reduce", default="mean_then_max", show_default=True,
    help="Gate of a KV head: mean_then_max or max_then_mean over its query heads.",
)  # fmt: skip
@click.option("--keep-benchmarks", is_flag=True, help="Keep documents that name a long-context benchmark.")
@click.option("--chunk", type=int, default=512, show_default=True, help="Prefill tokens per step.")
@model_options
@shared_options
def command(
    docs: str, model: str, out: str, tokens: int, seed: int, reduce: str, keep_benchmarks: bool, chunk: int,
    device: str | None, dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Read DOCS (.jsonl, .txt, .parquet or a folder of them) and write what allocations and triattention need.

    The gate table shares budgets (--allocation gate, gate_per_head); the query statistics are triattention's. What
    was measured, and on which documents, stands in calibrate.json in the artifact.

    \b
    wakesight calibrate texts/ --model smollm2 --out artifacts/smollm2
    wakesight fit labels/smollm2 --out artifacts/smollm2 --readers hidden
    """
    from wakesight.engines.hf.engine import load
    from wakesight.learning.calibrate import FEW, calibrate
    from wakesight.learning.documents import read_documents

    found = read_documents(Path(docs), drop_benchmarks=not keep_benchmarks)
    engine = load(model, device=device, dtype=dtype)
    with progress("calibrate") as on_document:
        report = calibrate(
            engine, found, out, tokens=tokens, seed=seed, reduce=reduce, chunk=chunk, on_document=on_document
        )
    if report["tokens"] < FEW:
        click.echo(
            f"measured on {report['tokens']:,} tokens only, which is too few to rely on: give more text, or raise "
            f"--tokens ({FEW:,} at least, 32,768 is the default)", err=True,
        )  # fmt: skip
    if as_json:
        print_json({"artifact": out, "report": report})
    else:
        click.echo(table(report))
        click.echo(f"{out}: {report['tokens']:,} tokens of {len(report['documents'])} documents", err=True)


def table(report: dict[str, Any]) -> str:
    """The gate of every attention layer and KV head as text; what is missing by name."""
    statistics = f"query statistics: {len(report['attention_layers'])} attention layers"
    if report["gate"] is None:
        return f"gate table: none, {report['no_gate']}\n{statistics}"
    lines = [f"{'layer':>5}  {'mean':>6}  by KV head"]
    for layer, mean, heads in zip(report["attention_layers"], report["gate_by_layer"], report["gate"], strict=True):
        lines.append(f"{layer:>5}  {mean:6.4f}  {' '.join(f'{head:.4f}' for head in heads)}")
    return "\n".join([*lines, statistics])
