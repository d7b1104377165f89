"""Problems to think about: MATH-500, AIME and GSM8K from official files, reasoning-gym's from its generators.

What is the context of a short problem? The problem itself: it is the text that is prefilled, scored and compacted,
and the question that follows only asks for the solution. Whatever is dropped is dropped before anybody asks, as in
every other suite. Such contexts have some tens to a few hundred tokens, so a small kept fraction leaves next to
nothing; the answers are what is long here, and what WakeKV's logs need.

With `data`, the files `math500.jsonl` (problem, answer, subject, level, unique_id), `aime24.jsonl` and `gsm8k.jsonl`
(question, answer; AIME's also problem, answer). Without, 22 kinds of problems of the package reasoning-gym; one that
is named is made whether or not there is `data`. `extra={"new_tokens": n}` limits the answers, otherwise to what
the task's row says; an answer never gets more than the length leaves.

Source: HuggingFaceH4/MATH-500; Zefan-Cai/R-KV run_math.py; reasoning-gym 0.1.25 (PyPI, Apache-2.0). Of the kinds
listed in benchmarks.md 6.1, polynomial_multiplication and intermediate_integration are left out, as their items
change with PYTHONHASHSEED, and needle_haystack, which is no short problem.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from collections.abc import Iterator
from typing import Any

from wakesight.errors import RequestError
from wakesight.evaluation.items import Context, Question, SuiteOptions
from wakesight.evaluation.suites.files import Record, find, missing, records
from wakesight.evaluation.suites.fitting import Draft, too_small
from wakesight.evaluation.suites.sizing import RESERVE
from wakesight.evaluation.suites.table import pick

ASK = "Solve this problem. Think step by step, and put the final answer into \\boxed{}."
# file -> (new tokens, where it is from); the numbers are ours, room for a chain of thought
OFFICIAL = {
    "math500": (8192, "MATH-500, hub id HuggingFaceH4/MATH-500"),
    "aime24": (16384, "AIME 2024"),
    "gsm8k": (2048, "GSM8K, hub id openai/gsm8k"),
}
GYM = (
    "gsm_symbolic", "basic_arithmetic", "chain_sum", "decimal_arithmetic", "fraction_simplification", "gcd", "lcm",
    "prime_factorization", "simple_equations", "polynomial_equations", "simple_integration", "complex_arithmetic",
    "simple_geometry", "advanced_geometry", "calendar_arithmetic", "time_intervals", "number_sequence", "countdown",
    "knights_knaves", "zebra_puzzles", "family_relationships", "shortest_path",
)  # fmt: skip
GYM_NEW_TOKENS = 2048
LEAST_NEW_TOKENS = 128  # less holds no thought
TASKS = tuple(OFFICIAL)
ALSO = GYM
OPTIONS = {"new_tokens": "longest answer in tokens (by task)", "reserve": RESERVE}


def contexts(options: SuiteOptions) -> Iterator[Context]:
    """One context per problem, task by task.

    Raises RequestError for an unknown task, a missing or malformed file, a length that leaves no room to think, or
    reasoning-gym not being installed.
    """
    for task in _tasks(options):
        if task in GYM:
            yield from _generated(task, options)
        else:
            yield from _official(task, options)


def _tasks(options: SuiteOptions) -> tuple[str, ...]:
    if options.data is None:
        tasks = pick(GYM, options, also=TASKS)
        if closed := [task for task in tasks if task in OFFICIAL]:
            raise RequestError(
                f"{closed[0]} needs the official file {closed[0]}.jsonl; name its folder with --data, or ask for "
                f"generated problems: {', '.join(GYM)}"
            )
        return tasks
    tasks = pick(TASKS, options, also=GYM)
    if not options.tasks and (gone := missing(options.data, tasks)):
        raise RequestError(
            f"{options.data} has no {', '.join(f'{name}.jsonl' for name in gone)}; add them, or name the tasks that "
            "are there with --tasks"
        )
    return tasks


def _official(task: str, options: SuiteOptions) -> Iterator[Context]:
    assert options.data is not None
    new_tokens, what = OFFICIAL[task]
    file = find(options.data, task, what)
    for index, record in enumerate(records(file)):
        if index == options.items:
            return
        problem, answer, meta = _ROWS[task](record)
        grader = {"aime24": "aime"}.get(task, task)
        yield _draft(problem, answer, grader, new_tokens, {}, meta, task, options).context(
            task, index, file.name, options
        )


def _math500(record: Record) -> tuple[str, str, dict[str, Any]]:
    meta = {name: record.values.get(name) for name in ("unique_id", "subject", "level")}
    return record.text("problem"), str(record.scalar("answer")), meta


def _aime(record: Record) -> tuple[str, str, dict[str, Any]]:
    problem = record.text("problem" if "problem" in record and "question" not in record else "question")
    return problem, str(record.scalar("answer")), {"record": record.values.get("id")}


def _gsm8k(record: Record) -> tuple[str, str, dict[str, Any]]:
    """The answer field tells the solution and then, behind ####, the number."""
    solution, mark, answer = record.text("answer").rpartition("####")
    if not mark or not answer.strip():
        raise record.wrong("answer", "a solution that ends in '#### ' and the number")
    return record.text("question"), answer.strip().replace(",", ""), {"solution": solution.strip()}


_ROWS = {"math500": _math500, "aime24": _aime, "gsm8k": _gsm8k}


def _generated(task: str, options: SuiteOptions) -> Iterator[Context]:
    try:
        gym: Any = importlib.import_module("reasoning_gym")
    except ImportError:
        raise RequestError(
            f"{task} comes from the package reasoning-gym, which is not installed; pip install 'wakesight[eval]'"
        ) from None
    source = f"generated:reasoning-gym-{importlib.metadata.version('reasoning-gym')}/{task}"
    items = gym.create_dataset(task, size=max(1, options.items), seed=options.seed)
    for index in range(options.items):
        # through JSON: what the grader gets is what the run record can hold
        item: dict[str, Any] = json.loads(json.dumps(items[index], default=str))
        extra = {"dataset": task, "entry": item}
        answer = str(item["answer"])
        draft = _draft(item["question"], answer, "reasoning_gym", GYM_NEW_TOKENS, extra, {}, task, options)
        yield draft.context(task, index, source, options)


def _draft(
    problem: str,
    answer: str,
    grader: str,
    new_tokens: int,
    extra: dict[str, Any],
    meta: dict[str, Any],
    task: str,
    options: SuiteOptions,
) -> Draft:
    limit = options.whole("new_tokens", new_tokens, least=1)
    taken = options.count(problem) + options.count("\n\n" + ASK) + options.whole("reserve", 0)
    allowed = min(limit, options.length - taken)
    if allowed < min(limit, LEAST_NEW_TOKENS):
        raise too_small(options, task, taken + LEAST_NEW_TOKENS)
    question = Question("", ASK, (answer,), grader, allowed, extra=extra)
    return Draft(problem, (question,), meta=meta)
