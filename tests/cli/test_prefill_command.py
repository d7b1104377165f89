"""wakesight prefill, and wakesight ask --session: a document read once and asked later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wakesight.cache import files
from wakesight.cli.main import run
from wakesight.engines.hf.engine import load
from wakesight.engines.session import Session
from wakesight.policy import Policy
from wakesight.testing import tiny

TEXT = "The keeper wrote <|im_end|> in the log. " * 12
FIELDS = {
    "saved", "file_bytes", "logical_length", "kept_entries", "kv_bytes_full", "kv_bytes_kept", "kv_bytes_slack",
    "kv_bytes_freed", "state_bytes", "sketch_bytes", "staging_bytes", "reservoir_bytes", "prefill_s", "score_s",
    "compact_s", "peak_memory_bytes", "policy", "model",
}  # fmt: skip
SOME = ("llama", "qwen3_5", "gemma3")


@pytest.fixture(scope="module", params=SOME)
def folder(request, tmp_path_factory):
    return str(tiny.save(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture
def document(tmp_path):
    file = tmp_path / "document.txt"
    file.write_bytes(TEXT.encode())
    return str(file)


@pytest.fixture
def target(tmp_path):
    """Where sessions are saved; alone in its folder."""
    (tmp_path / "saved").mkdir()
    return tmp_path / "saved" / "report.ws"


def done(capsys, *words: str) -> dict:
    """What a command that works prints with --json."""
    capsys.readouterr()
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def failure(capsys, *words: str, code: int = 2) -> str:
    """The sentence that a command fails with, after checking its form."""
    capsys.readouterr()
    assert run(list(words)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("wakesight: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def asked(capsys, path, *words: str) -> dict:
    return done(capsys, "ask", "--session", str(path), "--question", "Who?", "--max-new-tokens", "6", *words)


@pytest.mark.parametrize("size", [(), ("--keep", "0.3"), ("--keep", "0.3", "--unit", "page", "--page-size", "8")])
def test_what_is_saved_answers_as_what_is_read(folder, document, target, capsys, size):
    saved = done(capsys, "prefill", "--model", folder, "--context", document, "--save", str(target), *size)
    assert saved.keys() == FIELDS
    assert saved["saved"] == str(target)
    assert saved["file_bytes"] == target.stat().st_size
    assert (saved["policy"] is None) == (not size)

    found = asked(capsys, target)
    read = ("--model", folder, "--context", document, "--question", "Who?", "--max-new-tokens", "6")
    expected = done(capsys, "ask", *read, *(size or ("--keep", "1")))
    for name in ("answers", "logical_length", "kept_entries", "kv_bytes_kept", "kv_bytes_freed", "model"):
        assert found[name] == expected[name]
    assert found.keys() == expected.keys()
    assert found["policy"] == saved["policy"]


def test_a_saved_session_may_be_compacted_further(folder, document, target, capsys):
    words = ("--model", folder, "--context", document, "--save", str(target), "--record", "h2o", "--keep", "0.6")
    done(capsys, "prefill", *words)
    before = target.read_bytes()

    found = asked(capsys, target, "--keep", "0.2", "--scorer", "h2o")

    policy = Policy(scorer="h2o", keep=0.2)
    assert Policy.from_json(found["policy"]) == policy
    child = Session.load(target, load(folder)).compact(policy)
    assert found["kept_entries"] == child.stats.kept_entries
    assert found["answers"][0]["token_ids"] == list(child.ask("Who?", max_new_tokens=6).tokens)
    assert target.read_bytes() == before


def test_what_to_record_may_be_a_list_and_be_given_again(llama, document, target, capsys):
    words = (
        "--model",
        llama,
        "--context",
        document,
        "--save",
        str(target),
        "--record",
        "h2o, snapkv:window=4,kernel=3",
    )
    done(capsys, "prefill", *words, "--record", "future_rotation")
    assert files.read(target).header["recording"]["record"] == ["attention_sums", "future_rotation"]


def test_a_session_of_a_relative_folder_opens_from_elsewhere(llama, document, target, capsys, monkeypatch):
    monkeypatch.chdir(Path(llama).parent)
    done(capsys, "prefill", "--model", Path(llama).name, "--context", document, "--save", str(target))
    monkeypatch.chdir(target.parent)
    assert asked(capsys, target.name)["model"] == llama


def test_instruction_and_plain_text_are_kept_with_the_session(llama, document, target, capsys):
    words = ("--model", llama, "--context", document, "--save", str(target))
    done(capsys, "prefill", *words, "--instruction", "Be brief.", "--chunk", "64")
    with Session.load(target, load(llama)) as session:
        assert "Be brief." in session.engine.decode(session.tokens)
        assert session.state.prefix > len("Be brief.")
    done(capsys, "prefill", *words, "--no-chat")
    with Session.load(target, load(llama)) as session:
        assert session.tokens == tuple(TEXT.encode()) or len(session.tokens) == len(TEXT.encode())


def test_people_read_sizes_on_stderr(llama, document, target, capsys):
    assert run(["prefill", "--model", llama, "--context", document, "--save", str(target), "--keep", "0.5"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{target}: ")
    assert "kept" in err
    assert "growth slack" in err
    assert run(["ask", "--session", str(target), "--question", "Who?", "--max-new-tokens", "3"]) == 0
    assert "kept" in capsys.readouterr().err


def test_the_model_and_the_dtype_come_from_the_file(llama, document, target, capsys):
    done(capsys, "prefill", "--model", llama, "--context", document, "--save", str(target), "--dtype", "bfloat16")
    assert asked(capsys, target)["model"] == llama
    assert asked(capsys, target, "--model", llama, "--dtype", "bfloat16")["model"] == llama
    sentence = failure(capsys, "ask", "--session", str(target), "--question", "x", "--dtype", "float32")
    assert "was made with dtype bfloat16" in sentence


def test_a_policy_of_a_missing_plugin_is_a_note(llama, document, target, capsys):
    done(capsys, "prefill", "--model", llama, "--context", document, "--save", str(target), "--keep", "0.5")
    held = files.read(target)
    files.write(target, {**held.header, "policy": {**held.header["policy"], "scorer": "elsewhere"}}, held.tensors)
    assert run(["ask", "--session", str(target), "--question", "Who?", "--max-new-tokens", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["policy"] is None
    assert err.startswith(f"wakesight: {target} was compacted by a policy that cannot be made here")
    assert err.count("\n") == 1


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(llama, tmp_path_factory):
    """A whole session of the llama folder."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "document.txt").write_bytes(TEXT.encode())
    path = folder / "whole.ws"
    assert run(["prefill", "--model", llama, "--context", str(folder / "document.txt"), "--save", str(path)]) == 0
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--context", "a.txt"), "--context belongs to reading a document"),
        (("--instruction", "Be brief."), "--instruction belongs to reading"),
        (("--no-chat",), "--no-chat belongs to reading"),
        (("--chunk", "128"), "--chunk belongs to reading"),
        (("--scorer", "knorm"), "needs a size; add --keep, --entries or --fit"),
        (("--unit", "page"), "needs a size"),
        (
            ("--scorer", "h2o", "--keep", "0.5"),
            "(--record attention_sums), or take a scorer that reads keys only: --scorer keydiff",
        ),
        (("--keep", "0.5", "--entries", "4"), "give one size"),
        (("--page-size", "8"), "belongs to --unit page"),
        (("--max-new-tokens", "0"), "at least 1"),
        (("--stream", "--json"), "exclude each other"),
    ],
)
def test_choices_that_do_not_fit_a_session(saved, capsys, words, expected):
    assert expected in failure(capsys, "ask", "--session", str(saved), "--question", "x", *words)


