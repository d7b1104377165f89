"""config.json: arguments given and defaults apart, what may change when a run goes on, and what shards share."""

from __future__ import annotations

import pytest
from small_runs import plan

from wakesight.errors import RequestError
from wakesight.evaluation.config import arguments_of, first_difference, unsharded
from wakesight.evaluation.folders import merge
from wakesight.evaluation.records import Records, read_json
from wakesight.evaluation.runner import Plan, run
from wakesight.testing import tiny

CONFIG = {"given": {"suite": "niah", "shard": "0/2"}, "defaults": {"seed": 42, "rows": 16, "options": {}}}


@pytest.fixture(scope="module")
def engine():
    return tiny.engine("llama")


def changed(**given):
    return {**CONFIG, "given": {**CONFIG["given"], **given}}


def test_both_forms_are_read():
    assert arguments_of(CONFIG) == {"suite": "niah", "shard": "0/2", "seed": 42, "rows": 16, "options": {}}
    assert arguments_of({"arguments": {"suite": "niah"}, "versions": {}}) == {"suite": "niah"}


def test_what_differs_is_named_and_how_the_work_is_cut_up_does_not_matter():
    assert first_difference(CONFIG, CONFIG) is None
    assert first_difference(CONFIG, changed(seed=43)) == ("seed", 42, 43)
    assert first_difference(CONFIG, changed(seed=42)) is None  # typed or not, it is the same run
    assert first_difference(CONFIG, changed(rows=4, chunk=64)) is None
    assert first_difference(CONFIG, changed(shard="1/2"), ("shard",)) is None


def test_an_argument_that_an_older_run_did_not_know_had_its_default():
    old = {"arguments": {"suite": "niah", "shard": "0/2", "seed": 42}}
    assert first_difference(old, CONFIG) is None
    assert first_difference(CONFIG, old) is None
    assert first_difference(old, changed(options={"depths": "5"})) == ("options", {}, {"depths": "5"})


def test_the_whole_run_of_a_shard_has_none():
    for config in (CONFIG, {"arguments": arguments_of(CONFIG)}):
        assert arguments_of(unsharded(config)) == {**arguments_of(CONFIG), "shard": None}
    assert CONFIG["given"]["shard"] == "0/2"


def sharded(engine, folder, index, count, **given):
    base = plan(engine, shard=(index, count))
    config = {"given": {"suite": "fake", "shard": f"{index}/{count}", **given}, "defaults": {"seed": 1}}
    run(Plan(**{**vars(base), "config": config}), folder)
    return folder


def test_shards_must_be_of_one_run_and_all_there(engine, tmp_path):
    first, second = (sharded(engine, tmp_path / str(i), i, 3) for i in range(2))
    with pytest.raises(RequestError, match="shard 2/3 is not among the folders"):
        merge([first, second], tmp_path / "all")
    other = sharded(engine, tmp_path / "other", 2, 3, length=512)
    with pytest.raises(RequestError, match="no shards of one run: length is None in the one and 512"):
        merge([first, second, other], tmp_path / "all")
    third = sharded(engine, tmp_path / "2", 2, 3)
    half = (first / "records.jsonl").read_text().splitlines(keepends=True)[0]
    with open(third / "records.jsonl", "a") as file:
        file.write(half)
    with pytest.raises(RequestError, match="stopped in the middle of a question; finish it"):
        merge([first, second, third], tmp_path / "all")
    Records(third).keep_complete()
    merge([third, first, second], tmp_path / "all")
    assert read_json(tmp_path / "all" / "config.json")["given"] == {"suite": "fake"}
