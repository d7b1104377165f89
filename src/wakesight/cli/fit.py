"""wakesight fit: labels -> an estimator of one model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from wakesight.cli.common import print_json, read_names, shared_options


@click.command("fit", short_help="Train the estimator of a model from its labels.")
@click.argument("labels", metavar="LABELS")
@click.option("--out", required=True, help="Folder of the artifact: artifact.json, artifact.safetensors, report.md.")
@click.option(
    "--readers", default="signals", show_default=True,
    help="What to train, comma-separated: signals (the paper's), signals+keys, hidden, hidden+keys, age.",
)  # fmt: skip
@click.option("--epochs", type=int, default=12, show_default=True, help="Passes over the rows.")
@click.option("--hidden", type=int, default=64, show_default=True, help="Width of a network.")
@click.option("--window", type=int, default=6, show_default=True, help="Recurrent layers before a layer that it reads.")
@click.option("--rows", type=int, default=500, show_default=True, help="Random positions per document.")
@click.option("--utility", default="raw", show_default=True, help="raw, or relative to the residual stream's norm.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same artifact.")
@click.option("--window-study", is_flag=True, help="Also compare windows of 3, 6, 9 and 12 layers.")
@click.option("--no-loco", is_flag=True, help="Judge in sample, not by leaving one corpus out; much faster.")
@click.option("--judge-every", type=int, default=1, show_default=True, help="Judge on every n-th document.")
@click.option("--resume", is_flag=True, help="Go on with a fit that was stopped.")
@shared_options
def command(
    labels: str, out: str, readers: str, epochs: int, hidden: int, window: int, rows: int, utility: str, seed: int,
    window_study: bool, no_loco: bool, judge_every: int, resume: bool, as_json: bool,
) -> None:  # fmt: skip
    """Train readers on a folder of wakesight label, measure budgets and metrics, write the artifact.

    Metrics leave one corpus out: a document is judged by a reader that has not seen its corpus. A stopped fit goes on
    with --resume and gives the same artifact.

    \b
    wakesight fit labels/tiny --out artifacts/tiny --readers signals,signals+keys
    wakesight ask --model tiny --artifact artifacts/tiny --context report.txt --question "Who signed it?"
    """
    from wakesight.learning.dataset import open_labels
    from wakesight.learning.fit import fit

    found = open_labels(labels, utility)
    with _steps() as on_progress:
        artifact = fit(
            found, out, readers=read_names(readers), seed=seed, window=window, hidden=hidden, epochs=epochs,
            leave_one_out=not no_loco, window_study=window_study, rows=rows, judge_every=judge_every, resume=resume,
            on_progress=on_progress,
        )  # fmt: skip
    if as_json:
        print_json({"artifact": out, "training": artifact.training, "metrics": artifact.metrics})
        return
    click.echo(table(artifact.metrics))
    click.echo(f"{out}: readers {', '.join(artifact.readers)}; the whole report is {out}/report.md", err=True)


def table(metrics: Mapping[str, Any]) -> str:
    """rho, overlap and coverage of every predictor, best overlap first, as text."""
    rows = [(name, about["mean"]) for name, about in metrics["predictors"].items() if about["mean"] is not None]
    rows.sort(key=lambda row: -row[1]["overlap"])
    width = max(len(name) for name, _ in rows)
    k = f"{metrics['k_frac']:.0%}"
    lines = [f"{'':<{width}}  {'rho':>7}  {'Ov@' + k:>7}  {'Cov@' + k:>8}"]
    for name, mean in rows:
        lines.append(f"{name:<{width}}  {mean['rho']:>+7.3f}  {mean['overlap']:>7.1%}  {mean['coverage']:>8.1%}")
    return "\n".join(lines)


@contextlib.contextmanager
def _steps() -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar on stderr that says what is being done; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("fit", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total or None, description=what)
