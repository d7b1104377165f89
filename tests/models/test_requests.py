"""A model folder may say how its model is asked to repeat a context."""

from __future__ import annotations

import json

import pytest

from wakesight.errors import RequestError
from wakesight.models.requests import FILE, RepeatWords, read_words


def encode(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_without_a_file_there_are_no_words(tmp_path):
    assert read_words(tmp_path) is None


def test_words_are_read_and_become_ids(tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"repeat_all": "say it", "repeat_from": "say from", "repeat_end": "."}))
    words = read_words(tmp_path)
    assert words == RepeatWords("say it", "say from", ".")
    assert words.ids(encode, None) == [3, 2]
    assert words.ids(encode, [70, 71]) == [3, 4, 70, 71, 1]
    assert RepeatWords("say it", "say from").ids(encode, [70]) == [3, 4, 70]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"repeat_all": 1, "repeat_from": ""}', '{"other": "x"}', '{"repeat_all": ""}']
)
def test_anything_else_is_refused_by_name(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(RequestError, match=rf"{FILE} is damaged; it holds texts named repeat_all"):
        read_words(tmp_path)
