"""What every figure shares: matplotlib without a display, our style, the same bytes for the same numbers."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from wakesight.errors import RequestError
from wakesight.report.palette import GRID, INK, MUTED

STYLE: dict[str, Any] = {
    "svg.hashsalt": "wakesight",  # ids in a file depend on its content alone
    "svg.fonttype": "none",  # text stays text: small, searchable, in the reader's font
    "text.parse_math": False,  # a task's name may hold a dollar sign
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "savefig.transparent": False,
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Our style while drawing and saving. Raises RequestError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise RequestError("a report needs matplotlib; type: pip install 'wakesight[report]'") from None
    with matplotlib.rc_context(STYLE):
        yield


def figure(width: float, height: float) -> Any:
    """An empty figure of so many inches, laid out so that nothing overlaps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def png(made: Any) -> bytes:
    file = io.BytesIO()
    made.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def svg(made: Any, *, transparent: bool = False) -> str:
    """No date and no version in it."""
    file = io.StringIO()
    made.savefig(file, format="svg", transparent=transparent, metadata={"Date": None, "Creator": None})
    return file.getvalue()
