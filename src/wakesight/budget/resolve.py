"""A policy's size (fraction, entries or bytes) and allocation -> the `Budget` of one session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from wakesight.arguments import as_whole, shown
from wakesight.budget.base import Allocation, Body, BudgetRequest, DataFree, ScoreBased
from wakesight.budget.flat import Flat
from wakesight.budget.measured import measured
from wakesight.budget.rounding import keep_to_count
from wakesight.budget.table import allocation_spec
from wakesight.core import Budget, ModelGeometry, Tables
from wakesight.errors import RequestError


def check_allocation(
    rule: Allocation | tuple[int, ...], *, limit_bytes: int | None, n_body: int, geometry: ModelGeometry,
    tables: Tables | None = None,
) -> None:  # fmt: skip
    """What can be refused before anything is scored.

    Raises RequestError for explicit counts that do not fit the model or the context, for an allocation whose table
    was not measured or is of another model, and for a byte limit that an allocation could pass because layers
    differ in KV heads or in bytes per entry.
    """
    if isinstance(rule, tuple):
        _check_counts(rule, n_body, geometry)
        return
    if needed := getattr(rule, "needs_table", None):
        measured(tables, needed, _name(rule), len(geometry.kv_heads), geometry.kv_heads)
    if limit_bytes is not None and not isinstance(rule, Flat):
        entry_bytes = {geometry.entry_bytes(layer) for layer in range(len(geometry.kv_heads))}
        if len(entry_bytes) > 1 or len(set(geometry.kv_heads)) > 1:
            raise RequestError(
                f"bytes={limit_bytes} cannot be combined with the allocation {_name(rule)!r} on this model: its "
                "layers differ in KV heads or in bytes per entry, so moving entries between layers changes the bytes; "
                "use --allocation flat, or give the size with --keep or --entries"
            )


def _name(rule: Allocation) -> str:
    return allocation_spec(rule) or type(rule).__name__


def entries_per_head(
    *, keep: float | None, entries: int | None, limit_bytes: int | None, n_body: int, prefix: int, fixed_bytes: int,
    token_bytes: int,
) -> int:  # fmt: skip
    """R, the mean entries per (layer, KV head) beyond the prefix, from whichever size was given.

    limit_bytes covers prefix, kept entries and `fixed_bytes` (recurrent states, growth slack);
    a limit above the full cache keeps everything. Raises RequestError when the size cannot be met.
    """
    if keep is not None:
        return keep_to_count(keep, n_body)
    if entries is not None:
        _check_entries(entries, n_body, prefix)
        return entries
    assert limit_bytes is not None
    count = (limit_bytes - fixed_bytes) // token_bytes - prefix
    if count < 1:
        least = fixed_bytes + (prefix + 1) * token_bytes
        raise RequestError(
            f"{limit_bytes} bytes are too few: one entry per KV head, the protected prefix, the recurrent states and "
            f"the growth slack already take {least}; raise --fit to at least {least}"
        )
    return int(min(count, n_body))


def make_budget(
    rule: Allocation | tuple[int, ...], per_head: int | None, body: Body, geometry: ModelGeometry,
    tables: Tables | None = None,
) -> Budget:  # fmt: skip
    """Integers per (layer, KV head), none above what the head holds beyond the prefix.

    rule: explicit counts per layer (then per_head is None), a data-free or a score-based allocation.
    tables: what was measured of the model offline, for the rules that need it.
    A head that holds fewer entries than its share keeps them all; only a score-based rule passes the rest
    on to other heads. Raises RequestError for explicit counts that do not fit.
    """
    if isinstance(rule, tuple):
        _check_counts(rule, body.n_body, geometry)
        return _for_each_head(rule, body)
    assert per_head is not None
    request = BudgetRequest(per_head, body.n_body, len(geometry.attention_layers), tables)
    if isinstance(rule, ScoreBased):
        return Budget(_per_head(rule, request, body))
    return _for_each_head(_per_layer(rule, request), body)


def _per_layer(rule: DataFree, request: BudgetRequest) -> tuple[int, ...]:
    """What a data-free rule gives, checked: it may be somebody's own."""
    name = type(rule).__name__
    counts = _counts(rule.per_layer(request), f"the allocation {name} gave")
    if len(counts) != request.layers:
        raise RequestError(
            f"the allocation {name} gave counts for {len(counts)} layers, but this model has {request.layers} "
            "attention layers; give one number of entries for each"
        )
    return counts


def _per_head(rule: ScoreBased, request: BudgetRequest, body: Body) -> tuple[tuple[int, ...], ...]:
    name = type(rule).__name__
    found = rule.per_head(request, body)
    if not isinstance(found, Sequence) or len(found) != len(body.counts):
        given = f"{len(found)} layers" if isinstance(found, Sequence) else shown(found)
        raise RequestError(
            f"the allocation {name} gave {given}, but this model has {len(body.counts)} attention layers; "
            "give one tuple of counts for each"
        )
    layers = tuple(_counts(row, f"the allocation {name} gave layer {at}") for at, row in enumerate(found))
    for layer, (counts, held) in enumerate(zip(layers, body.counts, strict=True)):
        if len(counts) != len(held):
            raise RequestError(
                f"the allocation {name} gave {len(counts)} heads of attention layer {layer} a count, "
                f"but it has {len(held)} KV heads; give one number of entries for each"
            )
    return layers


def _counts(given: Any, who: str) -> tuple[int, ...]:
    """Whole numbers of at least 0. who: begins the sentence of the RequestError that everything else raises."""
    if not isinstance(given, Iterable):
        raise RequestError(f"{who} {shown(given)}; give a tuple of whole numbers")
    counts = []
    for count in given:
        number = as_whole(count)
        if number is None or number < 0:
            raise RequestError(f"{who} {shown(count)} entries; give whole numbers of at least 0")
        counts.append(number)
    return tuple(counts)


def _for_each_head(per_layer: tuple[int, ...], body: Body) -> Budget:
    layers = zip(per_layer, body.counts, strict=True)
    return Budget(tuple(tuple(min(count, held) for held in heads) for count, heads in layers))


def _check_entries(entries: int, n_body: int, prefix: int) -> None:
    if n_body == 0:
        raise RequestError(
            f"entries={entries} cannot be kept: all {prefix} tokens of this context belong to its protected prefix, "
            "which stays in any case; give --keep 1, or protect fewer tokens with --protect"
        )
    if not 1 <= entries <= n_body:
        raise RequestError(
            f"entries={entries} cannot be kept: this context has {n_body} entries per KV head beyond its "
            f"protected prefix; give --entries 1 to {n_body}"
        )


def _check_counts(counts: tuple[int, ...], n_body: int, geometry: ModelGeometry) -> None:
    layers = len(geometry.attention_layers)
    if len(counts) != layers:
        raise RequestError(
            f"the allocation names {len(counts)} layers, but this model has {layers} attention layers; "
            "give one number of entries for each"
        )
    for layer, count in enumerate(counts):
        if not 0 <= count <= n_body:
            raise RequestError(
                f"the allocation asks for {count} entries in attention layer {layer}; "
                f"this context has 0 to {n_body} beyond its protected prefix"
            )
