"""Documents to learn from: folders of .jsonl, .txt and .parquet files -> texts with a corpus name each."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wakesight.errors import RequestError

SUFFIXES = (".jsonl", ".txt", ".parquet")
# Names of long-context benchmarks. Some are plain words too, so capitals count.
BENCHMARKS = re.compile(
    r"\b(RULER|HELMET|SCBench|LongBench|InfiniteBench|LooGLE|L-Eval|LEval|ZeroSCROLLS|SCROLLS|BABILong|NoLiMa|"
    r"MRCR|LV-Eval|NIAH|LongEval|Long Range Arena|Michelangelo benchmark)\b|(?i:needle[- ]in[- ](?:a|the)[- ]haystack)"
)


@dataclass(frozen=True)
class Document:
    """One text. id: unique among the documents read together. corpus: the kind of text it stands for.

    ids: its tokens, once `fitted` has encoded and cut it; before that (). instruction: what stands before it, if it
    has words of its own there. continuations: what was said about it, for `label --given`; control tokens of the
    model's template mean what they say.
    """

    id: str
    corpus: str
    text: str
    ids: tuple[int, ...] = ()
    instruction: str | None = None
    continuations: tuple[str, ...] = ()


def read_documents(source: Path, *, drop_benchmarks: bool = True) -> Iterator[Document]:
    """Every document of a file or of a folder with its subfolders, in the order of paths and lines.

    A .jsonl line or .parquet row has `text`, and may have `corpus`, `id`, `instruction` and `continuations` (a list of
    texts). Without them the corpus is the name of the folder below `source`, or the file's stem where there is none,
    and the id is path:row. A .txt file is one document. drop_benchmarks: leave out texts that name a long-context
    benchmark (GateSight, section on data).

    Raises RequestError for a missing source, one without such files, a broken row, an id that occurs twice, and a
    parquet file without the package that reads it. What is wrong in a file shows when it is reached.
    """
    files = _files(source)
    seen: dict[str, Path] = {}
    for file in files:
        for document in _read(file, source):
            if document.id in seen:
                raise RequestError(
                    f"the id {document.id!r} occurs in {seen[document.id]} and again in {file}; give every document an "
                    "id of its own, or none"
                )
            seen[document.id] = file
            if not (drop_benchmarks and BENCHMARKS.search(document.text)):
                yield document


def fitted(
    documents: Iterable[Document], encode: Callable[[str], list[int]], min_tokens: int, max_tokens: int,
    on_short: Callable[[Document], None] | None = None,
) -> Iterator[Document]:  # fmt: skip
    """The documents of at least `min_tokens`, encoded, each cut to its first `max_tokens`.

    on_short: gets those that are left out. A document that the tokenizer refuses is given as it is: whoever runs it
    meets the same refusal and says it by the document's name.
    Raises RequestError for a range that holds no length.
    """
    if min_tokens < 1:
        raise RequestError(f"--min-tokens {min_tokens} must be at least 1; 750 is the default")
    if min_tokens > max_tokens:
        raise RequestError(
            f"--min-tokens {min_tokens} and --max-tokens {max_tokens} leave no length; give 1 <= min <= max"
        )
    for document in documents:
        try:
            ids = document.ids or tuple(encode(document.text))
        except RequestError:
            yield document
            continue
        if len(ids) >= min_tokens:
            yield replace(document, ids=ids[:max_tokens])
        elif on_short is not None:
            on_short(document)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        if source.suffix not in SUFFIXES:
            raise RequestError(f"{source} is no document file; give one ending in {', '.join(SUFFIXES)}, or a folder")
        return [source]
    if not source.is_dir():
        raise RequestError(f"{source} does not exist; give a folder or file of documents ({', '.join(SUFFIXES)})")
    found = [path for path in source.rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    if not found:
        raise RequestError(f"the folder {source} holds no documents; put {', '.join(SUFFIXES)} files into it")
    return sorted(found, key=lambda path: path.relative_to(source).as_posix())


def _read(file: Path, source: Path) -> Iterator[Document]:
    inside = file.relative_to(source) if source.is_dir() else Path(file.name)
    corpus = inside.parts[0] if len(inside.parts) > 1 else file.stem
    if file.suffix == ".txt":
        yield Document(inside.as_posix(), corpus, _text(file))
        return
    for number, row in _json_rows(file) if file.suffix == ".jsonl" else _parquet_rows(file):
        yield _document(row, f"{inside.as_posix()}:{number}", corpus, f"{file}, row {number},")


def _document(row: Any, default_id: str, default_corpus: str, place: str) -> Document:
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise RequestError(f"{place} has no text; every row needs a field 'text' that holds one")
    names = {}
    for name, default in (("id", default_id), ("corpus", default_corpus), ("instruction", "")):
        value = row.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int))):
            raise RequestError(f"{place} has a field {name!r} that is no text; write a text, or leave it out")
        names[name] = default if value is None or value == "" else str(value)
    said = row.get("continuations") or ()
    if not isinstance(said, (list, tuple)) or not all(isinstance(each, str) and each for each in said):
        raise RequestError(f"{place} has continuations that are no list of texts; write a list, or leave it out")
    return Document(
        names["id"], names["corpus"], row["text"], instruction=names["instruction"] or None, continuations=tuple(said)
    )


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not UTF-8 text (byte {error.start}); convert it, or take it away") from None
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}") from None


def _json_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """(number, value) of each line that is not blank, read line by line."""
    try:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield number, json.loads(line)
                except ValueError:  # a UnicodeDecodeError is one
                    raise RequestError(f"{file}, row {number}, is no JSON; mend the line, or take it out") from None
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}") from None


def _parquet_rows(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise RequestError(
            f"{file} is a parquet file, which needs the package pyarrow; type: pip install 'wakesight[learn]', or give "
            "the texts as .jsonl"
        ) from None
    try:
        table = parquet.ParquetFile(file)
        columns = [
            name
            for name in ("text", "corpus", "id", "instruction", "continuations")
            if name in table.schema_arrow.names
        ]
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (OSError, ValueError) as error:  # pyarrow's own errors are among them
        reason = " ".join(str(error).split())[:200]
        raise RequestError(f"{file} is no readable parquet file: {reason}") from None
