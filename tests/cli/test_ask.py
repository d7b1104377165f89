"""wakesight ask, end to end on a tiny model folder."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
import torch

from wakesight.cli.main import run
from wakesight.engines.hf.engine import load
from wakesight.policy import Policy
from wakesight.testing import tiny

TEXT = "The keeper wrote <|im_end|> in the log. " * 12
FIELDS = {
    "answers", "answer", "logical_length", "kept_entries", "kv_bytes_full", "kv_bytes_kept", "kv_bytes_slack",
    "kv_bytes_freed", "state_bytes", "sketch_bytes", "staging_bytes", "reservoir_bytes", "prefill_s", "score_s",
    "compact_s", "decode_tokens_per_s", "peak_memory_bytes", "policy", "model",
}  # fmt: skip


EVICTING = [family for family in tiny.FAMILIES if family != "qwen4_exp"]


@pytest.fixture(scope="module", params=EVICTING)
def folder(request, tmp_path_factory):
    return str(tiny.save(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture
def document(tmp_path):
    file = tmp_path / "document.txt"
    file.write_bytes(TEXT.encode())
    return str(file)


def ask(*words: str) -> int:
    return run(["ask", *words])


def test_json_has_every_documented_field(folder, document, capsys):
    code = ask("--model", folder, "--context", document, "--question", "Who?", "--question", "When?", "--keep", "0.3",
               "--max-new-tokens", "9", "--json")  # fmt: skip

    printed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert printed.keys() == FIELDS
    assert [a["question"] for a in printed["answers"]] == ["Who?", "When?"]
    assert printed["answer"] == printed["answers"][0]["answer"]
    for answer in printed["answers"]:
        assert answer["tokens"] == len(answer["token_ids"]) <= 9
        assert answer["misses"] == answer["fetches"] == 0
    assert printed["kv_bytes_freed"] == printed["kv_bytes_full"] - printed["kv_bytes_kept"] > 0
    assert printed["sketch_bytes"] == printed["reservoir_bytes"] == 0
    assert Policy.from_json(printed["policy"]) == Policy(scorer="keydiff", keep=0.3)


def test_numbers_agree_with_the_library(folder, document, capsys):
    ask("--model", folder, "--context", document, "--question", "Who?", "--scorer", "snapkv:window=8", "--keep", "0.4",
        "--allocation", "pyramid", "--max-new-tokens", "9", "--json")  # fmt: skip
    printed = json.loads(capsys.readouterr().out)

    session = load(folder).prefill(TEXT)
    child = session.compact(Policy(scorer="snapkv:window=8", keep=0.4, allocation="pyramid"))

    assert printed["logical_length"] == len(session.tokens)
    assert printed["kept_entries"] == child.stats.kept_entries
    assert printed["kv_bytes_kept"] == child.stats.kv_bytes_kept
    assert printed["answers"][0]["token_ids"] == list(child.ask("Who?", max_new_tokens=9).tokens)


def test_context_from_stdin_and_questions_from_a_file(folder, document, tmp_path, capsys, monkeypatch):
    (tmp_path / "questions.txt").write_text("Who?\n\nWhen?\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))

    code = ask("--model", folder, "--context", "-", "--questions", str(tmp_path / "questions.txt"), "--keep", "1",
               "--max-new-tokens", "3", "--json")  # fmt: skip

    printed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [a["question"] for a in printed["answers"]] == ["Who?", "When?"]
    assert printed["kv_bytes_freed"] == 0


def test_stdout_is_the_answer_and_stderr_talks(folder, document, capsys):
    words = ("--model", folder, "--context", document, "--question", "Who?", "--entries", "40", "--max-new-tokens", "6")
    assert ask(*words) == 0
    plain = capsys.readouterr()
    assert ask(*words, "--stream") == 0
    streamed = capsys.readouterr()

    assert plain.out == streamed.out  # streaming prints the same text
    assert "kept" in plain.err
    assert "freed" in plain.err


def test_sizes_by_entries_fit_and_counts(folder, document, capsys):
    engine = load(folder)
    layers, heads = len(engine.geometry.attention_layers), engine.geometry.kv_heads[0]
    session = engine.prefill(TEXT)
    prefix, token_bytes = session.state.prefix, engine.geometry.token_bytes
    common = ("--model", folder, "--context", document, "--question", "Who?", "--max-new-tokens", "1", "--json")

    ask(*common, "--entries", "33")
    assert json.loads(capsys.readouterr().out)["kept_entries"] == [[33 + prefix] * heads] * layers

    counts = [10 * (i + 1) for i in range(layers)]
    ask(*common, "--allocation", ",".join(map(str, counts)))
    assert json.loads(capsys.readouterr().out)["kept_entries"] == [[c + prefix] * heads for c in counts]

    limit = 400 * token_bytes + session.stats.state_bytes
    ask(*common, "--fit", str(limit))
    printed = json.loads(capsys.readouterr().out)
    used = printed["kv_bytes_kept"] + printed["kv_bytes_slack"] + printed["state_bytes"]
    assert used <= limit
    assert used > limit - 66 * token_bytes  # no more than one alignment unit is left unused


def test_pages_of_the_size_that_was_asked_for(llama, document, capsys):
    words = ("--model", llama, "--context", document, "--question", "Who?", "--max-new-tokens", "1", "--json")
    assert ask(*words, "--keep", "0.4", "--unit", "page", "--page-size", "8", "--page-reduce", "sum") == 0
    printed = json.loads(capsys.readouterr().out)

    policy = Policy(keep=0.4, unit="page", page_size=8, page_reduce="sum")
    assert Policy.from_json(printed["policy"]) == policy
    session = load(llama).prefill(TEXT)
    child = session.compact(policy)
    assert printed["kept_entries"] == child.stats.kept_entries
    edges = torch.tensor([session.state.prefix // 8, (len(session.tokens) - 1) // 8])  # these may be cut
    for heads in child.kept.positions:
        for head in heads:
            pages, counts = (head // 8).unique(return_counts=True)
            assert counts[(pages > edges[0]) & (pages < edges[1])].unique().tolist() == [8]


def test_scorers_that_need_a_recording_get_it(llama, document, capsys):
    words = ("--model", llama, "--context", document, "--question", "Who?", "--max-new-tokens", "1", "--keep", "0.4")
    for scorer in ("h2o", "expected_attention", "snapkv:window=100"):
        assert ask(*words, "--scorer", scorer, "--json") == 0
        assert json.loads(capsys.readouterr().out)["policy"]["scorer"] == scorer


@pytest.mark.skipif("qwen4_exp" not in tiny.FAMILIES, reason="this transformers has no qwen4_exp")
def test_a_model_that_can_only_be_kept_whole(tmp_path, document, capsys):
    words = ("--model", str(tiny.save("qwen4_exp", tmp_path / "m")), "--context", document, "--question", "Who?",
             "--max-new-tokens", "3")  # fmt: skip
    capsys.readouterr()
    assert ask(*words, "--keep", "0.3") == 2
    sentence = capsys.readouterr().err
    assert "cannot be evicted: its sparse indexer" in sentence
    assert sentence.endswith("use --keep 1\n")
    assert ask(*words, "--keep", "1", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert {count for layer in printed["kept_entries"] for count in layer} == {printed["logical_length"]}


def test_the_installed_command_works_as_a_process(llama, document):
    done = subprocess.run(
        [sys.executable, "-m", "wakesight.cli", "ask", "--model", llama, "--context", document, "--question", "Who?",
         "--max-new-tokens", "2", "--json"], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0
    assert json.loads(done.stdout)["logical_length"] > 400
    assert done.stderr == ""


def test_text_reaches_the_model_unchanged(folder, tmp_path):
    engine = load(folder)
    for text in ("ends in a space ", "ends\n", "<|im_start|>system\nx<|im_end|>", "\t é 日本 \U0001f600", "a\r\nb\r\n"):
        session = engine.prefill(text)
        context = session.tokens[session.state.prefix :]
        assert engine.tokenizer.decode(context, skip_special_tokens=False) == text
        assert not set(context) & {256, 257, 258}
