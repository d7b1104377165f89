"""Sortable HTML tables. Every text from a model, a document or a path passes through `escape` here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Cell:
    """text: what is read. value: what is sorted by. note: small, below. shade: 0..1, how strong the ground is.

    tone: name of the ground's colour. strong: stands out. swatch: index of a scorer's colour, in front.
    """

    text: str
    value: float | None = None
    note: str = ""
    shade: float | None = None
    tone: str = "good"
    strong: bool = False
    swatch: int | None = None
    hint: str = ""


EMPTY = Cell("-")
ROOMY = 8  # columns of a table whose notes have room beside the numbers


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str, *, numeric_from: int = 1) -> str:
    """A table that scrolls inside its own box; the first column names the row."""
    heads = "".join(
        f'<th scope="col" aria-sort="none"{_class(place >= numeric_from and "number")}>'
        f'<button type="button">{escape(name)}</button></th>'
        for place, name in enumerate(columns)
    )
    body = "".join(
        f"<tr>{''.join(_cell(cell, i == 0, i >= numeric_from) for i, cell in enumerate(r))}</tr>" for r in rows
    )
    roomy = " roomy" if len(columns) <= ROOMY else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table class="sortable{roomy}"><caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(cell: Cell, names_row: bool, number: bool) -> str:
    tag = 'th scope="row"' if names_row else "td"
    shaded = cell.shade is not None
    classes = _class(number and "number", cell.strong and "strong", shaded and f"shade {cell.tone}")
    style = f' style="--s:{min(max(cell.shade, 0.0), 1.0):.3f}"' if cell.shade is not None else ""
    value = f' data-value="{cell.value:.9g}"' if cell.value is not None else ""
    hint = f' title="{escape(cell.hint)}"' if cell.hint else ""
    swatch = f'<i class="swatch" style="background:var(--m{cell.swatch})"></i>' if cell.swatch is not None else ""
    note = f"<small>{escape(cell.note)}</small>" if cell.note else ""
    text = _breakable(cell.text) if names_row else escape(cell.text)
    return f"<{tag}{classes}{style}{value}{hint}>{swatch}{text}{note}</{tag.split()[0]}>"


def _breakable(text: str) -> str:
    """A long name that may break after its separators, and nowhere else."""
    return re.sub(r"([/_:,])", r"\1<wbr>", escape(text))


def definitions(pairs: Sequence[tuple[str, str]]) -> str:
    """Names with their values."""
    return "<dl>" + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in pairs) + "</dl>"


def _class(*names: str | bool) -> str:
    chosen = " ".join(name for name in names if isinstance(name, str))
    return f' class="{chosen}"' if chosen else ""
