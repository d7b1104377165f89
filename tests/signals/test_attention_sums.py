"""Accumulated attention against plain loops over queries and held keys, chunked or not, ragged or not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wakesight.errors import WorkError
from wakesight.signals.attention_sums import AttentionSums
from wakesight.signals.chunk import Chunk

GROUPS = (1, 3, 8)  # query heads per KV head
HEADS, DIM, SCALE = 2, 8, 0.4


def context(tokens: int, group: int = 3, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [query_head, token, dim] and keys [kv_head, token, dim] of one context."""
    noise = torch.Generator().manual_seed(tokens)
    queries = torch.randn(HEADS * group, tokens, DIM, generator=noise, dtype=torch.float64) * 2
    keys = torch.randn(HEADS, tokens, DIM, generator=noise, dtype=torch.float64)
    return queries.to(dtype), keys.to(dtype)


def prefill(tap: AttentionSums, queries: torch.Tensor, keys: torch.Tensor, sizes: list[int]) -> AttentionSums:
    """The whole context in chunks of the given sizes."""
    start = 0
    for size in sizes:
        end = start + size
        tap.watch(Chunk(queries[:, start:end], tuple(keys[:, :end]), None, start, SCALE))
        start = end
    assert start == queries.shape[1]
    return tap


def loops(queries: torch.Tensor, seen: list[dict[int, torch.Tensor]], start: int) -> np.ndarray:
    """Column sums of attention. seen: per KV head position -> key of everything held; float64 [query_head, token]."""
    heads, new, _ = queries.shape
    sums = np.zeros((heads, start + new))
    for head in range(heads):
        keys = {i: key.double().numpy() for i, key in seen[head * len(seen) // heads].items()}
        for t in range(start, start + new):
            query = queries[head, t - start].double().numpy()
            weights = {i: math.exp(SCALE * float(query @ key)) for i, key in keys.items() if i <= t}
            for i, weight in weights.items():
                sums[head, i] += weight / sum(weights.values())
    return sums


def dense(keys: torch.Tensor) -> list[dict[int, torch.Tensor]]:
    return [dict(enumerate(head)) for head in keys]


def assert_close(found: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-6) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tokens", [1, 7, 63, 64, 65, 130])
def test_sums_are_what_all_queries_gave_each_key(tokens, group):
    queries, keys = context(tokens, group)

    found = prefill(AttentionSums(), queries, keys, [tokens]).total(tokens)

    assert found.dtype == torch.float64
    assert_close(found, loops(queries, dense(keys), 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrower_numbers_are_summed_in_float32(dtype):
    queries, keys = context(130, dtype=dtype)

    found = prefill(AttentionSums(), queries, keys, [130]).total(130)

    assert found.dtype == torch.float32
    assert_close(found, loops(queries, dense(keys), 0))


@pytest.mark.parametrize("block", [1, 5, 64])
@pytest.mark.parametrize("sizes", [[1, 63, 2, 64], [129, 1], [1] * 130, [40, 0, 90]])
def test_any_chunking_and_any_block_give_the_same_sums(sizes, block):
    queries, keys = context(130)
    whole = prefill(AttentionSums(), queries, keys, [130]).total(130)

    found = prefill(AttentionSums(block), queries, keys, sizes).total(130)

    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


def test_every_query_gives_one_in_all():
    queries, keys = context(130)

    found = prefill(AttentionSums(), queries, keys, [100, 30]).total(130)

    torch.testing.assert_close(found.sum(dim=1), torch.full((6,), 130.0, dtype=torch.float64))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("sizes", [[12], [5, 1, 6]])
def test_heads_that_hold_different_entries_are_counted_by_position(group, sizes):
    """A child of 20 tokens, of which its heads kept 3 and 7, reads 12 more."""
    queries, keys = context(32, group)
    kept = ([0, 4, 19], [1, 2, 3, 9, 11, 17, 18])
    tap, start = AttentionSums(block=4), 20
    for size in sizes:
        positions = tuple(torch.tensor([*old, *range(20, start + size)]) for old in kept)
        held = tuple(keys[head, where] for head, where in enumerate(positions))
        tap.watch(Chunk(queries[:, start : start + size], held, positions, start, SCALE))
        start += size

    found = tap.total(32)

    seen = [{i: keys[head, i] for i in [*kept[head], *range(20, 32)]} for head in range(HEADS)]
    assert_close(found, loops(queries[:, 20:], seen, 20))
    for head in range(HEADS):
        dropped = [i for i in range(20) if i not in kept[head]]
        assert not found[head * group : (head + 1) * group, dropped].any()


def test_a_childs_sums_go_on_from_its_parents_and_forget_what_was_dropped():
    queries, keys = context(30)
    parent = prefill(AttentionSums(), queries[:, :20], keys[:, :20], [20])
    before = parent.total(20)
    kept = ([0, 4, 19], [1, 2, 3, 9, 11, 17, 18])
    held = torch.zeros(HEADS, 20, dtype=torch.bool)
    for head, where in enumerate(kept):
        held[head, where] = True

    child = parent.copy(held)
    child_before = child.total(20)
    positions = tuple(torch.tensor([*old, *range(20, 30)]) for old in kept)
    child.watch(Chunk(queries[:, 20:], tuple(keys[h, p] for h, p in enumerate(positions)), positions, 20, SCALE))

    seen = [{i: keys[head, i] for i in [*kept[head], *range(20, 30)]} for head in range(HEADS)]
    expected = loops(queries[:, 20:], seen, 20)
    expected[:, :20] += loops(queries[:, :20], dense(keys[:, :20]), 0) * np.repeat(held.numpy(), 3, axis=0)
    assert_close(child.total(30), expected)
    assert torch.equal(parent.total(20), before)
    assert torch.equal(child_before, before * held.repeat_interleave(3, dim=0))


def test_a_plain_copy_reads_on_alone():
    queries, keys = context(30)
    parent = prefill(AttentionSums(), queries[:, :20], keys[:, :20], [20])
    given_out = parent.total(20)
    before = given_out.clone()

    child = parent.copy()
    child.watch(Chunk(queries[:, 20:], tuple(keys), None, 20, SCALE))

    assert_close(child.total(30), loops(queries, dense(keys), 0))
    assert torch.equal(given_out, before)
    assert torch.equal(parent.total(20), before)


def test_a_total_is_cut_or_filled_to_the_tokens_asked_for():
    queries, keys = context(10)
    tap = prefill(AttentionSums(), queries, keys, [10])

    assert torch.equal(tap.total(4), tap.total(10)[:, :4])
    assert torch.equal(tap.total(12), torch.cat([tap.total(10), torch.zeros(6, 2, dtype=torch.float64)], dim=1))


def test_huge_logits_do_not_overflow():
    queries, keys = context(70, dtype=torch.float32)

    found = prefill(AttentionSums(), queries * 1e4, keys, [70]).total(70)

    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.sum(dim=1), torch.full((6,), 70.0))


def test_the_chunk_is_left_as_it_was():
    queries, keys = context(70)
    before = queries.clone(), keys.clone()

    prefill(AttentionSums(), queries, keys, [70])

    assert torch.equal(queries, before[0])
    assert torch.equal(keys, before[1])


def test_nothing_watched_is_said():
    with pytest.raises(WorkError, match="no attention was summed yet"):
        AttentionSums().total(3)
    with pytest.raises(WorkError, match="no attention was summed yet"):
        AttentionSums().copy(torch.ones(2, 3, dtype=torch.bool)).total(3)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_memory_is_linear_in_the_tokens():
    queries, keys = context(2000, dtype=torch.float32)

    with Largest() as watched:
        prefill(AttentionSums(), queries, keys, [2000])

    assert watched.numel <= 3 * 64 * 2000  # one block of one KV head's group, not [2000, 2000]
