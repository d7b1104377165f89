"""wakesight ask and prefill with --evicted demote."""

from __future__ import annotations

import json

import pytest

from wakesight.cli.main import run
from wakesight.policy import Policy
from wakesight.residency import Residency
from wakesight.testing import tiny

TEXT = "The keeper wrote the hour in the log. " * 20
DEMOTE = ("--evicted", "demote", "--page-size", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.save("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def document(tmp_path):
    file = tmp_path / "document.txt"
    file.write_text(TEXT)
    return str(file)


def ask(capsys, *words: str):
    assert run(["ask", "--max-new-tokens", "6", *words]) == 0
    return capsys.readouterr()


def test_misses_and_fetches_are_printed(folder, document, capsys):
    words = ("--model", folder, "--context", document, "--question", "Who?", "--keep", "0.1", *DEMOTE)

    talk = ask(capsys, *words).err
    printed = json.loads(ask(capsys, *words, "--rerank", "3", "--residency", "sketch=int8", "--json").out)

    assert "in fast memory" in talk
    assert " misses, " in talk
    assert " fetches, " in talk
    assert "in the reservoir" in talk
    answer = printed["answers"][0]
    assert answer["misses"] == answer["fetches"] > 0
    assert answer["moved_bytes"] > 0
    assert printed["reservoir_bytes"] > 0
    assert printed["sketch_bytes"] > 0
    assert Policy.from_json(printed["policy"]) == Policy(
        keep=0.1, unit="page", evicted="demote", page_size=8, residency=Residency(rerank=3, sketch="int8")
    )


@pytest.mark.parametrize("where", ["host", "file"])
def test_reading_all_pages_answers_like_the_whole_session(folder, document, capsys, tmp_path, where):
    asked = ("--model", folder, "--context", document, "--question", "Who?", "--json")
    reservoir = "host" if where == "host" else f"file:{tmp_path}"

    whole = json.loads(ask(capsys, *asked, "--keep", "1").out)
    child = json.loads(ask(capsys, *asked, *DEMOTE, "--pages", "2", "--attend", "all", "--reservoir", reservoir).out)

    assert child["answers"][0]["token_ids"] == whole["answers"][0]["token_ids"]
    assert child["answers"][0]["fetches"] > 0
    assert not list(tmp_path.glob("*.pages"))


def test_a_demoted_session_is_saved_and_asked(folder, document, capsys, tmp_path):
    file = str(tmp_path / "a.ws")
    words = ("--model", folder, "--context", document, "--save", file, *DEMOTE, "--pages", "3")
    assert run(["prefill", *words]) == 0
    capsys.readouterr()

    answer = json.loads(ask(capsys, "--session", file, "--question", "Who?", "--json").out)["answers"][0]

    assert answer["misses"] > 0
