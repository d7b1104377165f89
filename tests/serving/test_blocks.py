"""Counts that are known before scores, and entries in blocks whose layout nobody told us."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.engines.vllm.counts import child_counts
from wakesight.engines.vllm.pages import PagedSlots, Pages
from wakesight.errors import RequestError, WorkError
from wakesight.policy import Policy
from wakesight.testing import tiny


@pytest.fixture(scope="module")
def whole():
    with torch.no_grad():
        return tiny.engine("llama").prefill(tiny.tokens(90))


@pytest.mark.parametrize(
    "policy",
    [
        Policy(keep=0.3),
        Policy("random", "pyramid", keep=0.5, protect=7),
        Policy(entries=11, protect=90 - 11),
        Policy(allocation=(0, 5, 90)),
        Policy("streaming", keep=1),
        Policy("snapkv", entries=40),
    ],
)
def test_counts_are_those_of_a_real_child(whole, policy):
    geometry = whole.engine.geometry

    counts = child_counts(policy, 90, policy.protect or 0, geometry, None)

    assert [[count] * heads for count, heads in zip(counts, geometry.kv_heads, strict=True)] == (
        whole.compact(policy).kept.counts
    )


@pytest.mark.parametrize(
    ("policy", "prefix", "sentence"),
    [
        (Policy(keep=0.001), 0, "keeps 0 of 90"),
        (Policy(entries=91), 0, "cannot be kept"),
        (Policy(keep=0.5), 91, "protect fewer"),
        (Policy(allocation=(1, 2)), 0, "names 2 layers"),
        (Policy(keep=0.5, allocation="gate"), 0, "gate"),
    ],
)
def test_counts_that_cannot_be_met_are_refused(whole, policy, prefix, sentence):
    with pytest.raises(RequestError, match=sentence):
        child_counts(policy, 90, prefix, whole.engine.geometry, None)


class Layer:
    """An attention layer whose kernel packs every head's part of a block by a permutation of its own."""

    def __init__(self, blocks: int, heads: int, slots: int, dim: int, dtype: torch.dtype, seed: int) -> None:
        noise = torch.Generator().manual_seed(seed)
        self.packing = torch.randperm(slots * 2 * dim, generator=noise)
        self.kv_cache = torch.full((blocks, heads, slots, 2 * dim), float("nan"), dtype=dtype)
        self.impl = self

    def do_kv_cache_update(self, layer, keys, values, storage, places):
        blocks, heads, slots, both = storage.shape
        dim = both // 2
        flat = storage.view(blocks, heads, slots * both)
        for row, place in enumerate(places.tolist()):
            block, slot = divmod(place, slots)
            for which, numbers in enumerate((keys, values)):
                where = self.packing[(slot * 2 + which) * dim : (slot * 2 + which + 1) * dim]
                flat[block, :, where] = numbers[row]


@settings(deadline=None, max_examples=25)
@given(
    heads=st.integers(1, 3), slots=st.sampled_from([4, 8]), dim=st.sampled_from([2, 4]), ratio=st.integers(1, 3),
    count=st.integers(1, 30), seed=st.integers(0, 99), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_what_is_written_is_read_back_whatever_the_layout(heads, slots, dim, ratio, count, seed, dtype):
    layer = Layer(40, heads, slots, dim, dtype, seed)
    pages = Pages(layer, slots * ratio)
    noise = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(heads, count, dim, generator=noise).to(dtype) for _ in range(2))
    group_blocks = torch.randperm(40 // ratio, generator=noise)[: -(-count // (slots * ratio))].tolist()
    kernel_blocks = np.array([block * ratio + part for block in group_blocks for part in range(ratio)])

    pages.write(kernel_blocks, keys, values)

    assert torch.equal(pages.read(group_blocks, count)[0], keys)
    assert torch.equal(pages.read(group_blocks, count)[1], values)
    stored = PagedSlots(pages, group_blocks, count)
    assert torch.equal(stored.read("key"), keys)
    assert torch.equal(torch.stack(stored.strips("value")), values)
    pages.zero(kernel_blocks, count)
    assert not pages.read(group_blocks, count)[0].any()


def test_a_layout_that_cannot_be_told_is_refused():
    layer = Layer(2, 1, 4, 2, torch.float32, 0)
    layer.do_kv_cache_update = lambda *_: None

    with pytest.raises(WorkError, match="lays out a block"):
        Pages(layer, 4).read([0], 1)
