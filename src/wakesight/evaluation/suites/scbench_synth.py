"""Substitutes for the SCBench tasks whose data is not open to us, each under a name of its own.

A substitute has the official task's form, number of questions and grading rule, and text that comes with this
package, with Python or from a generator. Its numbers never stand in a column of the official task.
Source of the forms: microsoft/MInference scbench/eval_utils.py; the substitutes are ours.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from wakesight.evaluation.items import Question, SuiteOptions
from wakesight.evaluation.suites import chinese, facts, many_shot, stdlib_code, text
from wakesight.evaluation.suites.fitting import Draft, grow, item_random, too_small
from wakesight.evaluation.suites.scbench_scripts import kv_question, new_tokens, uuid_pairs, woven
from wakesight.evaluation.suites.scbench_turns import in_turns

READ_AND_ANSWER = "Read the book below, then answer questions about it."
REPEAT_FUNCTION = "Find the function that is described in the code below, and repeat it exactly in a code block."
Turn = tuple[Question, str]  # a question and its golden answer


def qa_eng(options: SuiteOptions, index: int) -> Draft:
    """Twelve facts about people nobody knows, in a novel; five are asked. Stands in for a book with questions."""
    rng = item_random(options, "qa_eng_synth", index)
    told = facts.english(rng, 12)
    turns = [
        (Question("", qa_text(fact.question), (fact.answer,), "scbench_qa_eng", new_tokens(40, options)), fact.answer)
        for fact in rng.sample(told, 5)
    ]
    return _novel(options, "qa_eng_synth", rng, told, turns, READ_AND_ANSWER + " Keep every answer very short.")


def choice_eng(options: SuiteOptions, index: int) -> Draft:
    """The same with four options, all of them answers of the same kind that stand in the text."""
    rng = item_random(options, "choice_eng_synth", index)
    told = facts.english(rng, 24)
    turns: list[Turn] = []
    for fact in rng.sample(told, 5):
        options_ = [one.answer for one in told if one.kind == fact.kind]
        rng.shuffle(options_)
        letter = "ABCD"[options_.index(fact.answer)]
        question = Question(
            "",
            choice_text(fact.question, options_),
            (fact.answer, letter),
            "scbench_choice_eng",
            new_tokens(40, options),
            extra={"options": options_},
        )
        turns.append((question, fact.answer))
    return _novel(options, "choice_eng_synth", rng, told, turns, READ_AND_ANSWER)


def qa_text(question: str) -> str:
    """A question as the English book tasks put it."""
    return f"Question: {question}\nAnswer:"


def choice_text(question: str, options: Sequence[str]) -> str:
    """A question with four lettered options as the multiple-choice task puts it."""
    lettered = "\n".join(f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True))
    return f"Question: {question}\n{lettered}\n\nThe right answer is"


def qa_chn(options: SuiteOptions, index: int) -> Draft:
    """The same in short Chinese sentences, all generated."""
    rng = item_random(options, "qa_chn_synth", index)
    told = chinese.facts(rng, 12)
    turns = [
        (Question("", chinese.ask(one.question), (one.answer,), "scbench_qa_chn", new_tokens(40, options)), one.answer)
        for one in rng.sample(told, 5)
    ]
    asked = _asked(turns, options)
    depths = [(rng.random(), fact.sentence) for fact in told]
    filler: list[str] = []
    pages = item_random(options, "qa_chn_synth pages", index)

    def build(n: int) -> Draft:
        while len(filler) < n:
            filler.append(chinese.sentence(pages))
        body = "".join(woven(filler[:n], depths))
        return Draft(body, asked, chinese.READ_AND_ANSWER, meta={"facts": len(told)})

    return grow(build, options, "qa_chn_synth", low=1, guess=options.length // 20)


def shots(options: SuiteOptions, index: int) -> Draft:
    """Up to 150 solved problems of one kind, then five to solve."""
    name, draw = many_shot.kind(index)
    problems = draw(item_random(options, "many_shot_synth", index), 150 + many_shot.ASKED)
    turns = [
        (
            Question(
                "",
                problem.ask(),
                (problem.letter,),
                "scbench_many_shot",
                new_tokens(10, options),
                extra={"options": list(problem.options), "option": problem.options[problem.correct]},
            ),
            f"({problem.letter})",
        )
        for problem in problems[150:]
    ]
    asked = _asked(turns, options)

    def build(n: int) -> Draft:
        body = "Solved problems of one kind:\n\n" + "\n\n".join(problem.solved() for problem in problems[:n])
        return Draft(body, asked, meta={"kind": name, "shots": n})

    return grow(build, options, "many_shot_synth", low=many_shot.ASKED, guess=options.length // 80, high=150)


def summary(options: SuiteOptions, index: int) -> Draft:
    """Up to eight reports, padded with running text; four are to be summarised.

    A report states its aim, method, finding and limit in one sentence each. Those four are the reference.
    """
    rng = item_random(options, "summary_synth", index)
    reports = [_report(rng, name) for name in rng.sample(_SUBJECTS, _reports(options))]
    return _reports_draft(options, "summary_synth", index, reports, [], _summaries(options, reports[:4], 200))


def summary_with_needles(options: SuiteOptions, index: int) -> Draft:
    """The same reports with five pass keys in them: three summaries, five keys."""
    task = "summary_with_needles_synth"
    rng = item_random(options, task, index)
    reports = [_report(rng, name) for name in rng.sample(_SUBJECTS, _reports(options))]
    doors = rng.sample(_DOORS, 5)
    keys = [f"{key:05}" for key in rng.sample(range(10000, 100000), 5)]
    needles = [
        (rng.random(), f"The pass key of the {door} is {key}. Remember it: {key} opens the {door}.")
        for door, key in zip(doors, keys, strict=True)
    ]
    turns = _summaries(options, reports[:3], 800) + [
        (Question("", f"What is the pass key of the {door}?", (key,), "scbench_passkey", new_tokens(15, options)), key)
        for door, key in zip(doors, keys, strict=True)
    ]
    return _reports_draft(options, task, index, reports, needles, turns)


def repoqa(options: SuiteOptions, index: int) -> Draft:
    """Functions of Python's standard library without their docstrings; five are asked for by what these said."""
    return _code(options, "repoqa_synth", index, asked=5, pairs=0)


