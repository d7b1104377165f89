"""Laws of the thirteen RULER tasks, and the official files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import subprocess
import sys

import pytest

from wakesight.errors import RequestError
from wakesight.evaluation.items import Context, SuiteOptions
from wakesight.evaluation.suites import ruler, ruler_official, words
from wakesight.evaluation.suites.cards import World

pytest.importorskip("wonderwords")

LENGTHS = (512, 2048, 8192)
ROWS = {f"niah_{name}" for name in ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3")}


def count(text: str) -> int:
    """A cheap stand-in for a tokenizer: words, single digits and signs."""
    return len(re.findall(r"[^\W\d]+|\d|[^\w\s]", text))


def make(task: str, length: int = 2048, items: int = 2, seed: int = 0, **more: object) -> list[Context]:
    return list(ruler.contexts(SuiteOptions(length, items, seed, count, tasks=(task,), **more)))


def prompt(context: Context) -> str:
    (question,) = context.questions
    return f"{context.instruction}\n\n{context.text}\n\n{question.text}{question.answer_prefix}"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", ruler.TASKS)
def test_prompt_and_answer_fill_the_length(task, length):
    for context in make(task, length):
        total = count(prompt(context)) + context.questions[0].max_new_tokens

        assert total <= length
        assert context.meta["tokens"] + context.questions[0].max_new_tokens == total
        # what is left is less than the largest piece of haystack: a document of fewer than 110 tokens
        assert total >= length - max(110, 0.01 * length)
        assert length < 8192 or total >= 0.95 * length


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", ruler.TASKS)
def test_the_answers_are_in_the_document_and_the_question_is_not(task, length):
    for context in make(task, length):
        (question,) = context.questions
        spans = [context.text[start:end] for start, end in context.meta["answers"]]

        assert spans == list(question.references)
        assert question.text not in context.text
        assert question.text not in (context.instruction or "") or task == "cwe"  # its example asks the same
        assert question.answer_prefix not in context.text
        assert question.grader == task


@pytest.mark.parametrize("task", ruler.NIAH)
def test_needles_and_their_depths_are_where_meta_says(task):
    for context in make(task, items=4):
        meta, references = context.meta, context.questions[0].references
        shown = [context.text[start:end] for start, end in meta["needles"]]

        assert all("the special magic" in needle and needle.endswith(".") for needle in shown)
        assert sum(any(value in needle for needle in shown) for value in references) == len(references)
        for (start, end), depth in zip(meta["needles"], meta["depths"], strict=True):
            assert depth == pytest.approx(start / (len(context.text) - (end - start)), abs=1e-4)


def test_needle_tasks_have_the_official_numbers_of_needles():
    rows = {task: make(task, items=1)[0] for task in ruler.NIAH}
    needles = {task: context.text.count("Take note: the special magic") for task, context in rows.items()}
    asked = {task: len(context.questions[0].references) for task, context in rows.items()}

    assert {task: needles[task] for task in ("niah_single_1", "niah_single_2", "niah_single_3")} == dict.fromkeys(
        ("niah_single_1", "niah_single_2", "niah_single_3"), 1
    )
    assert needles["niah_multikey_1"] == needles["niah_multivalue"] == needles["niah_multiquery"] == 4
    assert needles["niah_multikey_2"] > 20
    assert asked == dict.fromkeys(ROWS, 1) | {"niah_multivalue": 4, "niah_multiquery": 4}


def test_needle_depths_cover_the_essay():
    depths = [context.meta["depths"][0] for context in make("niah_single_2", items=40)]

    assert min(depths) < 0.1
    assert max(depths) > 0.9
    assert len(set(depths)) > 15


def test_the_chain_can_be_followed_to_its_answer():
    for context in make("vt", items=3):
        value = re.search(r"the value (\d+)", context.questions[0].text)[1]
        holds: set[str] = set()
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", context.text):
            if source == value or source in holds:
                holds.add(name)

        assert holds == set(context.questions[0].references)
        assert len(holds) == 5
        assert "Answer: 5 variables" in context.instruction  # the example


@pytest.mark.parametrize(
    ("length", "variant", "common", "other"),
    [(4096, "official", 30, 3), (4095, "official, below 4096 tokens", 6, 1), (400, "tiny, without example", 3, 1)],
)
def test_common_words_are_repeated_as_often_as_the_length_asks(length, variant, common, other):
    (context,) = make("cwe", length, items=1)
    listed = re.findall(r"\d+\. (.*?)(?= \d+\. |$)", context.text)
    times = {word: listed.count(word) for word in listed}

    assert context.meta["variant"] == variant
    assert {word for word, n in times.items() if n == common} == set(context.questions[0].references)
    assert {n for word, n in times.items() if word not in context.questions[0].references} == {other}


@pytest.mark.parametrize("length", LENGTHS)
def test_the_three_most_frequent_coded_words_are_the_answer(length):
    for context in make("fwe", length):
        coded = context.text.split()
        ranked = sorted(set(coded), key=lambda word: -coded.count(word))
        times = [coded.count(word) for word in ranked]

        assert ranked[0] == "..."
        assert tuple(ranked[1:4]) == context.questions[0].references
        assert times[0] > times[1] > times[2] > times[3] > times[4]


@pytest.mark.parametrize(("task", "hops"), [("qa_1", 1), ("qa_2", 2)])
def test_fact_cards_are_named_as_a_substitute_and_answer_by_construction(task, hops):
    for context in make(task, 8192, items=6):
        (question,) = context.questions
        gold = [context.text[start:end] for start, end in context.meta["needles"]]
        cards = context.text.split("\n\n")

        assert context.task == f"{task}_synth"
        assert context.source == "generated:fact cards"
        assert len(gold) == hops
        assert [card for card in cards if question.references[0].lower() in card.lower()] == [
            card for card in gold if question.references[0] in card
        ]
        assert len(cards) == context.meta["documents"] > 50


def test_two_hops_need_both_cards():
    for context in make("qa_2", items=6):
        gold = [context.text[start:end] for start, end in context.meta["needles"]]
        house = re.search(r"founder of the (.*?)(?: born| awarded)?\?", context.questions[0].text)[1]
        first = next(card for card in gold if house in card)
        second = next(card for card in gold if card is not first)

        assert context.questions[0].references[0] not in first
        assert second.split("\n")[1] in first  # the founder's name, title of the other card


def test_a_larger_world_begins_with_the_smaller_one():
    small, large = World(random.Random("w")), World(random.Random("w"))

    assert [small.house() for _ in range(3)] == [large.house() for _ in range(9)][:3]


SCRIPT = """
import hashlib, re, sys
from wakesight.evaluation.items import SuiteOptions
from wakesight.evaluation.suites.table import suite
count = lambda text: len(re.findall(r"[^\\W\\d]+|\\d|[^\\w\\s]", text))
print(hashlib.sha256("".join(
    repr(context) for name in ("ruler", "niah", "recall", "fidelity")
    for context in suite(name).contexts(SuiteOptions(2048, 2, int(sys.argv[1]), count))
).encode()).hexdigest())
"""


def digest(seed: int, hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(seed)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_same_seed_gives_the_same_bytes_in_every_process():
    assert digest(7, "0") == digest(7, "1234")
    assert digest(7, "0") != digest(8, "0")


def test_the_bytes_of_an_item_are_those_we_released():
    """A change here changes every published number: raise the version of whatever reports it."""
    texts = "".join(prompt(context) for task in ("niah_single_2", "vt", "fwe", "qa_2") for context in make(task))

    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == DIGEST or words.version() != "wonderwords-3.0.1"


DIGEST = "c4bfdc78bca99041"


@pytest.mark.parametrize("task", ruler.TASKS)
def test_different_seeds_and_items_differ(task):
    texts = {context.text for seed in (0, 1) for context in make(task, seed=seed)}

    assert len(texts) == 4


def test_an_item_is_the_same_whatever_else_is_asked_for():
    alone = make("vt", items=2)
    among = [
        context
        for context in ruler.contexts(SuiteOptions(2048, 2, 0, count, tasks=("fwe", "vt", "niah_single_1")))
        if context.task == "vt"
    ]

    assert among == alone
    assert make("niah_single_2", items=1)[0].questions == make("niah_single_2", items=3)[0].questions


def test_ids_are_unique():
    ids = [context.id for context in ruler.contexts(SuiteOptions(2048, 2, 0, count))]

    assert len(set(ids)) == len(ids) == 26


@pytest.mark.parametrize("task", ruler.TASKS)
def test_a_length_without_room_is_refused(task):
    with pytest.raises(RequestError, match=r"length=60|fit in length=60"):
        make(task, 60)


def test_room_can_be_kept_back_for_a_template():
    (context,) = make("niah_single_1", 2048, items=1, extra={"reserve": 100})

    assert 1750 < context.meta["tokens"] <= 2048 - 128 - 100


def test_without_wonderwords_the_extra_is_named(monkeypatch):
    words.wonderwords.cache_clear()
    monkeypatch.setitem(sys.modules, "wonderwords.assets", None)

    with pytest.raises(RequestError, match=re.escape("pip install 'wakesight[eval]'")):
        make("niah_single_1")


@pytest.mark.real
def test_every_task_fits_under_a_real_tokenizer(smollm2):
    options = SuiteOptions(1024, 1, 0, lambda text: len(smollm2.encode(text)))
    for context in ruler.contexts(options):
        (question,) = context.questions
        pieces = (context.instruction + "\n\n", context.text, "\n\n" + question.text, question.answer_prefix)
        total = sum(len(smollm2.encode(piece)) for piece in pieces) + question.max_new_tokens

        assert 0.85 * 1024 < total <= 1024
    assert len({context.task for context in ruler.contexts(dataclasses.replace(options, length=512))}) == 13


# official files

SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Rivers",
            "paragraphs": [
                {
                    "context": "The Aare rises in the Alps.",
                    "qas": [
                        {
                            "question": "Where does the Aare rise?",
                            "id": "1",
                            "is_impossible": False,
                            "answers": [{"text": "in the Alps", "answer_start": 15}, {"text": "the Alps"}],
                        },
                        {"question": "Who dug the Aare?", "id": "2", "is_impossible": True, "answers": []},
                    ],
                },
                {"context": "The Reuss meets the Aare near Brugg.", "qas": []},
            ],
        },
        {"title": "Bread", "paragraphs": [{"context": f"Loaf number {i} was baked.", "qas": []} for i in range(40)]},
    ],
}
HOTPOT = [
    {
        "_id": "a",
        "question": "Who founded the town of the tower?",
        "answer": "Countess Ida",
        "context": [["Tower", ["It stands in Lenz.", " It is old."]], ["Lenz", ["Countess Ida founded Lenz."]]],
    },
    {"_id": "b", "question": "Is it so?", "answer": "yes", "context": [["Other", ["It is so."]]]},
]


def put(folder, name: str, value: object) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_squad_is_read(tmp_path):
    put(tmp_path, "squad.json", SQUAD)

    (context,) = make("qa_1", 300, items=1, data=tmp_path)

    assert (context.task, context.source) == ("qa_1", "squad.json")
    assert context.questions[0].references == ("in the Alps", "the Alps")
    assert context.questions[0].text.endswith("Question: Where does the Aare rise?")
    assert context.questions[0].text.startswith("Answer the question based on the given documents.")
    assert context.instruction.startswith("Answer the question based on the given documents.")
    assert "The Reuss meets" in context.text  # the same article comes before others
    assert re.findall(r"Document (\d+):", context.text) == [str(i + 1) for i in range(context.meta["documents"])]


def test_hotpot_is_read(tmp_path):
    put(tmp_path, "hotpotqa.json", HOTPOT)

    contexts = make("qa_2", 300, data=tmp_path)

    assert [context.questions[0].references for context in contexts] == [("Countess Ida",), ("yes",)]
    assert "Tower\nIt stands in Lenz. It is old." in contexts[0].text
    assert contexts[0].meta["documents"] == 3


def test_more_items_than_questions_are_refused(tmp_path):
    put(tmp_path, "squad.json", SQUAD)

    with pytest.raises(RequestError, match=r"squad.json has 1 questions .* 2 items were asked for"):
        make("qa_1", 300, data=tmp_path)


@pytest.mark.parametrize(
    ("task", "name", "content", "field"),
    [
        ("qa_1", "squad.json", {"rows": []}, "'data'"),
        ("qa_1", "squad.json", [], "'data'"),
        ("qa_1", "squad.json", {"data": [{"title": "x"}]}, "'paragraphs'"),
        ("qa_1", "squad.json", {"data": [{"paragraphs": [{"qas": []}]}]}, "'context'"),
        ("qa_1", "squad.json", {"data": [{"paragraphs": [{"context": "x"}]}]}, "'qas'"),
        ("qa_1", "squad.json", {"data": [{"paragraphs": [{"context": "x", "qas": [{"answers": []}]}]}]}, "'answers'"),
        ("qa_1", "squad.json", "not json", "JSON"),
        ("qa_2", "hotpotqa.json", {"data": []}, "'question'"),
        ("qa_2", "hotpotqa.json", [{"question": "q", "answer": "a", "context": [["only a title"]]}], "'context'"),
        ("qa_2", "hotpotqa.json", [{"question": "q", "context": []}], "'answer'"),
    ],
)
def test_a_malformed_collection_is_named_with_its_field(tmp_path, task, name, content, field):
    put(tmp_path, name, content)

    with pytest.raises(RequestError, match=field) as caught:
        make(task, 300, data=tmp_path)
    assert name in str(caught.value)


def test_a_missing_collection_is_named_or_substituted(tmp_path):
    put(tmp_path, "squad.json", SQUAD)

    with pytest.raises(RequestError, match=r"qa_2 needs .*hotpotqa.json.*qa_2_synth"):
        make("qa_2", data=tmp_path)
    assert make("qa_1_synth", data=tmp_path)[0].source == "generated:fact cards"
    everything = ruler.contexts(SuiteOptions(512, 1, 0, count, data=tmp_path))
    assert [context.task for context in everything][-2:] == ["qa_1", "qa_2_synth"]


def test_a_folder_with_nothing_of_ruler_is_refused(tmp_path):
    with pytest.raises(RequestError, match="none of RULER's files"):
        make("vt", data=tmp_path)
    with pytest.raises(RequestError, match="does not exist"):
        make("vt", data=tmp_path / "nowhere")


def test_official_essays_are_the_haystack(tmp_path):
    put(tmp_path, "PaulGrahamEssays.json", {"text": "Startups are hard. " * 50})

    (context,) = make("niah_single_2", items=1, data=tmp_path)

    assert context.source.startswith("generated:PaulGrahamEssays.json,")
    assert context.text.count("Startups are hard.") > 100  # repeated where it ends


def test_english_words_extend_the_list(tmp_path):
    put(tmp_path, "english_words.json", {str(i): f"zz{i}q" for i in range(9000)})

    options = SuiteOptions(65536, 1, 0, lambda text: len(text.split()), tasks=("cwe",), data=tmp_path)
    (context,) = ruler.contexts(options)
    (offline,) = ruler.contexts(dataclasses.replace(options, data=None))

    assert "0q" in context.text
    assert len(set(offline.text.split()[1::2])) > len(words.pool())  # words of the packaged texts
    put(tmp_path, "english_words.json", ["a"])
    with pytest.raises(RequestError, match=r"english_words.json must be an object"):
        list(ruler.contexts(options))


# records in the shape that RULER writes, with documents of our own
RECORDS = {
    "niah_single_1": (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\nFiller. The code of x-y is 1234567. What is the special magic of it? More.\n"
        "What is the special magic number for x-y mentioned in the provided text?",
        ["1234567"],
        " The special magic number for x-y mentioned in the provided text is",
    ),
    "vt": (
        "Memorize and track the chain(s) hidden in the following text.\n\nVAR A = 1\nQuestion: Find A. Answer: A\n\n"
        "Memorize and track the chain(s) hidden in the following text.\n\nVAR BBB = 12345\n"
        "Question: Find all variables that are assigned the value 12345 in the text above.",
        ["BBB"],
        " Answer: 1 variables are assigned the value 12345, they are: ",
    ),
    "cwe": (
        "Memorize the ones that appear most often.\n1. a 2. a\nQuestion: What are they? Answer: 1. a\n"
        "Memorize the ones that appear most often.\n1. pear 2. pear 3. fig\nQuestion: What are they?",
        ["pear"],
        " Answer: The top words are:",
    ),
    "fwe": (
        "Find the three most frequently appeared coded words. ... abc abc\nQuestion: Do not provide any explanation.",
        ["abc"],
        " Answer: they are:",
    ),
    "qa_1": (
        "Answer the question based on the given documents. Be short.\n\nThe following are given documents.\n\n"
        "Document 1:\nRome is old.\n\nAnswer the question based on the given documents. Be short.\n\nQuestion: What?",
        ["Rome", "the city of Rome"],
        " Answer:",
    ),
}
DOCUMENTS = {
    "niah_single_1": "Filler. The code of x-y is 1234567. What is the special magic of it? More.",
    "vt": "VAR BBB = 12345",
    "cwe": "1. pear 2. pear 3. fig",
    "fwe": "... abc abc",
    "qa_1": "Document 1:\nRome is old.",
}


def record(task: str, **changes: object) -> str:
    text, outputs, prefix = RECORDS[task]
    fields = {"index": 5, "input": text, "outputs": outputs, "length": 99, "answer_prefix": prefix, **changes}
    return json.dumps({key: value for key, value in fields.items() if value is not None}) + "\n"


@pytest.mark.parametrize("place", ["{}.jsonl", "{}/validation.jsonl", "2048/{}/validation.jsonl", "2048/{}.jsonl"])
@pytest.mark.parametrize("task", RECORDS)
def test_ready_made_items_are_cut_at_the_last_question(tmp_path, task, place):
    put(tmp_path, place.format(task), record(task, token_position_answer=17) * 3)

    first, *rest = make(task, data=tmp_path)
    (question,) = first.questions

    assert len(rest) == 1
    assert first.text == DOCUMENTS[task]
    assert f"{first.instruction} {first.text} {question.text}".split() == RECORDS[task][0].split()
    assert question.references == tuple(RECORDS[task][1])
    assert question.answer_prefix == RECORDS[task][2].lstrip()
    assert question.max_new_tokens == ruler.NEW_TOKENS[task]
    assert first.task == question.grader == task
    assert first.source.endswith(".jsonl")
    assert first.meta["token_position_answer"] == 17


@pytest.mark.parametrize("task", RECORDS)
def test_an_older_file_carries_the_answer_prefix_in_its_input(tmp_path, task):
    put(tmp_path, f"{task}.jsonl", record(task, input=RECORDS[task][0] + RECORDS[task][2], answer_prefix=None))

    (context,) = make(task, items=1, data=tmp_path)

    assert context.text == DOCUMENTS[task]
    assert context.questions[0].answer_prefix == RECORDS[task][2].lstrip()


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"input": None}, "input is missing"),
        ({"outputs": None}, "outputs is missing"),
        ({"outputs": []}, "outputs is"),
        ({"input": "no question at all"}, "input is"),
        ({"answer_prefix": None}, "answer_prefix is"),
    ],
)
def test_a_broken_record_is_named_with_file_line_and_field(tmp_path, changes, wrong):
    put(tmp_path, "vt.jsonl", record("vt") + record("vt", **changes))

    with pytest.raises(RequestError, match=f"vt.jsonl, line 2: {wrong}"):
        make("vt", data=tmp_path)


def test_a_ready_made_file_must_have_enough_items_of_this_length(tmp_path):
    put(tmp_path, "vt.jsonl", record("vt"))

    with pytest.raises(RequestError, match="has 1 records and 2 items were asked for"):
        make("vt", data=tmp_path)
    with pytest.raises(RequestError, match="more than length=70"):
        make("vt", 70, items=1, data=tmp_path)


def test_ids_of_official_items_are_unique(tmp_path):
    put(tmp_path, "vt.jsonl", "".join(record("vt", index=i) for i in range(4)))

    assert len({context.id for context in make("vt", items=4, data=tmp_path)}) == 4


def test_every_task_knows_where_its_records_are_cut():
    assert all(task.split("_")[0] in ruler_official._CUTS for task in ruler.TASKS)
