"""OPTIONS of a suite are what it reads, no more and no less; what nobody reads is refused by name."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from wakesight.errors import RequestError
from wakesight.evaluation.items import SuiteOptions
from wakesight.evaluation.suites.table import SUITES, check_options, options_of, suite, task_id

OURS = ("ruler", "niah", "recall", "fidelity", "scbench", "longbench", "reasoning")


def count(text: str) -> int:
    return len(text) // 4 + 1


class Watched(dict[str, Any]):
    """Settings that remember which of them were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return default

    def __getitem__(self, key: str) -> Any:
        raise AssertionError(f"{key} is read without a default")


@pytest.mark.parametrize("name", OURS)
def test_options_are_what_a_suite_reads(name: str, tmp_path: Path) -> None:
    if name == "reasoning":
        pytest.importorskip("reasoning_gym")
    (tmp_path / "qasper.jsonl").write_text('{"input": "a", "context": "b", "answers": ["c"]}')
    watched = Watched()
    for data in (None, tmp_path):
        options = SuiteOptions(2048, 1, 0, count, ("qasper",) if name == "longbench" else (), data, watched)
        with contextlib.suppress(RequestError):  # most have no files there, and say so
            list(suite(name).contexts(options))
    assert watched.names == set(options_of(name))


@pytest.mark.parametrize("name", SUITES)
def test_every_option_says_what_it_is(name: str) -> None:
    for option, what in options_of(name).items():
        assert option.isidentifier()
        assert 3 < len(what) < 120


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="the suite niah has no option 'depth', did you mean 'depths'"):
        check_options("niah", {"depth": "5"})
    with pytest.raises(RequestError, match="ruler has no option 'turns'; it has: reserve"):
        check_options("ruler", {"turns": "golden"})
    check_options("niah", {"depths": "5", "lengths": "512"})


@pytest.mark.parametrize(
    ("name", "extra", "says"),
    [
        ("niah", {"depths": "many"}, "depths=many is no whole number; depths=10 is the default"),
        ("niah", {"depths": 2.5}, "depths=2.5 is no whole number"),
        ("niah", {"lengths": "512,x"}, "no list of whole numbers"),
        ("fidelity", {"continuation": "x"}, "continuation=x is no whole number"),
        ("ruler", {"reserve": "-1"}, "reserve=-1 must be at least 0"),
        ("scbench", {"turns": "goldn"}, "did you mean 'golden'"),
    ],
)
def test_a_wrong_value_is_one_sentence(name: str, extra: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        list(suite(name).contexts(SuiteOptions(2048, 1, 0, count, extra=extra)))


def test_text_from_a_command_line_does_what_numbers_do() -> None:
    def made(**extra: Any) -> list[Any]:
        return list(suite("niah").contexts(SuiteOptions(1024, 2, 0, count, extra=extra)))

    assert made(depths="2", lengths="512,1024") == made(depths=2, lengths=[512, 1024])
    assert made(depths="2", lengths="1024", reserve="300") != made(depths=2, lengths=[1024])


def test_names_that_several_suites_have_carry_their_suite() -> None:
    assert task_id("ruler", "vt") == "ruler:vt"
    assert task_id("scbench", "vt") == "scbench:vt"
    assert task_id("ruler", "cwe") == "cwe"
    assert task_id("niah", "niah_2048") == "niah_2048"
    named: dict[str, str] = {}
    for name in SUITES:
        module = suite(name)
        for task in (*module.TASKS, *getattr(module, "ALSO", ())):
            identity = task_id(name, task)
            assert named.setdefault(identity, name) == name
