"""The identity law on a real model: smollm2, real English, up to 4,000 tokens."""

from __future__ import annotations

import os
import pydoc_data.topics

import pytest
import torch

from wakesight.bench.plain import plain_model
from wakesight.policy import Policy
from wakesight.testing.laws import clear_margin, greedy, relative_gap

pytestmark = pytest.mark.real

LENGTHS = (50, 90, 160, 300, 520, 800, 1200, 2000, 3000, 4000)
TOLERANCE = 1e-5
QUESTION = 20


@pytest.fixture(scope="module")
def plain(smollm2):
    return plain_model(smollm2)


@pytest.fixture(scope="module")
def english(smollm2) -> list[int]:
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return smollm2.encode(text[200_000:225_000])


@pytest.fixture(autouse=True)
def _all_threads():
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)


def prompt(english: list[int], length: int) -> tuple[list[int], list[int]]:
    """A context and its next 20 tokens, together `length` long, different text for each length."""
    tokens = english[length : 2 * length] if 2 * length < len(english) else english[:length]
    return tokens[:-QUESTION], tokens[-QUESTION:]


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_and_greedy_tokens_equal_plain_transformers(smollm2, plain, english, length):
    context, question = prompt(english, length)
    expected = plain(input_ids=torch.tensor([context + question]), logits_to_keep=QUESTION + 1).logits[0, 1:]
    tokens, rows = greedy(plain, context + question, 12)
    clear = [clear_margin(row) for row in rows]
    until = clear.index(False) if False in clear else len(clear)

    one_shot = -(-length // 64) * 64
    for chunk in {512, one_shot}:
        with smollm2.prefill(context, chunk=chunk) as session:
            gap = relative_gap(session.logits(question), expected)
            allowed = TOLERANCE
            if gap > TOLERANCE and chunk < length:
                own = greedy(plain, context + question, 1, chunk=chunk)[1]
                allowed = max(allowed, 2 * relative_gap(own, rows[:1]))
            assert gap < allowed
            assert relative_gap(session.logits(question[:1]), expected[:1]) < allowed
            made = session.ask(question, max_new_tokens=12).tokens
            assert list(made[:until]) == [t for t in tokens[:until] if t not in smollm2._ends]


def test_eager_attention_gives_the_same(smollm2, plain, english):
    from wakesight.engines.hf.engine import load

    eager = load(plain_model(smollm2), tokenizer=smollm2.tokenizer, attention="eager")
    for length in (90, 800):
        context, question = prompt(english, length)
        expected = plain(input_ids=torch.tensor([context + question]), logits_to_keep=QUESTION).logits[0]
        for chunk in (64, 832):
            assert relative_gap(eager.prefill(context, chunk=chunk).logits(question), expected) < TOLERANCE
    eager.close()


def test_keeping_everything_is_bit_identical(smollm2, english):
    context, question = prompt(english, 1200)
    with smollm2.prefill(context) as whole, whole.compact(Policy(scorer="keydiff", keep=1.0)) as child:
        assert torch.equal(child.logits(question), whole.logits(question))
        assert torch.equal(child.logits(question[:1]), whole.logits(question[:1]))


def test_the_model_follows_its_chat_template(smollm2):
    document = "The harbour master of Vell is called Anna Brandt. The lighthouse has a green door."
    with smollm2.prefill(document) as session:
        assert "Brandt" in session.ask("What is the name of the harbour master?", max_new_tokens=24).text
        assert "green" in session.ask("What colour is the door?", max_new_tokens=24).text.lower()
