"""wakesight simulate: residency policies on recorded attention, without a model."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from wakesight.cli.common import once, print_json, progress, read_names, shared_options
from wakesight.errors import RequestError
from wakesight.registry import did_you_mean

if TYPE_CHECKING:
    from wakesight.simulate.compare import Comparison
    from wakesight.simulate.sweep import Run

UNITS = ("query_head", "kv_head")
POSITION_BYTES = 512  # K and V of 128 dims in 2 bytes


@click.command("simulate", short_help="Play residency policies on recorded attention.")
@click.option(
    "--traces", "sources", required=True, multiple=True, callback=once, help="A recording: DIR or sample:niah."
)
@click.option("--policies", default="full,reactive,evict,belady", show_default=True, help="Names, comma-separated.")
@click.option("--budgets", default="8,16,32,64", show_default=True, help="Pages per unit, comma-separated.")
@click.option("--per-run", is_flag=True, help="One row per run instead of runs pooled.")
@click.option("--compare", "compares", is_flag=True, help="Reactive against the others, at equal memory or budget.")
@click.option("--curve", default=None, help="More budgets of reactive, for --compare to interpolate on.")
@click.option("--unit", default="query_head", show_default=True, help="What holds pages: query_head or kv_head.")
@click.option("--page-size", type=int, default=16, show_default=True, help="Positions of a page.")
@click.option("--page-bytes", type=int, default=None, help="K and V of one page of one unit. Default: 512 a position.")
@click.option("--bandwidth-gbps", type=float, default=24.0, show_default=True, help="GB per second of a fetch.")
@click.option("--latency-us", type=float, default=0.0, show_default=True, help="Before a step's fetches move.")
@click.option("--overlap", type=float, default=0.0, show_default=True, help="Fraction of a step that hides fetches.")
@click.option("--step-ms", type=float, default=30.0, show_default=True, help="Time of a step without fetches.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the intervals of --compare, which draw runs.")
@click.option("--out", default=None, help="Folder for simulate.json, simulate.md, rows.csv and pareto (PNG, SVG).")
@shared_options
def command(
    sources: str, policies: str, budgets: str, per_run: bool, compares: bool, curve: str | None, unit: str,
    page_size: int, page_bytes: int | None, bandwidth_gbps: float, latency_us: float, overlap: float, step_ms: float,
    seed: int, out: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Misses, memory, transfers and stall time of residency policies on recorded page wants.

    Policies: full, reactive, evict, frozen, frozen_tail, snapkv, rkv, reasonalloc, belady, arc. Settings follow a
    colon (rkv:buffer=8); reactive:snapkv starts from the pages that SnapKV would keep, reactive:keydiff from those of
    any scorer whose scores of the prompt were recorded. A miss is a wanted page that is not resident; a page's first
    want is free where it has just been written (see docs/glossary.md).

    \b
    wakesight simulate --traces sample:niah --policies full,reactive,evict,belady --budgets 8,16,32
    wakesight simulate --traces traces/niah --policies reactive,frozen,snapkv --compare --out simulated
    """
    from wakesight.cli.study_folder import check_target, write_files
    from wakesight.simulate import compare, sweep
    from wakesight.simulate.costs import CostModel

    if unit not in UNITS:
        raise RequestError(f"unknown unit {unit!r}{did_you_mean(unit, UNITS)}; type --unit query_head or kv_head")
    if curve is not None and not compares:
        raise RequestError("--curve adds points for --compare to interpolate on; type --compare, too")
    if page_size < 1:
        raise RequestError(f"--page-size {page_size} must be at least 1; 16 is the default")
    if seed < 0:
        raise RequestError(f"--seed {seed} must be at least 0")
    specs, sizes = read_names(policies), _numbers(budgets, "--budgets")
    finer = _numbers(curve, "--curve") if curve is not None else []
    costs = CostModel(
        bandwidth_gbps * 1e9, latency_us * 1e-6, overlap, step_ms * 1e-3,
        POSITION_BYTES * page_size if page_bytes is None else page_bytes,
    )  # fmt: skip
    _check_names(specs)
    if compares and compare.OURS not in specs:
        raise RequestError("a comparison is with reactive; add it to --policies")
    check_target(out)
    runs = _runs(sources, unit, page_size)
    with progress("simulating") as on_cell:
        cells = sweep.sweep(runs, specs, sizes, on_cell)
        further = sweep.sweep(runs, [compare.OURS], finer) if finer else []
    rows = list(sweep.rows(cells, costs, per_run))
    found: dict[str, Any] = {"rows": rows}
    text = _table(rows)
    if compares:
        compared = compare.compare(cells, further, seed)
        found["comparisons"] = [_comparison(one) for one in compared]
        text += "\n\n" + "\n".join(compare.described(compared))
    if out is not None:
        asked = {"traces": sources, "unit": unit, "page_size": page_size, "costs": asdict(costs), "seed": seed}
        files = _files(found | {"asked": asked}, text, list(sweep.rows(cells, costs)))
        write_files(Path(out), "simulate", files)
        click.echo(f"{out}: {', '.join(sorted(files))}", err=True)
    if as_json:
        print_json(found)
    else:
        click.echo(text)