def repoqa_and_kv(options: SuiteOptions, index: int) -> Draft:
    """Functions with up to 100 uuid pairs between them: four functions and four values are asked for."""
    return _code(options, "repoqa_and_kv_synth", index, asked=4, pairs=min(100, options.length // 160))


def _asked(turns: Sequence[Turn], options: SuiteOptions) -> tuple[Question, ...]:
    return in_turns([question for question, _ in turns], [answer for _, answer in turns], options)


def _novel(
    options: SuiteOptions, task: str, rng: random.Random, told: list[facts.Fact], turns: list[Turn], instruction: str
) -> Draft:
    """A novel, from a sentence drawn at random on, with the facts at depths drawn at random."""
    pages = text.sentences(text.packaged("narrative"))
    start = rng.randrange(len(pages))
    depths = [(rng.random(), fact.sentence) for fact in told]
    asked = _asked(turns, options)

    def build(n: int) -> Draft:
        book = [pages[(start + place) % len(pages)] for place in range(n)]
        return Draft(" ".join(woven(book, depths)), asked, instruction, meta={"facts": len(told), "start": start})

    return grow(build, options, task, low=1, guess=options.length // 40)


_SUBJECTS = (
    "tidal clocks", "moss growth on slate", "the hearing of bats", "paper made of nettles", "lake ice in spring",
    "pigeon routes", "the wear of cobbles", "salt in bread", "kites at high wind", "the colour of rust",
    "bees and street lamps", "sleep on ships",
)  # fmt: skip
_METHODS = (
    "weekly readings at {n} stations", "a survey of {n} households", "{n} trials in a wind tunnel",
    "a comparison of {n} samples from old stock", "diaries that {n} volunteers kept for a year",
    "photographs taken on {n} mornings",
)  # fmt: skip
_FINDINGS = (
    "the effect grew by {n} percent within a season", "differences vanished after {n} days",
    "only {n} of the cases followed the expected course", "warm years showed {n} percent more of it than cold ones",
    "the oldest specimens lost {n} grams",
)  # fmt: skip
_LIMITS = (
    "all measurements come from one valley", "the instruments were replaced halfway", "the winter was unusually mild",
    "nobody checked the records a second time", "the smallest specimens were left out",
)  # fmt: skip
_AIMS = (
    "how quickly it changes", "what makes it stop", "whether it can be foreseen", "where it begins",
    "who profits from it",
)  # fmt: skip
_DOORS = (
    "north gate", "boathouse", "clock tower", "archive", "wine cellar", "greenhouse", "signal room", "print shop",
    "mill", "chapel",
)  # fmt: skip


def _report(rng: random.Random, subject: str) -> tuple[str, list[str]]:
    """(title, key sentences)"""
    number = rng.sample(range(12, 98), 2)
    return f"On {subject}", [
        f"This report on {subject} asks {rng.choice(_AIMS)}.",
        f"Its evidence is {rng.choice(_METHODS).format(n=number[0])}.",
        f"The main finding is that {rng.choice(_FINDINGS).format(n=number[1])}.",
        f"Its weak point is that {rng.choice(_LIMITS)}.",
    ]


def _reports(options: SuiteOptions) -> int:
    """Eight reports where there is room for some text between their sentences, fewer in a short context."""
    return max(3, min(8, options.length // 400))


def _summaries(options: SuiteOptions, reports: list[tuple[str, list[str]]], official: int) -> list[Turn]:
    turns = []
    for title, sentences in reports:
        reference = " ".join(sentences)
        ask = f'Summarise the report "{title}" in four sentences: what it asks, its evidence, finding and weak point.'
        turns.append((Question("", ask, (reference,), "scbench_summary", new_tokens(official, options)), reference))
    return turns


def _reports_draft(
    options: SuiteOptions,
    task: str,
    index: int,
    reports: list[tuple[str, list[str]]],
    needles: list[tuple[float, str]],
    turns: list[Turn],
) -> Draft:
    """The reports in an order drawn at random, n sentences of running text before each key sentence but the first."""
    rng = item_random(options, task + " order", index)
    order = rng.sample(reports, len(reports))
    pages = text.sentences(text.packaged("expository"))
    start = rng.randrange(len(pages))
    asked = _asked(turns, options)

    def build(n: int) -> Draft:
        lines: list[str] = []
        used = start
        gaps = [n // (3 * len(order)) + (place < n % (3 * len(order))) for place in range(3 * len(order))]
        for place, (title, sentences) in enumerate(order):
            lines.append(f"\n\nReport {place + 1}: {title}\n\n")
            lines.append(sentences[0] + " ")
            for gap, sentence in zip(gaps[3 * place : 3 * place + 3], sentences[1:], strict=True):
                lines += [pages[(used + step) % len(pages)] + " " for step in range(gap)] + [sentence + " "]
                used += gap
        body = "".join(woven(lines, [(depth, needle + " ") for depth, needle in needles])).strip()
        return Draft("Several reports follow.\n\n" + body, asked, meta={"reports": len(order), "filler": n})

    return grow(build, options, task, low=0, guess=options.length // 40)


def _code(options: SuiteOptions, task: str, index: int, asked: int, pairs: int) -> Draft:
    rng = item_random(options, task, index)
    most = new_tokens(1024, options)
    # a reply has to hold the function and the fence around it; no single function may fill a small context
    limit = min(most - 16, options.length // 8)
    pool = [one for one in stdlib_code.functions() if len(one.code) <= limit * 8 and options.count(one.code) <= limit]
    if len(pool) < 2 * asked:
        raise too_small(options, task, 512)
    pool = rng.sample(pool, len(pool))
    needles, rest = pool[:asked], pool[asked:]
    repo_needles = {one.name: one.code for one in needles}
    turns: list[Turn] = [
        (
            Question(
                "",
                f"Description of the function: {one.description}\n\nRepeat that function.",
                (one.code,),
                "scbench_repoqa",
                most,
                extra={"lang": "python", "repo": stdlib_code.REPO, "func_name": one.name, "needles": repo_needles},
            ),
            f"```python\n{one.code}\n```",
        )
        for one in needles
    ]
    table = uuid_pairs(rng, pairs)
    turns += [
        (kv_question(key, value, new_tokens(80, options)), value) for key, value in rng.sample(table, min(4, pairs))
    ]
    rng.shuffle(turns)
    questions = _asked(turns, options)
    depths = [(rng.random(), _block(one)) for one in needles]
    depths += [(rng.random(), json.dumps({key: value})) for key, value in table]
    meta: dict[str, Any] = {"pairs": pairs}

    def build(n: int) -> Draft:
        blocks = woven([_block(one) for one in rest[:n]], depths)
        body = "\n\n".join(blocks)
        if pairs:
            body = REPEAT_FUNCTION + " Between the functions stand pairs of a key and its value.\n\n" + body
        return Draft(body, questions, None if pairs else REPEAT_FUNCTION, meta={**meta, "functions": n + asked})

    return grow(build, options, task, low=0, guess=options.length // 150, high=len(rest))


def _block(function: stdlib_code.Function) -> str:
    return f"# module: {function.module}\n{function.code}"
