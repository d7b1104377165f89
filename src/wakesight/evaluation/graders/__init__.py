"""Takes a reply and the reference answers, gives a grade from 0 to 1; next, the runner writes it into the record.

    grade("scbench_choice_eng", "Based on chapter 3, C.", ["the cook", "B"])            # 1.0: "B"ased
    grade("scbench_choice_eng", "Based on chapter 3, C.", ["the cook", "B"], "strict")  # 0.0

`official` gives what the benchmark's own scorer gives, faults included, so that numbers compare with published
ones. `strict` is the corrected rule where that scorer is wrong, and the same everywhere else; `RULES` says task by
task. Both see the reply as it is: for a thinking model, pass it through `after_thinking` first.

These are grades of single items. Task scores are formed from them later, always as a mean over items (SCBench: over
turns), times 100: RULER and LongBench round that to two places; LongBench-E does so within lengths below 4,000, from
4,000 and from 8,000; SCBench's mixed tasks are the mean of their two parts' means, its benchmark the mean of twelve
tasks; GateSight's twelve-task mean takes `strict` where `Rule.revised` says so and `official` elsewhere.

One file per family (ruler, scbench, longbench, code for RepoQA, mathematics), each function with its source. Packages
of the `eval` extra are imported when a grader first needs them.
"""

from __future__ import annotations

import typing
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.graders import longbench, mathematics, ruler, scbench
from wakesight.evaluation.graders.rules import Rule, RuleName, as_references, as_reply
from wakesight.evaluation.graders.text import after_thinking
from wakesight.registry import did_you_mean

__all__ = ["RULES", "Rule", "RuleName", "after_thinking", "grade", "rule_of"]

RULES: dict[str, Rule] = {**ruler.RULES, **scbench.RULES, **longbench.RULES, **mathematics.RULES}


def grade(task: str, prediction: str, reference: Any, rule: RuleName = "official", **extra: Any) -> float:
    """The grade of one reply.

    reference: one acceptable answer or a list of them, as the official files have them. extra: what some graders
    need besides (`Rule.needs`, and their docstrings); the rest of it is ignored.
    Raises RequestError for an unknown task or rule, a reply that is no text, a reference that is missing, empty or
    neither text nor a number, and a missing extra or package, and WorkError where an
    answer cannot be compared in time: such an item has no grade.
    """
    found = rule_of(task)
    if rule not in (rules := typing.get_args(RuleName)):
        raise RequestError(f"unknown rule {rule!r}{did_you_mean(rule, rules)}; rules: {', '.join(rules)}")
    if missing := [name for name in found.needs if extra.get(name) is None]:
        raise RequestError(f"the grader of {task} needs {' and '.join(missing)}; give it as {missing[0]}=...")
    return float(found.grader(as_reply(prediction, task), as_references(reference, task), rule, extra))


def rule_of(task: str) -> Rule:
    """The row of `RULES` for a task; a substitute ("qa_1_synth") and a LongBench-E task ("qasper_e") have their
    original's.
    """
    name = task.removesuffix("_synth")
    if name.removesuffix("_e") in longbench.RULES:
        name = name.removesuffix("_e")
    if name not in RULES:
        raise RequestError(f"no grader for task {task!r}{did_you_mean(name, RULES)}; tasks: {', '.join(RULES)}")
    return RULES[name]