def test_files_that_are_no_session(saved, tmp_path, capsys):
    blob = saved.read_bytes()
    for name, content, expected in (
        ("text.ws", b"hello", "is not a session file"),
        ("empty.ws", b"", "is empty"),
        ("cut.ws", blob[:-9], "is cut off"),
        ("edited.ws", blob[:-9] + b"x" * 9, "does not match its checksum"),
    ):
        (tmp_path / name).write_bytes(content)
        sentence = failure(capsys, "ask", "--session", str(tmp_path / name), "--question", "x")
        assert expected in sentence
        assert name in sentence
    assert "there is no file" in failure(capsys, "ask", "--session", str(tmp_path / "no.ws"), "--question", "x")
    assert "is a folder" in failure(capsys, "ask", "--session", str(tmp_path), "--question", "x")


def test_a_session_of_another_model(saved, tmp_path, capsys):
    other = str(tiny.save("qwen3", tmp_path / "qwen3"))
    sentence = failure(capsys, "ask", "--session", str(saved), "--model", other, "--question", "x")
    assert "is a session of the llama model" in sentence
    reseeded = str(tiny.save("llama", tmp_path / "llama", seed=1))
    sentence = failure(capsys, "ask", "--session", str(saved), "--model", reseeded, "--question", "x")
    assert "was made with other weights" in sentence


