"""Names lead to suites, and task names are checked before anything is generated."""

from __future__ import annotations

import importlib.util

import pytest

from wakesight.errors import RequestError
from wakesight.evaluation.items import SuiteOptions
from wakesight.evaluation.suites import ruler
from wakesight.evaluation.suites.table import SUITES, chosen, pick, suite


def options(*tasks: str) -> SuiteOptions:
    return SuiteOptions(length=512, items=1, seed=0, count=lambda text: len(text.split()), tasks=tasks)


@pytest.mark.parametrize("name", ["ruler", "niah", "recall", "fidelity"])
def test_every_suite_of_ours_says_what_it_has(name):
    assert suite(name).TASKS
    assert callable(suite(name).contexts)


@pytest.mark.parametrize("name", SUITES)
def test_every_row_of_the_table_is_a_module(name):
    assert importlib.util.find_spec(SUITES[name]) is not None


def test_an_unknown_suite_is_corrected():
    with pytest.raises(RequestError, match=r"unknown suite 'rular', did you mean 'ruler'\?"):
        suite("rular")


def test_no_names_mean_every_task_but_those_given_only_on_request():
    assert chosen(ruler, options()) == ruler.TASKS
    assert len(ruler.TASKS) == 13


def test_tasks_come_once_in_the_order_of_the_suite():
    assert chosen(ruler, options("qa_2_synth", "vt", "niah_single_1", "vt")) == ("niah_single_1", "vt", "qa_2_synth")


@pytest.mark.parametrize("name", ["ruler", "niah", "recall", "fidelity"])
def test_an_unknown_task_is_refused_before_anything_is_made(name):
    with pytest.raises(RequestError, match="unknown task 'nothing_like_it'"):
        next(suite(name).contexts(options("nothing_like_it")))


def test_a_misspelt_task_is_corrected():
    with pytest.raises(RequestError, match="did you mean 'narrative'"):
        pick(("narrative", "code"), options("narative"))
