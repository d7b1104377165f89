"""The documents that tiny-hybrid is labelled on: readable, of nine kinds, the same for the same seed."""

from __future__ import annotations

import random
from pathlib import Path

from training import documents
from wakesight.evaluation.suites.closed import tasks, vocabulary
from wakesight.learning.documents import read_documents


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_they_are_read_back_with_corpus_and_instruction(tmp_path):
    documents.main([str(tmp_path / "docs"), "--each", "2", "--words", "200", "300"])
    found = list(read_documents(tmp_path / "docs"))
    assert len(found) == 2 * len(documents.KINDS) == 18
    assert {document.corpus for document in found} == set(documents.KINDS)
    for document in found:
        assert 190 <= len(document.text.split()) <= 300
        assert document.instruction
        assert set(document.text.split()) | set(document.instruction.split()) <= set(vocabulary.IDS)


def test_what_is_said_about_a_context_asks_nothing_twice_and_is_true():
    for kind in documents.KINDS:
        item = tasks.make(kind, random.Random(3), 700)
        said = documents.conversations(item)
        assert 1 <= len(said) <= 4
        assert all(len(each.split()) <= 128 for each in said)
        turns = [turn for each in said for turn in each.split(f" {vocabulary.EOS}") if turn]
        turns = [turn.removeprefix(f" {vocabulary.USER} ") for turn in turns]
        true = {" ".join((*a.question, vocabulary.ASSISTANT, *a.prefix, *a.answer)) for a in item.asked}
        assert len(turns) == len(set(turns))
        assert set(turns) <= true


def test_a_context_may_be_read_back(tmp_path):
    documents.main([str(tmp_path), "--each", "1", "--words", "200", "300", "--repeat"])
    for document in read_documents(tmp_path):
        (said,) = document.continuations
        assert said.split(f" {vocabulary.ASSISTANT} ")[1] == f"{document.text} {vocabulary.EOS}"


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        documents.write(tmp_path / name, 1, (200, 300), seed)
    first, again, other = (content(tmp_path / name) for name in "abc")
    assert first == again
    assert first.keys() == other.keys()
    assert all(first[name] != other[name] for name in first)
