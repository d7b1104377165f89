"""RULER's own output files: which there are, and how a record is cut into instruction, document and question.

A file is made by NVIDIA/RULER scripts/data/prepare.py with the model template "base". The prefix-only split is made
at the last match of the question's opening words. Source: NVIDIA/kvpress
evaluation/benchmarks/ruler/create_huggingface_dataset.py. What stands before the document is the instruction (the
protected prefix); the line break behind it becomes the blank line that a session puts there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from wakesight.errors import RequestError
from wakesight.evaluation.items import Context, Question, SuiteOptions
from wakesight.evaluation.suites.files import Record, records
from wakesight.evaluation.suites.sizing import Draft, facts, within

SOURCES = ("squad.json", "hotpotqa.json", "PaulGrahamEssays.json", "english_words.json")


def _words(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


# the question's opening words, the first words of the answer, and the end of the instruction
_CUTS = {
    "niah": (
        _words(r"What (?:is|are all) the special magic"),
        _words(r" ?The special magic"),
        _words(r"afterwards\.\n"),
    ),
    "vt": (_words(r"Question: "), _words(r" ?Answer:"), _words(r"in the following text\.\s+")),
    "cwe": (_words(r"Question: "), _words(r" ?Answer:"), _words(r"appear most often\.\n")),
    "fwe": (_words(r"Question: "), _words(r" ?Answer:"), _words(r"coded words\.\s+")),
    "qa": (
        _words(r"Answer the question based on the given documents\."),
        _words(r" ?Answer:"),
        _words(r"The following are given documents\.\n\n"),
    ),
}


def find(data: Path | None, task: str, length: int) -> Path | None:
    """The ready-made file of a task: <task>.jsonl or <task>/validation.jsonl, also in a folder named by the length."""
    if data is None:
        return None
    places = [folder / name for folder in (data / str(length), data) for name in _names(task)]
    return next((place for place in places if place.is_file()), None)


def _names(task: str) -> tuple[str, str]:
    return f"{task}.jsonl", f"{task}/validation.jsonl"


def any_file(data: Path, tasks: Sequence[str], length: int) -> bool:
    """Whether the folder holds anything of RULER."""
    return any((data / name).is_file() for name in SOURCES) or any(find(data, task, length) for task in tasks)


def read(file: Path, task: str, new_tokens: int, options: SuiteOptions) -> Iterator[Context]:
    """The first `options.items` records. Raises RequestError for a record that is broken or too long."""
    number = -1
    for number, record in enumerate(records(file)):
        if number == options.items:
            return
        yield _context(record, task, new_tokens, options, number)
    if number + 1 < options.items:
        raise RequestError(f"{file} has {number + 1} records and {options.items} items were asked for; ask for fewer")


def _context(record: Record, task: str, new_tokens: int, options: SuiteOptions, number: int) -> Context:
    draft = split(record, task)
    tokens = draft.tokens(options.count)
    if tokens + new_tokens > options.length:
        raise RequestError(
            f"{record.file}, line {record.line} has {tokens} tokens and its answer {new_tokens}, more than "
            f"length={options.length}; raise the length to the one the file was made for"
        )
    index = record.values.get("index", number)
    name = f"{task}-{options.length}-{record.file.parent.name}-{record.file.stem}-{index}"
    question = Question(f"{name}-q0", draft.question, draft.references, task, new_tokens, draft.prefix)
    meta = {**facts(draft, options), "index": index}
    if "token_position_answer" in record:
        meta["token_position_answer"] = record.values["token_position_answer"]
    return Context(
        name, task, draft.text, (question,), draft.instruction or None, _source(record.file, task), meta=meta
    )


def _source(file: Path, task: str) -> str:
    return file.name if file.stem == task else f"{file.parent.name}/{file.name}"


def split(record: Record, task: str) -> Draft:
    """Raises RequestError if the record lacks a field, or the words at which it is cut."""
    opening, answer, end_of_instruction = _CUTS[task.split("_")[0]]
    prompt, references = record.text("input"), tuple(str(one) for one in record.scalars("outputs"))
    starts = [match.start() for match in opening.finditer(prompt)]
    if not starts:
        raise record.wrong("input", f"a question of {task} (it has no {opening.pattern!r})")
    before, question = prompt[: starts[-1]], prompt[starts[-1] :]
    if "answer_prefix" in record:
        prefix = record.text("answer_prefix")
    else:  # files made before the field existed carry it in the input
        found = answer.search(question)
        if not found:
            raise record.wrong("answer_prefix", "the start of the answer")
        question, prefix = question[: found.start()], question[found.start() :]
    ends = [match.end() for match in end_of_instruction.finditer(before)]
    # an example comes first in vt and cwe; a document has none of these words
    cut = ends[-1] if ends else 0
    text = before[cut:].rstrip()
    spans = [span for one in references for span in within(text, one, [(0, len(text))])]
    return Draft(before[:cut].strip(), text, question.strip(), prefix.lstrip(), references, (), spans)
