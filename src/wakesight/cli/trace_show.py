"""wakesight trace show: what a recording holds, and what is damaged in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from wakesight.cli.common import print_json, shared_options

if TYPE_CHECKING:
    from wakesight.traces.schema import Trace

ABOUT = ("model", "regime", "language", "seed", "depth", "question", "answer", "reply", "finish", "commit")


@click.command("show")
@click.argument("source")
@shared_options
def command(source: str, as_json: bool) -> None:
    """List the traces of SOURCE: a run folder, a zip file of one, or sample:NAME from the package.

    \b
    wakesight trace show traces/niah
    wakesight trace show sample:niah --json
    """
    from wakesight.traces.store import load_traces

    traces = load_traces(source)
    rows: list[dict[str, Any]] = []
    for name in traces.names:
        trace, damage = traces.open(name)
        rows.append({**_row(trace), "finished": traces.finished(name), "damaged": [str(each) for each in damage]})
    if as_json:
        print_json({"source": source, "asked": dict(traces.asked), "traces": rows})
        return
    for row in rows:
        _print(row)
    whole = sum(row["finished"] for row in rows)
    steps, damaged = sum(row["steps"] for row in rows), sum(len(row["damaged"]) for row in rows)
    click.echo(f"{source}: {len(rows)} traces, {whole} of them finished, {steps} steps, {damaged} damaged chunks")


def _row(trace: Trace) -> dict[str, Any]:
    return {
        "name": trace.name,
        "steps": trace.steps,
        "prompt_len": trace.prompt_len,
        "needle_spans": [list(span) for span in trace.needle_spans],
        "layers": trace.layers,
        "query_heads": trace.query_heads,
        "kv_heads": list(trace.kv_heads),
        "weights": str(trace.topk_val.dtype),
        "prompt_mass": trace.prompt_mass is not None,
        **{name: trace.meta.get(name) for name in ABOUT},
    }


def _print(row: Mapping[str, Any]) -> None:
    state = "" if row["finished"] else ", not finished"
    click.echo(f"{row['name']}: {row['steps']} steps behind {row['prompt_len']} prompt tokens{state}")
    heads = f"{row['layers']} layers of {row['query_heads']} query and {_range(row['kv_heads'])} KV heads"
    click.echo(f"    {row['model']}, {row['regime']}, {heads}, weights {row['weights']}")
    needles = ", ".join(f"{start} to {end - 1}" for start, end in row["needle_spans"]) or "none"
    click.echo(f"    needle at {needles}; answer {row['answer']}; reply {' '.join(str(row['reply']).split())[:80]}")
    for damage in row["damaged"]:
        click.echo(f"    damaged: {damage}; it is left out")


def _range(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
