"""Needles stand where they should, and prompts are as long as asked for."""

from __future__ import annotations

import pytest

from wakesight.cli.trace_closed import Closed
from wakesight.errors import RequestError
from wakesight.testing import tiny
from wakesight.traces.english import English
from wakesight.traces.regimes import Script, Settings, prompt_of, scripts

BOTH = (English(), Closed())


@pytest.fixture(scope="module")
def wide():
    """Bytes are tokens: a paragraph of English has some hundreds."""
    return tiny.engine("llama", max_position_embeddings=16384)


def needle_text(engine, script):
    prompt = prompt_of(engine, script)
    return [engine.decode(prompt.tokens[start:end]) for start, end in prompt.needles]


@pytest.mark.parametrize("length", [4000, 8000])
def test_niah_puts_one_key_at_every_depth(wide, length):
    made = scripts(Settings("niah", length, (0, 0.25, 0.5, 1), (0, 1)), wide, BOTH)

    assert [(script.seed, script.depth) for script in made] == [(s, d) for s in (0, 1) for d in (0, 0.25, 0.5, 1)]
    for script in made:
        prompt = prompt_of(wide, script)
        ((start, end),) = script.needles
        sentence = script.context[start:end]
        assert script.answer in sentence
        assert needle_text(wide, script) == [sentence]
        assert 0.8 * length <= len(prompt.tokens) <= length
        assert abs(start / (len(script.context) - len(sentence)) - script.depth) < 0.12
        assert script.context.count(script.answer) == 1
        assert wide.decode(prompt.tokens).endswith(script.reply)


def test_scripts_are_the_same_for_the_same_seed_only(wide):
    first = scripts(Settings("niah", 4000, (0.5,), (0, 1)), wide, BOTH)

    assert first == scripts(Settings("niah", 4000, (0.5,), (0, 1)), wide, BOTH)
    assert first[0].answer != first[1].answer
    assert first[0].context != first[1].context


def test_recall_tells_facts_turn_by_turn_and_asks_for_one(wide):
    made = scripts(Settings("recall", 9000, seeds=(0, 1, 2)), wide, BOTH)

    for script in made:
        assert script.context.count("User: ") == script.context.count("Assistant: ") == 4
        ((start, end),) = script.needles
        assert script.answer in script.context[start:end]
        assert script.context[:start].endswith("User: ")
        assert needle_text(wide, script) == [script.context[start:end]]
        assert 6000 <= len(prompt_of(wide, script).tokens) <= 9000


def test_reasoning_has_the_whole_problem_as_needle(wide):
    pytest.importorskip("reasoning_gym")
    made = scripts(Settings("reasoning", seeds=(0, 1)), wide, BOTH)

    assert made[0].context != made[1].context
    for script in made:
        assert needle_text(wide, script) == [script.context]
        assert "boxed" in script.question
        assert script.answer


@pytest.mark.parametrize("regime", ["niah", "recall", "reasoning"])
def test_the_bundled_hybrid_is_asked_in_its_own_words(tiny_hybrid, regime):
    for script in scripts(Settings(regime, 300, (0.25, 0.75), (0, 1)), tiny_hybrid, BOTH):
        prompt = prompt_of(tiny_hybrid, script)
        assert script.language == "the closed language"
        ((start, end),) = script.needles
        assert needle_text(tiny_hybrid, script) == [script.context[start:end]]
        if regime != "reasoning":
            assert 250 <= len(prompt.tokens) <= 300
            assert script.answer in script.context[start:end]


@pytest.mark.real
@pytest.mark.parametrize("regime", ["niah", "recall"])
def test_needles_of_merged_tokens_hold_the_sentence_and_little_else(smollm2, regime):
    for script in scripts(Settings(regime, 1200), smollm2, BOTH):
        ((start, end),) = script.needles
        (text,) = needle_text(smollm2, script)
        assert text.strip() == script.context[start:end]


def test_a_token_that_begins_or_ends_outside_the_needle_belongs_to_it(wide):
    """As with the byte tokens here: é is two of them, and a cut between characters never falls inside."""
    script = Script("x", "niah", "aé the é b", ((1, 8),), "?", "", "", 0, "English")

    assert needle_text(wide, script) == ["é the é"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regime": "niha"}, "unknown regime 'niha', did you mean 'niah'"),
        ({"length": 0}, "--length 0 must be at least 1"),
        ({"depths": (0.5, 1.5)}, "--depths 0.5,1.5 must be numbers from 0 to 1"),
        ({"depths": ()}, "--depths"),
        ({"depths": (0.5, 0.5)}, "names one twice"),
        ({"seeds": (-1,)}, "--seeds -1 must be"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(RequestError, match=message):
        Settings(**changes)


@pytest.mark.parametrize("regime", ["niah", "recall"])
def test_a_length_without_room_is_refused(wide, regime):
    with pytest.raises(RequestError, match="--length 300 has no room"):
        scripts(Settings(regime, 300), wide, BOTH)


def test_a_model_of_other_words_is_refused(tiny_hybrid):
    with pytest.raises(RequestError, match="cannot read English"):
        scripts(Settings(), tiny_hybrid, (English(),))
