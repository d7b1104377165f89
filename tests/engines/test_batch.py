"""A row of a batch equals the same session alone: kept sets, logits, answers, also in transformers' own generate."""

from __future__ import annotations

import functools

import pytest
import torch

from wakesight.engines.batch import SessionBatch
from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.scores.table import SCORERS
from wakesight.testing import tiny
from wakesight.testing.artifacts import fitted, scores_of
from wakesight.testing.laws import Masked, cached, relative_gap, same_but_for_ties

TOLERANCE = 1e-5
PAD, END = 258, 257
LENGTHS = ((60, 100), (1, 300))
QUESTIONS = [tiny.tokens(9, seed=7), tiny.tokens(4, seed=8)]
WHOLE_ONLY = ("qwen4_exp",)
EVICTING = [family for family in tiny.FAMILIES if family not in WHOLE_ONLY]
SOME = ("llama", "gemma3", "qwen3_5", "falcon_h1")


@functools.lru_cache(maxsize=1)
def engine_of(family: str):
    return fitted(tiny.engine(family))


def contexts(lengths) -> list[list[int]]:
    return [tiny.tokens(length, seed=length) for length in lengths]


def left_padded(rows) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def prefilled(family: str, lengths, form: str, **options) -> SessionBatch:
    engine, rows = engine_of(family), contexts(lengths)
    if form == "lists":
        return engine.prefill_batch(rows, **options)
    ids, mask = left_padded(rows)
    return engine.prefill_batch(ids, attention_mask=mask, **options)


def generated(engine, cache, rows, new: int, **options) -> list[list[int]]:
    """What transformers' generate makes of left-padded rows behind `cache`, without the end token and what follows."""
    ids, mask = left_padded(rows)
    made = engine.model.generate(
        ids,
        attention_mask=mask,
        **cached(cache),
        max_new_tokens=new,
        pad_token_id=PAD,
        **{"do_sample": False, **options},
    )
    return [until_end(row) for row in made[:, ids.shape[1] :].tolist()]


def until_end(row: list[int]) -> list[int]:
    return row[: row.index(END)] if END in row else row


def same_sets(one, other) -> bool:
    return all(
        torch.equal(a, b)
        for heads, others in zip(one.positions, other.positions, strict=True)
        for a, b in zip(heads, others, strict=True)
    )


@pytest.mark.oldest
@pytest.mark.parametrize("form", ["left-padded tensor", "lists"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rows_are_read_as_if_alone_and_no_pad_is_kept(family, form):
    for lengths in LENGTHS if form != "lists" else LENGTHS[:1]:
        batch = prefilled(family, lengths, form)
        for row, context, length in zip(batch, contexts(lengths), lengths, strict=True):
            alone = engine_of(family).prefill(context)
            assert row.tokens == alone.tokens == tuple(context)
            assert row.stats.logical_length == length
            assert row.stats.kept_entries == [[length] * heads for heads in row.engine.geometry.kv_heads]
            assert row.stats.kv_bytes_freed == 0
            assert torch.equal(row.logits(QUESTIONS[0]), alone.logits(QUESTIONS[0]))
        batch.close()


@pytest.mark.oldest
@pytest.mark.parametrize("family", EVICTING)
def test_rows_of_60_and_100_decode_together_as_alone(family):
    batch = prefilled(family, LENGTHS[0], "left-padded tensor")
    small = batch.compact(Policy(scorer="snapkv", keep=0.4, allocation="ada"))
    for rows in (batch, small):
        answers = [answer.tokens for answer in rows.ask(QUESTIONS, max_new_tokens=8)]
        assert answers == [
            row.ask(question, max_new_tokens=8).tokens for row, question in zip(rows, QUESTIONS, strict=True)
        ]
        made = generated(engine_of(family), rows.cache(), QUESTIONS, 8)
        assert made == [list(answer) for answer in answers]
    assert answers[0] != answers[1]  # rows that answered alike could be swapped unnoticed


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("family", SOME)
def test_every_scorer_keeps_what_it_keeps_alone(family, lengths, scorer):
    batch = prefilled(family, lengths, "left-padded tensor", record=[scorer])
    policy = Policy(scorer=scorer, entries=1) if 1 in lengths else Policy(scorer=scorer, keep=0.4, allocation="global")
    small = batch.compact(policy)
    plain = tiny.model(family)
    for row, child, context in zip(batch, small, contexts(lengths), strict=True):
        alone = engine_of(family).prefill(context, record=[scorer])
        solo = alone.compact(policy)
        assert same_sets(child.kept, solo.kept)
        assert same_but_for_ties(child.kept, solo.kept, scores_of(row, policy.scorer_method))
        assert all(int(head.max()) < len(context) for layer in child.kept.positions for head in layer if len(head))
        found = child.logits(QUESTIONS[0])
        assert torch.equal(found, solo.logits(QUESTIONS[0]))
        assert relative_gap(found, Masked(plain, context).logits(QUESTIONS[0], child.kept)) < TOLERANCE
    assert [answer.tokens for answer in small.ask(QUESTIONS, max_new_tokens=6)] == [
        child.ask(question, max_new_tokens=6).tokens for child, question in zip(small, QUESTIONS, strict=True)
    ]


@pytest.mark.parametrize("family", SOME)
def test_children_of_one_context_under_different_policies_decode_together(family):
    whole = engine_of(family).prefill(tiny.tokens(150), record=["h2o"])
    policies = [
        Policy(scorer="knorm", keep=0.3, allocation="global"),
        Policy(scorer="h2o", keep=0.5, allocation="ada"),
        Policy(scorer="streaming", keep=0.05),
        Policy(scorer="random", keep=0.6, allocation="pyramid"),
        Policy(scorer="snapkv", keep=0.5, unit="page"),
    ]
    batch = SessionBatch([whole, *(whole.compact(policy) for policy in policies)])
    questions = [tiny.tokens(3 + i, seed=20 + i) for i in range(len(batch))]

    answers = [answer.tokens for answer in batch.ask(questions, max_new_tokens=8)]

    assert answers == [row.ask(q, max_new_tokens=8).tokens for row, q in zip(batch, questions, strict=True)]
    assert generated(engine_of(family), batch.cache(), questions, 8) == [list(answer) for answer in answers]
    assert all(
        torch.equal(a, row.logits(q)) for a, row, q in zip(batch.logits(questions), batch, questions, strict=True)
    )


def test_rows_that_end_early_leave_the_others_alone(monkeypatch):
    engine = tiny.engine("qwen3_5")
    batch = engine.prefill_batch(contexts((60, 100, 80)))
    questions = [*QUESTIONS, tiny.tokens(5, seed=9)]
    long = [row.ask(q, max_new_tokens=12).tokens for row, q in zip(batch, questions, strict=True)]
    monkeypatch.setattr(engine, "_ends", frozenset({long[1][2]}))

    answers = batch.ask(questions, max_new_tokens=12)

    assert [answer.tokens for answer in answers] == [
        row.ask(q, max_new_tokens=12).tokens for row, q in zip(batch, questions, strict=True)
    ]
    assert answers[1].finish == "eos"
    assert len(answers[1].tokens) <= 2
    assert len({len(answer.tokens) for answer in answers}) > 1


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "falcon_h1", "gemma3", "jamba"])
def test_beam_search_and_sampling_go_on_as_plain_transformers(family):
    """Nothing was dropped, so transformers on all ids must find the same beams, and draw the same samples."""
    context, question = tiny.tokens(80), QUESTIONS[0]
    engine, plain = engine_of(family), tiny.model(family)
    full = torch.tensor([[*context, *question]])
    same = engine.prefill(context).compact(Policy(scorer="knorm", keep=1.0, allocation="global"))
    for options in (
        {"num_beams": 3, "num_return_sequences": 3, "do_sample": False},
        {"num_return_sequences": 3, "do_sample": True, "top_k": 0, "temperature": 0.7},
    ):
        torch.manual_seed(0)
        expected = plain.generate(full, max_new_tokens=8, pad_token_id=PAD, **options)[:, full.shape[1] :].tolist()
        torch.manual_seed(0)
        found = generated(engine, same.cache(), [question], 8, **options)
        assert found == [until_end(row) for row in expected]
        assert len({tuple(row) for row in found}) == 3  # three equal rows could hide a mix-up


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "falcon_h1", "gemma3"])
def test_beams_of_padded_rows_equal_the_beams_of_each_alone(family):
    engine = engine_of(family)
    for keep in (1.0, 0.4):
        batch = prefilled(family, LENGTHS[0], "lists").compact(Policy(scorer="knorm", keep=keep, allocation="ada"))
        together = generated(engine, batch.cache(), QUESTIONS, 8, num_beams=3)
        alone = [
            generated(engine, row.cache(), [question], 8, num_beams=3)[0]
            for row, question in zip(batch, QUESTIONS, strict=True)
        ]
        assert together == alone


