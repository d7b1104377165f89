"""Sentences, essays and passages."""

from __future__ import annotations

import json

import pytest

from wakesight.errors import RequestError
from wakesight.evaluation.suites import text


@pytest.mark.parametrize(
    ("running", "split"),
    [
        ("It rained. Nobody came.", ["It rained.", "Nobody came."]),
        ('"Stop!" she said. He did.', ['"Stop!" she said.', "He did."]),
        ('He asked "Why?" She laughed.', ['He asked "Why?"', "She laughed."]),
        ("Mr. Elliot met Dr. J. Shepherd in St. Ives.", ["Mr. Elliot met Dr. J. Shepherd in St. Ives."]),
        ("Use a tool, e.g. Emacs, or none. It works.", ["Use a tool, e.g. Emacs, or none.", "It works."]),
        ("See No. 4 of them. Then stop", ["See No. 4 of them.", "Then stop"]),
        ("Version 4.4.7 is out\nnow. (It is good.) Yes.", ["Version 4.4.7 is out now.", "(It is good.)", "Yes."]),
        ("So did I. We left.", ["So did I.", "We left."]),
        ("", []),
    ],
)
def test_sentences_end_where_a_reader_ends_them(running, split):
    assert list(text.sentences(running)) == split


@pytest.mark.parametrize("kind", ["narrative", "expository"])
def test_sentences_lose_no_word(kind):
    whole = text.packaged(kind)

    assert " ".join(text.sentences(whole)).split() == whole.split()


def test_the_packaged_essay_is_long_and_does_not_repeat_early():
    found = text.essay(None).sentences
    words = sum(len(sentence.split()) for sentence in found)

    assert words > 150_000
    assert len(set(found)) > 0.97 * len(found)  # short exclamations occur twice


def test_an_essay_gives_exactly_the_words_asked_for_and_goes_round():
    essay = text.Essay("two", ("One two three.", "Four five."))

    assert essay.first(0) == []
    assert essay.first(4) == ["One two three.", "Four"]
    assert essay.first(7, start=1) == ["Four five.", "One two three.", "Four five."]


def test_official_essays_are_read(tmp_path):
    (tmp_path / text.ESSAY_FILE).write_text(json.dumps({"text": "First one.\n\nSecond one."}))

    assert text.essay(tmp_path) == text.Essay(text.ESSAY_FILE, ("First one.", "Second one."))
    assert text.essay(tmp_path / "elsewhere").name != text.ESSAY_FILE


@pytest.mark.parametrize(
    ("content", "wrong"), [("[1]", "field 'text'"), ('{"text": 3}', "field 'text'"), ("{", "JSON")]
)
def test_broken_official_essays_are_reported(tmp_path, content, wrong):
    (tmp_path / text.ESSAY_FILE).write_text(content)

    with pytest.raises(RequestError, match=wrong) as caught:
        text.essay(tmp_path)
    assert text.ESSAY_FILE in str(caught.value)


@pytest.mark.parametrize("kind", text.KINDS)
def test_every_kind_has_passages_with_a_source(kind):
    found = text.passages(kind)

    assert found
    assert all(source.startswith("generated:") and len(passage) > 1000 for source, passage in found)
