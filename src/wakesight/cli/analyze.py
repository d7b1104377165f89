"""wakesight analyze: what the native signals of a model are like."""

from __future__ import annotations

from pathlib import Path

import click

from wakesight.cli.common import print_json, shared_options
from wakesight.errors import RequestError

FILES = ("analysis.json", "analysis.md", "half-lives", "summaries", "cells")


@click.command("analyze", short_help="Describe a model's native signals and their relation to utility.")
@click.argument("labels", metavar="LABELS")
@click.option("--out", required=True, help="Folder for analysis.json, analysis.md and the figures (PNG, SVG).")
@click.option("--window", type=int, default=6, show_default=True, help="Recurrent layers before an attention layer.")
@click.option("--slow", type=float, default=1000.0, show_default=True, help="Half-life in tokens of a slow head.")
@click.option("--artifact", default=None, help="Also judge this estimator's readers here: transfer to other text.")
@click.option("--every", type=int, default=1, show_default=True, help="Use every n-th document.")
@shared_options
def command(
    labels: str, out: str, window: int, slow: float, artifact: str | None, every: int, as_json: bool
) -> None:  # fmt: skip
    """Half-lives, slow heads, where variance lies, and how signals relate to utility, from a folder of wakesight label.

    The paper's values stand beside ours in a column of their own.

    \b
    wakesight analyze labels/tiny --out analysis/tiny
    wakesight analyze labels/tiny-long --out analysis/long --artifact artifacts/tiny
    """
    if every < 1 or window < 1:
        raise RequestError("--every and --window must be at least 1")
    if not slow > 0:
        raise RequestError(f"--slow {slow} must be more than 0 tokens; 1000 is the default")
    from wakesight.estimator.artifact import Artifact
    from wakesight.learning.analysis import analyze
    from wakesight.learning.analysis_report import markdown
    from wakesight.learning.dataset import open_labels
    from wakesight.report.analysis_figures import figure_files
    from wakesight.report.drawing import style

    with style():  # raises without matplotlib, before any work
        pass
    folder = Path(out)
    _check_target(folder)
    fitted = None if artifact is None else Artifact.load(artifact)
    found = analyze(open_labels(labels), window=window, slow_tokens=slow, artifact=fitted, every=every)
    text = markdown(found)
    files = {"analysis.json": _json(found), "analysis.md": text.encode(), **dict(figure_files(found))}
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if as_json:
        print_json({"folder": out, "files": sorted(files), "analysis": found})
    else:
        click.echo(text)
        click.echo(f"{out}: {', '.join(sorted(files))}", err=True)


def _check_target(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file; give a folder with --out")
    if folder.is_dir():
        foreign = sorted(one.name for one in folder.iterdir() if one.name not in FILES and one.stem not in FILES)
        if foreign:
            raise RequestError(f"{folder} holds other files ({foreign[0]}); give a new folder with --out")


def _json(found: dict[str, object]) -> bytes:
    import json

    return (json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()
