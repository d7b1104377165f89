"""summary.json: its shape, which rules stand where, and that nothing but the rows decides its bytes."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from wakesight.evaluation.arms import WHOLE, facts_of, make_arms
from wakesight.evaluation.comparison import compare
from wakesight.evaluation.intervals import holm
from wakesight.evaluation.summary import summarise, title

ARGUMENTS = {"suite": "ruler", "seed": 1, "methods": "snapkv:window=8,kernel=5,keydiff", "allocations": "flat,ada",
             "evicted": "drop"}  # fmt: skip
ARMS = [arm.id for arm in make_arms(["snapkv:window=8,kernel=5", "keydiff"], ["flat", "ada"], [0.1, 0.5])]
ARM_KEYS = {
    "suite", "task", "method", "allocation", "evicted", "unit", "keep", "n", "mean", "low", "high", "official_mean",
    "kept_entries", "kv_bytes_ratio",
}  # fmt: skip
PAIR_KEYS = {"suite", "task", "a", "b", "diff", "low", "high", "p", "n"}


def rows(
    tasks: tuple[str, ...] = ("vt", "cwe"), contexts: int = 5, questions: int = 2, grades: Any = None,
    arms: Any = ARMS,
) -> Any:  # fmt: skip
    """Rows of every arm; strict grades grow with p and with the context, official ones are a little higher."""
    noise = random.Random(3)
    made = []
    for task in tasks:
        for context in range(contexts):
            for question in range(questions):
                for arm in arms:
                    keep = facts_of(arm).keep
                    strict = float(noise.random() < keep)
                    marks = {"official": min(1.0, strict + 0.25), "strict": strict}
                    made.append({
                        "task": task, "context": f"{task}-{context}", "question": f"q{question}", "arm": arm,
                        "arms": len(arms), "source": "generated", "skipped": None, "tokens": 100,
                        "kept": int(600 * keep), "kv_bytes_kept": int(6000 * keep), "kv_bytes_full": 6000,
                        "grades": marks if grades is None else grades(keep, noise),
                    })  # fmt: skip
    return made


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    return summarise(rows(), ARGUMENTS)


def test_rows_have_the_fields_that_were_agreed(summary):
    assert all(row.keys() >= ARM_KEYS for row in summary["arms"])
    assert all(row.keys() >= PAIR_KEYS for row in summary["paired"])
    assert len(summary["arms"]) == 3 * len(ARMS)  # two tasks and their mean
    json.dumps(summary, allow_nan=False)


def test_an_arm_is_told_in_parts(summary):
    by_arm = {row["arm"]: row for row in summary["arms"] if row["task"] == "cwe"}
    told = by_arm["snapkv:window=8,kernel=5/ada/drop/0.1"]
    assert (told["method"], told["allocation"], told["evicted"], told["unit"], told["keep"]) == (
        "snapkv:window=8,kernel=5", "ada", "drop", "entry", 0.1,
    )  # fmt: skip
    assert (told["kept_entries"], told["kv_bytes_ratio"]) == (60, 0.1)
    whole = by_arm[WHOLE]
    assert (whole["method"], whole["keep"], whole["kv_bytes_ratio"]) == ("whole", 1, 1)
    (paged,) = (arm.id for arm in make_arms(["random"], ["flat"], [0.5], unit="page", page_size=8)[1:])
    assert vars(facts_of(paged)) == {
        "method": "random", "allocation": "flat", "evicted": "drop", "unit": "page", "keep": 0.5, "page": "8-max",
    }  # fmt: skip


def test_means_are_strict_and_the_official_mean_stands_beside_them(summary):
    made = rows()
    for row in summary["arms"]:
        if row["task"] == "mean":
            continue
        own = [one["grades"] for one in made if one["arm"] == row["arm"] and one["task"] in row["task"]]
        assert row["mean"] == pytest.approx(sum(one["strict"] for one in own) / len(own), abs=1e-6)
        assert row["official_mean"] == pytest.approx(sum(one["official"] for one in own) / len(own), abs=1e-6)
        assert 0 <= row["low"] <= row["mean"] <= row["high"] <= 1
        assert (row["n"], row["contexts"]) == (10, 5)


def test_every_task_weighs_the_same_in_the_mean():
    uneven = [row for row in rows() if row["task"] == "vt" or row["context"] == "cwe-0"]
    found = summarise(uneven, ARGUMENTS)["arms"]
    for arm in ARMS:
        means = {row["task"]: row["mean"] for row in found if row["arm"] == arm}
        assert means.pop("mean") == pytest.approx(sum(means.values()) / 2, abs=1e-6)


def test_a_task_that_several_suites_have_carries_its_suite(summary):
    assert {row["task"] for row in summary["arms"]} == {"ruler:vt", "cwe", "mean"}
    assert {row["task"] for row in summary["paired"]} == {"ruler:vt", "cwe", "mean"}
    other = summarise(rows(("vt", "kv")), {**ARGUMENTS, "suite": "scbench"})
    assert {row["task"] for row in other["arms"]} == {"scbench:vt", "kv", "mean"}


def test_three_families_of_pairs_each_adjusted_by_itself(summary):
    families: dict[str, list[dict[str, Any]]] = {}
    for row in summary["paired"]:
        families.setdefault(row["family"], []).append(row)
    assert {(row["task"], row["a"], row["b"]) for row in families["whole"]} == {
        (task, arm, WHOLE) for task in ("ruler:vt", "cwe", "mean") for arm in ARMS[1:]
    }
    first = "snapkv:window=8,kernel=5/flat/drop"  # named first, though not the first of the alphabet
    assert {(row["a"], row["b"]) for row in families["first"]} == {
        (arm, f"{first}/{facts_of(arm).keep:g}") for arm in ARMS[1:] if not arm.startswith(f"{first}/")
    }
    assert {row["task"] for row in families["first"]} == {"ruler:vt", "cwe"}
    pairs = [frozenset((row["a"], row["b"])) for row in families["pairs"]]
    assert {row["task"] for row in families["pairs"]} == {"mean"}
    assert len(pairs) == len(set(pairs)) == 2 * 6
    assert all(facts_of(row["a"]).keep == facts_of(row["b"]).keep for row in families["pairs"])
    for found in families.values():
        adjusted = holm([row["p_raw"] for row in found])
        assert [row["p"] for row in found] == pytest.approx(adjusted, abs=1e-4)
    assert any(row["p"] > row["p_raw"] for row in summary["paired"])


@pytest.mark.parametrize(
    ("methods", "allocations", "first"),
    [
        ("snapkv,keydiff", "natural", "snapkv/flat"),
        ("snapkv@flat,keydiff@flat", "natural", "snapkv/flat"),
        ("keydiff,snapkv", "natural", "keydiff/flat"),
        ("snapkv@ada,keydiff", "flat", "snapkv/ada"),
        ("snapkv:kernel=5,window=8,keydiff", "ada,flat", "snapkv:window=8,kernel=5/ada"),
    ],
)
def test_the_first_named_is_what_the_arguments_make_first(methods, allocations, first):
    from wakesight.registry import read_names

    arms = [arm.id for arm in make_arms(read_names(methods), read_names(allocations), [0.1, 0.5])]
    found = summarise(rows(arms=arms), {**ARGUMENTS, "methods": methods, "allocations": allocations})
    assert found["first"] == f"{first}/drop"
    compared = {row["b"] for row in found["paired"] if row["family"] == "first"}
    assert compared == {f"{first}/drop/{keep}" for keep in (0.1, 0.5)}


def test_a_first_named_that_is_not_installed_here_is_not_replaced_by_another():
    found = summarise(rows(), {**ARGUMENTS, "methods": "plugged_in,keydiff"})
    assert found["first"] is None
    assert {row["family"] for row in found["paired"]} == {"whole", "pairs"}


def test_one_task_is_counted_once():
    found = summarise(rows(("cwe",)), ARGUMENTS)["paired"]
    assert {row["task"] for row in found} == {"cwe"}
    assert [sum(row["family"] == name for row in found) for name in ("whole", "first", "pairs")] == [8, 6, 6]
    compared = [frozenset((row["a"], row["b"])) for row in found]
    assert len(compared) == len(set(compared))  # no pair in two families
    alone = summarise(rows(("cwe",), contexts=8, arms=ARMS[:2], grades=lambda keep, noise: {"strict": keep}), ARGUMENTS)
    (only,) = alone["paired"]
    assert only["p"] == only["p_raw"] == pytest.approx(2 / 2**8, abs=1e-5)


@pytest.mark.parametrize("tasks", [("cwe",), ("vt", "cwe")])
def test_the_report_has_the_same_p_values(tasks):
    made = rows(tasks, contexts=7)
    theirs = compare(made, ARGUMENTS)["rules"]["strict"]["apart"]
    for row in summarise(made, ARGUMENTS)["paired"]:
        (cell,) = (
            cell for cell in theirs[row["family"]]
            if (cell["a"], cell["b"]) == (row["a"], row["b"]) and cell["task"] == row["task"].removeprefix("ruler:")
        )  # fmt: skip
        assert (cell["p_holm"], cell["p_value"], cell["mean"]) == (row["p"], row["p_raw"], row["diff"])


def test_one_context_has_null_for_an_interval():
    found = summarise(rows(contexts=1), ARGUMENTS)
    assert {row[end] for part in ("arms", "paired") for row in found[part] for end in ("low", "high")} == {None}
    json.dumps(found, allow_nan=False)


def test_measures_of_a_text_are_no_grades_and_keep_the_bootstraps_interval():
    found = summarise(rows(("code",), grades=lambda keep, noise: {"kl": 0.0, "top1": 1.0}), ARGUMENTS)
    assert all((row["low"], row["high"]) == (1, 1) and row["kl"]["high"] == 0 for row in found["arms"])


def test_its_title_says_which_rule_and_which_way_is_up(summary):
    assert title(summary) == "strict grade from 0 to 1, higher is better; means of 20 questions, 10 contexts"
    one = summarise(rows(("code",), contexts=1, questions=1, grades=lambda keep, noise: {"top1": 1.0}), ARGUMENTS)
    assert title(one) == "same most likely token as the whole cache, higher is better; means of 1 question, 1 context"


def test_the_table_of_a_terminal_has_a_title_and_a_mean_only_over_several_tasks(summary):
    from wakesight.cli.eval import show

    lines = show(summary).splitlines()
    assert lines[0] == title(summary)
    assert lines[1].split() == ["cwe", "ruler:vt", "mean"]
    assert show(summarise(rows(("cwe",)), ARGUMENTS)).splitlines()[1].split() == ["cwe"]


def test_differences_are_those_of_the_means(summary):
    means = {(row["task"], row["arm"]): row["mean"] for row in summary["arms"]}
    for row in summary["paired"]:
        apart = means[row["task"], row["a"]] - means[row["task"], row["b"]]
        assert row["diff"] == pytest.approx(apart, abs=3e-6)
        assert row["low"] <= row["diff"] <= row["high"]
        assert row["n"] == (20 if row["task"] == "mean" else 10)


def test_where_nothing_was_named_the_first_of_the_sorted_arms_is_compared_with():
    found = summarise(rows(), {"suite": "ruler", "seed": 1})
    assert {row["b"].rpartition("/")[0] for row in found["paired"] if row["family"] == "first"} == {"keydiff/ada/drop"}


def test_the_order_of_the_rows_has_no_part_in_the_bytes(summary):
    for seed in range(3):
        shuffled = rows()
        random.Random(seed).shuffle(shuffled)
        assert json.dumps(summarise(shuffled, ARGUMENTS)) == json.dumps(summary)
    changed = rows()
    changed[0]["grades"]["strict"] = 0.5
    assert json.dumps(summarise(changed, ARGUMENTS)) != json.dumps(summary)


def test_of_fidelity_the_mean_is_top1_and_kl_and_nll_stand_beside_it():
    found = summarise(
        rows(("code",), grades=lambda keep, noise: {"kl": 1 - keep, "top1": keep, "nll": 2 + noise.random()}),
        {**ARGUMENTS, "suite": "fidelity"},
    )
    for row in found["arms"]:
        assert row["mean"] == row["official_mean"] == pytest.approx(row["keep"])
        assert row["kl"]["mean"] == pytest.approx(1 - row["keep"])
        assert row["nll"]["low"] < row["nll"]["mean"] < row["nll"]["high"]
    assert all(row["diff"] < 0 for row in found["paired"] if row["b"] == WHOLE)


def test_skipped_rows_are_told_and_their_questions_count_for_no_arm():
    made = rows()
    for row in made:
        if row["context"] == "vt-0" and row["arm"] == ARMS[1]:
            row.update(skipped="out of memory in answering", grades={})
    found = summarise(made, ARGUMENTS)
    assert found["skipped"] == {"out of memory in answering": 2}
    assert (found["questions"], found["scored_questions"]) == (20, 18)
    assert {row["n"] for row in found["arms"] if row["task"] == "ruler:vt"} == {8}
    for row in made:
        row.update(skipped="all of it", grades={})
    nothing = summarise(made, ARGUMENTS)
    assert (nothing["arms"], nothing["paired"], nothing["skipped"]) == ([], [], {"all of it": len(made)})
