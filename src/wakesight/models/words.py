"""Tokenizers that know whole words only: what they cannot hold is refused, never turned into another token."""

from __future__ import annotations

from typing import Any

from wakesight.errors import RequestError

SHOWN = 3  # unknown words named in a refusal


def check_words(tokenizer: Any, text: str, control: bool = False) -> None:
    """Raise RequestError naming words of `text` that a word-level tokenizer lacks; other tokenizers hold any text.

    control: whether control tokens (<eos>, ...) may occur. To such a tokenizer they are words like any other, and a
    document must not end its own turn; a template may.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "WordLevel":
        return
    for token in tokenizer.get_added_vocab() if control else ():
        text = text.replace(token, " ")
    known = tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)
    words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    unknown = list(dict.fromkeys(word for word in words if word not in known))
    if unknown:
        more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
        raise RequestError(
            f"this model knows {len(known)} words, and not {', '.join(map(repr, unknown[:SHOWN]))}{more}; "
            "give text made of its own words (wakesight eval closed makes such texts), or take another model"
        )
