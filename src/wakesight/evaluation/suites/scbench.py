"""SCBench: one long context, several questions on it; twelve tasks.

With `data`, the official files (`scbench_kv.jsonl`, ...: id, context, multi_turns) or their shortened form
(`SCBench-preprocessed`: prompts, ground_truth; `extra={"variant": "tiny"}` reads `scbench_kv_tiny.jsonl` and reports
it as task `kv_tiny`). Without, the four tasks that come from scripts alone and substitutes for the other eight.
A substitute's name ends in _synth; given by name, it is made whether or not there is `data`.

A context without a question is the instruction and the document, as in the official code; instructions are worded
by us. A context over the length is cut in its middle. `extra={"turns": "golden"}`: see scbench_turns.py.
Graders are named after the official task whose rule is used ("scbench_kv"), in the two mixes question by question.

Source: SCBench (Li et al. 2025); microsoft/MInference scbench/eval_utils.py, run_scbench.py, compute_scores.py;
snu-mllab/KVzip data/load.py for the shortened form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from wakesight.errors import RequestError
from wakesight.evaluation.items import Context, Question, SuiteOptions
from wakesight.evaluation.suites import chinese, scbench_scripts, scbench_synth, stdlib_code, text
from wakesight.evaluation.suites.files import Record, Scalar, find, missing, records
from wakesight.evaluation.suites.fitting import Draft, cut_middle, room
from wakesight.evaluation.suites.scbench_turns import form, in_turns
from wakesight.evaluation.suites.sizing import RESERVE
from wakesight.evaluation.suites.table import pick

# new tokens per task, of the mixes per question; source: scbench/eval_utils.py
NEW_TOKENS = {
    "kv": 150,
    "prefix_suffix": 150,
    "vt": 30,
    "repoqa": 1024,
    "qa_eng": 40,
    "qa_chn": 40,
    "choice_eng": 40,
    "many_shot": 10,
    "mf": 5,
    "summary": 200,
}
MIXES = {
    "summary_with_needles": {"scbench_summary": 800, "scbench_passkey": 15},
    "repoqa_and_kv": {"scbench_repoqa": 1024, "scbench_kv": 80},
}
TASKS = (*NEW_TOKENS, *MIXES)
VARIANTS = ("tiny", "short", "mid")  # about 8K, 20K and 60K tokens
OPTIONS = {
    "turns": "alone: every question by itself; golden: after the questions and right answers before it (alone)",
    "variant": "which shortened official files to read: tiny, short or mid (the full ones)",
    "reserve": RESERVE,
}

SCRIPTS: dict[str, Callable[[SuiteOptions, int], Draft]] = {
    "kv": scbench_scripts.kv,
    "prefix_suffix": scbench_scripts.prefix_suffix,
    "vt": scbench_scripts.vt,
    "mf": scbench_scripts.mf,
}
SUBSTITUTES: dict[str, Callable[[SuiteOptions, int], Draft]] = {
    "repoqa_synth": scbench_synth.repoqa,
    "qa_eng_synth": scbench_synth.qa_eng,
    "qa_chn_synth": scbench_synth.qa_chn,
    "choice_eng_synth": scbench_synth.choice_eng,
    "many_shot_synth": scbench_synth.shots,
    "summary_synth": scbench_synth.summary,
    "summary_with_needles_synth": scbench_synth.summary_with_needles,
    "repoqa_and_kv_synth": scbench_synth.repoqa_and_kv,
}
ALSO = tuple(SUBSTITUTES)
OFFLINE = tuple(task if task in SCRIPTS else f"{task}_synth" for task in TASKS)

INSTRUCTIONS = {
    "kv": scbench_scripts.FIND_VALUE,
    "repoqa": scbench_synth.REPEAT_FUNCTION,
    "qa_eng": scbench_synth.READ_AND_ANSWER + " Keep every answer very short.",
    "qa_chn": chinese.READ_AND_ANSWER,
    "choice_eng": scbench_synth.READ_AND_ANSWER,
}


def contexts(options: SuiteOptions) -> Iterator[Context]:
    """Contexts task by task.

    Raises RequestError for an unknown task, an official task that needs a file that is not there, a malformed
    file, or a length in which a task has no room.
    """
    form(options)
    for task in _tasks(options):
        made = SUBSTITUTES.get(task) or (SCRIPTS[task] if options.data is None else None)
        if made:
            for index in range(options.items):
                yield made(options, index).context(task, index, _source(task), options)
        else:
            yield from _official(task, options)


def _tasks(options: SuiteOptions) -> tuple[str, ...]:
    """The tasks asked for, checked before anything is made."""
    if options.data is None:
        tasks = pick(OFFLINE, options, also=TASKS + ALSO)
        if closed := [task for task in tasks if task not in SCRIPTS and task not in SUBSTITUTES]:
            raise RequestError(
                f"{closed[0]} needs the official file scbench_{closed[0]}.jsonl; name its folder with --data, "
                f"or ask for the substitute {closed[0]}_synth"
            )
        return tuple(dict.fromkeys(tasks))
    tasks = pick(TASKS, options, also=ALSO)
    if not options.tasks and (gone := missing(options.data, [_file(task, options) for task in tasks])):
        raise RequestError(
            f"{options.data} has no {', '.join(name + '.jsonl' for name in gone)}; all of SCBench is twelve files: "
            "add these, or name the tasks that are there with --tasks"
        )
    return tasks


def _file(task: str, options: SuiteOptions) -> str:
    variant = str(options.extra.get("variant", ""))
    if variant and variant not in VARIANTS:
        raise RequestError(f"variant={variant!r} is not one of SCBench's; take {', '.join(VARIANTS)}, or leave it out")
    return f"scbench_{task}" + (f"_{variant}" if variant else "")


def _source(task: str) -> str:
    if task.startswith("repoqa"):
        return stdlib_code.SOURCE
    packaged = {
        "qa_eng_synth": "narrative",
        "choice_eng_synth": "narrative",
        "summary_synth": "expository",
        "summary_with_needles_synth": "expository",
    }
    return text.passages(packaged[task])[0][0] if task in packaged else f"generated:scbench_{task}"


def _official(task: str, options: SuiteOptions) -> Iterator[Context]:
    assert options.data is not None
    name = _file(task, options)
    file = find(options.data, name, "SCBench, hub id microsoft/SCBench")
    needles = _needles(file) if task.startswith("repoqa") else {}
    for index, record in enumerate(records(file)):
        if index == options.items:
            return
        draft = _draft(task, record, needles, options)
        yield draft.context(name.removeprefix("scbench_"), index, file.name, options)


def _draft(task: str, record: Record, needles: dict[str, dict[str, str]], options: SuiteOptions) -> Draft:
    if "prompts" in record:
        body, instruction, questions, answers = _preprocessed(task, record, needles)
    else:
        body, instruction, questions, answers = _as_published(task, record, needles)
    if task == "summary" and form(options) == "golden":  # the official opening of later summaries
        questions[1:] = [replace(one, answer_prefix="This paper") for one in questions[1:]]
    asked = in_turns(questions, answers, options)
    kept, cut = cut_middle(body, room(asked, instruction, options, task), options.count)
    meta = {"record": record.values.get("id"), "form": "preprocessed" if "prompts" in record else "official", **cut}
    return Draft(kept, asked, instruction, meta=meta)


Parts = tuple[str, str | None, list[Question], list[str]]  # context, instruction, questions, golden answers


def _as_published(task: str, record: Record, needles: dict[str, dict[str, str]]) -> Parts:
    turns = record.records("multi_turns")
    questions, answers = [], []
    for turn in turns:
        subtask, new_tokens = _subtask(task, turn, turn.values.get("task"))
        asked, golden = turn.text("input"), turn.scalars("answer")
        references = tuple(str(one) for one in golden)
        extra: dict[str, object] = {}
        if subtask == "scbench_choice_eng":
            options = turn.texts("options")
            references, extra["options"] = _lettered(turn, "answer", options), list(options)
            asked = scbench_synth.choice_text(asked, options)
        elif subtask == "scbench_qa_eng":
            asked = scbench_synth.qa_text(asked)
        elif subtask == "scbench_qa_chn":
            asked = chinese.ask(asked)
        elif subtask == "scbench_mf":
            asked = _statistic(asked)
        elif subtask == "scbench_many_shot":
            extra |= _option(asked, references[0])
        elif subtask == "scbench_repoqa":
            extra |= _code(record, _first(turn, record, ("name", "func_name")), needles)
        questions.append(Question("", asked, references, subtask, new_tokens, extra=extra))
        answers.append(_told(golden))
    if task == "mf":
        return _numbers(record), turns[0].text("input"), questions, answers
    return record.text("context"), INSTRUCTIONS.get(task), questions, answers


def _preprocessed(task: str, record: Record, needles: dict[str, dict[str, str]]) -> Parts:
    """prompts: the context with its instruction, then the questions as they are asked."""
    body, *asked = record.texts("prompts")
    truths = record.values.get("ground_truth")
    if not isinstance(truths, list) or len(truths) != len(asked) or not truths:
        raise record.wrong("ground_truth", f"a list of {len(asked)} answers, one for each prompt after the first")
    subtasks = _listed(record, "task", len(asked)) if task in MIXES else [None] * len(asked)
    questions, answers = [], []
    for place, prompt in enumerate(asked):
        truth = Record(record.file, record.line, {"ground_truth": truths[place]}, f"[{place}] of ")
        golden = truth.scalars("ground_truth")
        references = tuple(str(one) for one in golden)
        subtask, new_tokens = _subtask(task, record, subtasks[place])
        extra: dict[str, object] = {}
        if subtask == "scbench_choice_eng":
            found = re.findall(r"^[A-D]\. (.*)$", prompt, re.MULTILINE)[-4:]
            if len(found) != 4:
                raise record.wrong(f"prompts[{place + 1}]", "four options, a line each: 'A. ...'")
            references, extra["options"] = _lettered(truth, "ground_truth", found), found
        elif subtask == "scbench_many_shot":
            extra |= _option(prompt, references[0])
        elif subtask == "scbench_repoqa":
            extra |= _code(record, str(_listed(record, "func_name", len(asked))[place]), needles)
        questions.append(Question("", prompt, references, subtask, new_tokens, extra=extra))
        answers.append(_told(golden))
    return body, None, questions, answers


def _subtask(task: str, record: Record, said: object) -> tuple[str, int]:
    """The official task whose rule grades a question, and its new tokens."""
    if task not in MIXES:
        return f"scbench_{task}", NEW_TOKENS[task]
    if not isinstance(said, str) or said not in MIXES[task]:
        raise record.wrong("task", f"one of {', '.join(MIXES[task])} for every question of {task}")
    return said, MIXES[task][said]


def _told(golden: tuple[Scalar, ...]) -> str:
    return ", ".join(str(one) for one in golden)


def _numbers(record: Record) -> str:
    value = record.values.get("context")
    if isinstance(value, list) and value and all(type(one) in (int, float) for one in value):
        return str(value)
    if isinstance(value, str) and value:
        return value
    raise record.wrong("context", "a list of numbers")


def _statistic(asked: str) -> str:
    """The question by name, then as it is stored: "What is the median?" before "... The median ... is"."""
    named = re.search(r"The .+ is", asked)
    return f"What is {named.group().lower()[: -len(' is')]}?\n\n{asked}" if named else asked


def _lettered(turn: Record, field: str, options: tuple[str, ...] | list[str]) -> tuple[str, str]:
    """(text, letter) of the right option; the file may state either."""
    if len(options) != 4:
        raise turn.wrong("options", "four options")
    answer = str(turn.scalars(field)[0])
    if answer in options:
        return answer, "ABCD"[list(options).index(answer)]
    if answer in ("A", "B", "C", "D"):
        return options["ABCD".index(answer)], answer
    raise turn.wrong(field, f"one of the options {', '.join(options)}")


def _option(asked: str, label: str) -> dict[str, object]:
    """The lettered options of a solved-examples question, and the text of the right one, where they can be read."""
    found = re.findall(r"^\(([A-Z])\)\s*(.*)$", asked, re.MULTILINE)
    letter = label.strip().strip("()")[:1]
    text_of = dict(found)
    return {"options": [one for _, one in found], "option": text_of[letter]} if letter in text_of else {}


def _needles(file: Path) -> dict[str, dict[str, str]]:
    """Repository -> function name -> code, over the whole file: a reply is compared with all of its repository."""
    found: dict[str, dict[str, str]] = {}
    for record in records(file):
        repo = str(record.scalar("repo"))
        codes = found.setdefault(repo, {})
        if "prompts" in record:
            truths = record.values.get("ground_truth")
            names = _listed(record, "func_name", len(truths) if isinstance(truths, list) else 0)
            pairs = [(str(name), code) for name, code in zip(names, truths or (), strict=True) if name]
        else:
            pairs = [
                (_first(turn, record, ("name", "func_name")), turn.values.get("answer"))
                for turn in record.records("multi_turns")
                if turn.values.get("task", "scbench_repoqa") == "scbench_repoqa"
            ]
        codes.update((name, str(code)) for name, code in pairs)
    return found


def _code(record: Record, name: str, needles: dict[str, dict[str, str]]) -> dict[str, object]:
    repo = str(record.scalar("repo"))
    return {"lang": record.text("lang"), "repo": repo, "func_name": name, "needles": needles[repo]}


def _first(turn: Record, record: Record, fields: tuple[str, ...]) -> str:
    """The first of the fields that the turn has, or else the record."""
    for place in (turn, record):
        for field in fields:
            if field in place:
                return str(place.scalar(field))
    return turn.text(fields[0])


def _listed(record: Record, field: str, n: int) -> list[object]:
    value = record.values.get(field)
    if not isinstance(value, list) or len(value) != n:
        raise record.wrong(field, f"a list of {n}, one for each question")
    return value
