"""What allocations read of a model's tables, and how a table's numbers become weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from wakesight.core import Table, Tables
from wakesight.errors import RequestError

SOURCES = {  # field of Tables: (what it holds, the command that makes it)
    "gate": ("the mean output gate of every KV head", "wakesight calibrate"),
    "utility_mass": ("the utility that the best entries of every KV head hold", "wakesight fit"),
    "utility_peak": ("the largest utility of every KV head", "wakesight fit"),
}


def measured(tables: Tables | None, name: str, asker: str, layers: int, heads: Sequence[int] | None = None) -> Table:
    """The table `name` of a model with `layers` attention layers and, where known, `heads` KV heads in each.

    asker: the allocation, for the message. Raises RequestError if the table was not measured, or is of another model.
    """
    table: Table | None = getattr(tables, name, None)
    content, command = SOURCES[name]
    if table is None:
        gate = name == "gate"
        none = " (one without output gates has none)" if gate else ""
        other = "utility" if gate and tables is not None and tables.utility_mass is not None else "flat"
        raise RequestError(
            f"the allocation {asker!r} needs {content}, which was not measured for this model{none}; measure it with: "
            f"{command}, or use --allocation {other}"
        )
    rows = [len(row) for row in table]
    if len(rows) != layers or (heads is not None and rows != list(heads)):
        wanted = f"{layers} attention layers" + ("" if heads is None else f" with {_shown(heads)} KV heads")
        raise RequestError(
            f"the allocation {asker!r} has a table of {len(rows)} attention layers with {_shown(rows)} KV heads, but "
            f"this model has {wanted}; measure its own with: {command}"
        )
    return table


def powered(weights: Sequence[Fraction], exponent: float) -> list[Fraction]:
    """weights ** exponent up to a common factor: the largest becomes 1, so that nothing overflows.

    Exact for exponent 1; exponent 0 makes all equal.
    """
    largest = max(weights)
    if exponent == 1 or largest == 0:
        return list(weights)
    return [Fraction(float(weight / largest) ** exponent) for weight in weights]


def check_exponent(asker: str, exponent: float) -> None:
    """RequestError unless the exponent is a finite number of at least 0, so that a larger weight never gets less."""
    if not 0 <= exponent < math.inf:
        raise RequestError(
            f"{asker} exponent={exponent} must be a finite number of at least 0: 0 is flat, 1 in proportion to what "
            f"was measured; use {asker}:exponent=1.0"
        )


def _shown(heads: Sequence[int]) -> str:
    kinds = sorted(set(heads))
    return str(kinds[0]) if len(kinds) == 1 else "/".join(map(str, heads))
