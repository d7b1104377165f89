"""KVzip against a second pass computed by hand on a plain transformers model, its weights summed in float64."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from transformers import AttentionInterface, DynamicCache

from wakesight.core import Scores
from wakesight.engines.hf import compat
from wakesight.engines.hf.engine import load
from wakesight.engines.probe import REPEAT_ALL, REPEAT_FROM, ProbeContext, score_by_probe
from wakesight.engines.recording import needs
from wakesight.errors import RequestError, WorkError
from wakesight.models.families import FAMILIES as ROWS
from wakesight.models.families import family_of
from wakesight.policy import Policy
from wakesight.registry import resolve, spec_of
from wakesight.scores.base import has_probe, reads_of
from wakesight.scores.kvzip import KVzip
from wakesight.testing import tiny
from wakesight.testing.laws import state_digest

OPEN = tuple(row.name for row in ROWS if row.name in tiny.FAMILIES and not row.only_whole)
TEXT = "The lighthouse keeper wrote 41 letters, and hid the key marked K7 under the third stair. Nobody asked him."
SHORT = "Again:"  # keeps the repeat input of the tiny models short
_CAPTURE = "kvzip_reference"


class Reference:
    """Every attention call of a plain model: hides what a child dropped, keeps queries and keys."""

    def __init__(self, model, tokens, held=None) -> None:
        self.model, self.tokens = model, list(tokens)
        self.seen: list[list[tuple]] = []  # per pass and attention layer (queries, keys, scaling)
        self.cache = DynamicCache(config=model.config)
        layers = [each for each in self.cache.layers if compat.kind(each) in (*compat.HOLDS_SLOTS, "window")]
        self.windows = [getattr(layer, "sliding_window", None) for layer in layers]
        full = iter(held if held is not None else [None] * len(layers))
        self.held = [None if window else next(full) for window in self.windows]
        self.reading_context = True
        self.run(self.cache, 0, self.tokens)
        self.reading_context = False

    def run(self, cache, start, ids) -> list[tuple]:
        """(queries [Q, q, d], keys [H, k, d], scaling) of every full-attention layer for one pass over `ids`."""
        AttentionInterface.register(_CAPTURE, self._attention)
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(_CAPTURE)
        step = 1 if start and family_of(self.model.config).one_at_a_time else len(ids)
        calls = []
        try:
            for part in torch.split(torch.tensor([ids]), step, dim=1):
                self.calls = []
                keywords = {compat.cache_keyword(self.model): cache, "use_cache": True}
                positions = torch.arange(start, start + part.shape[1])[None]
                self.model(input_ids=part, position_ids=positions, **keywords)
                start += part.shape[1]
                calls.append(self.calls)
        finally:
            self.model.set_attn_implementation(before)
        joined = []
        for layer, window in enumerate(self.windows):
            if window is None:
                queries = torch.cat([call[layer][0] for call in calls], dim=1)
                joined.append((queries, *calls[-1][layer][1:]))
        return joined

    def _attention(self, module, query, key, value, attention_mask, scaling, **_):
        layer, group = len(self.calls), query.shape[1] // key.shape[1]
        self.calls.append((query[0].double(), key[0].double(), scaling))
        keys, values = (each.repeat_interleave(group, dim=1).float() for each in (key, value))
        logits = query.float() @ keys.mT * scaling
        new, slots = logits.shape[2:]
        unseen = torch.ones(new, slots, dtype=torch.bool).triu(slots - new + 1)
        if self.windows[layer] is not None:
            unseen |= torch.ones(new, slots, dtype=torch.bool).tril(slots - new - self.windows[layer])
        logits = logits.masked_fill(unseen, float("-inf"))
        if self.held[layer] is not None and not self.reading_context:
            each = self.held[layer].repeat_interleave(query.shape[1] // self.held[layer].shape[0], dim=0)
            gone = torch.nn.functional.pad(~each, (0, slots - each.shape[1]))
            logits = logits.masked_fill(gone[None, :, None], float("-inf"))
        output = logits.softmax(dim=-1).to(query.dtype) @ values.to(query.dtype)
        return output.transpose(1, 2).contiguous(), None


def kvzip(reference: Reference, kv_heads, prefix: int, chunk: int, words, tail) -> list[torch.Tensor]:
    """float64 [kv_head, token] per layer. words: (ids for the first part, ids for later ones)."""
    n = len(reference.tokens)
    scores = [torch.zeros(heads, n, dtype=torch.float64) for heads in kv_heads]
    for start in range(prefix, n, chunk):
        part = reference.tokens[start : start + chunk]
        asked = words[0] if start == prefix else [*words[1], *reference.tokens[max(prefix, start - 8) : start]]
        ids = [*asked, *tail, *part]
        layers = reference.run(copy.deepcopy(reference.cache), n, ids)
        full_held = [held for held, window in zip(reference.held, reference.windows, strict=True) if window is None]
        for found, (queries, keys, scaling), held in zip(scores, layers, full_held, strict=True):
            for head, rows in enumerate(queries):
                logits = rows @ keys[head * keys.shape[0] // queries.shape[0]].T * scaling  # [q, slot]
                mine = head * found.shape[0] // queries.shape[0]
                allowed = torch.zeros(len(ids), n + len(ids), dtype=torch.bool)
                allowed[:, :prefix] = allowed[:, start : start + chunk] = True
                if held is not None:
                    allowed[:, :n] &= held[mine]
                allowed[:, n:] = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
                weights = logits.masked_fill(~allowed, float("-inf")).softmax(dim=-1).amax(dim=0)
                at = slice(start, start + len(part))
                found[mine, at] = torch.maximum(found[mine, at], weights[at])
    return scores


def encoded(text: str) -> list[int]:
    return tiny.tokenizer()(text).input_ids


@pytest.fixture(scope="module", params=OPEN)
def pair(request):
    """An engine, and a plain model with the same weights."""
    return tiny.engine(request.param), tiny.model(request.param)


@pytest.fixture(scope="module")
def llama():
    return tiny.engine("llama")


def close(found: Scores, expected: list[torch.Tensor], tolerance: float = 2e-4) -> None:
    for one, other in zip(found.layers, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
        assert other.max() > 0.02


@pytest.mark.parametrize("chunk", [40, 2000])
def test_scores_are_those_of_a_repeat_pass_by_hand(pair, chunk):
    engine, plain = pair
    session = engine.prefill(TEXT, instruction="Read.")
    before = state_digest(session.state)

    found = score_by_probe(KVzip(chunk=chunk, instruction=SHORT), session)

    assert state_digest(session.state) == before
    words = encoded("\n\n" + SHORT)
    reference = Reference(plain, session.tokens)
    prefix = len(session.frame.head)
    expected = kvzip(reference, engine.geometry.kv_heads, prefix, chunk, (words, words), session.frame.tail)
    close(found, expected)
    assert all((layer[:, :prefix] == 0).all() for layer in found.layers)
    assert found.must_keep is None


def test_a_child_is_scored_by_what_it_holds(pair):
    engine, plain = pair
    with engine.prefill(TEXT, instruction="Read.") as session:
        child = session.compact(Policy(scorer="random", allocation="ada", keep=0.4))
    held = child.signals().held

    found = score_by_probe(KVzip(chunk=40, instruction=SHORT), child)

    words = encoded("\n\n" + SHORT)
    reference = Reference(plain, child.tokens, held)
    prefix = len(child.frame.head)
    close(found, kvzip(reference, engine.geometry.kv_heads, prefix, 40, (words, words), child.frame.tail))
    for scores, mask in zip(found.layers, held, strict=True):
        assert (scores[~mask] == 0).all()


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_plain_text_and_the_english_request(family):
    engine, plain = tiny.engine(family), tiny.model(family)
    session = engine.prefill(TEXT, chat=False)

    found = score_by_probe(KVzip(chunk=50), session)

    assert session.frame.tail == ()
    words = encoded(REPEAT_ALL), encoded(REPEAT_FROM)
    close(found, kvzip(Reference(plain, session.tokens), engine.geometry.kv_heads, 0, 50, words, ()))


def test_float64_models_are_scored_in_float64():
    plain = tiny.model("llama").double()
    engine = load(tiny.model("llama"), tokenizer=tiny.tokenizer(), dtype=torch.float64)
    session = engine.prefill(TEXT)
    found = score_by_probe(KVzip(chunk=40, instruction=SHORT), session)
    words, prefix = encoded("\n\n" + SHORT), len(session.frame.head)
    expected = kvzip(
        Reference(plain, session.tokens), engine.geometry.kv_heads, prefix, 40, (words, words), session.frame.tail
    )
    for one, other in zip(found.layers, expected, strict=True):
        assert one.dtype == torch.float64
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def context_of(engine, tokens, prefix=0, **changes) -> tuple[ProbeContext, list[list[int]]]:
    """A context whose passes are written down and show nothing but uniform attention."""
    passes: list[list[int]] = []

    def overhear(ids, taps):
        passes.append(list(ids))
        for tap, heads in zip(taps, engine.geometry.kv_heads, strict=True):
            tap._largest = torch.full((heads, tap.stop - tap.start), 0.5)

    given = ProbeContext(
        tokens=tuple(tokens), prefix=prefix, geometry=engine.geometry, scaling=(1.0,) * len(engine.layer_devices),
        held=None, devices=engine.layer_devices, tail=(7, 8), separator="\n\n", encode=engine.encode,
        decode=engine.decode, overhear=overhear,
    )  # fmt: skip
    return dataclasses.replace(given, **changes), passes


def test_parts_requests_and_reminders(llama):
    tokens = tiny.tokens(25)
    context, passes = context_of(llama, tokens, prefix=3)

    found = KVzip(chunk=10).probe(context)

    first, later = encoded(REPEAT_ALL), encoded(REPEAT_FROM)
    assert passes == [
        [*first, 7, 8, *tokens[3:13]],
        [*later, *tokens[5:13], 7, 8, *tokens[13:23]],
        [*later, *tokens[15:23], 7, 8, *tokens[23:25]],
    ]
    for layer in found.layers:
        assert torch.equal(layer, torch.tensor([0.0] * 3 + [0.5] * 22).expand(2, -1))


def test_a_reminder_does_not_reach_into_the_prefix(llama):
    tokens = tiny.tokens(12)
    context, passes = context_of(llama, tokens, prefix=3, tail=())
    KVzip(chunk=5, instruction="go").probe(context)
    words = encoded("\n\ngo")
    assert passes == [[*words, *tokens[3:8]], [*words, *tokens[3:8], *tokens[8:12]]]


def test_the_default_part_has_2000_tokens(llama):
    context, passes = context_of(llama, tiny.tokens(4001))
    KVzip().probe(context)
    assert [len(ids) for ids in passes[:1]] == [len(encoded(REPEAT_ALL)) + 2 + 2000]
    assert len(passes) == 3


def test_a_context_of_nothing_but_prefix_needs_no_pass(llama):
    context, passes = context_of(llama, tiny.tokens(5), prefix=5)
    found = KVzip().probe(context)
    assert passes == []
    assert [tuple(layer.shape) for layer in found.layers] == [(2, 5)] * 3


def test_a_model_may_have_its_own_words(llama):
    asked = []

    def instruct(previous):
        asked.append(previous)
        return (9,) if previous is None else (9, *previous)

    tokens = tiny.tokens(20)
    context, passes = context_of(llama, tokens, instruct=instruct)
    KVzip(chunk=10).probe(context)
    assert asked == [None, tuple(tokens[2:10])]
    assert passes == [[9, 7, 8, *tokens[:10]], [9, *tokens[2:10], 7, 8, *tokens[10:]]]


def test_the_engine_hands_its_own_words_on(llama, monkeypatch):
    session = llama.prefill(TEXT)
    english = score_by_probe(KVzip(), session)
    words = encoded("\n\n" + SHORT)
    monkeypatch.setattr(llama, "repeat_instruction", lambda previous: [*words, *(previous or ())])
    own, given = score_by_probe(KVzip(), session), score_by_probe(KVzip(instruction=SHORT), session)
    for a, b, c in zip(english.layers, own.layers, given.layers, strict=True):
        assert torch.equal(b, c)
        assert not torch.equal(a, b)


@pytest.mark.parametrize("instruction", ["", "Say it again"])
def test_words_that_cannot_be_encoded_are_refused_by_name(llama, instruction):
    def refuses(text):
        raise RequestError("this model knows 5 words")

    context, passes = context_of(llama, tiny.tokens(20), encode=refuses)
    with pytest.raises(RequestError, match=r"knows 5 words.*--scorer kvzip:instruction="):
        KVzip(instruction=instruction).probe(context)
    assert passes == []


def test_without_a_tokenizer_it_says_so():
    engine = load(tiny.model("llama"))
    session = engine.prefill(tiny.tokens(50))
    with pytest.raises(RequestError, match=r"no tokenizer.*kvzip:instruction="):
        session.compact(Policy(scorer=KVzip(), keep=0.5))


def test_settings_and_text_form():
    table = {"kvzip": "wakesight.scores.kvzip:KVzip"}
    for method in (KVzip(), KVzip(chunk=512), KVzip(instruction="repeat: what=was said")):
        assert resolve(spec_of(method, "kvzip"), table, "scorer") == method
    assert KVzip(instruction=" again ") == KVzip(instruction="again")
    assert KVzip.natural_allocation == "global"
    assert has_probe(KVzip())
    assert reads_of(KVzip()) == ()
    assert needs(KVzip())["record"] == ()
    with pytest.raises(RequestError, match="kvzip chunk=0 is too small"):
        KVzip(chunk=0)
    with pytest.raises(RequestError, match="holds a comma"):
        KVzip(instruction="again, please")


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_compaction_keeps_exactly_the_best_of_the_whole_cache(family):
    engine = tiny.engine(family)
    session = engine.prefill(TEXT)
    before, method = state_digest(session.state), KVzip(chunk=40, instruction=SHORT)

    child = session.compact(Policy(scorer=method, allocation="global", entries=20))

    assert state_digest(session.state) == before
    prefix, scores = session.state.prefix, score_by_probe(method, session)
    flat = torch.cat([layer[:, prefix:].reshape(-1) for layer in scores.layers])
    mask = torch.cat([layer[:, prefix:].reshape(-1) for layer in child.signals().held])
    assert int(mask.sum()) == 20 * sum(engine.geometry.kv_heads)
    assert flat[mask].min() >= flat[~mask].max()
    assert child.ask("Which key?", max_new_tokens=3).tokens


def test_one_probing_serves_every_size_and_another_prefix_has_its_own(llama, monkeypatch):
    session, calls = llama.prefill(TEXT), []
    whole = llama.overhear
    monkeypatch.setattr(llama, "overhear", lambda *args, **kw: (calls.append(1), whole(*args, **kw))[1])
    policy = Policy(scorer=KVzip(instruction=SHORT), allocation="global", keep=0.5)
    for keep in (0.1, 0.5, 0.9):
        session.compact(policy.at(keep=keep))
    assert len(calls) == 1
    child = session.compact(Policy(scorer=KVzip(instruction=SHORT), allocation="global", keep=0.5, protect=0))
    assert len(calls) == 2
    assert int(session.state.prefix) > 0
    scores = score_by_probe(KVzip(instruction=SHORT), session, prefix=0)
    for layer, mask in zip(scores.layers, child.signals().held, strict=True):
        assert (layer > 0).all()  # what is no longer protected is scored too
        kept, gone = (torch.where(where, layer, rest) for where, rest in ((mask, 2.0), (~mask, -1.0)))
        lowest, highest = kept.min(), gone.max()
        assert lowest >= highest


def test_no_question_reaches_the_probe(llama):
    """The probe's fields hold the context alone, and questions asked before change nothing."""
    seen: list[ProbeContext] = []

    @dataclasses.dataclass(frozen=True)
    class Looks:
        def probe(self, context):
            seen.append(context)
            return KVzip(instruction=SHORT).probe(context)

    asked, fresh = llama.prefill(TEXT), llama.prefill(TEXT)
    asked.ask("Where is the key?", max_new_tokens=4)
    found, expected = (score_by_probe(Looks(), session) for session in (asked, fresh))

    assert all(torch.equal(a, b) for a, b in zip(found.layers, expected.layers, strict=True))
    for context in seen:
        assert context.tokens == fresh.tokens
        assert context.tail == fresh.frame.tail
        assert not any(hasattr(getattr(context, field.name), "ask") for field in dataclasses.fields(context))


