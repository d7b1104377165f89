"""Open text to label: what the strippers leave, where documents are cut, and what is said when a package is missing.

No package is fetched here: apt-get is a stand-in, and the pages are made up.
"""

from __future__ import annotations

import json
import random
import struct
import subprocess
from pathlib import Path

import pytest

from training import open_text, stripping
from wakesight.errors import RequestError
from wakesight.learning.documents import read_documents

PAGE = """<html><head><title>not this</title></head><body><p id="title">Banner</p>
<ul class="docnav top"><li>Prev</li><li>Next <ul><li>deeper</li></ul></li></ul>
<h1>Locks<a class="headerlink" href="#x">P</a></h1>
<p>A &ldquo;lock&rdquo; holds
 one <b>door</b>&nbsp;shut.</p><table><tr><td>left out</td></tr></table>
<ul><li><p>first</p></li><li>second<br/>third</li></ul>
<pre>def f():
    return 1

f()
</pre><p class="title">Kept</p><script>no()</script>tail</body></html>"""

MANUAL = r""".\" a comment
.TH turn 2 2023-01-01 "Pages"
.SH NAME
turn \- turn a \(lqwheel\(rq
.SH SYNOPSIS
.nf
.B #include <wheel.h>
.BI "int turn(int " fd ", \
int " by );
.fi
.PP
The file \fIfd\fP is
.\" not this
.IR "open for turning" ,
see
.BR read (2).
.TS
a	b
.TE
.TP
.B TURN_LEFT
To the left.
.TP
.B TURN_ALONE
.TP
.B TURN_A
.TQ
.B TURN_B
Either way.
.IP \(bu 3
A bullet.
"""


def test_html_keeps_the_text_and_loses_the_furniture():
    assert stripping.html(PAGE) == [
        "Locks", 'A "lock" holds one door shut.', "- first", "- second", "third", "def f():\n    return 1\n\nf()",
        "Kept", "tail",
    ]  # fmt: skip


def test_a_manual_page_becomes_paragraphs():
    assert stripping.manual(MANUAL) == [
        "turn(2)",
        "NAME",
        'turn - turn a "wheel"',
        "SYNOPSIS",
        "#include <wheel.h>\nint turn(int fd, int by);",
        "The file fd is open for turning, see read(2).",
        "TURN_LEFT\nTo the left.",
        "TURN_ALONE",
        "TURN_A\nTURN_B\nEither way.",
        "* A bullet.",
    ]


@pytest.mark.parametrize("source", [".so man2/open.2\n", ".Dd May 1\n.Sh NAME\n"])
def test_a_page_that_cannot_be_read_gives_nothing(source):
    assert stripping.manual(source) == []


def test_code_is_cut_at_its_blank_lines_only():
    assert stripping.code("\nimport re\n\n\ndef f():\n    a = 1\n\n    return a\n \nx = 2\n") == [
        "import re", "def f():\n    a = 1", "    return a", "x = 2",
    ]  # fmt: skip


def test_the_bible_is_put_together_from_its_blocks(monkeypatch):
    monkeypatch.setattr(stripping, "_uncompressed", lambda block: block.decode())
    blocks = [b"Title.\nGe1:1 In the begin", b"ning.\n1Sam2:3 Talk no more.\n"]
    start = 0x5C + 4 * 3
    places = [start, start + len(blocks[0]), start + len(blocks[0]) + len(blocks[1])]
    head = b"EC02".ljust(0x58, b"\0") + struct.pack(">4I", 2, *places)
    assert stripping.bible(head + b"".join(blocks)) == [
        ("Ge", ["1:1 In the beginning."]),
        ("1Sam", ["2:3 Talk no more."]),
    ]
    for broken in (b"", b"EC03" + head[4:], head[:0x60]):
        with pytest.raises(RequestError, match="bible-kjv-text"):
            stripping.bible(broken)


