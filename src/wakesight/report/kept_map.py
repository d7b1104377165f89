"""Which tokens stayed: a strip of shades for a terminal, coloured words, and a picture (layer x position)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.text import Text

from wakesight.core import KeptSet
from wakesight.errors import RequestError, WorkError

SHADES = " .:-=+*#%@"


def strip(kept: KeptSet, tokens: int, width: int = 72) -> str:
    """The context in `width` columns; the darker, the larger the share of its (layer, head) entries that stayed."""
    share = kept.per_layer_token(tokens).mean(dim=0)
    columns = torch.nn.functional.adaptive_avg_pool1d(share[None, None], min(width, tokens))[0, 0]
    return "".join(SHADES[min(int(x * len(SHADES)), len(SHADES) - 1)] for x in columns.tolist())


def words(pieces: Sequence[str], kept: KeptSet, start: int, stop: int, tokens: int) -> Text:
    """Tokens start..stop as text, each on a background from black (nobody kept it) to green (everybody did)."""
    share = kept.per_layer_token(tokens).mean(dim=0)
    text = Text()
    for position in range(start, stop):
        level = float(share[position])
        colour = f"rgb(0,{int(30 + 150 * level)},{int(40 * level)})"
        piece = pieces[position].replace("\n", " ")
        text.append(piece, style=f"white on {colour}")
    return text


def picture(arms: Mapping[str, KeptSet], tokens: int, file: Path, title: str) -> None:
    """PNG: one panel per arm, attention layers down, positions across, share of a layer's heads that kept it.

    Written under a temporary name and renamed. Raises RequestError without matplotlib or for an unwritable path.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise RequestError("a picture needs matplotlib; type: pip install 'wakesight[report]'") from None
    figure = Figure(figsize=(10, 0.8 + 1.7 * len(arms)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(arms), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, kept) in zip(panels, arms.items(), strict=True):
        share = kept.per_layer_token(tokens)
        cells = torch.nn.functional.adaptive_avg_pool1d(share[None], min(tokens, 900))[0]
        image = panel.imshow(
            cells.numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest",
            extent=(0, tokens, share.shape[0] - 0.5, -0.5),
        )  # fmt: skip
        panel.set_title(name, loc="left", fontsize=9)
        panel.set_ylabel("attention layer", fontsize=8)
    panels[-1].set_xlabel("token position")
    figure.colorbar(image, ax=list(panels), label="share of KV heads that keep it", shrink=0.6)
    figure.suptitle(title, fontsize=10)
    scratch = file.with_name(f".{file.name}.part")
    try:
        figure.savefig(scratch, dpi=110, format="png")
        os.replace(scratch, file)
    except OSError as error:
        raise WorkError(f"the picture {file} could not be written: {error.strerror}") from error
    finally:
        scratch.unlink(missing_ok=True)
