"""The documents that tiny-hybrid is labelled on: readable, of nine kinds, the same for the same seed."""

from __future__ import annotations

from pathlib import Path

from training import documents
from wakesight.evaluation.suites.closed import vocabulary
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


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        documents.write(tmp_path / name, 1, (200, 300), seed)
    first, again, other = (content(tmp_path / name) for name in "abc")
    assert first == again
    assert first.keys() == other.keys()
    assert all(first[name] != other[name] for name in first)