def test_pieces_are_whole_neighbouring_paragraphs_of_the_asked_length():
    paragraphs = [f"p{number} " + "word " * (number % 17) + "end." for number in range(200)]
    found = list(open_text.pieces(paragraphs, "\n\n", (60, 90), random.Random(0)))
    parts = [part for text in found for part in text.split("\n\n")]
    assert parts == paragraphs[: len(parts)]
    assert len(parts) > 180
    assert all(60 <= open_text.estimate(text + "\n\n") <= 90 for text in found)
    assert len({open_text.estimate(text) // 8 for text in found}) > 1


def test_a_piece_neither_starts_indented_nor_holds_a_paragraph_too_long():
    long, good = "word " * 200, "some words that fit in here"
    paragraphs = ["    return a", good, good, long, "  indented", good, good]
    found = list(open_text.pieces(paragraphs, "\n\n", (10, 14), random.Random(0)))
    assert found == [f"{good}\n\n{good}"] * 2


def test_places_are_different_and_spread_over_the_source():
    for count, each in ((10, 10), (1000, 50), (101, 50)):
        places = open_text.spread(count, each, random.Random(1))
        assert len(set(places)) == each
        assert [place * each // count for place in places] == pytest.approx(list(range(each)), abs=1)
        assert 0 <= min(places) <= max(places) < count


def test_a_novel_starts_at_its_first_chapter():
    blocks = [
        "A NOVEL",
        "Volume I",
        "CHAPTER I",
        "It rained.",
        "",
        "Chapter 2",
        "Chapter 2 was read aloud and wept over.",
        "FINIS",
    ]
    assert list(open_text._chapters(blocks)) == ["It rained.", "Chapter 2 was read aloud and wept over."]


def test_a_document_of_questions_holds_every_answer():
    text = open_text.questions(random.Random(3), (600, 900))
    assert (
        text == open_text.questions(random.Random(3), (600, 900)) != open_text.questions(random.Random(4), (600, 900))
    )
    assert 400 < open_text.estimate(text) <= 900
    answers = [line.removeprefix("Answer: ") for line in text.split("\n") if line.startswith("Answer: ")]
    assert len(answers) >= 4
    assert all(text.count(answer) >= 2 for answer in answers)


def test_a_package_that_cannot_be_fetched_is_named_with_the_command(tmp_path, monkeypatch):
    def refuses(command, **_):
        return subprocess.CompletedProcess(command, 100, "", "W: first\nE: Unable to locate package manpages\n")

    monkeypatch.setattr(open_text.subprocess, "run", refuses)
    with pytest.raises(RequestError, match=r"manpages .*Unable to locate.*apt-get update.*apt-get download manpages"):
        open_text.fetch("manpages", tmp_path / "cache")

    def absent(command, **_):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(open_text.subprocess, "run", absent)
    with pytest.raises(RequestError, match=r"no apt-get.*apt-get download manpages"):
        open_text.fetch("manpages", tmp_path / "cache")


def test_a_package_that_is_there_is_not_fetched_and_two_versions_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(open_text.subprocess, "run", None)
    (tmp_path / "manpages-dev_6_all.deb").touch()
    (tmp_path / "manpages_6_all.deb").touch()
    assert open_text.fetch("manpages", tmp_path) == tmp_path / "manpages_6_all.deb"
    (tmp_path / "manpages_7_all.deb").touch()
    with pytest.raises(RequestError, match="2 files of the package manpages"):
        open_text.fetch("manpages", tmp_path)


def test_a_package_with_another_layout_is_named(tmp_path, monkeypatch):
    (tmp_path / "anarchism_1_all.deb").write_bytes(b"x")
    monkeypatch.setattr(open_text, "_dpkg", lambda *_: "15.3")
    with pytest.raises(RequestError, match=r"anarchism 15\.3 is not laid out"):
        open_text.packaged("faq", open_text.PACKAGED["faq"], tmp_path, tmp_path)


def stand_in(kind: str, each: int, seed: int, cache: Path, scratch: Path):
    rng = random.Random(f"{kind}/{seed}")
    return [open_text.Source(kind, "1", "none")], [f"{kind} text é {rng.random()}" for _ in range(each)]


def test_what_is_written_is_read_back_and_the_same_for_the_same_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(open_text, "texts", stand_in)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        open_text.write(tmp_path / name, 3, seed, tmp_path)
    first, again, other = ({f.name: f.read_bytes() for f in sorted((tmp_path / name).iterdir())} for name in "abc")
    assert first == again != other
    found = list(read_documents(tmp_path / "a"))
    assert len(found) == 27
    assert {document.corpus for document in found} == set(open_text.KINDS)
    about = json.loads(first["SOURCES.json"])
    assert set(about["kinds"]) == set(open_text.KINDS) == set(open_text.DENSITY)
    assert about["kinds"]["faq"]["sources"][0]["version"] == "1"


def test_more_documents_than_there_are_places_are_refused(tmp_path, monkeypatch):
    section = open_text.Section("one", ["word " * 300 + str(number) for number in range(20)])
    monkeypatch.setattr(open_text, "packaged", lambda *_: ([], [section]))
    with pytest.raises(RequestError, match=r"faq has only \d places .*--each \d"):
        open_text.texts("faq", 50, 0, tmp_path, tmp_path)
    with pytest.raises(RequestError, match="--each 0"):
        open_text.write(tmp_path / "out", 0, 0, tmp_path)
