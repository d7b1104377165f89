"""Wrong arguments are refused in a sentence that says what to type; unusual right ones give the same session."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from wakesight.budget.base import DataFree
from wakesight.core import Scores
from wakesight.engines.batch import SessionBatch
from wakesight.engines.hf.compacting import compacting
from wakesight.engines.hf.engine import load
from wakesight.engines.session import Session
from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.scores.keydiff import KeyDiff
from wakesight.testing import tiny

CONTEXT, QUESTION = tiny.tokens(40), tiny.tokens(5, seed=2)
ENCODING = BatchEncoding({"input_ids": [CONTEXT], "attention_mask": [[1] * 40]})
THIRD = Policy(scorer="random", keep=0.3)
SURROGATE = "some text \udce9"


@pytest.fixture(scope="module")
def engine():
    return tiny.engine("llama")


@pytest.fixture(scope="module")
def doc(engine):
    return engine.prefill(CONTEXT)


@pytest.fixture(scope="module")
def batch(engine):
    return engine.prefill_batch([CONTEXT, CONTEXT[:30]])


@pytest.fixture(scope="module")
def plain():
    return tiny.model("llama")


PREFILL = [
    (lambda e: e.prefill(None), "the context must be text or token ids, not None"),
    (lambda e: e.prefill(5), "must be text or token ids, not 5"),
    (lambda e: e.prefill(b"text"), "decode bytes first"),
    (lambda e: e.prefill({1, 2}), "has no order; give a list"),
    (lambda e: e.prefill(ENCODING), r"give enc\['input_ids'\] and attention_mask=enc\['attention_mask'\] to prefill_b"),
    (lambda e: e.prefill([1, 2.5]), "item 1 is 2.5, which is no whole number"),
    (lambda e: e.prefill(torch.tensor([1.0, 2.0])), "dtype torch.float32, but whole numbers are wanted"),
    (lambda e: e.prefill(torch.tensor([CONTEXT])), r"has the shape \[1, 40\]: one row is wanted, take ids\[0\]"),
    (lambda e: e.prefill(torch.tensor([CONTEXT, CONTEXT])), "prefill reads one context, .*for several use prefill_bat"),
    (lambda e: e.prefill([CONTEXT]), "for several use prefill_batch"),
    (lambda e: e.prefill([1, 259]), "token id 259 is outside the model's vocabulary of 259"),
    (lambda e: e.prefill([-1]), "token id -1 is outside"),
    (lambda e: e.prefill(SURROGATE), "the context holds a lone surrogate at character 10; decode the file as UTF-8"),
    (lambda e: e.prefill("text", instruction=SURROGATE), "lone surrogate"),
    (lambda e: e.prefill("text", instruction=5), "instruction must be a text, not 5"),
    (lambda e: e.prefill(CONTEXT, instruction=["a"]), "instruction must be a text"),
    (lambda e: e.prefill(CONTEXT, chunk=64.0), "chunk must be a whole number, not 64.0; 512 is the default"),
    (lambda e: e.prefill(CONTEXT, chunk=None), "chunk must be a whole number, not None"),
    (lambda e: e.prefill(CONTEXT, chunk=100), "chunk=100 must be a multiple of 64"),
    (lambda e: e.prefill(CONTEXT, query_window=2.5), "query_window must be a whole number, not 2.5"),
    (lambda e: e.prefill(CONTEXT, query_window=True), "query_window must be a whole number, not True"),
    (lambda e: e.prefill(CONTEXT, record=None), "record must be a list of signals or scorers, not None"),
    (lambda e: e.prefill(CONTEXT, record=5), "record must be a list"),
    (lambda e: e.prefill(CONTEXT, record=[5]), "record holds 5; give names"),
    (lambda e: e.prefill(CONTEXT, record="h20"), "did you mean 'h2o'"),
    (lambda e: e.prefill_batch("text"), "give a list of texts"),
    (lambda e: e.prefill_batch(None), "list of contexts, each a text or token ids, not None"),
    (lambda e: e.prefill_batch(ENCODING), r"give enc\['input_ids'\]"),
    (lambda e: e.prefill_batch(CONTEXT), "for one list of token ids use prefill"),
    (lambda e: e.prefill_batch(torch.tensor(CONTEXT)), r"shape \[40\]: give one context to prefill"),
    (lambda e: e.prefill_batch(torch.ones(2, 3)), "whole numbers are wanted"),
    (lambda e: e.prefill_batch([CONTEXT, None]), "the context must be text or token ids, not None"),
    (lambda e: e.prefill_batch([torch.tensor([CONTEXT])]), r"take ids\[0\]"),
    (lambda e: e.prefill_batch([[1, 2], [1, 2, 3]], attention_mask=[[1, 1]]), "rows of several lengths"),
    (lambda e: e.prefill_batch(["a"], attention_mask=[[1]]), "leave it out for a list of texts"),
    (lambda e: e.prefill_batch([[1, 2]], attention_mask=[[1]]), r"has the shape \[1, 1\], but the ids have \[1, 2\]"),
    (lambda e: e.prefill_batch([[1, 2]], attention_mask=[[1, 1, 1]]), r"shape \[1, 3\], but the ids have \[1, 2\]"),
    (lambda e: e.prefill_batch([[1, 2]] * 2, attention_mask=[[1, 1]]), r"shape \[1, 2\], but the ids have \[2, 2\]"),
    (lambda e: e.prefill_batch([[1, 2]], attention_mask=[1, 1]), r"shape \[2\], but the ids have \[1, 2\]"),
    (lambda e: e.prefill_batch([[1, 2]], attention_mask="11"), "give rows of 0 and 1"),
    (lambda e: e.prefill_batch([[1, 2]], attention_mask=[[1, 7]]), "other numbers than 0 and 1"),
]
SESSION = [
    (lambda d: d.compact(None), r"None is no policy; give a Policy, for example Policy\(keep=0.3\)"),
    (lambda d: d.compact(0.3), "0.3 is no policy"),
    (lambda d: d.compact("keydiff"), "'keydiff' is no policy"),
    (lambda d: d.compact(Policy), "the class Policy is no policy"),
    (lambda d: d.ask(None), "the question must be text or token ids, not None"),
    (lambda d: d.ask(5), "the question must be text or token ids, not 5"),
    (lambda d: d.ask([1, "a"]), "item 1 is 'a'"),
    (lambda d: d.ask([1, 999]), "token id 999 is outside"),
    (lambda d: d.ask(torch.tensor([QUESTION])), r"take ids\[0\]"),
    (lambda d: d.ask("a \ud800"), "the question holds a lone surrogate at character 2"),
    (lambda d: d.ask(QUESTION, max_new_tokens=2.5), "max_new_tokens must be a whole number, not 2.5"),
    (lambda d: d.ask(QUESTION, max_new_tokens=None), "max_new_tokens must be a whole number, not None"),
    (lambda d: d.ask(QUESTION, max_new_tokens=0), "max_new_tokens=0 must be at least 1"),
    (lambda d: d.append(None), "the text must be text or token ids, not None"),
    (lambda d: d.append([999]), "token id 999 is outside"),
    (lambda d: d.append(ENCODING), "tokenizer's whole output"),
    (lambda d: d.append(QUESTION, chunk="64"), "chunk must be a whole number, not '64'"),
    (lambda d: d.append(SURROGATE), "lone surrogate at character 10"),
    (lambda d: d.logits(None), "must be token ids, not None"),
    (lambda d: d.logits("text"), r"engine.encode\(text\) gives its ids"),
    (lambda d: d.logits([-1]), "token id -1 is outside"),
    (lambda d: d.logits([1.5]), "item 0 is 1.5"),
    (lambda d: d.save(None), "the path must be a str or a Path, not None"),
    (lambda d: d.save("a\0b"), "names no file"),
    (lambda d: d.save(""), "names no file"),
    (lambda d: Session.load("there", None), "None is no engine; give the one that wakesight.load made"),
    (lambda d: Session.load("there", d.engine.model), "is no engine"),
    (lambda d: Session.load(None, d.engine), "the path must be a str or a Path"),
    (lambda d: SessionBatch(d), r"made of a list of sessions; give \[session\]"),
    (lambda d: SessionBatch([1, 2]), "a batch is made of sessions, not of 1"),
    (lambda d: SessionBatch(None), "a batch is made of sessions, not of None"),
]
BATCH = [
    (lambda b: b.ask(None), r"questions must be a list with one per row of the batch \(2\), not None"),
    (lambda b: b.ask({"a", "b"}), "questions must be a list with one per row"),
    (lambda b: b.ask([1, 2]), "the question must be text or token ids, not 1"),
    (lambda b: b.ask(torch.tensor([1, 2])), "single id into a list"),
    (lambda b: b.ask([QUESTION]), "the batch has 2 rows, but 1 questions were given"),
    (lambda b: b.append(None), "texts must be a list with one per row"),
    (lambda b: b.append(["a"]), "2 rows, but 1 texts were given"),
    (lambda b: b.logits([QUESTION]), "2 rows, but 1 lists of ids were given"),
    (lambda b: b.logits(None), "lists of ids must be a list"),
    (lambda b: b.compact(None), "None is no policy"),
]
LOADING = [
    (lambda m: load(""), "the model's name '' is empty"),
    (lambda m: load(None), "cannot load None"),
    (lambda m: load(type(m)), "cannot load the class LlamaForCausalLM"),
    (lambda m: load(m, tokenizer="gpt2"), "tokenizer must be a transformers tokenizer, not 'gpt2'"),
    (lambda m: load(m, dtype=torch.int8), "dtype torch.int8 is no type a model can compute in here; use float32"),
    (lambda m: load(m, dtype=float), "is no type a model can compute in"),
    (lambda m: load(m, dtype="int8"), "dtype 'int8' is unknown"),
    (lambda m: load(m, device=1.5), "device 1.5 is unknown; use cpu or cuda"),
    (lambda m: load(m, growth=-1), "growth=-1 must be at least 0"),
    (lambda m: load(m, growth=2.5), "growth must be a whole number, not 2.5"),
    (lambda m: compacting(m, None).__enter__(), "None is no policy"),
    (lambda m: compacting(m, 0.3).__enter__(), "0.3 is no policy"),
    (lambda m: compacting(None, THIRD).__enter__(), "a transformers causal model, not None"),
    (lambda m: compacting("gpt2", THIRD).__enter__(), "a transformers causal model, not 'gpt2'"),
    (lambda m: compacting(m, THIRD, chunk=1.5).__enter__(), "chunk must be a whole number"),
    (lambda m: compacting(m, THIRD, prefix_tokens=2.5).__enter__(), "prefix_tokens must be a whole number, or one for"),
    (lambda m: compacting(m, THIRD, prefix_tokens="5").__enter__(), "prefix_tokens must be a whole number.* text '5'$"),
    (lambda m: compacting(m, THIRD, prefix_tokens=[5, 2.5]).__enter__(), "item 1 is 2.5"),
    (lambda m: compacting(m, THIRD, prefix_tokens=True).__enter__(), "not True"),
    (lambda m: Policy.from_json([]), r"\[\] is no policy; give the dict that to_json made"),
    (lambda m: Policy.from_json(None), "None is no policy"),
    (lambda m: Policy(scorer=KeyDiff, keep=0.3), r"scorer=KeyDiff is a class; make one: scorer=KeyDiff\(\)"),
]


@pytest.mark.parametrize(("call", "reason"), PREFILL)
def test_prefill_refuses(engine, call, reason):
    before = (engine.pool.held_bytes, engine.pool.leases)
    with pytest.raises(RequestError, match=reason):
        call(engine)
    assert (engine.pool.held_bytes, engine.pool.leases) == before


@pytest.mark.parametrize(("call", "reason"), SESSION)
def test_a_session_refuses_and_stays(doc, call, reason):
    with pytest.raises(RequestError, match=reason):
        call(doc)
    assert doc.tokens == tuple(CONTEXT)


@pytest.mark.parametrize(("call", "reason"), BATCH)
def test_a_batch_refuses_and_stays(batch, call, reason):
    with pytest.raises(RequestError, match=reason):
        call(batch)
    assert [len(row.tokens) for row in batch] == [40, 30]


@pytest.mark.parametrize(("call", "reason"), LOADING)
def test_loading_and_policies_refuse(plain, call, reason):
    before = plain.config._attn_implementation
    with pytest.raises(RequestError, match=reason):
        call(plain)
    assert plain.config._attn_implementation == before


@pytest.mark.parametrize(
    "ids",
    [
        tuple(CONTEXT), np.array(CONTEXT), torch.tensor(CONTEXT), torch.tensor(CONTEXT).int(),
        [np.int64(i) for i in CONTEXT], list(torch.tensor(CONTEXT)),
    ],
)  # fmt: skip
def test_ids_of_any_form_make_the_same_session(engine, doc, ids):
    session = engine.prefill(ids, chunk=np.int64(64), query_window=torch.tensor(32))

    assert session.tokens == doc.tokens
    assert all(type(token) is int for token in session.tokens)
    assert torch.equal(session.logits(np.array(QUESTION)), doc.logits(QUESTION))


def test_generators_are_read_once(engine, doc):
    session = engine.prefill(i for i in CONTEXT[:30])
    session.append(i for i in CONTEXT[30:])

    assert session.tokens == doc.tokens
    assert torch.equal(session.logits(i for i in QUESTION), session.logits(QUESTION))
    assert session.ask((i for i in QUESTION), max_new_tokens=np.int64(3)).tokens == doc.ask(QUESTION).tokens[:3]
    rows = engine.prefill_batch(row for row in (CONTEXT, "text"))
    assert rows[0].tokens == doc.tokens


IDS, MASK = [CONTEXT, [0] * 10 + CONTEXT[:30]], [[1] * 40, [0] * 10 + [1] * 30]


@pytest.mark.parametrize("make_mask", [list, np.array, torch.tensor, lambda mask: torch.tensor(mask).bool()])
@pytest.mark.parametrize("make_ids", [list, np.array, torch.tensor, lambda ids: [np.array(row) for row in ids]])
def test_padded_ids_and_masks_of_any_form(engine, make_ids, make_mask):
    batch = engine.prefill_batch(make_ids(IDS), attention_mask=make_mask(MASK))

    assert [row.tokens for row in batch] == [tuple(CONTEXT), tuple(CONTEXT[:30])]


def test_a_tokenizers_output_is_read_in_its_parts(engine):
    batch = engine.prefill_batch(ENCODING["input_ids"], attention_mask=ENCODING["attention_mask"])
    assert batch[0].tokens == tuple(CONTEXT)


def test_one_name_to_record_is_a_list_of_one(engine):
    session = engine.prefill(CONTEXT, record="h2o")
    assert session.compact(Policy(scorer="h2o", keep=0.5)).kept is not None


@pytest.mark.parametrize(
    "prefix", [30, np.int64(30), torch.tensor(30), [30, 30], np.array([30, 30]), (30, np.int8(30))]
)
def test_prefix_tokens_of_any_form(plain, prefix):
    ids = torch.tensor([CONTEXT, CONTEXT[::-1]])
    with compacting(plain, Policy(scorer="knorm", keep=0.5), prefix_tokens=prefix) as run:
        plain(ids, use_cache=True)
    assert [kept.counts for kept in run.kept] == [[[15, 15]] * 3] * 2


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ([[1] * 40] * 3, r"shape \[3, 40\] does not fit 40 tokens in 2 rows"),
        ([[1] * 39] * 2, r"shape \[2, 39\] does not fit 40 tokens"),
        ([1] * 40, r"shape \[40\] does not fit"),
        ("11", "rows of 0 and 1"),
    ],
)
def test_masks_of_another_shape_are_refused_by_compacting(plain, mask, reason):
    with compacting(plain, THIRD), pytest.raises(RequestError, match=reason):
        plain(torch.tensor([CONTEXT] * 2), attention_mask=mask, use_cache=True)


def test_masks_as_lists_and_one_row_for_all_are_read(plain):
    ids = torch.tensor([CONTEXT, CONTEXT[::-1]])
    for mask in ([[1] * 40] * 2, [[0] * 5 + [1] * 35], [[1] * 40]):
        with compacting(plain, Policy(scorer="knorm", keep=1.0)) as run:
            plain(ids, attention_mask=mask, use_cache=True)
        assert [stats.logical_length for stats in run.stats] == [sum(mask[0])] * 2


# Somebody's own scorers and allocations


@dataclass(frozen=True)
class Gives:
    """A scorer whose result is made by a function of (layers, heads, tokens); it names no signals."""

    make: object

    def score(self, signals):
        return self.make(3, 2, signals.tokens)


def scored(layers: int, heads: int, tokens: int, must: torch.Tensor | None = None) -> Scores:
    return Scores(tuple(torch.rand(heads, tokens) for _ in range(layers)), must)


def test_a_scorer_that_names_no_signals_runs(doc):
    child = doc.compact(Policy(scorer=Gives(scored), keep=0.5))
    assert child.kept.counts == [[20, 20]] * 3


def test_a_single_signal_may_be_a_str(doc):
    class Single(Gives):
        reads: ClassVar = "keys"

    assert doc.compact(Policy(scorer=Single(scored), keep=0.5)).kept is not None


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda *_: None, r"the scorer Gives gave None; its score method must return Scores\(layers\)"),
        (lambda _, h, n: torch.rand(3, h, n), "gave a Tensor of shape"),
        (lambda _, h, n: scored(2, h, n), "scores for 2 layers, but this model has 3 attention layers"),
        (
            lambda layers, h, n: scored(layers, h + 1, n),
            r"a Tensor of shape \[3, 40\].* layer 0; .* of shape \[2, 40\]",
        ),
        (lambda layers, h, n: scored(layers, h, n - 1), r"a Tensor of shape \[2, 39\].* of shape \[2, 40\]"),
        (lambda _, h, n: Scores((torch.ones(h, n, dtype=torch.long),) * 3), "floating-point scores"),
        (lambda _, h, n: Scores(([[0.0] * n] * h,) * 3), "floating-point scores"),
        (lambda *shape: scored(*shape, torch.zeros(39, dtype=torch.bool)), r"as must_keep; give bool .* shape \[40\]"),
        (lambda *shape: scored(*shape, torch.zeros(40)), "as must_keep; give bool"),
        (lambda *shape: scored(*shape, [True] * 40), "as must_keep; give bool"),
    ],
)
def test_scores_of_another_form_are_refused(doc, make, reason):
    with pytest.raises(RequestError, match=reason):
        doc.compact(Policy(scorer=Gives(make), keep=0.5))


def test_an_unhashable_scorer_is_refused():
    @dataclass
    class Loose:
        window: int = 8

        def score(self, signals): ...

    @dataclass(frozen=True)
    class Holding:
        windows: list[int] = field(default_factory=list)

        def score(self, signals): ...

    for scorer in (Loose(), Holding()):
        name = type(scorer).__name__
        with pytest.raises(RequestError, match=rf"{name} cannot be hashed.*make it a frozen dataclass of plain"):
            Policy(scorer=scorer, keep=0.3)


@dataclass(frozen=True)
class Shares:
    counts: object

    def per_layer(self, request):
        return self.counts


@dataclass(frozen=True)
class SharesHeads:
    counts: object

    def per_head(self, request, body):
        return self.counts


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (Shares((5, 5)), "the allocation Shares gave counts for 2 layers, but this model has 3 attention layers"),
        (Shares(5), "the allocation Shares gave 5; give a tuple of whole numbers"),
        (Shares((5, 5, 5.0)), "gave 5.0 entries; give whole numbers"),
        (Shares((5, 5, -1)), "gave -1 entries; give whole numbers of at least 0"),
        (SharesHeads(((5, 5),) * 2), "SharesHeads gave 2 layers, but this model has 3"),
        (SharesHeads(None), "SharesHeads gave None, but this model has 3"),
        (SharesHeads(((5, 5), (5,), (5, 5))), "gave 1 heads of attention layer 1 a count, but it has 2 KV heads"),
        (SharesHeads((5, 5, 5)), "gave layer 0 5; give a tuple"),
    ],
)
def test_an_allocation_of_another_form_is_refused_by_name(doc, rule, reason):
    with pytest.raises(RequestError, match=reason):
        doc.compact(Policy(scorer="knorm", allocation=rule, keep=0.5))


def test_an_allocation_may_count_in_numpys_numbers(doc):
    rule = Shares(np.array([5, 6, 7]))
    assert isinstance(rule, DataFree)
    assert doc.compact(Policy(scorer="knorm", allocation=rule, keep=0.5)).kept.counts == [[5, 5], [6, 6], [7, 7]]
