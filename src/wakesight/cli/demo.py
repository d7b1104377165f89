"""wakesight demo: the main job on a bundled model and document."""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path
from typing import Any

import click

from wakesight.cli.common import checked_text, model_options, print_json, progress, shared_options, show_bytes
from wakesight.policy import Policy

FRACTIONS = (1.0, 0.5, 0.3, 0.1)
DOCUMENT = "lighthouse.txt"
# One answer stands late in the document and survives eviction longer, one stands early and is lost sooner.
QUESTIONS = ("What is the telephone number of the museum?", "What is the archive number of the keeper's diary?")
CLUES = ("telephone number", "archive number")  # where the document answers; only used to show those passages


@click.command("demo")
@click.option("--model", default="smollm2", show_default=True, help="As for ask.")
@click.option("--scorer", default="keydiff", show_default=True, help="See wakesight methods.")
@click.option("--question", "questions", multiple=True, default=QUESTIONS, show_default=True, callback=checked_text)
@click.option("--png", default=None, help="Also draw which tokens were kept into this PNG file.")
@model_options
@shared_options
def command(
    model: str,
    scorer: str,
    questions: tuple[str, ...],
    png: str | None,
    device: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Read a bundled document once, then ask the same questions with all, half, 30% and 10% of its KV cache."""
    policies = [Policy(scorer=scorer, keep=keep) for keep in FRACTIONS]
    text = (importlib.resources.files("wakesight") / "data" / DOCUMENT).read_text(encoding="utf-8")
    from wakesight.engines.hf.engine import load
    from wakesight.report import kept_map

    engine = load(model, device=device, dtype=dtype)
    with progress("reading") as on_chunk:
        whole = engine.prefill(text, on_chunk=on_chunk)
    tokens = whole.stats.logical_length
    rows: list[dict[str, Any]] = []
    arms = {}
    for policy in policies:
        with whole.compact(policy) as child:
            answers, stats = [child.ask(q, max_new_tokens=32).text.strip() for q in questions], child.stats
            assert child.kept is not None
            arms[f"p = {policy.keep:g}: {' | '.join(answer[:60] for answer in answers)}"] = child.kept
            rows.append(
                {
                    "keep": policy.keep,
                    "answers": answers,
                    "kept_entries": stats.kept_entries,
                    "kv_bytes_full": stats.kv_bytes_full,
                    "kv_bytes_kept": stats.kv_bytes_kept,
                    "kv_bytes_slack": stats.kv_bytes_slack,
                    "strip": kept_map.strip(child.kept, tokens),
                }
            )
    if png:
        kept_map.picture(arms, tokens, Path(png), f"{engine.name}, {tokens:,} tokens, scorer {scorer}")
    if as_json:
        print_json({"model": engine.name, "tokens": tokens, "questions": questions, "arms": rows, "png": png})
        return
    click.echo(f"{engine.name} read {tokens:,} tokens in {whole.prefill_s:.1f} s; scorer {scorer}, one scoring for all")
    click.echo("".join(f"question {i + 1}: {q}\n" for i, q in enumerate(questions)))
    for row in rows:
        heads = [count for layer in row["kept_entries"] for count in layer]
        click.echo(
            f"p = {row['keep']:<4g} "
            + "\n         ".join(f"{i + 1}: {' '.join(a.split())}" for i, a in enumerate(row["answers"]))
            + f"\n         kept {sum(heads):,} of {tokens * len(heads):,} entries, "
            f"KV {show_bytes(row['kv_bytes_full'])} -> {show_bytes(row['kv_bytes_kept'])} "
            f"(+ {show_bytes(row['kv_bytes_slack'])} growth slack)\n"
            f"         |{row['strip']}|"
        )
    _show_passage(engine, whole.tokens, arms, text)
    if png:
        click.echo(f"picture: {png}")


def _show_passage(engine: Any, ids: tuple[int, ...], arms: dict[str, Any], text: str) -> None:
    """The sentences that hold the answers, every token shaded by how many entries kept it."""
    from rich.console import Console

    from wakesight.report import kept_map

    pieces = [engine.decode([i]) for i in ids]
    console = Console(file=sys.stdout, highlight=False)
    console.print("\nthe passages with the answers, brighter green = kept by more (layer, head) pairs:")
    for clue in CLUES:
        at = len(ids) - len(engine.encode(text)) + len(engine.encode(text[: text.index(clue)]))
        start, stop = max(at - 4, 0), min(at + 16, len(ids))
        for name, kept in arms.items():
            console.print(name.split(":")[0].ljust(8), kept_map.words(pieces, kept, start, stop, len(ids)))
