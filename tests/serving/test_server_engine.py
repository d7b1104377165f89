"""`wakesight serve` as users meet it: its own processes, HTTP, our client and the openai package."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch

from wakesight.client import Client
from wakesight.engines.hf.engine import load
from wakesight.errors import RequestError, WorkError
from wakesight.policy import Policy
from wakesight.testing import tiny

TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 5
QUESTIONS = ("Who jumps?", "How many jugs are there?", "Over whom?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save("llama", tmp_path_factory.mktemp("llama"), head_dim=32)


@pytest.fixture(scope="module")
def server(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "wakesight", "serve", "--model", str(folder), "--port", str(port)]
    words += ["--max-model-len", "1024", "--", "--dtype", "float32", "--block-size", "32"]
    words += ["--num-gpu-blocks-override", "240", "--max-num-batched-tokens", "256"]
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    process = subprocess.Popen(words, env={**os.environ, **quiet}, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address, process)
        yield address
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def wait_for(address, process, seconds=500):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
            return
        except OSError:
            time.sleep(1)
    raise AssertionError("the server did not start")


@pytest.fixture(scope="module")
def client(server):
    return Client(server)


@pytest.fixture(scope="module")
def engine(folder):
    return load(str(folder))


@pytest.fixture(scope="module")
def whole(engine):
    with torch.no_grad():
        return engine.prefill(TEXT)


def same(text: str, reference: str) -> bool:
    """Random weights speak in random bytes; where those end in the middle of a character is a matter of taste."""
    return text.rstrip("\ufffd") == reference.rstrip("\ufffd")


def test_a_child_answers_over_http_as_on_transformers(client, whole):
    doc = client.prefill(TEXT)
    small = doc.fork(keep=0.5, scorer="keydiff")
    doc.drop()
    reference = whole.compact(Policy("keydiff", keep=0.5))

    assert doc.tokens == whole.tokens
    for question in QUESTIONS:
        wanted = reference.ask(question, max_new_tokens=12)
        reply = small.ask(question, max_new_tokens=12)
        assert reply.tokens[: len(wanted.tokens)] == wanted.tokens
        assert "".join(small.ask(question, max_new_tokens=12, stream=True)) == reply.text
    info = small.info()
    assert info["tokens"] == len(whole.tokens)
    assert info["kept_entries"] == reference.stats.kept_entries
    small.drop()
    with pytest.raises(RequestError, match="there is no session"):
        small.ask("Who?")


def test_the_tokenizer_may_be_the_clients_own(server, engine, whole):
    with_own = Client(server, tokenizer=engine.tokenizer)
    doc = with_own.prefill(TEXT, instruction="Read.")

    assert doc.tokens == engine.prefill(TEXT, instruction="Read.").tokens
    assert doc.info()["prefix"] == len(engine.frame("Read.", True).head)
    doc.drop()


def test_many_at_once(client):
    documents = [TEXT[: 200 + 60 * at] for at in range(3)]
    wholes = [client.prefill(document) for document in documents]
    sessions = [whole.fork(keep=0.5) for whole in wholes]
    alone = {(at, q): sessions[at].ask(q, max_new_tokens=12).text for at in range(3) for q in QUESTIONS}

    def streamed(key):
        return key, "".join(sessions[key[0]].ask(key[1], max_new_tokens=12, stream=True))

    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        assert dict(pool.map(streamed, alone)) == alone
    for session in wholes + sessions:
        session.drop()


def test_the_openai_package_on_completions_and_chat(server, client):
    openai = pytest.importorskip("openai")
    api = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    model = client.model
    session, child = "a" * 32, "b" * 32
    document = {"role": "system", "content": TEXT}
    keep = {"vllm_xargs": {"ws_session": session}, "add_generation_prompt": False}
    api.chat.completions.create(model=model, messages=[document], max_tokens=1, temperature=0, extra_body=keep)
    asked = [document, {"role": "user", "content": QUESTIONS[0]}]
    fork = {"vllm_xargs": {"ws_fork": session, "ws_child": child, "ws_keep": 0.5}}
    ask = {"vllm_xargs": {"ws_attach": child}}

    first = api.chat.completions.create(model=model, messages=asked, max_tokens=12, temperature=0, extra_body=fork)
    stream = api.chat.completions.create(
        model=model, messages=asked, max_tokens=12, temperature=0, extra_body=ask, stream=True
    )

    said = first.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == said
    other = [{"role": "system", "content": "x" + TEXT}, asked[1]]
    with pytest.raises(openai.BadRequestError, match="differs from the session's context"):
        api.chat.completions.create(model=model, messages=other, max_tokens=4, extra_body=ask)
    with pytest.raises(openai.BadRequestError, match="send max_tokens=1"):
        api.completions.create(
            model=model, prompt="a b", max_tokens=9, extra_body={"vllm_xargs": {"ws_session": "c" * 32}}
        )
    for one in (session, child):
        api.completions.create(model=model, prompt="a", max_tokens=1, extra_body={"vllm_xargs": {"ws_drop": one}})


def test_a_refusal_while_streaming_is_a_sentence_too(client):
    doc = client.prefill(TEXT)
    doc.drop()

    with pytest.raises(RequestError, match="there is no session"):
        list(doc.ask("Who?", stream=True))


def test_a_client_that_hangs_up_leaves_nothing(client, server):
    doc = client.prefill(TEXT)
    pieces = doc.ask("Tell me everything.", max_new_tokens=400, stream=True)
    next(pieces)
    pieces.close()

    deadline = time.monotonic() + 60
    while doc.info()["users"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert doc.info()["users"] == 0
    doc.drop()


def test_metrics(client, server):
    doc = client.prefill(TEXT)
    small = doc.fork(keep=0.25)
    small.ask("Who?", max_new_tokens=2)

    shown = urllib.request.urlopen(f"{server}/metrics", timeout=30).read().decode()
    numbers = {line.split()[0]: float(line.split()[1]) for line in shown.splitlines() if line.startswith("wakesight_")}

    assert numbers["wakesight_sessions"] == 2
    assert numbers["wakesight_children"] == 1
    assert numbers["wakesight_forks_total"] >= 1
    assert 0 < numbers["wakesight_session_bytes"] < numbers["wakesight_logical_bytes"]
    assert doc.id not in shown
    doc.drop()
    small.drop()


def test_ids_are_shown_to_nobody(client, server):
    doc = client.prefill(TEXT)

    assert doc.id not in json.dumps(doc.info())
    with pytest.raises(RequestError) as refused:
        client.complete([1], 1, {"ws_info": "0" * 32})
    assert "0" * 32 not in str(refused.value)
    doc.drop()


def test_no_server(folder):
    with pytest.raises(WorkError, match="wakesight serve"):
        Client("http://127.0.0.1:9", "model").prefill([1, 2, 3])
