"""SCBench's twelve tasks, and the parts of its two mixed ones.

Source: microsoft/MInference scbench/compute_scores.py; labels as scbench/eval_utils.py, get_ground_truth, has
them. A lone reference is a label that is a string in the official files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.graders import code
from wakesight.evaluation.graders.rules import Grader, References, Rule, RuleName, table
from wakesight.evaluation.graders.summaries import rouge_lsum
from wakesight.evaluation.graders.text import (
    bare_chinese,
    contains_whole,
    explicit_option,
    normal_chinese,
    normal_english,
    token_f1,
)
from wakesight.registry import did_you_mean

_SOURCE = "microsoft/MInference scbench/compute_scores.py"


def key_value(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """1 if the value stands in the prediction. [get_score_one_kv_retrieval]

    Strict: it stands there as a string of its own, and is the first string of its kind, the key apart. A reply
    that repeats the JSON object therefore gets 0, one that goes on after the value gets 1. extra: key, the
    key that was asked for; without it one string before the value is taken for the key.
    """
    value = str(references[0])
    if rule == "official":
        return float(value in prediction)
    return float(contains_whole(prediction, value) and _comes_first(prediction, value, extra.get("key")))


def _comes_first(prediction: str, value: str, key: str | None) -> bool:
    if not re.fullmatch(r"[\w-]{20,}|\w*\d\w*", value):
        return True  # too like an ordinary word to tell others of its kind
    runs = (run.strip("-_") for run in re.findall(r"[\w-]+", prediction, re.ASCII))
    said = [run for run in runs if run == value or _alike(run, value)]
    if key is None:
        return value in said[:2]
    return next((run for run in said if run != key), None) == value


def _alike(run: str, value: str) -> bool:
    return 0.75 <= len(run) / len(value) <= 1.25 and _classes(run) == _classes(value)


def _classes(text: str) -> set[str]:
    return {"digit" if c.isdigit() else "letter" if c.isalpha() else c for c in text}


def variables(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """Share of the names found, case ignored, rounded to two places. [string_match_all]

    A lone "A, B, C" is the list as KVzip's preprocessed files write it. Strict: whole names, not rounded.
    """
    listed = str(references[0]).split(", ") if len(references) == 1 else map(str, references)
    names = [name.lower() for name in listed]
    text = prediction.lower()
    if rule == "strict":
        return sum(contains_whole(text, name) for name in names) / len(names)
    return round(sum(name in text for name in names) / len(names), 2)


def option(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """1 if the prediction chooses the right option. References: answer text and letter, or the text alone with
    `options` in extra, or the letter alone.

    Official: a first character in A-D is the choice, so "Based on ..." chooses B; else the forms listed there.
    [get_score_one_longbook_choice_eng] Strict: an explicit letter or nothing. [gatesight.md 13.2]
    """
    labels = _option_labels(references, extra.get("options"))
    if rule == "strict":
        chosen = explicit_option(prediction)
        return float(chosen is not None and chosen in labels)
    return float(_chosen_officially(prediction.strip(), labels))


def _option_labels(references: References, options: Any) -> list[str]:
    labels = [str(reference) for reference in references]
    if len(labels) == 1 and options and labels[0] not in "ABCD":
        if labels[0] not in options:
            raise RequestError(f"the answer {labels[0]!r} is none of the options; options: {', '.join(options)}")
        labels.append("ABCD"[list(options).index(labels[0])])
    return labels


def _chosen_officially(reply: str, labels: list[str]) -> bool:
    if not reply:
        return False
    if reply[0] in "ABCD":
        return reply[0] in labels
    if reply in labels:
        return True
    spaced = re.sub(r"[\n\"'.,?!{}]", " ", reply)
    spaced = re.sub(" +", " ", spaced)
    for prefix in ("answer is:", "answer:", "answer is", "option is"):
        _, found, behind = spaced.partition(prefix)
        if found:  # one character behind the prefix is skipped, whatever it is
            return bool(behind) and any(behind[1:].startswith(label) for label in labels)
    # "AB" and "BCD" are substrings of "ABCD" too: such a word ends the search without being a label
    return next((word for word in spaced.split() if word in "ABCD"), None) in labels


def many_shot(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """Official: 1 if any label, case ignored, is contained; a string label is walked character by character, so
    one shared character is enough. [get_score_one_longdialogue_qa_eng]

    Strict: the option letter where label and reply have one; else the label's text as whole words. extra: option,
    the text behind the right letter, for a label that is the letter alone.
    """
    if rule == "official":
        return _any_contained(prediction, str(references[0]) if len(references) == 1 else references)
    text = str(extra.get("option") or "")
    return float(any(_same_label(prediction, str(reference), text) for reference in references))


def _same_label(prediction: str, label: str, option: str) -> bool:
    """label: "(B) Tuesday", "(B)", "B" or "Tuesday"."""
    parts = re.match(r"\s*(?:\(([A-Z])\)|([A-Z])\s*$)", label)
    if parts is None:
        return contains_whole(prediction.lower(), label.strip().lower())
    said = re.search(r"\(([A-Z])\)", prediction)
    chosen = said.group(1) if said else explicit_option(prediction, "A-Z")
    if chosen is not None:
        return chosen in parts.groups()
    return contains_whole(prediction.lower(), (label[parts.end() :].strip() or option).lower())


def qa_english(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """1 if any answer, case ignored, is contained. [get_score_one_longdialogue_qa_eng, a list as label]

    Strict: contained as whole words, both sides without punctuation and articles: "no" is not in "know".
    """
    if rule == "official":
        return _any_contained(prediction, references)
    text = f" {normal_english(prediction)} "
    return float(any(_words_in(str(reference), text, prediction) for reference in references))


def _words_in(reference: str, text: str, prediction: str) -> bool:
    if words := normal_english(reference):
        return f" {words} " in text
    return contains_whole(prediction.lower(), reference.strip().lower())  # nothing but an article or a sign


def _any_contained(prediction: str, labels: Any) -> float:
    text = prediction.strip().upper()
    return float(any(str(label).upper() in text for label in labels))


def qa_chinese(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """Character F1, best over the references. Officially a string label is walked, so that every character is a
    reference of its own. [get_score_one_longbook_qa_chn] Strict: complete references. [gatesight.md 13.1]
    """
    if rule == "strict":
        said = bare_chinese(prediction)
        return max(token_f1(said, bare_chinese(str(reference))) for reference in references)
    said = normal_chinese(prediction)
    labels = set(str(references[0])) if len(references) == 1 else references
    return max((token_f1(said, normal_chinese(str(label))) for label in labels), default=0.0)


def first_number(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """1 if the first number is the label; for a whole label its fraction is cut off. [get_score_one_math_find]

    A label given as text is read as a number. Strict: the sign and the fraction count.
    """
    label = _number(references[0])
    found = re.search(r"(?:(?<!\w)-)?\d+(?:\.\d+)?" if rule == "strict" else r"\d+\.\d+|\d+", prediction)
    if found is None:
        return 0.0
    value = float(found.group())
    whole = isinstance(label, int) and rule == "official"
    return float((int(value) if whole else value) == label)


def _number(label: Any) -> int | float:
    if isinstance(label, int | float):
        return label
    try:
        return int(label)
    except ValueError:
        pass
    try:
        return float(label)
    except ValueError:
        raise RequestError(f"the reference {label!r} is not a number, and scbench_mf asks for one") from None


def passkey(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """1 if the first run of digits is the label. [get_score_one_passkey]"""
    found = re.search("[0-9]+", prediction)
    return float(found is not None and found.group() == str(references[0]))


def summary(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """rougeLsum F-measure, best over the references (officially one). [get_score_one_longbook_sum_eng]"""
    return max(rouge_lsum(prediction, str(reference)) for reference in references)


def _mixed(task: str, parts: Mapping[str, Grader]) -> Grader:
    """Grades by `part` in extra, the turn's `task` in the official file."""

    def grade(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
        part = str(extra["part"])
        if part not in parts:
            raise RequestError(f"{task} has no part {part!r}{did_you_mean(part, parts)}; parts: {', '.join(parts)}")
        return parts[part](prediction, references, rule, extra)

    return grade


def _rule(task: str, metric: str, grader: Grader, strict: str = "", **other: Any) -> Rule:
    return Rule(f"scbench_{task}", "scbench", metric, _SOURCE, grader, strict, **other)


_KV = "the value on its own and first of its kind, not somewhere in a repeated object"
_REPOQA = "a code block with any info string, or cut off before its end, is a block too"

RULES = table(
    _rule("kv", "value contained", key_value, _KV),
    _rule("prefix_suffix", "value contained", key_value, _KV),
    _rule("vt", "share of names contained, 2 places", variables, "whole names, not rounded"),
    _rule("repoqa", "best BLEU match is the target, at 0.8", code.repoqa, _REPOQA, needs=("needles",)),
    _rule("qa_eng", "any answer contained", qa_english, "the answer as whole words"),
    _rule("qa_chn", "character F1", qa_chinese, "complete references, not single characters", revised=True),
    _rule("choice_eng", "option", option, "an explicit letter; else unresolved, 0", revised=True),
    _rule("many_shot", "any character of the label", many_shot, "the option letter, or the label's text"),
    _rule("mf", "first number", first_number, "sign and fraction count"),
    _rule("passkey", "first digits", passkey),
    _rule("summary", "rougeLsum", summary),
    _rule(
        "summary_with_needles",
        "by part: summary or passkey",
        _mixed("scbench_summary_with_needles", {"scbench_summary": summary, "scbench_passkey": passkey}),
        needs=("part",),
    ),
    _rule(
        "repoqa_and_kv",
        "by part: repoqa or kv",
        _mixed("scbench_repoqa_and_kv", {"scbench_repoqa": code.repoqa, "scbench_kv": key_value}),
        f"by part: {_REPOQA}; {_KV}",
        needs=("part",),
    ),
)
