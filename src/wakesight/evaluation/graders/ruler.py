"""RULER's thirteen tasks, and WakeKV's needle and recall checks, which look for a string in the same way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from wakesight.evaluation.graders.rules import References, Rule, RuleName, table
from wakesight.evaluation.graders.text import contains_whole

_SOURCE = "NVIDIA/RULER scripts/eval/synthetic/constants.py, scripts/eval/evaluate.py"
_WHOLE = "the reference as a whole word or number, not inside a longer one"


def clean(prediction: str) -> str:
    """Stripped, control characters as line ends, stripped again. [evaluate.py, postprocess_pred]"""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def match_all(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """Share of the references found in the prediction, case ignored. [constants.py, string_match_all]"""
    found = _found(prediction, references, rule)
    return sum(found) / len(found)


def match_part(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """1 if any reference is found in the prediction, case ignored. [constants.py, string_match_part]"""
    return float(any(_found(prediction, references, rule)))


def _found(prediction: str, references: References, rule: RuleName) -> list[bool]:
    text = clean(prediction).lower()
    wanted = [str(reference).lower() for reference in references]
    if rule == "strict":
        return [contains_whole(text, reference) for reference in wanted]
    return [reference in text for reference in wanted]


_ALL = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe",
)  # fmt: skip

RULES = table(
    *(Rule(task, "ruler", "share of references contained", _SOURCE, match_all, _WHOLE) for task in _ALL),
    *(Rule(task, "ruler", "any reference contained", _SOURCE, match_part, _WHOLE) for task in ("qa_1", "qa_2")),
    *(
        Rule(task, "wakekv", "share of needles contained", "ours, after RULER's string_match_all", match_all, _WHOLE)
        for task in ("niah", "recall")
    ),
)
