"""The simulator and the live cache decide alike on one trace: same wants, same misses and fetches, step by step."""

from __future__ import annotations

import numpy as np
import pytest

from wakesight.cache.residency.policies import Reactive
from wakesight.policy import Policy
from wakesight.residency import Residency
from wakesight.simulate.stepping import play
from wakesight.testing import tiny
from wakesight.traces.pages import PageWants

PAGE, TOKENS = 8, 203


def traced(child, question, new_tokens):
    """Per layer, what every choice of one answer wanted, and what had been counted before it."""
    layers = [[] for _ in child.state.paged]
    for heard, slots in zip(layers, child.state.paged, strict=True):
        slots.listener = lambda step, pages, weights, heard=heard, slots=slots: heard.append(
            (pages.numpy().copy(), weights.numpy().copy(), slots.traffic)
        )
    start = [slots.traffic for slots in child.state.paged]
    child.ask(question, max_new_tokens=new_tokens)
    return layers, start


def as_wants(layers, firsts, closed) -> PageWants:
    """The trace as the simulator reads it. firsts: per unit, the first resident set, the best first."""
    steps, offsets, pages, weights, layer_of = len(layers[0]), [0], [], [], []
    for layer, heard in enumerate(layers):
        for head in range(len(heard[0][0])):
            layer_of.append(layer)
            for wanted, weight, _ in heard:
                order = np.lexsort((wanted[head], weight[head]))
                pages.append(wanted[head][order])
                weights.append(weight[head][order])
                offsets.append(offsets[-1] + len(order))
    scores = np.full((len(layer_of), closed), -1, np.float32)
    for unit, first in enumerate(firsts):
        scores[unit, first] = np.arange(len(first), 0, -1)
    return PageWants(
        np.array(offsets, np.int64), np.concatenate(pages).astype(np.int32), np.concatenate(weights), len(layer_of),
        steps, np.full(steps, closed, np.int32), np.array(layer_of, np.int32), closed, scores, PAGE, "kv_head",
    )  # fmt: skip


@pytest.mark.parametrize("wants", ["oracle", "sketch"])
@pytest.mark.parametrize("pages", [4, 9])
def test_the_simulator_and_the_live_cache_decide_alike(wants, pages):
    whole = tiny.engine("qwen3_5").prefill(tiny.tokens(TOKENS))
    residency = Residency(pages=pages, attend=4, wants=wants)
    child = whole.compact(Policy(unit="page", evicted="demote", page_size=PAGE, residency=residency))
    firsts = [row.numpy() for slots in child.state.paged for row in slots.table.slot_page]
    closed = child.state.paged[0].pages

    layers, start = traced(child, tiny.tokens(20, seed=3), 30)

    assert max(int(wanted.max()) for heard in layers for wanted, _, _ in heard) < closed + 7
    trace = as_wants(layers, firsts, closed + 7)
    tally = play(Reactive(start="snapkv", first_touch="miss"), trace, pages, body="plain")
    live = [
        [sum(getattr(heard[step][2], name) for heard in layers) for step in range(len(layers[0]))]
        for name in ("misses", "fetches", "hits")
    ]
    before = [sum(getattr(one, name) for one in start) for name in ("misses", "fetches", "hits")]
    after = [getattr(child.state.traffic, name) for name in ("misses", "fetches", "hits")]
    found = [np.diff([*row, last]) for row, last in zip(live, after, strict=True)]

    assert [row[0] for row in live] == before
    assert np.array_equal(found[0], tally.misses)
    assert np.array_equal(found[1], tally.fetches)
    assert found[0].sum() > 0
    assert found[2].sum() > 0