def test_a_model_that_moved_is_named_with_the_session(document, target, tmp_path, capsys):
    folder = tiny.save("llama", tmp_path / "here")
    done(capsys, "prefill", "--model", str(folder), "--context", document, "--save", str(target))
    folder.rename(tmp_path / "there")
    sentence = failure(capsys, "ask", "--session", str(target), "--question", "x")
    assert str(tmp_path / "here") in sentence
    assert "--model" in sentence
    assert asked(capsys, target, "--model", str(tmp_path / "there"))["model"] == str(tmp_path / "there")


@pytest.mark.parametrize("missing", ["--model", "--context", "--save"])
def test_prefill_needs_all_three(llama, document, target, capsys, missing):
    words = {"--model": llama, "--context": document, "--save": str(target)}
    del words[missing]
    assert f"Missing option '{missing}'" in failure(capsys, "prefill", *[w for pair in words.items() for w in pair])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--record", "h20"), "did you mean 'h2o'"),
        (("--scorer", "keydif", "--keep", "0.5"), "did you mean 'keydiff'"),
        (("--scorer", "knorm"), "needs a size"),
        (("--keep", "0"), "above 0 and at most 1"),
        (("--chunk", "100"), "multiple of 64"),
        (("--dtype", "float8"), "is unknown"),
        (("--context", "no.txt"), "does not exist"),
    ],
)
def test_wrong_choices_leave_no_file(llama, document, target, capsys, words, expected):
    given = {"--model": llama, "--context": document, "--save": str(target)}
    given.update(zip(words[::2], words[1::2], strict=True))
    assert expected in failure(capsys, "prefill", *[w for pair in given.items() for w in pair])
    assert list(target.parent.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused_before_reading(llama, document, target, capsys, monkeypatch):
    def never(*args, **keywords):
        raise AssertionError("the document was read")

    monkeypatch.setattr("wakesight.engines.hf.engine.load", never)
    words = ("prefill", "--model", llama, "--context", document, "--save")
    assert "there is no folder" in failure(capsys, *words, str(target.parent / "none" / "a.ws"))
    assert "is a folder" in failure(capsys, *words, str(target.parent))
    before = Path(document).read_bytes()
    model = str(Path(llama) / "model.safetensors")
    assert "holds another file that is no session; give another name" in failure(capsys, *words, model)
    (target.parent / "link").symlink_to(document)
    for name in (document, str(target.parent / "link")):
        assert "is the document of --context; give another name" in failure(capsys, *words, name)
    (target.parent / "link").unlink()
    assert Path(document).read_bytes() == before
    assert "--context is given 2 times" in failure(capsys, *words, str(target), "--context", document)
    with monkeypatch.context() as patch:
        patch.setattr("wakesight.cli.prefill.os.access", lambda *args: False)
        assert "is not allowed" in failure(capsys, *words, str(target))
    assert list(target.parent.iterdir()) == []


def test_a_full_disk_is_exit_1_and_leaves_the_old_file(llama, document, target, capsys, monkeypatch):
    files.write(target, {"old": True}, {})

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wakesight.cache.files.os.fsync", full)
    words = ("prefill", "--model", llama, "--context", document, "--save", str(target))
    assert "the disk is full" in failure(capsys, *words, code=1)
    assert files.read(target).header == {"old": True}
    assert [file.name for file in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize("where", ["reading", "saving"])
def test_an_interrupt_leaves_no_file(llama, document, target, capsys, monkeypatch, where):
    def interrupted(*args, **keywords):
        raise KeyboardInterrupt

    place = {"reading": "wakesight.engines.hf.engine.HFEngine.forward", "saving": "wakesight.cache.files.os.fsync"}
    monkeypatch.setattr(place[where], interrupted)
    capsys.readouterr()
    words = ("prefill", "--model", llama, "--context", document, "--save", str(target))
    assert run(words) == 130
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("", "wakesight: interrupted; nothing was written")  # the ^C ends its line
    assert list(target.parent.iterdir()) == []