def test_a_sparse_indexer_is_read_in_a_batch_and_asked_row_by_row():
    batch = prefilled("qwen4_exp", LENGTHS[0], "lists")
    with pytest.raises(RequestError, match="cannot run several sequences at once; ask row by row"):
        batch.ask(QUESTIONS, max_new_tokens=4)
    ids, mask = left_padded(QUESTIONS)
    for make, options in ((batch.cache, {}), (batch[0].cache, {"num_beams": 2})):
        rows = slice(None) if make == batch.cache else slice(0, 1)
        with pytest.raises(RequestError, match="cannot run several sequences at once; ask row by row"):
            batch[0].engine.model.generate(
                ids[rows], attention_mask=mask[rows], **cached(make()), max_new_tokens=2, pad_token_id=PAD, **options
            )
    for row, context in zip(batch, contexts(LENGTHS[0]), strict=True):
        plain = tiny.model("qwen4_exp")(input_ids=torch.tensor([[*context, *QUESTIONS[0]]])).logits[0, len(context) :]
        assert relative_gap(row.logits(QUESTIONS[0]), plain) < TOLERANCE


def test_batches_that_cannot_be_are_refused():
    engine = engine_of("llama")
    batch = prefilled("llama", LENGTHS[0], "lists")
    with pytest.raises(RequestError, match="2 rows, but 3 questions"):
        batch.ask([*QUESTIONS, [1]])
    with pytest.raises(RequestError, match="at least one session"):
        SessionBatch([])
    with pytest.raises(RequestError, match="occurs twice"):
        SessionBatch([batch[0], batch[0]]).ask(QUESTIONS)
    with pytest.raises(RequestError, match="different engines"):
        SessionBatch([batch[0], tiny.engine("llama").prefill([1, 2])]).ask(QUESTIONS)
    ids, mask = left_padded(contexts(LENGTHS[0]))
    with pytest.raises(RequestError, match="pad the rows on the left"):
        engine.prefill_batch(ids.flip(1), attention_mask=mask.flip(1))
    with pytest.raises(RequestError, match="attention_mask belongs to a tensor"):
        engine.prefill_batch(contexts(LENGTHS[0]), attention_mask=mask)
    before = (engine.pool.held_bytes, engine.pool.leases)
    with pytest.raises(RequestError, match="outside the model's vocabulary"):
        engine.prefill_batch([[1, 2], [1, 999]])
    with pytest.raises(RequestError):
        batch.compact(Policy(scorer="knorm", entries=80))  # the row of 60 cannot
    assert (engine.pool.held_bytes, engine.pool.leases) == before