def _numbers(text: str, option: str) -> list[int]:
    """ "8,16" -> [8, 16]. Raises RequestError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise RequestError(f"{option} {text} is no list of pages per unit; write 8,16,32")
    return [int(part) for part in parts]


def _check_names(specs: Sequence[str]) -> None:
    """Raises RequestError for a policy that is unknown or given twice, before traces are read."""
    from wakesight.simulate.specs import policy_of

    for spec in specs:
        policy_of(spec)
        if specs.count(spec) > 1:
            raise RequestError(f"--policies names {spec} twice; give each once")


def _runs(source: str, unit: str, page_size: int) -> list[Run]:
    """The traces that hold a step, as wants."""
    from wakesight.simulate.sweep import Run
    from wakesight.traces.pages import Unit, wants_of
    from wakesight.traces.store import load_traces

    found = []
    for trace in load_traces(source):
        if trace.steps:
            combo = f"{trace.meta.get('model', 'unknown')} / {trace.meta.get('regime', 'unknown')}"
            wants = wants_of(trace, page_size, cast("Unit", unit))
            found.append(Run(trace.name, combo, wants, trace.prompt_mass is not None))
    if not found:
        raise RequestError(f"{source} holds no decode step; record some with: wakesight trace record")
    return found


def _comparison(one: Comparison) -> dict[str, Any]:
    return asdict(one) | {
        "wins": one.wins,
        "matched": len(one.points),
        "combos": one.combos,
        "losses": [asdict(loss) for loss in one.losses],
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows for people: aligned columns, runs and combos only where rows have them."""
    names = [name for name in ("combo", "run") if any(name in row for row in rows)]
    heads = [*names, "policy", "B", "miss rate", "misses", "accesses", "first", "fetches", "pages", "peak", "MB in",
             "MB out", "stalls", "stall s"]  # fmt: skip
    lines = [heads]
    for row in rows:
        lines.append([
            *(str(row.get(name, "")) for name in names), row["policy"],
            "-" if row["budget"] is None else str(row["budget"]), f"{row['miss_rate']:.4f}",
            *(f"{row[name]:,}" for name in ("misses", "accesses", "first_touches", "fetches")),
            f"{row['mean_resident_pages']:,.1f}", f"{row['peak_resident_pages']:,}", f"{row['bytes_in'] / 1e6:,.2f}",
            f"{row['bytes_out'] / 1e6:,.2f}", f"{row['stall_steps']:,}", f"{row['stall_seconds']:.4f}",
        ])  # fmt: skip
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    words = len(names) + 1  # left-aligned columns
    return "\n".join(
        "  ".join(cell.ljust(width) if at < words else cell.rjust(width) for at, (cell, width) in
                  enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )  # fmt: skip


def _files(found: Mapping[str, Any], text: str, pooled: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    from wakesight.report.pareto import pareto_files

    sheet = io.StringIO()
    writer = csv.DictWriter(sheet, list(found["rows"][0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found["rows"])
    return {
        "simulate.json": (json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode(),
        "simulate.md": f"```\n{text}\n```\n".encode(),
        "rows.csv": sheet.getvalue().encode(),
        **dict(pareto_files(pooled)),
    }
