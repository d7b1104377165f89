"""Data files: what is read, and the sentence for what cannot be; contexts that fit."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from wakesight.errors import RequestError
from wakesight.evaluation.items import Question, SuiteOptions
from wakesight.evaluation.suites.files import Record, find, missing, records
from wakesight.evaluation.suites.fitting import Draft, cut_middle, grow, room


def written(folder: Path, name: str, *lines: str) -> Path:
    file = folder / name
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def words(text: str) -> int:
    return len(text.split())


def test_lines_keep_their_numbers_over_blank_ones(tmp_path: Path) -> None:
    file = written(tmp_path, "a.jsonl", '{"x": "one"}', "", '{"x": "zwölf"}')

    assert [(record.line, record.text("x")) for record in records(file)] == [(1, "one"), (3, "zwölf")]


def test_a_json_list_is_read_like_lines(tmp_path: Path) -> None:
    file = written(tmp_path, "a.json", json.dumps([{"x": "one"}, {"x": "two"}], indent=1))

    assert [(record.line, record.text("x")) for record in records(file)] == [(1, "one"), (2, "two")]


def test_lines_in_a_file_named_json_are_read_too(tmp_path: Path) -> None:
    file = written(tmp_path, "a.json", '{"x": "one"}', '{"x": "two"}')

    assert [record.text("x") for record in records(file)] == ["one", "two"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"x": 1}', '{"x": '], "a.jsonl, line 2: not JSON"),
        (["[1, 2]"], "a.jsonl, line 1: this is list, and a record is a JSON object"),
        ([""], "holds no records"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, lines: list[str], said: str) -> None:
    file = written(tmp_path, "a.jsonl", *lines)

    with pytest.raises(RequestError, match=said):
        list(records(file))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(RequestError, match="cannot be read as UTF-8"):
        list(records(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda record: record.text("gone"), "line 7: turns\\[1\\].gone is missing; the line has"),
        (lambda record: record.text("number"), "turns\\[1\\].number is 3, and this format needs a string there"),
        (lambda record: record.scalar("flag"), "needs a string or a number"),
        (lambda record: record.scalars("empty"), "needs a string, a number or a list of those"),
        (lambda record: record.texts("empty"), "a list of strings that is not empty"),
        (lambda record: record.records("number"), "a list of objects that is not empty"),
    ],
)
def test_a_wrong_field_is_named_with_its_place(read, said: str) -> None:
    values = {"number": 3, "flag": True, "empty": []}
    record = Record(Path("f.jsonl"), 7, values, "turns[1].")

    with pytest.raises(RequestError, match=said):
        read(record)


def test_files_are_found_beside_the_folder_or_in_its_data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    inner = written(tmp_path / "data", "a.jsonl", "{}")

    assert find(tmp_path, "a", "A") == inner
    assert missing(tmp_path, ["a", "b"]) == ["b"]


def test_a_file_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"has no a\.jsonl; put the file of the A set there"):
        find(tmp_path, "a", "the A set")
    with pytest.raises(RequestError, match="is not a folder"):
        find(tmp_path / "nowhere", "a", "the A set")


def test_parquet_is_refused_with_the_line_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "a-00000-of-00001.parquet").write_bytes(b"PAR1")

    with pytest.raises(RequestError, match=r"read_parquet\(\.\.\.\)\.to_json\('a\.jsonl'"):
        find(tmp_path, "a", "the A set")


@pytest.mark.parametrize("limit", [1, 2, 7, 50, 99])
def test_cutting_keeps_both_ends_within_the_limit(limit: int) -> None:
    text = " ".join(f"w{place}" for place in range(100))

    kept, meta = cut_middle(text, limit, words)

    assert words(kept) <= limit
    assert meta["characters"] == len(text)
    assert meta["characters_kept"] == len(kept)
    if limit > 3:
        assert kept.startswith("w0 ")
        assert kept.endswith("w99")
        assert words(kept) >= limit - 2


def test_a_text_that_fits_is_not_touched() -> None:
    assert cut_middle("one two", 2, words) == ("one two", {})


def options(length: int) -> SuiteOptions:
    return SuiteOptions(length=length, items=1, seed=0, count=words)


def test_grow_takes_the_largest_that_fits() -> None:
    question = Question("", "two words", ("a",), "g", max_new_tokens=5)

    draft = grow(lambda n: Draft("w " * n, (question,)), options(57), "a task", low=1, guess=3)

    assert words(draft.text) == 50
    assert draft.tokens(options(57)) == 57


def test_grow_and_room_refuse_what_cannot_fit() -> None:
    question = Question("", "two words", ("a",), "g", max_new_tokens=50)

    with pytest.raises(RequestError, match="length=57 is too short for a task, which needs at least 152"):
        grow(lambda n: Draft("w " * n, (question,)), options(57), "a task", low=100, guess=200)
    with pytest.raises(RequestError, match="too short for a task, which needs at least 70"):
        room([question], None, options(57), "a task")


def test_room_of_the_length_it_names_is_enough() -> None:
    for new in random.Random(0).sample(range(1, 5000), 50):
        question = Question("", "two words", ("a",), "g", max_new_tokens=new)
        with pytest.raises(RequestError) as refused:
            room([question], None, options(8), "t")
        needed = int(str(refused.value).split("at least ")[1].split(" ")[0])
        assert room([question], None, options(needed), "t") >= needed // 4


def test_reserve_keeps_tokens_back() -> None:
    question = Question("", "two words", ("a",), "g", max_new_tokens=5)
    kept_back = SuiteOptions(length=57, items=1, seed=0, count=words, extra={"reserve": 10})

    assert words(grow(lambda n: Draft("w " * n, (question,)), kept_back, "t", low=1, guess=3).text) == 40
