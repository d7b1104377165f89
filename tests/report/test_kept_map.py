"""The strip, the coloured words and the picture show the kept set and nothing else."""

from __future__ import annotations

import pytest
import torch

from wakesight.core import KeptSet
from wakesight.errors import WorkError
from wakesight.report import kept_map

FIRST_HALF = KeptSet(((torch.arange(50),) * 2,) * 2)


def test_the_strip_is_dark_where_entries_stayed():
    assert kept_map.strip(FIRST_HALF, 100, width=10) == "@@@@@     "
    assert len(kept_map.strip(FIRST_HALF, 100, width=500)) == 100


def test_words_shade_tokens_by_the_share_that_kept_them():
    text = kept_map.words([f"{i} " for i in range(100)], FIRST_HALF, 48, 52, 100)
    assert text.plain == "48 49 50 51 "
    assert len({str(span.style) for span in text.spans}) == 2


def test_the_picture_is_written_whole_or_not_at_all(tmp_path):
    pytest.importorskip("matplotlib")
    kept_map.picture({"half": FIRST_HALF, "half again": FIRST_HALF}, 100, tmp_path / "a.png", "title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(WorkError, match="could not be written"):
        kept_map.picture({"half": FIRST_HALF}, 100, tmp_path / "missing" / "a.png", "title")
    assert [f.name for f in tmp_path.iterdir()] == ["a.png"]


def test_counts_per_token_and_layer():
    kept = KeptSet(((torch.tensor([0, 2]), torch.tensor([0])), (torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]))))
    assert kept.per_token(4).tolist() == [4, 2, 3, 0]
    assert kept.per_layer_token(4).tolist() == [[1, 0, 0.5, 0], [1, 1, 1, 0]]
    assert kept.counts == [[2, 1], [3, 3]]


def test_a_kept_set_goes_on_with_new_tokens():
    kept = KeptSet(((torch.tensor([0, 2]), torch.tensor([], dtype=torch.int64)),)).extended(4, 6)
    assert [head.tolist() for head in kept.positions[0]] == [[0, 2, 4, 5], [4, 5]]
