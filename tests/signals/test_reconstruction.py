"""The largest weight in a repeat pass against plain loops over queries and keys, chunked or not, ragged or not."""

from __future__ import annotations

import math

import pytest
import torch

from wakesight.errors import WorkError
from wakesight.signals.chunk import Chunk
from wakesight.signals.reconstruction import ReconstructionMax

HEADS, DIM, SCALE = 2, 8, 0.4
N, NEW = 60, 45  # context tokens, tokens of the repeat input


def tensors(group: int = 3, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of the repeat input [query_head, NEW, dim], keys of context and repeat input [kv_head, N + NEW, dim]."""
    noise = torch.Generator().manual_seed(group)
    queries = torch.randn(HEADS * group, NEW, DIM, generator=noise, dtype=torch.float64) * 3
    keys = torch.randn(HEADS, N + NEW, DIM, generator=noise, dtype=torch.float64)
    return queries.to(dtype), keys.to(dtype)


def loops(queries, keys, held: list[set[int]], prefix: int, start: int, stop: int) -> torch.Tensor:
    """float64 [kv_head, stop - start]. held: per KV head the context positions that exist."""
    group = queries.shape[0] // HEADS
    largest = torch.zeros(HEADS, stop - start, dtype=torch.float64)
    for head in range(queries.shape[0]):
        kv = head // group
        context = [i for i in sorted(held[kv]) if i < prefix or start <= i < stop]
        for t in range(NEW):
            seen = context + [N + j for j in range(t + 1)]
            powers = {i: math.exp(SCALE * float(queries[head, t].double() @ keys[kv, i].double())) for i in seen}
            for i in context:
                if i >= start:
                    largest[kv, i - start] = max(float(largest[kv, i - start]), powers[i] / sum(powers.values()))
    return largest


def watched(tap: ReconstructionMax, queries, keys, held=None, sizes=(NEW,)) -> torch.Tensor:
    """The repeat input in chunks of the given sizes."""
    at = 0
    for size in sizes:
        end = at + size
        if held is None:
            positions, rows = None, tuple(keys[:, : N + end])
        else:
            positions = tuple(torch.tensor(sorted(mine) + list(range(N, N + end))) for mine in held)
            rows = tuple(head[where] for head, where in zip(keys, positions, strict=True))
        tap.watch(Chunk(queries[:, at:end], rows, positions, N + at, SCALE))
        at = end
    assert at == NEW
    return tap.largest


EVERYTHING = [set(range(N))] * HEADS
RAGGED = [set(range(0, N, 3)) | {1}, set(range(20, 33))]


@pytest.mark.parametrize(("prefix", "start", "stop"), [(0, 0, N), (5, 5, 30), (5, 30, N), (0, 59, N), (7, 20, 21)])
@pytest.mark.parametrize("group", [1, 3])
def test_the_largest_weight_over_queries_and_group(group, prefix, start, stop):
    queries, keys = tensors(group)

    found = watched(ReconstructionMax(prefix, start, stop, N), queries, keys)

    assert found.dtype == torch.float64
    torch.testing.assert_close(found, loops(queries, keys, EVERYTHING, prefix, start, stop), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sizes", [(1,) * NEW, (44, 1), (1, 44), (16, 16, 13)])
@pytest.mark.parametrize("block", [1, 16, 64])
def test_chunks_and_blocks_change_nothing(block, sizes):
    queries, keys = tensors()

    found = watched(ReconstructionMax(4, 10, 50, N, block), queries, keys, sizes=sizes)

    torch.testing.assert_close(found, loops(queries, keys, EVERYTHING, 4, 10, 50), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sizes", [(NEW,), (20, 25)])
@pytest.mark.parametrize(("prefix", "start", "stop"), [(5, 5, 30), (5, 30, N), (0, 0, N), (3, 3, 20)])
def test_only_held_entries_take_part(prefix, start, stop, sizes):
    queries, keys = tensors()

    found = watched(ReconstructionMax(prefix, start, stop, N), queries, keys, RAGGED, sizes)

    torch.testing.assert_close(found, loops(queries, keys, RAGGED, prefix, start, stop), rtol=1e-9, atol=1e-12)
    for head, held in enumerate(RAGGED):
        assert all((float(found[head, i - start]) > 0) == (i in held) for i in range(start, stop))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)])
def test_narrower_numbers_are_compared_in_float32(dtype, tolerance):
    queries, keys = tensors(dtype=dtype)

    found = watched(ReconstructionMax(4, 10, 50, N), queries, keys)

    assert found.dtype == torch.float32
    expected = loops(queries, keys, EVERYTHING, 4, 10, 50)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_keys_outside_the_three_sets_do_not_matter():
    queries, keys = tensors()
    other = keys.clone()
    other[:, 4:10] = other[:, 50:N] = float("nan")

    found, expected = (watched(ReconstructionMax(4, 10, 50, N), queries, each) for each in (other, keys))

    assert torch.equal(found, expected)


def test_several_passes_share_one_maximum():
    queries, keys = tensors()
    tap = ReconstructionMax(4, 10, 50, N)
    first = watched(tap, queries, keys).clone()

    both = watched(tap, -queries, keys)

    assert torch.equal(both, torch.maximum(first, watched(ReconstructionMax(4, 10, 50, N), -queries, keys)))


def test_nothing_can_be_read_before_a_pass_and_no_part_lies_outside():
    with pytest.raises(WorkError, match="nothing was repeated yet"):
        _ = ReconstructionMax(0, 0, 1, 1).largest
    with pytest.raises(WorkError, match=r"no part 3 \.\. 9"):
        ReconstructionMax(5, 3, 9, 20)
