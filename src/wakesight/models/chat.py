"""The chat template, cut where the context ends.

    head ids | context ids |  question ids  | tail ids
    template, instruction    asked later      end of turn, start of the reply

The context and the question are tokenised as plain text, apart from the template: chat-template
tokens inside a document stay text, and no template can trim or escape what the user gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wakesight.arguments import check_text, text_or_ids
from wakesight.errors import RequestError
from wakesight.models.words import check_words

_MARK = "\u2402wakesight-context\u2403"
PROTECT_LIMIT = 256  # GateSight: the instruction prefix is protected up to 256 tokens


@dataclass(frozen=True)
class Frame:
    """Token ids around the context of one session."""

    head: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()
    separator: str = ""

    @property
    def prefix(self) -> int:
        """prot = min(256, tokens before the context). Source: GateSight, protected prefix."""
        return min(PROTECT_LIMIT, len(self.head))

    def question_ids(self, text: str | Sequence[int], encode: Callable[[str], list[int]]) -> list[int]:
        """Ids that ask `text` behind the context; ids are taken as they are. Raises RequestError for an empty text."""
        given = text_or_ids(text, "the question")
        if not isinstance(given, str):
            return given
        if not given.strip():
            raise RequestError("the question is empty; type one after --question")
        return [*encode(self.separator + given), *self.tail]


def chat_frame(tokenizer: Any, instruction: str | None) -> Frame:
    """Cut the model's chat template around one user turn of instruction, context and question.

    Raises RequestError if the tokenizer has no template, or one that changes the user's text.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("this model's tokenizer has no chat template; use --no-chat (chat=False) to send plain text")
    turn = [{"role": "user", "content": _MARK}]
    rendered = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    head, mark, tail = rendered.partition(_MARK)
    if not mark or _MARK in tail:
        raise RequestError("this model's chat template rewrites the user's text; use --no-chat (chat=False)")
    ids = encode_template(tokenizer, head)
    if instruction:
        ids += encode_plain(tokenizer, instruction + "\n\n")
    return Frame(head=tuple(ids), tail=tuple(encode_template(tokenizer, tail)), separator="\n\n")


def plain_frame(tokenizer: Any, instruction: str | None) -> Frame:
    """No template: only the tokenizer's own start token, if it adds one, and the instruction."""
    start = list(tokenizer("").input_ids)
    if start and start[-1] == getattr(tokenizer, "eos_token_id", None):
        start.pop()
    return Frame(head=tuple(start + (encode_plain(tokenizer, instruction + "\n\n") if instruction else [])))


def encode_template(tokenizer: Any, text: str) -> list[int]:
    """Ids of template text, where control tokens mean what they say."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Ids of a user's text: nothing is added, and control tokens spelled out in it stay plain text.

    Raises RequestError for text that no encoding can hold, or whose words this tokenizer does not know.
    """
    check_text(text)
    check_words(tokenizer, text)
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)
