"""From a policy that demotes to a plan for every attention layer: how many pages, which first, and what is refused.

Takes the budget and ranking that any policy gets; gives `PagePlan`s and page orders to `SessionState.demoting`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from wakesight.cache.residency.dense_heads import whole_slots
from wakesight.cache.residency.growth import grown
from wakesight.cache.residency.plan import PagePlan
from wakesight.cache.residency.reservoir import check_reservoir
from wakesight.cache.slots import GROWTH
from wakesight.cache.state import SessionState
from wakesight.core import Budget, ModelGeometry
from wakesight.engines.base import Engine
from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.residency import Residency
from wakesight.selection.pages import whole_pages
from wakesight.selection.topk import Ranking


def check_demotion(engine: Engine, state: SessionState, residency: Residency) -> None:
    """Raises RequestError for what cannot be demoted: a model, a child that lost entries, a folder, unknown heads."""
    engine.check_demotable()
    if state.demoted:
        raise RequestError(
            "this session is demoted already, and only a whole one can be demoted or compacted; compact its parent"
        )
    if state.kept is not None:
        raise RequestError(
            "this session has dropped entries for good, so not all of them can be brought back; demote the whole "
            "session, or use --evicted drop"
        )
    heads = engine.geometry.kv_heads
    for layer, head in residency.dense_heads:
        if layer >= len(heads) or head >= heads[layer]:
            raise RequestError(
                f"dense_heads names KV head {head} of attention layer {layer}, but {engine.name} has {len(heads)} "
                f"attention layers of {', '.join(map(str, sorted(set(heads))))} KV heads; name heads that it has"
            )
    if residency.dense_layers > len(heads):
        raise RequestError(
            f"dense_layers={residency.dense_layers} is more than the {len(heads)} attention layers of {engine.name}; "
            "give fewer"
        )
    check_reservoir(residency.reservoir)


def plans(
    policy: Policy, budget: Budget | None, geometry: ModelGeometry, prefix: int, tokens: int
) -> list[PagePlan | None]:  # fmt: skip
    """One plan per attention layer, None for the dense ones.

    budget: entries beyond the prefix; None where the residency names its pages. keep=1 reads every page. Raises
    RequestError for `attend` beyond what a layer holds.
    """
    residency = policy.residency
    assert residency is not None
    layers = len(geometry.kv_heads)
    if residency.pages is not None:
        counts = [residency.pages] * layers
    else:
        assert budget is not None
        counts = whole_pages(budget, policy.page_size)
    found: list[PagePlan | None] = []
    for layer in range(layers):
        if layer < residency.dense_layers:
            found.append(None)
            continue
        slots = counts[layer]
        attend = slots if residency.attend is None else residency.attend
        if isinstance(attend, int) and attend > slots:
            raise RequestError(
                f"attend={attend} pages cannot be read in attention layer {layer}, which holds {slots}; "
                f"lower --attend, or hold more with --pages or --keep"
            )
        whole = attend == "all" or (policy.keep == 1 and residency.attend is None and residency.pages is None)
        dense = tuple(head for at, head in residency.dense_heads if at == layer)
        plan = PagePlan.of(residency, slots, None if whole else int(attend), prefix, dense)
        if residency.pages is None:  # a share is never more than there is
            most = max(1, (tokens - plan.strip * plan.page_size) // plan.page_size)
            plan = dataclasses.replace(plan, slots=min(slots, most), attend=plan.attend and min(plan.attend, most))
        found.append(plan)
    return found


def first_pages(ranking: Ranking, plans: Sequence[PagePlan | None]) -> list[Tensor | None]:
    """Per layer int64 [kv_head, page]: page ids from behind the strip, by the ranking of their lifted scores.

    Pages that start in the tail (recent ones) are none of them.
    """
    found: list[Tensor | None] = []
    for order, plan in zip(ranking.order, plans, strict=True):
        if plan is None:
            found.append(None)
            continue
        size, tokens = plan.page_size, ranking.prefix + order.shape[1]
        closed = max(0, tokens // size - plan.strip - plan.recent)
        starts = (order % size == 0) & (order >= plan.strip * size) & (order < (plan.strip + closed) * size)
        found.append((order[starts] // size - plan.strip).view(order.shape[0], closed))
    return found


def entries_that_fit(
    limit: int, policy: Policy, geometry: ModelGeometry, *, tokens: int, prefix: int, state_bytes: int, growth: int
) -> int:  # fmt: skip
    """Entries per head, whole pages, such that all fast memory of a demoted session is at most `limit` bytes.

    It counts slots, strip and tail, sketches with their growth, staging, recurrent states, and whole dense layers with
    their slack. Raises RequestError where not even one page fits.
    """
    residency = policy.residency
    assert residency is not None
    fixed, page = state_bytes, 0
    for layer, heads in enumerate(geometry.kv_heads):
        entry = heads * geometry.entry_bytes(layer)
        if layer < residency.dense_layers:
            fixed += entry * (tokens + growth + GROWTH)
            continue
        plan = PagePlan.of(residency, 1, 1 if not residency.reads_all else None, prefix)
        dense = sum(at == layer for at, _ in residency.dense_heads)
        fixed += dense * geometry.entry_bytes(layer) * plan.page_size * (whole_slots(plan, tokens) + plan.tail)
        heads -= dense
        entry = heads * geometry.entry_bytes(layer)
        fixed += entry * plan.page_size * (plan.strip + plan.tail + plan.staging)
        if residency.wants == "sketch" and not residency.reads_all:
            fixed += heads * _sketch_bytes(plan, tokens, geometry.key_dims[layer], geometry.itemsize)
        page += entry * plan.page_size
    pages = (limit - fixed) // page if page else 0
    if pages < 1:
        raise RequestError(
            f"{limit} bytes are too few: one page per KV head, what is always read, the sketches of {tokens} tokens "
            f"and the recurrent states already take {fixed + page}; raise --fit to at least {fixed + page}, or take a "
            "larger --page-size"
        )
    return int(pages) * policy.page_size


def _sketch_bytes(plan: PagePlan, tokens: int, dim: int, itemsize: int) -> int:
    """Of one KV head, growth included."""
    pages = grown(max(0, tokens // plan.page_size - plan.strip), 0)
    return pages * (2 * dim + 4 if plan.sketch == "int8" else 2 * dim * itemsize)
