"""The page as text: whole, self-contained, closed to what models and documents write into it."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html import unescape
from html.parser import HTMLParser

import pytest
from run_folders import ARMS, EVIL, PIECES, make_run

from wakesight.evaluation.records import Records, read_json, write_json
from wakesight.evaluation.runner import unpack
from wakesight.report.folder import open_runs
from wakesight.report.page import page
from wakesight.report.safe_json import in_script

pytest.importorskip("matplotlib")
VOID = {"meta", "link", "input", "br", "wbr", "img"}


class Reader(HTMLParser):
    """Checks nesting; collects attributes and scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[self.tags[-1][1].get("id", "code")] = data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def text(run_folder) -> str:
    return page(open_runs([run_folder]))


def test_it_is_well_formed_and_ids_are_unique(text):
    ids = [about["id"] for _, about in read(text).tags if "id" in about]
    assert len(ids) == len(set(ids))


def test_it_loads_nothing(text):
    for tag, about in read(text).tags:
        for name in ("src", "href", "data", "action", "poster", "srcset", "xlink:href"):
            value = about.get(name)
            assert value is None or value.startswith("#") or value == "data:,", (tag, name, value)
    assert not re.search(r"@import|url\((?!#)", text)
    policy = next(about["content"] for _, about in read(text).tags if about.get("http-equiv"))
    assert policy.startswith("default-src 'none';")


def test_the_same_run_gives_the_same_bytes(text, run_folder):
    assert page(open_runs([run_folder])) == text


def test_a_block_holds_the_item_as_it_was_recorded(text):
    scripts = read(text).scripts
    index = json.loads(scripts["index"])[0]
    assert [arm["id"] for arm in index["arms"]] == sorted(ARMS, key=lambda a: (a != "whole", a))
    block = json.loads(scripts[index["contexts"][0]["block"]])
    item = json.loads(zlib.decompress(base64.b64decode(block["text"])))
    assert item["pieces"] == PIECES
    row = item["questions"]["q0"]["rows"][1]
    assert row["output"] == "417"
    assert unpack(block["kept"][1]).sum() == row["kept"]
    assert block["kept"][0] is None  # the whole cache


def test_what_a_model_or_a_path_writes_stays_text(tmp_path):
    run = make_run(tmp_path / "a<script>b", tasks=(f"{EVIL}_64",), output=EVIL, items=2, suite=EVIL)
    text = page(open_runs([run]))
    reader = read(text)
    assert text.count("<script") == 2 + len([name for name in reader.scripts if name.startswith("item-")])
    assert not any(tag == "img" or "onerror" in about for tag, about in reader.tags)
    assert "\u2028" not in reader.scripts["index"]
    assert EVIL in json.loads(reader.scripts["index"])[0]["contexts"][0]["task"]


def test_json_in_a_script_is_the_same_value_and_cannot_end_it():
    value = {EVIL: [EVIL, "<!--", 1.5, None]}
    text = in_script(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029") & set(text)


def test_arguments_given_and_defaults_stand_apart(text):
    given = text.index("Arguments given")
    defaults = text.index("<h3>Defaults")
    assert given < text.index("<dt>suite</dt>") < defaults < text.index("<dt>seed</dt>")


def test_skipped_contexts_have_their_reason_and_their_place(tmp_path):
    text = page(open_runs([make_run(tmp_path / "run", skip="niah_64-0")]))
    assert "26 rows: the model reads at most 8 tokens | &lt;i&gt;and&lt;/i&gt;" in text
    assert "10 of 12 questions scored" in text


def test_a_run_in_which_everything_was_skipped_still_has_a_page(tmp_path):
    text = page(open_runs([make_run(tmp_path / "run", tasks=("niah_64",), items=1, skip="niah_64-0")]))
    assert "No question was scored" in text
    read(text)


def test_methods_are_compared_with_each_other(text):
    assert text.count("<h2>Methods against each other</h2>") == 2  # one per rule
    assert "named first, keydiff/flat</h3>" in text
    assert "Every two methods at the same keep, mean over tasks</h3>" in text
    assert text.index("<span>strict grade</span>") < text.index("<span>official grade</span>")


def test_kept_fractions_and_p_values_have_names_of_their_own(text):
    assert '<button type="button">p</button>' not in text
    assert "p = 0" not in text
    assert '<button type="button">keep</button>' in text
    assert "p-value 0" in text
    assert "of the whole cache's score" in unescape(text)


def test_what_may_be_chance_is_neither_bold_nor_filled(tmp_path):
    few = page(open_runs([make_run(tmp_path / "few", items=2)]))  # of four contexts no p-value is below 0.05
    assert "shade bad" not in few
    many = page(open_runs([make_run(tmp_path / "many", items=12)]))
    assert '<td class="number strong shade bad"' in many


def test_one_context_is_one_context_and_has_no_interval(tmp_path):
    text = page(open_runs([make_run(tmp_path / "one", tasks=("niah_64",), items=1)]))
    assert "<li>1 context</li>" in text
    assert "<small>-</small>" in text
    assert "<small>-, p-value 1</small>" in text
    assert "None" not in text.replace("<p>None.</p>", "").replace("None of", "")


def test_an_unfinished_run_says_so_at_its_top(tmp_path):
    folder = make_run(tmp_path / "run")
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "planned_questions": 40})
    Records(folder).append([dict(row, question="<cut>") for row in Records(folder).read()[:4]])
    header = re.search("<header>.*?</header>", page(open_runs([folder])))[0]
    assert "12 of 40 questions scored, unfinished: 12 run so far" in header
    assert "niah_64-0, &lt;cut&gt;: 4 of 13 rows are there" in header


def test_the_protected_prefix_explains_bytes_above_keep(text):
    assert "the protected prefix (2 tokens here)" in text


def test_contexts_beyond_the_limit_are_named_as_left_out_and_every_task_is_there(tmp_path):
    runs = open_runs([make_run(tmp_path / "run", items=4)])
    text = page(runs, most_contexts=3)
    index = json.loads(read(text).scripts["index"])[0]
    assert [one["task"] for one in index["contexts"]] == ["niah_128", "niah_128", "niah_64"]
    assert "5 contexts left out of this page" in text


def test_several_runs_have_an_article_each_and_a_selector(tmp_path):
    runs = open_runs([make_run(tmp_path / "one"), make_run(tmp_path / "two", rules=("kl", "top1"))])
    reader = read(page(runs))
    assert [about["data-run"] for tag, about in reader.tags if tag == "article"] == ["0", "1", "0", "1"]
    assert any(about.get("id") == "pick-run" for _, about in reader.tags)
    ids = [about["id"] for _, about in reader.tags if "id" in about]
    assert len(ids) == len(set(ids))
