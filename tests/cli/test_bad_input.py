"""Bad input: one clear sentence on stderr, exit 2 (1 for lack of memory), no traceback, nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from wakesight.cli.main import run
from wakesight.testing import tiny


@pytest.fixture(scope="module")
def folder(llama):
    return llama


@pytest.fixture
def document(tmp_path):
    file = tmp_path / "document.txt"
    file.write_text("The harbour froze in the second week of March. " * 8)
    return str(file)


def failure(capsys, *words: str, code: int = 2) -> str:
    """The sentence that `ask` fails with, after checking its form."""
    capsys.readouterr()  # whatever the test's own preparation printed
    assert run(["ask", *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("wakesight: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def test_contexts_that_are_no_document(folder, tmp_path, capsys):
    for name, content, expected in (
        ("empty.txt", b"", "the context is empty"),
        ("one.txt", b"x", "keep=0.3 keeps 0 of 1 entries"),
        ("binary.bin", b"\x7fELF\0\0", "binary"),
        ("latin.txt", "caf\xe9 noir".encode("latin-1"), "not UTF-8"),
    ):
        (tmp_path / name).write_bytes(content)
        assert expected in failure(capsys, "--model", folder, "--context", str(tmp_path / name), "--question", "x")
    assert "does not exist" in failure(capsys, "--model", folder, "--context", "no.txt", "--question", "x")
    assert "is a folder" in failure(capsys, "--model", folder, "--context", str(tmp_path), "--question", "x")


def test_a_context_over_the_limit_names_both_numbers(folder, tmp_path, capsys):
    (tmp_path / "long.txt").write_text("x" * 1500)
    sentence = failure(capsys, "--model", folder, "--context", str(tmp_path / "long.txt"), "--question", "x")
    assert "1506 tokens" in sentence
    assert "1024" in sentence


def test_a_question_over_the_limit(folder, tmp_path, capsys):
    (tmp_path / "nearly.txt").write_text("x" * 1000)
    sentence = failure(
        capsys, "--model", folder, "--context", str(tmp_path / "nearly.txt"), "--question", "why " * 30, "--keep", "1"
    )
    assert "reads at most 1024" in sentence


@pytest.mark.parametrize("keep", ["0", "-0.5", "1.5", "nan", "inf"])
def test_fractions_outside_zero_to_one(folder, document, capsys, keep):
    sentence = failure(capsys, "--model", folder, "--context", document, "--question", "x", "--keep", keep)
    assert "above 0 and at most 1" in sentence


def test_a_fraction_that_keeps_nothing(folder, document, capsys):
    sentence = failure(capsys, "--model", folder, "--context", document, "--question", "x", "--keep", "0.0001")
    assert "keeps 0 of" in sentence
    assert "raise --keep to at least" in sentence


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--keep", "abc"), "is not a valid float"),
        (("--entries", "100000"), "give --entries 1 to"),
        (("--entries", "0"), "must be at least 1"),
        (("--fit", "10"), "raise --fit to at least"),
        (("--fit", "2 parsecs"), "is no size"),
        (("--keep", "0.5", "--entries", "5"), "give one size"),
        (("--scorer", "keydif"), "did you mean 'keydiff'"),
        (("--scorer", "snapkv:windw=3"), "did you mean 'window'"),
        (("--scorer", "snapkv:window"), "setting 'window' has no value; write window=32"),
        (("--scorer", "snapkv:window=16,window=8"), "setting 'window' is given twice"),
        (("--scorer", "snapkv:window=x"), "takes a value of type int"),
        (("--allocation", "piramid"), "did you mean 'pyramid'"),
        (("--allocation", "\u00b2,5"), "unknown allocation"),
        (("--allocation", "10,20"), "3 attention layers"),
        (("--allocation", "10,20,9999"), "asks for 9999 entries"),
        (("--allocation", "1,2,3", "--keep", "0.5"), "leave out keep"),
        (("--evicted", "demote", "--unit", "entry"), "use --unit page"),
        (("--pages", "4"), "--pages belongs to --evicted demote; add that"),
        (("--attend", "4"), "--attend belongs to --evicted demote"),
        (("--reservoir", "host"), "--reservoir belongs to --evicted demote"),
        (("--residency", "wants=oracle"), "--residency belongs to --evicted demote"),
        (("--evicted", "demote", "--residency", "want=oracle"), "--residency want=oracle sets nothing"),
        (("--evicted", "demote", "--residency", "wants"), "write NAME=VALUE"),
        (("--evicted", "demote", "--residency", "rerank=2", "--rerank", "3"), "--residency rerank is given twice"),
        (("--evicted", "demote", "--residency", "wants=guess"), "use 'sketch' or 'oracle'"),
        (("--evicted", "demote", "--attend", "some"), "attend='some' must be a whole number"),
        (("--evicted", "demote", "--pages", "3", "--attend", "5"), "lower --attend to 3"),
        (("--evicted", "demote", "--reservoir", "cloud"), "use 'host' or 'file:FOLDER'"),
        (("--evicted", "demote", "--reservoir", "file:/nowhere/at/all"), "/nowhere/at/all"),
        (("--unit", "line"), "use unit='entry' or unit='page'"),
        (("--page-size", "8"), "--page-size belongs to --unit page"),
        (("--page-reduce", "sum"), "--page-reduce belongs to --unit page"),
        (("--unit", "page", "--page-size", "0"), "1 to 4096"),
        (("--unit", "page", "--page-reduce", "median"), "use 'max' or 'mean' or 'sum'"),
        (("--evicted", "forget"), "is unknown"),
        (("--rerank", "4"), "--rerank belongs to --evicted demote"),
        (("--chunk", "100"), "multiple of 64"),
        (("--max-new-tokens", "0"), "at least 1"),
        (("--device", "warp"), "is unknown"),
        (("--dtype", "float8"), "is unknown"),
        (("--protect", "5000"), "protect fewer"),
        (("--stream", "--json"), "exclude each other"),
        (("--question", "  "), "question is empty"),
        (("--question", "\udcff"), "--question is not UTF-8 text"),
        (("--instruction", "\udcff"), "--instruction is not UTF-8 text"),
        (("--context", "other.txt"), "--context is given 2 times; give it once"),
        (("--session", "a.ws", "--session", "b.ws"), "--session is given 2 times"),
        (("--bogus",), "No such option"),
    ],
)
def test_wrong_choices_are_named(folder, document, capsys, words, expected):
    assert expected in failure(capsys, "--model", folder, "--context", document, "--question", "x", *words)


@pytest.mark.parametrize("missing", ["--model", "--context"])
def test_a_missing_model_or_document(folder, document, capsys, missing):
    words = {"--model": folder, "--context": document}
    del words[missing]
    sentence = failure(capsys, *[word for pair in words.items() for word in pair], "--question", "x")
    assert f"{missing} is missing; give a model and a document, or a saved session" in sentence


def test_no_question_at_all(folder, document, capsys):
    assert "there is no question" in failure(capsys, "--model", folder, "--context", document)


def test_models_that_are_none(document, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{ not json")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "file.bin").write_text("x")
    (tmp_path / "fake.gguf").write_text("not a gguf file")
    for name, expected in (
        ("smollm", "did you mean 'smollm2'"),
        (str(tmp_path / "empty"), "no config.json"),
        (str(tmp_path / "broken"), "could not be loaded"),
        (str(tmp_path / "strange"), "models of type 'gpt2' are not supported"),
        (str(tmp_path / "file.bin"), "no GGUF file"),
        (str(tmp_path / "fake.gguf"), "could not be loaded"),
        ("nobody/nothing", "could not be loaded"),
    ):
        assert expected in failure(capsys, "--model", name, "--context", document, "--question", "x")


def test_a_damaged_checkpoint(document, tmp_path, capsys):
    folder = tiny.save("llama", tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "could not be loaded" in failure(capsys, "--model", str(folder), "--context", document, "--question", "x")


def test_lack_of_memory_is_exit_1_and_leaves_nothing(folder, document, capsys, monkeypatch):
    real = torch.empty

    def small(*shape, **keywords):
        if keywords.get("dtype") == torch.float32 and shape and isinstance(shape[0], tuple) and len(shape[0]) == 2:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return real(*shape, **keywords)

    monkeypatch.setattr("wakesight.cache.pool.torch.empty", small)
    sentence = failure(capsys, "--model", folder, "--context", document, "--question", "x", code=1)
    assert "out of memory" in sentence


def test_debug_shows_the_traceback(document, capsys):
    assert run(["ask", "--model", "smollm", "--context", document, "--question", "x", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_real_process_out_of_memory(document, tmp_path):
    """The address space is capped once the text is tokenised: one sentence and exit 1, no abort."""
    folder = tiny.save("llama", tmp_path / "wide", num_hidden_layers=2, max_position_embeddings=2**27)
    code = (
        "import resource, sys, torch\n"
        "from wakesight.cli.main import run\n"
        "import wakesight.engines.hf.engine as e\n"
        "real = e.HFEngine._read\n"
        "def capped(*a, **k):\n"
        "    used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (used + 40 * 2**20,) * 2)\n"
        "    return real(*a, **k)\n"
        "e.HFEngine._read = capped\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    (tmp_path / "long.txt").write_text("x" * 400_000)
    words = ["ask", "--model", str(folder), "--context", str(tmp_path / "long.txt"), "--question", "x"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=300)

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("wakesight: out of memory")
    assert done.stderr.count("\n") == 1
