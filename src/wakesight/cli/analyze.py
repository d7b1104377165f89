"""wakesight analyze: what the native signals of a model are like, and what its attention heads are good for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from wakesight.cli.common import model_options, print_json, progress, shared_options
from wakesight.cli.recipe import given
from wakesight.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from wakesight.learning.dataset import Labels

OF_LABELS = ("window", "slow", "artifact", "every", "utility")  # options that --close has no use for
OF_CLOSING = ("share", "seeds", "tokens")  # and that nothing else has
FILES = ("analysis.json", "analysis.md", "half-lives", "summaries", "cells", "closing.json", "closing.md")


@click.command("analyze", short_help="Describe a model's native signals and their relation to utility.")
@click.argument("source", metavar="LABELS|DOCS")
@click.option("--out", required=True, help="Folder for analysis.json, analysis.md and the figures (PNG, SVG).")
@click.option("--window", type=int, default=6, show_default=True, help="Recurrent layers before an attention layer.")
@click.option("--slow", type=float, default=1000.0, show_default=True, help="Half-life in tokens of a slow head.")
@click.option("--artifact", default=None, help="Also judge this estimator's readers here: transfer to other text.")
@click.option("--every", type=int, default=1, show_default=True, help="Use every n-th document.")
@click.option("--utility", default="raw", show_default=True, help="raw, or relative to the residual stream's norm.")
@click.option("--model", default=None, help="Also read static half-lives from the weights of the labels' model.")
@click.option("--close", "closing", is_flag=True, help="Close attention heads while --model reads DOCS; no labels.")
@click.option("--share", type=float, default=0.125, show_default=True, help="--close: part of the query heads.")
@click.option("--seeds", type=int, default=5, show_default=True, help="--close: random choices of as many heads.")
@click.option("--tokens", type=int, default=8192, show_default=True, help="--close: about so many tokens are read.")
@model_options
@shared_options
@click.pass_context
def command(
    context: click.Context, source: str, out: str, window: int, slow: float, artifact: str | None, every: int,
    utility: str, model: str | None, closing: bool, share: float, seeds: int, tokens: int, device: str | None,
    dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Half-lives, slow heads, where variance lies, and how signals relate to utility, from a folder of wakesight label.

    The paper's values stand beside ours in a column of their own. With --close, the query heads of the lowest output
    gates are switched off instead, then as many random ones, then whole attention layers, and next-token accuracy on
    documents is compared: closing.json and closing.md.

    \b
    wakesight analyze labels/tiny --out analysis/tiny --model tiny
    wakesight analyze labels/tiny-long --out analysis/long --artifact artifacts/tiny
    wakesight analyze texts/ --out analysis/tiny --model tiny --close
    """
    for name in sorted(given(context) & set(OF_LABELS if closing else OF_CLOSING)):
        what = "is about labels, and --close reads none" if closing else "belongs to --close"
        raise RequestError(f"--{name} {what}; leave one of them out" if closing else f"--{name} {what}; add it")
    if every < 1 or window < 1:
        raise RequestError("--every and --window must be at least 1")
    if not slow > 0:
        raise RequestError(f"--slow {slow} must be more than 0 tokens; 1000 is the default")
    folder = Path(out)
    _check_target(folder)
    if closing:
        if model is None:
            raise RequestError("--close reads documents with a model; name one with --model")
        _close(source, folder, model, share, seeds, tokens, device, dtype, as_json)
        return
    _analyze(source, folder, window, slow, artifact, every, utility, model, device, dtype, as_json)


def _analyze(
    source: str, folder: Path, window: int, slow: float, artifact: str | None, every: int, utility: str,
    model: str | None, device: str | None, dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    from wakesight.estimator.artifact import Artifact
    from wakesight.learning.analysis import analyze
    from wakesight.learning.analysis_report import markdown
    from wakesight.learning.dataset import open_labels
    from wakesight.report.analysis_figures import figure_files
    from wakesight.report.drawing import style

    with style():  # raises without matplotlib, before any work
        pass
    fitted = None if artifact is None else Artifact.load(artifact)
    labels = open_labels(source, utility)
    static = None if model is None else _static(model, labels, device, dtype)
    found = analyze(labels, window=window, slow_tokens=slow, static=static, artifact=fitted, every=every)
    text = markdown(found)
    files = {"analysis.json": _json(found), "analysis.md": text.encode(), **dict(figure_files(found))}
    _write(folder, files)
    if as_json:
        print_json({"folder": str(folder), "files": sorted(files), "analysis": found})
    else:
        click.echo(text)
        click.echo(f"{folder}: {', '.join(sorted(files))}", err=True)


def _static(model: str, labels: Labels, device: str | None, dtype: str | None) -> list[Tensor] | None:
    """Half-lives at zero input of the labels' own model; None for a family that has no such number."""
    from wakesight.engines.hf.engine import load
    from wakesight.learning.analysis import static_half_lives

    engine = load(model, device=device, dtype=dtype)
    if engine.weights_fingerprint() != labels.fingerprint:
        raise RequestError(f"{model} is not the model that these labels were made with; give that one, or no --model")
    weights = engine.decay_weights()
    return None if weights is None else [static_half_lives(*layer) for layer in weights]


def _close(
    source: str, folder: Path, model: str, share: float, seeds: int, tokens: int, device: str | None,
    dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    from wakesight.engines.hf.engine import load
    from wakesight.learning.closing import close_heads, markdown
    from wakesight.learning.documents import read_documents

    documents = read_documents(Path(source))
    engine = load(model, device=device, dtype=dtype)
    with progress("closing heads") as on_arm:
        found = close_heads(engine, documents, share=share, seeds=seeds, tokens=tokens, on_arm=on_arm)
    text = markdown(found)
    _write(folder, {"closing.json": _json(found), "closing.md": text.encode()})
    if as_json:
        print_json({"folder": str(folder), "files": ["closing.json", "closing.md"], "closing": found})
    else:
        click.echo(text)
        click.echo(f"{folder}: closing.json, closing.md", err=True)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    from wakesight.learning.folder import make_folder

    make_folder(folder)
    for name, data in files.items():
        (folder / name).write_bytes(data)


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
