"""Folders of texts are read in one order, with ids and corpora, and everything wrong in them is named."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from wakesight.errors import RequestError
from wakesight.learning.documents import Document, fitted, read_documents


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    (folder / "code" / "deep").mkdir(parents=True)
    (folder / "b.jsonl").write_text(
        json.dumps({"text": "one", "corpus": "math", "id": 7}) + "\n\n" + json.dumps({"text": "two"}) + "\n"
    )
    (folder / "a.txt").write_text("drei ü\n", encoding="utf-8")
    (folder / "code" / "deep" / "z.txt").write_text("four")
    (folder / "code" / "c.jsonl").write_text(json.dumps({"text": "five", "corpus": None, "id": ""}) + "\n")
    (folder / "notes.md").write_text("not read")
    return folder


def read(path: Path, **options) -> list[Document]:
    return list(read_documents(path, **options))


def test_a_folder_gives_every_document_in_the_order_of_paths(source):
    assert read(source) == [
        Document("a.txt", "a", "drei ü\n"),
        Document("7", "math", "one"),
        Document("b.jsonl:3", "b", "two"),
        Document("code/c.jsonl:1", "code", "five"),
        Document("code/deep/z.txt", "code", "four"),
    ]


def test_a_file_alone_gives_its_own(source):
    assert [d.id for d in read(source / "b.jsonl")] == ["7", "b.jsonl:3"]
    assert read(source / "code" / "deep" / "z.txt") == [Document("z.txt", "z", "four")]


@pytest.mark.parametrize(
    "text",
    [
        "We test on RULER at 8K.",
        "see LongBench",
        "a Needle in a Haystack task",
        "the needle-in-the-haystack test",
        "BABILong",
    ],
)
def test_texts_about_long_context_benchmarks_are_left_out(tmp_path, text):
    (tmp_path / "x.txt").write_text(text)
    (tmp_path / "y.txt").write_text(
        "The ruler lay beside the helmet, the needle in her hand; Rulers and SCROLLSAW too."
    )
    assert [d.id for d in read(tmp_path)] == ["y.txt"]
    assert [d.id for d in read(tmp_path, drop_benchmarks=False)] == ["x.txt", "y.txt"]


def test_documents_are_cut_to_a_range_of_tokens():
    documents = [Document(str(n), "c", "x" * n) for n in (4, 5, 8, 20)]
    cut = list(fitted(documents, lambda text: [1] * len(text), 5, 8))
    assert [(d.id, len(d.ids)) for d in cut] == [("5", 5), ("8", 8), ("20", 8)]
    given = [Document("ids", "c", "", (1, 2, 3, 4, 5, 6))]
    assert [d.ids for d in fitted(given, pytest.fail, 5, 5)] == [(1, 2, 3, 4, 5)]
    for low, high, said in ((0, 5, "--min-tokens 0 must be at least 1"), (6, 5, "leave no length")):
        with pytest.raises(RequestError, match=said):
            list(fitted(documents, list, low, high))


def test_short_documents_are_told_and_refused_ones_passed_on():
    def encode(text):
        if "?" in text:
            raise RequestError("unknown word")
        return [1] * len(text)

    short = []
    documents = [Document("a", "c", "xx"), Document("b", "c", "??????"), Document("c", "c", "xxxxxx")]
    assert [(d.id, len(d.ids)) for d in fitted(documents, encode, 4, 5, short.append)] == [("b", 0), ("c", 5)]
    assert [d.id for d in short] == ["a"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{not json}\n", "row 1, is no JSON"),
        (json.dumps({"text": "fine"}) + "\n" + '{"text": "cut', "row 2, is no JSON"),
        (json.dumps({"body": "x"}), "row 1, has no text"),
        (json.dumps({"text": 5}), "row 1, has no text"),
        (json.dumps(["x"]), "row 1, has no text"),
        (json.dumps({"text": "x", "corpus": ["a"]}), "has a field 'corpus' that is no text"),
        (json.dumps({"text": "x", "id": True}), "has a field 'id' that is no text"),
        (json.dumps({"text": "x", "continuations": "y"}), "row 1, has continuations that are no list"),
        (json.dumps({"text": "x", "continuations": ["y", ""]}), "row 1, has continuations that are no list"),
        ("\n".join([json.dumps({"text": "x", "id": "same"})] * 2), "'same' occurs in"),
    ],
)
def test_a_bad_row_is_named(tmp_path, content, said):
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(RequestError, match=r"d\.jsonl") as found:
        read(tmp_path)
    assert said in str(found.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "d.txt").write_bytes(b"abc\xff")
    with pytest.raises(RequestError, match=r"d.txt is not UTF-8 text \(byte 3\)"):
        read(tmp_path)
    (tmp_path / "d.txt").unlink()
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(RequestError, match="row 1, is no JSON"):
        read(tmp_path)


def test_a_missing_or_empty_source_is_named(tmp_path):
    with pytest.raises(RequestError, match="does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(RequestError, match="holds no documents"):
        read(tmp_path)
    (tmp_path / "x.pdf").write_text("x")
    with pytest.raises(RequestError, match="is no document file"):
        read(tmp_path / "x.pdf")


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(RequestError, match=r"pip install 'wakesight\[learn\]'"):
        read(tmp_path)


def test_parquet_rows_are_documents(tmp_path, monkeypatch):
    """Against a stand-in with pyarrow's calls, and against pyarrow itself where it is installed."""
    rows = [{"text": "one", "id": "a", "other": 1}, {"text": "two", "id": None, "other": 2}]
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        (tmp_path / "x.parquet").touch()
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", _stand_in(rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")

    assert read(tmp_path) == [Document("a", "x", "one"), Document("x.parquet:2", "x", "two")]


def _stand_in(rows):
    class Batch:
        def to_pylist(self):
            return [{name: row[name] for name in ("text", "id")} for row in rows]

    class ParquetFile:
        schema_arrow = types.SimpleNamespace(names=["text", "id", "other"])

        def __init__(self, path):
            assert path.name == "x.parquet"

        def iter_batches(self, batch_size, columns):
            assert columns == ["text", "id"]
            yield Batch()

    return types.SimpleNamespace(ParquetFile=ParquetFile)


def test_a_row_may_bring_the_instruction_before_it(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "one", "instruction": "Read this."}) + "\n")
    assert read(tmp_path) == [Document("x.jsonl:1", "x", "one", instruction="Read this.")]


def test_a_row_may_bring_what_was_said_about_it(tmp_path):
    rows = [{"text": "one", "continuations": ["Why?", "How?"]}, {"text": "two", "continuations": None}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [document.continuations for document in read(tmp_path)] == [("Why?", "How?"), ()]
