"""Dropping while decoding: R-KV's and SnapKV's scores as published, and cuts that keep what they must."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.cache.residency.dropping import RKV, ROWS, DecodeSnapKV, redundancy, reference
from wakesight.errors import RequestError

LAWS = settings(deadline=None, derandomize=True, max_examples=30)
METHODS = [RKV, DecodeSnapKV]


def layer(heads: int, entries: int, window: int, seed: int, dim: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [kv_head, group, window, dim] and keys; some keys occur twice."""
    noise = torch.Generator().manual_seed(seed)
    key = torch.randn(heads, entries, dim, generator=noise)
    twice = torch.randint(0, entries, (entries // 3,), generator=noise)
    key[:, twice] = key[:, torch.randint(0, entries, (entries // 3,), generator=noise)]
    return torch.randn(heads, 2, window, dim, generator=noise) * 2, key


@given(
    st.sampled_from(METHODS), st.integers(1, 3), st.integers(1, 12), st.integers(1, 4), st.sampled_from([1, 3, 7]),
    st.integers(0, 10**6),
)  # fmt: skip
@LAWS
def test_the_fast_scores_equal_the_plain_ones(method, heads, older, window, kernel, seed):
    query, key = layer(heads, older + window, window, seed)
    rule = method(budget=window, window=window, kernel=kernel)

    got = rule.scores(query, key, 0.5)

    assert got.shape == (heads, older)
    assert torch.allclose(got.double(), reference(query, key, 0.5, rule), atol=1e-6)


def test_the_most_recent_of_like_keys_is_spared():
    """Keys 0, 1, 3 are equal. Row 0 spares 3, row 1 spares 3, row 3 spares 1; so 0 is held against by 1 and 3."""
    key = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])

    got = redundancy(key)

    column = torch.tensor([1 + 1, 1, 0, 0]) / 4.0
    assert torch.allclose(got[0], column.softmax(0), atol=1e-6)


def test_redundancy_in_blocks_of_rows_equals_one_matrix():
    key = layer(2, ROWS + 40, 1, 0)[1]
    unit = key / key.norm(dim=-1, keepdim=True)
    cosine = unit @ unit.transpose(1, 2)
    cosine.diagonal(dim1=1, dim2=2).zero_()
    latest = torch.where(cosine > 0.5, torch.arange(cosine.shape[2]), 0).amax(-1, keepdim=True)

    assert torch.allclose(redundancy(key), cosine.scatter(2, latest, 0.0).mean(1).softmax(-1), atol=1e-6)


@given(st.sampled_from(METHODS), st.integers(8, 40), st.integers(1, 60), st.integers(0, 10**6))
@LAWS
def test_a_cut_keeps_its_budget_and_the_window(method, budget, entries, seed):
    query, key = layer(2, max(entries, 9), 8, seed)
    entries = key.shape[1]

    kept = method(budget=budget).kept(query, key, 1.0)

    if entries <= budget:
        assert kept is None
        return
    assert kept.shape == (2, budget)
    assert bool((kept[:, 1:] > kept[:, :-1]).all())
    assert kept[:, -8:].tolist() == [list(range(entries - 8, entries))] * 2


@given(st.sampled_from(METHODS), st.integers(8, 60), st.integers(9, 90), st.integers(1, 8), st.integers(0, 10**6))
@LAWS
def test_a_cut_by_page_keeps_whole_pages_and_those_of_the_window(method, budget, entries, size, seed):
    query, key = layer(2, entries, 8, seed)
    rule = method(budget=budget)

    kept = rule.kept_pages(query, key, 1.0, size)

    pages, most = entries // size, max(1, budget // size)
    if pages <= most:
        assert kept is None
        return
    touched = set(range((entries - 8) // size, pages))
    assert kept.shape == (2, most)
    for row in kept.tolist():
        assert row == sorted(set(row))
        assert touched <= set(row) or set(row) <= touched
        scores = rule.scores(query, key, 1.0)
    for head, row in enumerate(kept.tolist()):
        worth = {p: float(scores[head, p * size : (p + 1) * size].max()) for p in range(pages) if p not in touched}
        chosen = [worth[p] for p in row if p in worth]
        assert sorted(worth.values(), reverse=True)[: len(chosen)] == sorted(chosen, reverse=True)


def test_snapkv_keeps_what_the_last_queries_read():
    key = torch.eye(12)[None]
    query = torch.zeros(1, 1, 2, 12)
    query[..., 3] = 20.0

    kept = DecodeSnapKV(budget=3, window=2, kernel=1).kept(query, key, 1.0)

    assert kept.tolist() == [[3, 10, 11]]


def test_rkv_drops_the_oldest_of_like_entries_first():
    """Of three: two alike spare each other, by the rule as published."""
    key = torch.eye(10)[None].clone()
    key[0, 4] = key[0, 6] = key[0, 1]
    query = torch.zeros(1, 1, 2, 10)  # nothing is more important than anything else

    kept = RKV(budget=9, window=2, kernel=1).kept(query, key, 1.0)

    assert kept[0].tolist() == [0, 2, 3, 4, 5, 6, 7, 8, 9]


def test_cuts_come_every_so_many_generated_tokens():
    rule = RKV(budget=64)

    assert [token for token in range(300) if rule.due(token)] == [128, 256]


@pytest.mark.parametrize("given_", [{"every": 0}, {"window": 0}, {"kernel": 4}, {"budget": 7}])
def test_settings_that_make_no_sense_are_refused(given_):
    with pytest.raises(RequestError):
        RKV(**{"budget": 64, **given_})
