"""A client for `wakesight serve`: sessions over HTTP, with nothing but the standard library.

    from wakesight.client import Client
    client = Client("http://127.0.0.1:8000")
    doc = client.prefill(open("report.txt").read())
    small = doc.fork(keep=0.2)
    doc.drop()
    print(small.ask("Who signed it?").text)
    for piece in small.ask("And when?", stream=True): print(piece, end="")

A session's id is made here and known to nobody else; whoever has it may ask. Text becomes tokens on the server, or
with the tokenizer given, and tokens are what is sent: the server compares them with the session's.
"""

from __future__ import annotations

import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from wakesight.errors import RequestError, WorkError


@dataclass(frozen=True)
class Reply:
    """tokens: generated ids, an end-of-sequence id included if the server returns it. finish: "stop" or "length"."""

    text: str
    tokens: tuple[int, ...]
    finish: str


class Client:
    """One server.

    model: its name there; None takes the first it serves. tokenizer: a transformers tokenizer; without one the server
    splits the text, and control tokens that are spelled out in a document mean what they say. timeout: seconds.
    """

    def __init__(
        self, base_url: str = "http://127.0.0.1:8000", model: str | None = None, *, tokenizer: Any = None,
        api_key: str | None = None, timeout: float = 3600.0,
    ) -> None:  # fmt: skip
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._key, self._timeout, self._tokenizer = api_key, timeout, tokenizer
        self.model = model or str(self._send("/v1/models", None)["data"][0]["id"])

    def prefill(
        self, text: str | Sequence[int], *, instruction: str | None = None, chat: bool = True,
        record: Sequence[str] = (),
    ) -> RemoteSession:  # fmt: skip
        """Read a document once and keep it. record: signals or scorers to listen for, beside the usual.

        instruction: text before the document; it and the chat template are protected from eviction. Raises
        RequestError for what the server refuses, WorkError if it cannot be reached.
        """
        head, context, tail = self._framed(text, instruction, chat)
        session = RemoteSession(self, secrets.token_hex(16), (*head, *context), tail, "\n\n" if tail else "")
        keys: dict[str, Any] = {"ws_session": session.id, "ws_protect": min(256, len(head))}
        if record:
            keys["ws_record"] = ",".join(record)
        _told(self.complete(session.tokens, 1, keys))
        return session

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""
        if self._tokenizer is not None:
            from wakesight.models.chat import encode_plain

            return encode_plain(self._tokenizer, text)
        return self._ids({"prompt": text, "add_special_tokens": False})

    def complete(self, prompt: Sequence[int], max_tokens: int, keys: dict[str, Any]) -> dict[str, Any]:
        """One greedy completion of token ids, as the server gives it."""
        return self._send("/v1/completions", self._body(prompt, max_tokens, keys))

    def streamed(self, prompt: Sequence[int], max_tokens: int, keys: dict[str, Any]) -> Iterator[str]:
        """The same, piece by piece."""
        with self._open("/v1/completions", {**self._body(prompt, max_tokens, keys), "stream": True}) as response:
            for line in response:
                data = line.decode().removeprefix("data:").strip()
                if not data or data == "[DONE]":
                    continue
                found = json.loads(data)
                if "error" in found:
                    raise RequestError(str(found["error"].get("message", found["error"])))
                for choice in found.get("choices", ()):
                    if choice.get("text"):
                        yield str(choice["text"])

    def _body(self, prompt: Sequence[int], max_tokens: int, keys: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
            "return_token_ids": True, "vllm_xargs": keys,
        }  # fmt: skip

    def _framed(
        self, text: str | Sequence[int], instruction: str | None, chat: bool
    ) -> tuple[list[int], list[int], list[int]]:
        """Ids before the context, of it, and behind the question."""
        if not isinstance(text, str):
            return [], list(text), []
        if self._tokenizer is not None:
            from wakesight.models.chat import chat_frame, plain_frame

            frame = (chat_frame if chat else plain_frame)(self._tokenizer, instruction)
            return list(frame.head), self.encode(text), list(frame.tail)
        context = self.encode(text)
        before = self.encode(instruction + "\n\n") if instruction else []
        if not chat:
            return before, context, []
        whole = self._ids({"messages": [{"role": "user", "content": text}], "add_generation_prompt": True})
        size = len(context)
        at = next((i for i in range(len(whole) - size + 1) if whole[i : i + size] == context), None)
        if at is None:
            raise RequestError(
                "the model's chat template does not leave the document's tokens as they are; use chat=False, or give "
                "Client(tokenizer=AutoTokenizer.from_pretrained(...))"
            )
        return [*whole[:at], *before], context, whole[at + size :]

    def _ids(self, body: dict[str, Any]) -> list[int]:
        return [int(token) for token in self._send("/tokenize", {"model": self.model, **body})["tokens"]]

    def _send(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        with self._open(path, body) as response:
            found: dict[str, Any] = json.loads(response.read())
        return found

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(
                urllib.request.Request(self.base_url + path, data, headers), timeout=self._timeout
            )
        except urllib.error.HTTPError as error:
            raise _explained(error) from error
        except OSError as error:
            raise WorkError(
                f"no answer from {self.base_url} ({error}); start it with: wakesight serve --model M"
            ) from error


@dataclass(frozen=True)
class RemoteSession:
    """A context that a server holds, whole or compacted. Ids in `tokens` are the whole context's."""

    client: Client
    id: str
    tokens: tuple[int, ...]
    tail: Sequence[int] = ()
    separator: str = ""

    def fork(
        self, *, keep: float | None = None, entries: int | None = None, scorer: str | None = None,
        allocation: str | Sequence[int] | None = None, protect: int | None = None,
    ) -> RemoteSession:  # fmt: skip
        """A child that holds only what is kept; this session stays as it is."""
        child = RemoteSession(self.client, secrets.token_hex(16), self.tokens, self.tail, self.separator)
        sizes = {"ws_keep": keep, "ws_entries": entries, "ws_scorer": scorer, "ws_protect": protect}
        keys: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
        if allocation is not None:
            counts = not isinstance(allocation, str)
            keys["ws_allocation"] = ",".join(map(str, allocation)) if counts else allocation
        behind = self.tokens[-1]  # a fork runs one token behind the context; which one does not matter
        _told(self.client.complete((*self.tokens, behind), 1, {"ws_fork": self.id, "ws_child": child.id, **keys}))
        return child

    @overload
    def ask(
        self, question: str | Sequence[int], *, max_new_tokens: int = 128, stream: Literal[False] = False
    ) -> Reply: ...
    @overload
    def ask(
        self, question: str | Sequence[int], *, max_new_tokens: int = 128, stream: Literal[True]
    ) -> Iterator[str]: ...

    def ask(
        self, question: str | Sequence[int], *, max_new_tokens: int = 128, stream: bool = False
    ) -> Reply | Iterator[str]:
        """Answer one question, greedily; the session stays as it is. stream: pieces of text as they come."""
        prompt = (*self.tokens, *self._question(question))
        keys = {"ws_attach": self.id}
        if stream:
            return self.client.streamed(prompt, max_new_tokens, keys)
        found = self.client.complete(prompt, max_new_tokens, keys)
        choice = found["choices"][0]
        return Reply(choice["text"], tuple(choice.get("token_ids") or ()), choice["finish_reason"])

    def _question(self, question: str | Sequence[int]) -> list[int]:
        if not isinstance(question, str):
            return list(question)
        if not question.strip():
            raise RequestError("the question is empty; give one")
        return [*self.client.encode(self.separator + question), *self.tail]

    def info(self) -> dict[str, Any]:
        """What the server holds of it: tokens, entries per layer and head, blocks, bytes, kept positions."""
        return _told(self.client.complete([self.tokens[0]], 1, {"ws_info": self.id}))

    def drop(self) -> None:
        """Forget it there."""
        _told(self.client.complete([self.tokens[0]], 1, {"ws_drop": self.id}))


def _told(found: dict[str, Any]) -> dict[str, Any]:
    """What a completion brought back in wakesight's name. Raises RequestError for a refusal, or a plain vLLM."""
    told = (found.get("kv_transfer_params") or {}).get("wakesight")
    if told is None:
        raise RequestError("this server runs without wakesight's plugin; start it with: wakesight serve --model M")
    if "refused" in told:
        raise RequestError(told["refused"])
    return dict(told)


def _explained(error: urllib.error.HTTPError) -> Exception:
    text = error.read().decode(errors="replace")
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = text.strip()[:300] or str(error)
    return RequestError(text) if error.code < 500 else WorkError(text)
