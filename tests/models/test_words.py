"""A tokenizer of whole words refuses what it does not know."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from wakesight.errors import RequestError
from wakesight.models.chat import encode_plain
from wakesight.models.words import check_words


def words_only(unknown: str | None = None) -> PreTrainedTokenizerFast:
    vocabulary = {word: at for at, word in enumerate(["the", "cat", "sleeps", "<eos>", "<unk>"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token=unknown)


def test_known_words_become_their_ids() -> None:
    assert encode_plain(words_only(), "the cat\n\nsleeps") == [0, 1, 2]


@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_unknown_words_are_refused_by_name(unknown: str | None) -> None:
    with pytest.raises(RequestError, match=r"not 'dog', 'barks', 'at' and 1 more"):
        encode_plain(words_only(unknown), "the dog barks at night")


def test_a_control_token_in_a_document_is_no_word() -> None:
    with pytest.raises(RequestError, match="<eos>"):
        encode_plain(words_only(), "the cat <eos> sleeps")


def test_other_tokenizers_are_left_alone() -> None:
    check_words(object(), "anything at all")
    backend = Tokenizer(models.BPE({"a": 0}, []))
    check_words(PreTrainedTokenizerFast(tokenizer_object=backend), "anything at all")
