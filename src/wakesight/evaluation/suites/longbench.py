"""LongBench: 21 tasks of one context and one question, read from the official files.

`data` holds `<task>.jsonl` (fields input, context, answers, length, dataset, language, all_classes, _id) and, for the
even-length edition, `<task>_e.jsonl`, which is task `<task>_e` here. There are no substitutes: without files the
suite refuses. What stands before and behind the context follows the official prompts, in our words. Tasks whose
contexts are solved examples, or code, are sent without a chat template.

The official code cuts the middle out of the whole prompt; here only the context is cut, so that instruction and
question stay whole.

Source: THUDM/LongBench LongBench/README.md, config/dataset2prompt.json, config/dataset2maxlen.json, pred.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wakesight.errors import RequestError
from wakesight.evaluation.items import Context, Question, SuiteOptions
from wakesight.evaluation.suites import chinese
from wakesight.evaluation.suites.files import Record, find, missing, records
from wakesight.evaluation.suites.fitting import Draft, cut_middle, room
from wakesight.evaluation.suites.sizing import RESERVE
from wakesight.evaluation.suites.table import pick


@dataclass(frozen=True)
class Outline:
    """What stands around the context of a task. question: {input} is the record's field.

    chat: whether the chat template is used; without it, the question carries the line break before it.
    stop: where a reply ends besides the model's own end.
    """

    instruction: str
    question: str
    new_tokens: int
    chat: bool = True
    stop: str = ""


_PASSAGES = "Below are several passages. Answer the question about them with the answer alone."
_FROM_PASSAGES = "Answer from the passages above, with the answer alone.\n\nQuestion: {input}\nAnswer:"
_CODE = "Continue the code below by its next line."

OUTLINES = {
    "narrativeqa": Outline(
        "Below is a story, a novel or a film script. Answer the question about it with a phrase if you can, and do "
        "not explain.",
        "Answer from the story, with a phrase if you can, without explanation.\n\nQuestion: {input}\n\nAnswer:",
        128,
    ),
    "qasper": Outline(
        'Below is a scientific article. Answer the question about it in a phrase or a sentence: "unanswerable" if the '
        'article does not tell; "yes" or "no" to a yes/no question. Do not explain.',
        'Answer from the article, in a phrase or a sentence: "unanswerable" if it does not tell; "yes" or "no" to a '
        "yes/no question.\n\nQuestion: {input}\n\nAnswer:",
        128,
    ),
    "multifieldqa_en": Outline(
        "Read the text and answer in few words.",
        "Answer from the text, with the answer alone.\n\nQuestion: {input}\nAnswer:",
        64,
    ),
    "multifieldqa_zh": Outline(chinese.READ_BRIEFLY, chinese.FROM_TEXT, 64),
    "hotpotqa": Outline(_PASSAGES, _FROM_PASSAGES, 32),
    "2wikimqa": Outline(_PASSAGES, _FROM_PASSAGES, 32),
    "musique": Outline(_PASSAGES, _FROM_PASSAGES, 32),
    "dureader": Outline(chinese.ARTICLES, chinese.FROM_ARTICLES, 128),
    "gov_report": Outline(
        "Below is a report of a government agency. Summarise it on one page.",
        "Now write the summary of the report, one page long.\n\nSummary:",
        512,
    ),
    "qmsum": Outline(
        "Below is the transcript of a meeting. Answer the request about it in one or a few sentences.",
        "Answer from the transcript, in one or a few sentences.\n\nRequest: {input}\nAnswer:",
        512,
    ),
    "multi_news": Outline(
        "Below are several news articles. Summarise them together on one page.",
        "Now write one summary of all the articles, one page long.\n\nSummary:",
        512,
    ),
    "vcsum": Outline(chinese.MEETING, chinese.SUMMARISE_MEETING, 512),
    "trec": Outline("Name the type of the last question. Examples come first.", "\n{input}", 64, chat=False),
    "triviaqa": Outline(
        "Answer the question from its passage, with the answer alone. Examples come first.",
        "\n\n{input}",
        32,
        chat=False,
    ),
    "samsum": Outline(
        "Summarise the last dialogue in a few short sentences. Examples come first.",
        "\n\n{input}",
        128,
        chat=False,
        stop="\n",
    ),
    "lsht": Outline(chinese.NEWS_TYPES, "\n{input}", 64, chat=False),
    "passage_count": Outline(
        "Below are paragraphs, some of them more than once. Count the different ones.",
        "How many different paragraphs are there? Reply with the number alone.\n\nNumber:",
        32,
    ),
    "passage_retrieval_en": Outline(
        "Below are 30 numbered paragraphs and then a summary of one of them. Find out of which.",
        'This is the summary.\n\n{input}\n\nWhich paragraph is it of? Reply like this: "Paragraph 1".\n\nAnswer:',
        32,
    ),
    "passage_retrieval_zh": Outline(chinese.PARAGRAPHS, chinese.WHICH_PARAGRAPH, 32),
    "lcc": Outline(_CODE, "\nNext line:\n", 64, chat=False),
    "repobench-p": Outline(_CODE, "{input}\nNext line:\n", 64, chat=False),
}
TASKS = tuple(OUTLINES)
EVEN = (
    "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum",
    "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
)  # fmt: skip
ALSO = tuple(f"{task}_e" for task in EVEN)
OPTIONS = {"reserve": RESERVE}


def contexts(options: SuiteOptions) -> Iterator[Context]:
    """Contexts task by task, in the order of the files.

    Raises RequestError without `data`, for an unknown task, a missing or malformed file, or too small a length.
    """
    tasks = pick(TASKS, options, also=ALSO)
    if options.data is None:
        raise RequestError(
            f"LongBench has no substitutes; name a folder with --data that holds {_files(tasks)} (hub id "
            "THUDM/LongBench, out of its data.zip), or fewer tasks with --tasks"
        )
    if gone := missing(options.data, tasks):
        raise RequestError(
            f"{options.data} has no {_files(gone)}; put the files of THUDM/LongBench there, or name the tasks that "
            "are there with --tasks"
        )
    for task in tasks:
        file = find(options.data, task, "LongBench, hub id THUDM/LongBench")
        for index, record in enumerate(records(file)):
            if index == options.items:
                break
            yield _draft(task, record, options).context(task, index, file.name, options)


def _files(tasks: Sequence[str]) -> str:
    """Their names; of many, the first few and how many there are."""
    shown = ", ".join(f"{task}.jsonl" for task in tasks[:3])
    return shown if len(tasks) <= 3 else f"{shown} and {len(tasks) - 3} more"


def _draft(task: str, record: Record, options: SuiteOptions) -> Draft:
    grader = task.removesuffix("_e")
    outline = OUTLINES[grader]
    extra: dict[str, object] = {"language": record.values.get("language")}
    if "all_classes" in record:
        extra["all_classes"] = list(record.texts("all_classes"))
    elif grader in ("trec", "lsht"):
        raise record.wrong("all_classes", "the list of class names")
    if outline.stop:
        extra["stop"] = outline.stop
    question = Question(
        id="",
        text=outline.question.replace("{input}", record.text("input")),
        references=record.texts("answers"),
        grader=grader,
        max_new_tokens=outline.new_tokens,
        extra=extra,
    )
    left = room([question], outline.instruction, options, task)
    kept, cut = cut_middle(record.text("context"), left, options.count)
    meta = {"record": record.values.get("_id"), "words": record.values.get("length"), **cut}
    return Draft(kept, (question,), outline.instruction, outline.chat, meta)
