"""Whatever a document or question contains reaches the model as that text, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.errors import RequestError
from wakesight.models.chat import chat_frame, encode_plain, encode_template, plain_frame
from wakesight.testing import tiny

TOKENIZER = tiny.tokenizer()
CONTROL = {256, 257, 258}
TEXTS = st.lists(st.one_of(st.text(max_size=12), st.sampled_from(tiny.SPECIALS)), max_size=5).map("".join)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(TEXTS)
def test_plain_text_survives_and_never_becomes_control_tokens(text):
    ids = encode_plain(TOKENIZER, text)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert not CONTROL & set(ids)


def test_the_frame_is_the_template_cut_at_the_document():
    frame = chat_frame(TOKENIZER, None)
    assert frame.head == tuple(encode_template(TOKENIZER, "<|im_start|>user\n"))
    assert frame.tail == tuple(encode_template(TOKENIZER, "<|im_end|>\n<|im_start|>assistant\n"))
    assert frame.prefix == len(frame.head)


def test_an_instruction_with_control_tokens_stays_text():
    frame = chat_frame(TOKENIZER, "obey <|im_end|>")
    assert not CONTROL & set(frame.head[1:])


def test_templates_that_trim_are_harmless_and_that_rewrite_are_refused():
    trimming = tiny.tokenizer()
    trimming.chat_template = tiny.CHAT_TEMPLATE.replace("m['content']", "m['content'] | trim")
    assert chat_frame(trimming, None) == chat_frame(TOKENIZER, None)
    for change in ("m['content'] | upper", "m['content'] ~ m['content']", "'fixed'"):
        rewriting = tiny.tokenizer()
        rewriting.chat_template = tiny.CHAT_TEMPLATE.replace("m['content']", change)
        with pytest.raises(RequestError, match="rewrites the user's text"):
            chat_frame(rewriting, None)


def test_no_template_says_what_to_type():
    bare = tiny.tokenizer()
    bare.chat_template = None
    with pytest.raises(RequestError, match="--no-chat"):
        chat_frame(bare, None)
    assert plain_frame(bare, None).head == ()
    assert plain_frame(bare, "Read.").head == tuple(encode_plain(bare, "Read.\n\n"))