def probing(result):
    @dataclasses.dataclass(frozen=True)
    class Gives:
        def probe(self, context):
            return result

    return Gives()


def test_a_probe_scorer_is_checked_like_any_other(llama):
    session = llama.prefill(tiny.tokens(20))
    for result, reason in (
        (None, r"the scorer Gives gave None; its probe method must return Scores\(layers\)"),
        (Scores((torch.zeros(2, 20),)), "gave scores for 1 layers, but this model has 3"),
        (Scores((torch.zeros(2, 19),) * 3), r"of shape \[2, 20\]"),
        (Scores((torch.zeros(2, 20),) * 3, must_keep=torch.zeros(20)), "as must_keep"),
    ):
        with pytest.raises(RequestError, match=reason):
            session.compact(Policy(scorer=probing(result), keep=0.5))
    with pytest.raises(WorkError, match="gave nan"):
        session.compact(Policy(scorer=probing(Scores((torch.full((2, 20), float("nan")),) * 3)), keep=0.5))


def test_a_scorer_without_either_method_is_refused():
    with pytest.raises(RequestError, match="neither a name nor an object with a score or probe method"):
        Policy(scorer=object(), keep=0.5)


def test_a_pass_beyond_the_models_limit_is_refused(llama):
    session = llama.prefill(tiny.tokens(700))
    with pytest.raises(RequestError, match=r"the second pass reads .* reads at most 1024.*kvzip:chunk="):
        session.compact(Policy(scorer=KVzip(), keep=0.5))
    assert session.compact(Policy(scorer=KVzip(chunk=100), keep=0.5)).kept is not None
