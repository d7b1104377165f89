"""Demoted sessions: exact where all is read, restored after every answer, and every byte accounted for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from wakesight.cache.pool import Pool
from wakesight.core import Answer
from wakesight.engines.hf import compat
from wakesight.engines.hf.compacting import compacting
from wakesight.engines.hf.engine import HFEngine
from wakesight.engines.session import Session, ask_together
from wakesight.errors import RequestError
from wakesight.models.families import family_of
from wakesight.models.load import LoadedModel
from wakesight.policy import Policy
from wakesight.residency import Residency
from wakesight.testing import tiny
from wakesight.testing.laws import relative_gap

N, PAGE = 203, 8
QUESTION, OTHER = tiny.tokens(20, seed=3), tiny.tokens(37, seed=4)
HOLDS_PAGES = tuple(family for family in tiny.FAMILIES if family not in ("kimi_linear", "qwen4_exp"))


def demote(keep: float | None = None, **fields) -> Policy:
    return Policy(keep=keep, unit="page", evicted="demote", page_size=PAGE, residency=Residency(**fields))


@pytest.fixture(scope="module")
def llama():
    return tiny.engine("llama")


@pytest.fixture(scope="module")
def hybrid():
    return tiny.engine("qwen3_5")


@pytest.fixture(scope="module")
def whole(llama):
    with torch.no_grad():
        return llama.prefill(tiny.tokens(N))


@pytest.mark.parametrize("family", HOLDS_PAGES)
def test_reading_all_pages_through_one_slot_is_full_attention(family):
    """What is not in the slot or the tail is in the reservoir only; freed memory is NaN."""
    engine = tiny.engine(family)
    whole = engine.prefill(tiny.tokens(N))
    for pages in (1, 5):
        with whole.compact(demote(pages=pages, attend="all")) as child:
            assert relative_gap(child.logits(QUESTION), whole.logits(QUESTION)) < 1e-5
            asked, expected = (one.ask(QUESTION, max_new_tokens=12) for one in (child, whole))
            assert expected.margin < 1e-4 or asked.tokens == expected.tokens
            assert asked.misses > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_keeping_everything_is_full_attention_with_either_kernel(attention):
    engine = tiny.engine("llama", attention=attention)
    whole = engine.prefill(tiny.tokens(N))

    child = whole.compact(demote(keep=1))

    assert relative_gap(child.logits(OTHER), whole.logits(OTHER)) < 1e-5


@pytest.mark.parametrize(
    ("family", "message"), [("kimi_linear", "stores latent keys"), ("qwen4_exp", "sparse indexer")]
)
def test_models_whose_pages_cannot_be_demoted_are_named(family, message):
    if family not in tiny.FAMILIES:
        pytest.skip(f"this transformers has no {family}")
    engine = tiny.engine(family)

    with pytest.raises(RequestError, match=f"tiny-{family} cannot be demoted: it.* {message}"):
        engine.prefill(tiny.tokens(40)).compact(demote(keep=0.5))


def test_at_r_1_tokens_do_not_depend_on_b_or_on_the_first_set(whole):
    policies = [
        demote(attend=4, pages=4),
        demote(attend=4, pages=9).at(scorer="random"),
        demote(attend=4, pages=100).at(scorer="streaming"),
    ]
    answers = [whole.compact(policy).ask(QUESTION, max_new_tokens=16) for policy in policies]

    assert len({answer.tokens for answer in answers}) == 1
    assert len({answer.misses for answer in answers}) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rerank": 4},
        {"rerank": 16, "reads": "resident"},
        {"pages": 9, "attend": 4},
        {"recent": 2, "sketch": "int8"},
        {"wants": "oracle", "attend": 3},
        {"attend": "all", "pages": 3},
        {"dense_layers": 1, "dense_heads": [(1, 0), (2, 1)]},
    ],
    ids=str,
)
def test_question_order_does_not_matter(llama, whole, fields):
    child = whole.compact(demote(keep=0.25, **fields))
    held = (llama.pool.held_bytes, child.stats)

    first, second = child.ask(QUESTION, max_new_tokens=20), child.ask(OTHER, max_new_tokens=20)
    again = child.ask(QUESTION, max_new_tokens=20)

    def facts(answer: Answer):
        return answer.tokens, answer.misses, answer.fetches, answer.margin

    assert facts(again) == facts(first)
    fresh = whole.compact(demote(keep=0.25, **fields))
    assert facts(fresh.ask(OTHER, max_new_tokens=20)) == facts(second)
    assert second.misses > 0 or child.stats.reservoir_bytes == 0
    fresh.close()
    assert dataclasses.replace(child.stats, kv_bytes_slack=0) == dataclasses.replace(held[1], kv_bytes_slack=0)
    child.close()


@pytest.mark.parametrize(
    "fields", [{}, {"wants": "oracle", "rerank": 9}, {"dense_layers": 1, "sketch": "int8"}], ids=str
)
def test_the_ledger_is_the_bytes_of_real_tensors(fields):
    engine = tiny.engine("qwen3_5")
    whole = engine.prefill(tiny.tokens(N))
    before = engine.pool.held_bytes
    child = whole.compact(demote(keep=0.3, **fields))
    stats = child.stats

    assert engine.pool.held_bytes - before == stats.kv_bytes_kept + stats.kv_bytes_slack
    assert stats.reservoir_bytes <= engine.pool.reservoir_bytes
    assert stats.kv_bytes_freed == stats.kv_bytes_full - stats.kv_bytes_kept
    pages = [slots.pages for slots in child.state.paged]
    entry = PAGE * engine.geometry.token_bytes // len(engine.geometry.kv_heads)
    assert stats.reservoir_bytes == sum(pages) * entry
    assert (stats.sketch_bytes > 0) == (fields.get("wants") != "oracle")
    child.close()
    assert (engine.pool.held_bytes, engine.pool.reservoir_bytes) == (before, 0)


def test_fit_counts_every_line_of_fast_memory(hybrid):
    whole = hybrid.prefill(tiny.tokens(900))
    policy = demote(recent=1)
    stats = whole.compact(policy.at(bytes=200_000)).stats

    used = stats.kv_bytes_kept + stats.kv_bytes_slack + stats.state_bytes
    page = PAGE * hybrid.geometry.token_bytes
    assert 200_000 - page < used <= 200_000
    with pytest.raises(RequestError, match="bytes are too few: one page per KV head") as refused:
        whole.compact(policy.at(bytes=50_000))
    least = int(str(refused.value).split("--fit to at least ")[1].split(",")[0])
    small = whole.compact(policy.at(bytes=least)).stats
    assert small.kv_bytes_kept + small.kv_bytes_slack + small.state_bytes <= least


def test_a_share_becomes_whole_pages_per_layer(whole):
    plans = [slots.plan for slots in whole.compact(demote(keep=0.25)).state.paged]
    uneven = whole.compact(demote(keep=0.25).at(allocation="pyramid")).state.paged
    given = whole.compact(demote().at(allocation=(80, 7, 40))).state.paged

    # a quarter of 203 is 51 entries: 6 pages each, and with what is left one more for the first layer
    assert [plan.slots for plan in plans] == [7, 6, 6]
    assert all(plan.attend == plan.slots for plan in plans)
    counts = [slots.plan.slots for slots in uneven]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]
    assert sum(counts) * PAGE <= 3 * 51
    assert [slots.plan.slots for slots in given] == [9, 1, 5]  # the page of layer 1 comes out of layer 0


def test_the_best_pages_of_the_scorer_are_resident_first(whole):
    child = whole.compact(demote(keep=0.25, recent=2))
    dropped = whole.compact(Policy(keep=0.25, unit="page", page_size=PAGE))

    for slots, kept in zip(child.state.paged, dropped.kept.positions, strict=True):
        for row, positions in zip(slots.table.slot_page, kept, strict=True):
            wanted = {int(at) // PAGE - 1 for at in positions if at >= PAGE}  # ids count from behind the sink
            settled = N // PAGE - 1 - 2
            assert len(set(row.tolist()) & wanted) >= min(len(row), len([p for p in wanted if p < settled])) - 1
            assert max(row.tolist()) < settled


def test_pages_beside_a_size_win_and_attend_must_fit(whole):
    assert [s.plan.slots for s in whole.compact(demote(keep=0.25, pages=3)).state.paged] == [3, 3, 3]
    with pytest.raises(RequestError, match="attend=9 pages cannot be read in attention layer 0, which holds 7"):
        whole.compact(demote(keep=0.25, attend=9))


def test_what_cannot_come_back_is_refused(whole):
    dropped = whole.compact(Policy(keep=0.5))
    with pytest.raises(RequestError, match="has dropped entries for good"):
        dropped.compact(demote(keep=0.3))
    child = whole.compact(demote(keep=0.25))
    with pytest.raises(RequestError, match="is demoted already"):
        child.compact(demote(keep=0.1))
    with pytest.raises(RequestError, match="only a whole one can be compacted"):
        child.compact(Policy(keep=0.1))
    with pytest.raises(RequestError, match="cannot be scored"):
        child.signals()
    with pytest.raises(RequestError, match="a demoted session cannot be followed"):
        child.engine.follow(child.state, QUESTION)
    with pytest.raises(RequestError, match="a demoted session cannot be watched"):
        child.engine.overhear(child.state, QUESTION, [None] * 3)
    with pytest.raises(RequestError, match="a demoted session cannot be watched"):
        next(child.engine.stepping(child.state, 3, [None] * 3))
    with pytest.raises(RequestError, match="names KV head 7 of attention layer 0"):
        whole.compact(demote(keep=0.3, dense_heads=((0, 7),)))
    with pytest.raises(RequestError, match="dense_layers=4 is more than the 3"):
        whole.compact(demote(keep=0.3, dense_layers=4))
    with pytest.raises(RequestError, match="nowhere"):
        whole.compact(demote(keep=0.3, reservoir="file:/nowhere"))


def test_dense_heads_read_everything(whole):
    """All heads dense: full attention, however few pages there are."""
    everything = [(layer, head) for layer in range(3) for head in range(2)]
    child = whole.compact(demote(pages=1, dense_heads=everything))

    assert relative_gap(child.logits(QUESTION), whole.logits(QUESTION)) < 1e-5
    with pytest.raises(RequestError, match="dense_heads"):
        child.save("unused.ws")


def test_appending_for_good_goes_on_in_pages(hybrid):
    context, more = tiny.tokens(N), tiny.tokens(150, seed=8)
    whole = hybrid.prefill(context)
    child = whole.compact(demote(pages=4, attend="all"))
    for session in (whole, child):
        session.append(more)

    assert child.tokens == whole.tokens
    assert [slots.pages for slots in child.state.paged] == [(N + 150) // PAGE - 1] * 2
    assert relative_gap(child.logits(QUESTION), whole.logits(QUESTION)) < 1e-5
    asked = [child.ask(QUESTION, max_new_tokens=4) for _ in range(2)]
    assert asked[0].misses == asked[1].misses
    child.append(more[:3])
    assert child.stats.logical_length == N + 153


@pytest.mark.parametrize(
    "fields", [{}, {"rerank": 5, "sketch": "int8", "dense_layers": 1}, {"attend": "all", "pages": 2}], ids=str
)
def test_a_saved_session_answers_alike(hybrid, tmp_path, fields):
    child = hybrid.prefill(tiny.tokens(N)).compact(demote(keep=0.25, **fields))
    child.append(tiny.tokens(30, seed=8))
    child.save(tmp_path / "a.ws")
    back = Session.load(tmp_path / "a.ws", hybrid)

    facts = [dataclasses.replace(one.stats, kv_bytes_slack=0) for one in (child, back)]  # sketches grow anew
    assert facts[0] == facts[1]
    assert back.policy == child.policy
    one, other = child.ask(QUESTION, max_new_tokens=16), back.ask(QUESTION, max_new_tokens=16)
    assert (one.tokens, one.misses, one.fetches) == (other.tokens, other.misses, other.fetches)
    assert torch.equal(child.logits(OTHER), back.logits(OTHER))


def test_rows_of_a_batch_equal_themselves_alone(llama, whole):
    other = llama.prefill(tiny.tokens(77, seed=6))
    rows = [
        whole,
        whole.compact(demote(keep=0.25)),
        whole.compact(demote(keep=0.1, rerank=4)),
        other.compact(demote(keep=0.5)),
        whole.compact(Policy(keep=0.25)),
    ]
    questions = [QUESTION, QUESTION, OTHER, QUESTION[:3], OTHER]
    alone = [row.ask(question, max_new_tokens=10) for row, question in zip(rows, questions, strict=True)]

    together = ask_together(rows, questions, 10)

    for one, row in zip(alone, together, strict=True):
        assert one.tokens == row.tokens
        assert (one.misses, one.fetches) == (row.misses, row.fetches)
    assert [answer.misses > 0 for answer in together] == [False, True, True, True, False]


def test_a_copy_goes_on_in_transformers_generate(llama, whole):
    child = whole.compact(demote(pages=3, attend="all"))
    expected = child.ask(QUESTION, max_new_tokens=8).tokens
    ids, name = torch.tensor([QUESTION]), compat.cache_keyword(llama.model)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 258}

    made = llama.model.generate(ids, **{name: child.cache()}, **settings)

    assert tuple(made[0, len(QUESTION) :].tolist())[: len(expected)] == expected
    assert child.ask(QUESTION, max_new_tokens=8).tokens == expected
    with pytest.raises(RequestError, match="beams of a demoted session"):
        llama.model.generate(ids, **{name: child.cache()}, num_beams=3, **settings)


def test_a_loop_of_ones_own_demotes_too():
    model, ids = tiny.model("llama"), torch.tensor([[*tiny.tokens(N), *QUESTION]])
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 258}
    expected = model.generate(ids, **settings)

    with compacting(model, demote(pages=3, attend="all"), prefix_tokens=N) as run:
        made = model.generate(ids, **settings)

    assert torch.equal(made, expected)
    assert run.kept == [None]
    assert run.stats[0].reservoir_bytes > 0


def test_samples_leave_the_session_as_it_was(llama, whole):
    child = whole.compact(demote(keep=0.3))
    before = child.logits(QUESTION)

    drawn = llama.sample(child.state, QUESTION, 3, 6, seed=1)

    assert drawn == llama.sample(child.state, QUESTION, 3, 6, seed=1)
    assert torch.equal(child.logits(QUESTION), before)


def test_bfloat16_and_its_sketches():
    model = tiny.model("llama").bfloat16()
    engine = HFEngine(LoadedModel("bf16", model, None, family_of(model.config)), pool=Pool(poison=True))
    whole = engine.prefill(tiny.tokens(N))
    child = whole.compact(demote(pages=2, attend="all"))

    assert relative_gap(child.logits(QUESTION).float(), whole.logits(QUESTION).float()) < 0.03
    assert all(slots.payloads["key"].dtype is torch.bfloat16 for slots in child.state.slots)
    assert torch.isfinite(whole.compact(demote(pages=2, sketch="int8")).logits(QUESTION)).all()
