"""What a user gave becomes plain Python, or is refused in one sentence."""

from __future__ import annotations

import array
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from wakesight import arguments
from wakesight.errors import RequestError


@pytest.mark.parametrize("value", [5, np.int64(5), np.uint8(5), np.array(5), torch.tensor(5), torch.tensor(5).int()])
def test_a_whole_number_of_any_kind_becomes_an_int(value):
    number = arguments.whole_number(value, "chunk")

    assert (number, type(number)) == (5, int)


@pytest.mark.parametrize(
    "value",
    [
        True, np.True_, torch.tensor(True), 5.0, np.float64(5), torch.tensor(5.0), "5", None, [5],
        np.array([5]), torch.tensor([5]), torch.tensor([5, 6]), int,
    ],
)  # fmt: skip
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(RequestError, match="chunk must be a whole number, not"):
        arguments.whole_number(value, "chunk")


def test_a_number_below_the_least_is_refused_with_the_usual_one():
    assert arguments.whole_number(0, "growth", 0) == 0
    with pytest.raises(RequestError, match="growth=-1 must be at least 0; 256 is the default"):
        arguments.whole_number(-1, "growth", 0, usual=256)


def test_a_chunk_is_a_multiple_of_64():
    assert arguments.chunk_size(np.int32(128)) == 128
    for chunk in (0, 63, 100, -64):
        with pytest.raises(RequestError, match="multiple of 64"):
            arguments.chunk_size(chunk)


IDS = [
    [3, 4], (3, 4), range(3, 5), (i for i in (3, 4)), np.array([3, 4]), np.array([3, 4], dtype=np.uint16),
    torch.tensor([3, 4]), torch.tensor([3, 4], dtype=torch.int32), [np.int64(3), np.int32(4)],
    [torch.tensor(3), 4], array.array("i", [3, 4]),
]  # fmt: skip


@pytest.mark.parametrize("value", IDS)
def test_ids_of_any_form_become_a_list_of_ints(value):
    ids = arguments.token_ids(value, "the tokens")

    assert ids == [3, 4]
    assert {type(token) for token in ids} == {int}


def test_ids_are_a_list_of_their_own():
    given = [3, 4]
    assert arguments.token_ids(given, "the tokens") is not given


@pytest.mark.parametrize("value", [[], (), range(0), np.array([]), torch.tensor([], dtype=torch.long), iter(())])
def test_no_ids_are_an_empty_list(value):
    assert arguments.token_ids(value, "the tokens") == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "must be token ids, not None"),
        (5, "must be token ids, not 5"),
        (int, "not the class int"),
        ("abc", r"not the text 'abc'; engine.encode\(text\) gives its ids"),
        (b"abc", r"decode bytes first"),
        (bytearray(b"abc"), r"decode bytes first"),
        ({3, 4}, "has no order; give a list"),
        ({3: 4}, "is a dict; give token ids"),
        (BatchEncoding({"input_ids": [3]}), r"give enc\['input_ids'\] and attention_mask"),
        ([3, True], "item 1 is True"),
        ([3, 4.0], "item 1 is 4.0, which is no whole number"),
        ([3, "4"], "item 1 is '4'"),
        ([3, None], "item 1 is None"),
        ([[3, 4]], "item 0 is "),
        (torch.tensor([3.0]), "dtype torch.float32, but whole numbers are wanted"),
        (torch.tensor([True]), "dtype torch.bool"),
        (np.array([3.0]), "dtype float64"),
        (np.array(["a"]), "dtype <U1"),
        (torch.tensor(3), "single id into a list"),
        (torch.tensor([[3, 4]]), r"has the shape \[1, 2\]: one row is wanted, take ids\[0\]"),
        (np.array([[3, 4]]), r"take ids\[0\]"),
        (torch.tensor([[3], [4]]), r"shape \[2, 1\]: one row is wanted$"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(value, reason):
    with pytest.raises(RequestError, match=reason):
        arguments.token_ids(value, "the tokens")


def test_text_stays_text_and_other_things_are_ids():
    assert arguments.text_or_ids("abc", "the question") == "abc"
    assert arguments.text_or_ids(np.array([3]), "the question") == [3]
    with pytest.raises(RequestError, match="the question must be text or token ids, not None"):
        arguments.text_or_ids(None, "the question")
    with pytest.raises(RequestError, match=r"is a path, not a text; read the file first"):
        arguments.text_or_ids(Path("a.txt"), "the question")


def test_text_with_half_a_character_is_refused_with_its_place():
    arguments.check_text("\U0001f600 é")
    with pytest.raises(RequestError, match="the question holds a lone surrogate at character 2; decode the file as"):
        arguments.text_or_ids("ab\udcff", "the question")


@pytest.mark.parametrize("mask", [[[0, 1]], ((0, 1),), [[False, True]], np.array([[0, 1]]), torch.tensor([[0.0, 1.0]])])
def test_a_mask_of_any_form_becomes_a_bool_tensor(mask):
    assert torch.equal(arguments.mask_of(mask), torch.tensor([[False, True]]))


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ([[0, 1], [1]], "rows of 0 and 1 of equal length"),
        ("11", "rows of 0 and 1"),
        ({"full_attention": None}, "is a dict; give rows of 0 and 1"),
        ([[None, 1]], "rows of 0 and 1"),
        ([[0, 2]], "other numbers than 0 and 1"),
        (torch.tensor([[float("-inf"), 0.0]]), "other numbers than 0 and 1"),
    ],
)
def test_what_is_no_mask_is_refused(mask, reason):
    with pytest.raises(RequestError, match=reason):
        arguments.mask_of(mask)


def test_one_item_per_row():
    assert arguments.one_per_row((text for text in "ab"), 2, "questions") == ["a", "b"]
    with pytest.raises(RequestError, match="the batch has 2 rows, but 3 questions were given"):
        arguments.one_per_row([1, 2, 3], 2, "questions")
    for wrong in (None, "ab", {"a", "b"}, {"a": 1, "b": 2}, 5, torch.tensor(5)):
        with pytest.raises(RequestError, match=r"questions must be a list with one per row of the batch \(2\), not"):
            arguments.one_per_row(wrong, 2, "questions")


def test_a_path_names_a_file():
    assert arguments.file_path(Path("a") / "b") == str(Path("a") / "b")
    for wrong in (None, 3, b"a"):
        with pytest.raises(RequestError, match="the path must be a str or a Path, not"):
            arguments.file_path(wrong)
    for wrong in ("", "a\0b"):
        with pytest.raises(RequestError, match="names no file"):
            arguments.file_path(wrong)
