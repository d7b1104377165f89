"""LongBench's twenty-one tasks, English and Chinese; `<task>_e` is graded as `<task>`.

An item's grade is the best over its references. Sources: THUDM/LongBench LongBench/metrics.py (metrics) and
LongBench/eval.py (which metric for which task, which tasks count their first line only).
"""

from __future__ import annotations

import difflib
import functools
import logging
import re
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.graders.rules import Grader, References, Rule, RuleName, optional, table
from wakesight.evaluation.graders.summaries import NESTED_CALLS, TooDeep, rouge_l
from wakesight.evaluation.graders.text import normal_chinese, normal_english, token_f1

_SOURCE = "THUDM/LongBench LongBench/metrics.py, LongBench/eval.py"
_FIRST_LINE = {"trec", "triviaqa", "samsum", "lsht"}

Metric = Callable[[str, str, RuleName, Mapping[str, Any]], float]


def f1_english(prediction: str, reference: str, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """Token F1 of the normal forms. [qa_f1_score]"""
    return token_f1(normal_english(prediction).split(), normal_english(reference).split())


def f1_chinese(prediction: str, reference: str, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """F1 over jieba's words, each in its normal form, empty ones dropped. [qa_f1_zh_score]"""
    ours, theirs = (
        [form for word in words(text) if (form := normal_chinese(word))] for text in (prediction, reference)
    )
    return token_f1(ours, theirs)


def rouge_english(prediction: str, reference: str, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """ROUGE-L F1. A pair too long for the package's recursion gets 0 officially. [rouge_score]"""
    return _rouge(prediction, reference, rule, NESTED_CALLS)


def rouge_chinese(prediction: str, reference: str, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """The same over jieba's words. Chinese has no full stops of that kind: a text is one sentence. [rouge_zh_score]"""
    return _rouge(" ".join(words(prediction)), " ".join(words(reference)), rule, NESTED_CALLS - 1)


def _rouge(prediction: str, reference: str, rule: RuleName, limit: int) -> float:
    try:
        return rouge_l(prediction, reference, limit if rule == "official" else None)
    except TooDeep:
        return 0.0


def classification(prediction: str, reference: str, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """One over the number of class names in the prediction, if the right one is among them. [classification_score]

    Names that are part of the right name are taken out. The official loop takes them out of the list it walks,
    so that it steps over the name behind each one it removes.
    """
    named = [name for name in extra["all_classes"] if name in prediction]

    def inside(name: str) -> bool:
        return name in reference and name != reference

    if rule == "strict":
        named = [name for name in named if not inside(name)]
    else:
        place = 0
        while place < len(named):
            if inside(named[place]):
                named.remove(named[place])
            place += 1
    return 1.0 / len(named) if reference in named else 0.0


def paragraph_number(prediction: str, reference: str, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """Share of the prediction's numbers that are the right paragraph's. [retrieval_score, retrieval_zh_score]"""
    wanted = re.search(r"(?:Paragraph |段落)(\d+)", reference)
    if wanted is None:
        raise RequestError(f"the reference {reference!r} names no paragraph; it should read 'Paragraph 7' or '段落7'")
    return count(prediction, wanted.group(1), rule, extra)


def count(prediction: str, reference: str, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """Share of the prediction's numbers that are the right one, compared as text. [count_score]"""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, reference: str, rule: RuleName, extra: Mapping[str, Any]) -> float:
    """Similarity of the reply's first line of code and the right next line. [code_sim_score]

    Official: the first line without a backtick, # or //, compared by fuzzywuzzy's ratio without Levenshtein:
    difflib, rounded to whole per cent, 0 for an empty string. A right line with a trailing comment is passed
    over, and difflib takes frequent characters of long lines for junk. Strict: the first line that is not
    blank, a fence or nothing but a comment, by the normalised edit distance of insertions and deletions.
    """
    if rule == "strict":
        line = _code_line(prediction, reference)
        return float(optional("rapidfuzz.fuzz", "rapidfuzz").ratio(line, reference.strip())) / 100 if line else 0.0
    plain = (line for line in prediction.lstrip("\n").split("\n") if not re.search("`|#|//", line))
    line = next(plain, "")
    if line == reference:
        return 1.0
    if not line or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def _code_line(prediction: str, reference: str) -> str:
    comment = re.compile(r"#|//")
    wanted = bool(comment.match(reference.strip()))  # the right line may be one: #include, #region
    for line in map(str.strip, prediction.split("\n")):
        if line and not line.startswith("```") and (wanted or not comment.match(line)):
            return line
    return ""


def words(text: str) -> list[str]:
    """jieba's default segmentation."""
    return list(_segmenter().cut(text, cut_all=False))


@functools.cache
def _segmenter() -> Any:
    """A tokenizer of our own: jieba's global one reads its dictionary from a file anyone may put into /tmp."""
    tokenizer = optional("jieba", "jieba").Tokenizer()
    logging.getLogger("jieba").setLevel(logging.WARNING)  # it tells stderr that it reads its dictionary
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.tmp_dir = folder
        tokenizer.initialize()
    return tokenizer


def _best(metric: Metric, first_line: bool) -> Grader:
    def grade(prediction: str, references: References, rule: RuleName, extra: Mapping[str, Any]) -> float:
        text = prediction.lstrip("\n").split("\n")[0] if first_line else prediction
        return max(metric(text, str(reference), rule, extra) for reference in references)

    return grade


_DEEP = "a long text is graded instead of getting 0 for a recursion limit"
_NESTED = "every class name inside the right one is taken out, not every other"
_CODE = "comments do not hide the right line; true edit similarity, not rounded"
_F1 = ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa")


def _rule(task: str, metric: Metric, what: str, strict: str = "", needs: tuple[str, ...] = ()) -> Rule:
    first = task in _FIRST_LINE
    note = ", first line" if first else ""
    return Rule(task, "longbench", what + note, _SOURCE, _best(metric, first), strict, needs=needs)


RULES = table(
    *(_rule(task, f1_english, "token F1") for task in _F1),
    _rule("multifieldqa_zh", f1_chinese, "token F1 on jieba words"),
    *(_rule(task, rouge_english, "ROUGE-L F1", _DEEP) for task in ("gov_report", "qmsum", "multi_news", "samsum")),
    *(_rule(task, rouge_chinese, "ROUGE-L F1 on jieba words", _DEEP) for task in ("dureader", "vcsum")),
    *(_rule(task, classification, "1 / class names matched", _NESTED, ("all_classes",)) for task in ("trec", "lsht")),
    *(
        _rule(task, paragraph_number, "share of numbers that are the right paragraph")
        for task in ("passage_retrieval_en", "passage_retrieval_zh")
    ),
    _rule("passage_count", count, "share of numbers that are the right count"),
    *(_rule(task, code_similarity, "similarity of the first code line", _CODE) for task in ("lcc", "repobench-p")),
)
