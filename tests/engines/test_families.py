"""Every family x allocation x chunking x dtype obeys the laws, or is refused by name; docs/families.md is the result.

`docs/generate_families.py` runs this file and writes the page from what `verdicts` holds afterwards. The marker
`oldest` picks float32, read at once, for transformers 5.16.1.

bfloat16: "loss" is what plain transformers itself loses against the same (rounded) weights in float32, as a share
of max |logit|. Two computations that lose as much each lie within twice the loss of each other, so that is the
tolerance.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

from wakesight.cache.pool import Pool
from wakesight.cache.slots import GROWTH
from wakesight.engines.batch import SessionBatch
from wakesight.engines.hf import compat
from wakesight.engines.hf.engine import HFEngine
from wakesight.engines.session import Session
from wakesight.errors import RequestError
from wakesight.models.families import FAMILIES, family_of, missing_model_types
from wakesight.models.load import LoadedModel
from wakesight.policy import Policy
from wakesight.scores.table import SCORERS
from wakesight.testing import tiny
from wakesight.testing.artifacts import fitted
from wakesight.testing.laws import Masked, greedy, relative_gap, state_digest

DOCS = Path(__file__).parents[2] / "docs"
N, PREFIX, KEEP = 200, 7, 0.3
QUESTION = tuple(tiny.tokens(9, seed=2))
ANSWER = 12
FLOAT32 = 1e-5  # of max |logit|
SHOWS = 1e-3  # a smaller change could hide in rounding
MARGIN = 1e-4  # rows whose two best logits lie closer are counted apart
NEW_IN_TRANSFORMERS = {"kimi_linear"}  # what 5.16.1 lacks
# each with a scorer that makes it uneven where it may be
SCORER = {"flat": "keydiff", "pyramid": "snapkv", "ada": "snapkv", "global": "knorm"}
LAWS = ("identity", "masking", "bytes", "isolation")

CASES = [
    pytest.param(
        (family, dtype, chunk),
        id=f"{family}-{dtype}-{'chunked' if chunk == 64 else 'one-shot'}",
        marks=[pytest.mark.oldest] if (dtype, chunk) == ("float32", 512) else [],
    )
    for family in tiny.FAMILIES
    for dtype in ("float32", "bfloat16")
    for chunk in (512, 64)
]
# (family, dtype, chunk, allocation, law), (family, "scorer", name), (family, "together") and (family, "layers")
# -> "yes", the reason of a refusal, or what was found. Filled by the tests below, read by the page.
verdicts: dict[tuple[str | int, ...], str] = {}
CELLS = len(CASES) * len(SCORER) * len(LAWS) + len(tiny.FAMILIES) * (len(SCORERS) + 2)


@dataclasses.dataclass(frozen=True)
class Reference:
    """Plain transformers on the same weights, and on the same numbers in float32 (`exact`)."""

    plain: object
    exact: object
    context: tuple[int, ...]

    @functools.cached_property
    def masked(self) -> Masked:
        return Masked(self.plain, self.context)

    @functools.cached_property
    def masked_exact(self) -> Masked:
        return self.masked if self.exact is self.plain else Masked(self.exact, self.context)

    def logits(self, tokens: tuple[int, ...]) -> tuple[torch.Tensor, float]:
        """Plain logits behind the context, and the tolerance for them."""
        ids = torch.tensor([[*self.context, *tokens]])
        return self._allowing(*(model(input_ids=ids).logits[0, N:] for model in (self.plain, self.exact)))

    def without(self, kept, tokens: tuple[int, ...]) -> tuple[torch.Tensor, float]:
        """Logits behind the context with everything but `kept` masked, and the tolerance for them."""
        return self._allowing(self.masked.logits(tokens, kept), self.masked_exact.logits(tokens, kept))

    def _allowing(self, found: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor, float]:
        return found, FLOAT32 if self.exact is self.plain else 2 * relative_gap(found.float(), exact)


@functools.lru_cache(maxsize=1)
def reference(family: str, dtype: str) -> Reference:
    plain = model_of(family, dtype)
    exact = plain if dtype == "float32" else stored_as(model_of(family, dtype), "float32")
    return Reference(plain, exact, tuple(tiny.tokens(N)))


def model_of(family: str, dtype: str):
    """In bfloat16 every expert is chosen: a choice that rounding flips says nothing about the cache."""
    settings = tiny.config(family)
    experts = next((n for n in ("num_experts", "num_local_experts", "n_routed_experts") if hasattr(settings, n)), None)
    chosen = "num_experts_per_token" if family == "kimi_linear" else "num_experts_per_tok"
    flips = dtype != "float32" and experts is not None
    return stored_as(tiny.model(family, **({chosen: getattr(settings, experts)} if flips else {})), dtype)


def stored_as(model, dtype: str):
    """Weights in `dtype`; buffers such as RoPE's frequencies stay float32, as in a model that is loaded so."""
    for weight in model.parameters():
        weight.data = weight.data.to(getattr(torch, dtype))
    return model


@dataclasses.dataclass(frozen=True)
class Case:
    """One family, dtype and chunking: a session that was read once."""

    family: str
    dtype: str
    chunk: int
    engine: HFEngine
    session: Session

    @property
    def reference(self) -> Reference:
        return reference(self.family, self.dtype)

    def holds(self, allocation: str, law: str) -> None:
        verdicts[self.family, self.dtype, self.chunk, allocation, law] = "yes"


@pytest.fixture(scope="module", params=CASES)
def case(request):
    family, dtype, chunk = request.param
    model = model_of(family, dtype)
    loaded = LoadedModel(f"tiny-{family}", model, tiny.tokenizer(), family_of(model.config))
    engine = HFEngine(loaded, growth=64, pool=Pool(poison=True))
    with torch.no_grad():
        session = engine.prefill(tiny.tokens(N), chunk=chunk)
    session.state.prefix = PREFIX
    return Case(family, dtype, chunk, engine, session)


@pytest.fixture(scope="module", params=SCORER)
def allocation(request) -> str:
    return request.param


@pytest.fixture
def child(case, allocation):
    """A compacted child; a family that must stay whole refuses it, in words, and that is its verdict."""
    policy = Policy(scorer=SCORER[allocation], keep=KEEP, allocation=allocation)
    if case.engine.only_whole is not None:
        with pytest.raises(RequestError, match=r"cannot be evicted: its sparse indexer .*; use --keep 1") as refusal:
            case.session.compact(policy)
        assert case.engine.only_whole in str(refusal.value)
        for law in LAWS[1:]:
            verdicts[case.family, case.dtype, case.chunk, allocation, law] = case.engine.only_whole
        pytest.skip("keep < 1 is refused by name")
    with case.session.compact(policy) as made:
        yield made


def test_a_whole_session_equals_plain_transformers(case):
    answer = case.session.ask(QUESTION, max_new_tokens=ANSWER)
    expected, allowed = case.reference.logits((*QUESTION, *answer.tokens))
    found = case.session.logits(QUESTION)

    gap = relative_gap(found.float(), expected[: len(QUESTION)].float())
    if gap > allowed and case.chunk < N:
        once, parts = (
            greedy(case.reference.plain, [*case.session.tokens, 1], 1, chunk=c)[1] for c in (None, case.chunk)
        )
        allowed = max(allowed, 2 * relative_gap(parts.float(), once.float()))
    assert gap < allowed
    _greedy_rows_agree(expected[len(QUESTION) - 1 :].float(), answer, allowed if case.dtype != "float32" else None)


def _greedy_rows_agree(rows, answer, allowed: float | None, least: int = 1) -> None:
    """Every token of `answer` is the best of plain transformers' row, where that row is clear: half of them in
    float32, `least` in bfloat16."""
    chosen = [*answer.tokens, 257] if answer.finish == "eos" else list(answer.tokens)
    margin = MARGIN if allowed is None else 2 * allowed * float(rows.abs().max())
    best, second = rows[: len(chosen)].topk(2).values.T
    clear = (best - second >= margin).tolist()
    expected = rows.argmax(dim=-1).tolist()
    assert sum(clear) >= (len(chosen) / 2 if allowed is None else least), "too few clear rows to learn anything"
    assert [token for token, sure in zip(chosen, clear, strict=True) if sure] == [
        token for token, sure in zip(expected, clear, strict=False) if sure
    ]


def test_identity_keeping_everything_changes_no_bit(case, allocation):
    session = case.session
    with session.compact(Policy(scorer=SCORER[allocation], keep=1.0, allocation=allocation)) as same:
        assert torch.equal(same.logits(QUESTION), session.logits(QUESTION))
        assert same.ask(QUESTION, max_new_tokens=4).tokens == session.ask(QUESTION, max_new_tokens=4).tokens
        assert same.stats.kv_bytes_kept == session.stats.kv_bytes_kept
    case.holds(allocation, "identity")


def test_masking_dropping_equals_hiding_on_the_full_cache(case, allocation, child):
    answer = child.ask(QUESTION, max_new_tokens=4)
    expected, allowed = case.reference.without(child.kept, (*QUESTION, *answer.tokens))

    found = child.logits(QUESTION)

    assert relative_gap(found.float(), expected[: len(QUESTION)].float()) < allowed
    _greedy_rows_agree(expected[len(QUESTION) - 1 :].float(), answer, allowed if case.dtype != "float32" else None, 0)
    assert relative_gap(found.float(), case.session.logits(QUESTION).float()) > max(SHOWS, 2 * allowed)
    case.holds(allocation, "masking")


def test_bytes_held_tensors_shrink_by_what_was_dropped(case, allocation, child):
    heads, stats, growth = case.engine.geometry.kv_heads, child.stats, case.engine.growth
    body = [[count - PREFIX for count in layer] for layer in child.kept.counts]
    per_head = round(KEEP * (N - PREFIX))

    assert sum(map(sum, body)) == per_head * sum(heads)  # exact, whatever the shape
    assert [len(layer) for layer in body] == list(heads)
    if allocation == "flat":
        assert body == [[per_head] * count for count in heads]
    if allocation == "pyramid":
        assert all(len(set(layer)) == 1 for layer in body)
        assert [layer[0] for layer in body] == sorted((layer[0] for layer in body), reverse=True)
        assert body[0][0] > body[-1][0]
    if allocation == "ada":
        assert [sum(layer) for layer in body] == [per_head * count for count in heads]
    if allocation in ("ada", "global") and sum(heads) > len(heads):
        assert len({count for layer in body for count in layer}) > 1, "nothing is ragged here"

    entry = [case.engine.geometry.entry_bytes(layer) for layer in range(len(heads))]
    assert stats.kv_bytes_kept == sum(n * e for layer, e in zip(child.kept.counts, entry, strict=True) for n in layer)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for slots in child.state.slots
        for tensor in map(slots.storage, slots.names)
    }
    assert stats.kv_bytes_kept + stats.kv_bytes_slack == sum(storages.values())
    room = sum(
        (-(-(n + growth) // GROWTH) * GROWTH) * e
        for layer, e in zip(child.kept.counts, entry, strict=True)
        for n in layer
    )
    assert sum(storages.values()) == room  # each head pays for its own entries, not for the longest head's
    assert stats.kv_bytes_full == case.session.stats.kv_bytes_kept == N * case.engine.geometry.token_bytes
    assert stats.kv_bytes_freed == stats.kv_bytes_full - stats.kv_bytes_kept
    assert Fraction(stats.kv_bytes_freed, stats.kv_bytes_full) == 1 - Fraction(per_head + PREFIX, N)
    case.holds(allocation, "bytes")


def test_isolation_a_question_leaves_no_trace(case, allocation, child):
    other = tiny.tokens(5, seed=3)
    before = [state_digest(session.state) for session in (case.session, child)]

    child.ask(other, max_new_tokens=6)
    child.logits(other)

    assert [state_digest(session.state) for session in (case.session, child)] == before
    with case.session.compact(child.policy) as fresh:
        assert torch.equal(child.logits(QUESTION), fresh.logits(QUESTION))
        assert child.ask(QUESTION, max_new_tokens=4).tokens == fresh.ask(QUESTION, max_new_tokens=4).tokens
    case.holds(allocation, "isolation")


@pytest.mark.oldest
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_scorers_rows_and_layers(family):
    """Which scorers run, whether rows that differ decode together, and what the tiny model is made of."""
    engine = fitted(tiny.engine(family))
    record = [] if engine.only_whole else list(SCORERS)
    rows = engine.prefill_batch([tiny.tokens(60), tiny.tokens(100, seed=4)], record=record)
    children = [*rows]
    for name in SCORERS:
        try:
            children.append(rows[0].compact(Policy(scorer=name, keep=0.4)))
            verdicts[family, "scorer", name] = "yes"
        except RequestError as refusal:
            verdicts[family, "scorer", name] = str(refusal)
    refused = {name for name in SCORERS if verdicts[family, "scorer", name] != "yes"}
    assert refused == (set(SCORERS) if engine.only_whole else _reading_values(engine))

    alone = [child.ask(QUESTION, max_new_tokens=4).tokens for child in children]
    if engine.only_whole is None:
        assert [
            answer.tokens for answer in SessionBatch(children).ask([QUESTION] * len(children), max_new_tokens=4)
        ] == alone
        verdicts[family, "together"] = "yes"
    else:
        with pytest.raises(RequestError, match="ask row by row") as refusal:
            SessionBatch(children).ask([QUESTION] * len(children), max_new_tokens=4)
        verdicts[family, "together"] = str(refusal.value)
    kinds = [compat.kind(layer) for layer in compat.empty_layers(engine.model.config)]
    found = {
        "attention": len(engine.geometry.attention_layers),
        "recurrent": len([kind for kind in kinds if "state" in kind]),
        "window": kinds.count("window"),
    }
    verdicts[family, "layers"] = ", ".join(f"{count} {kind}" for kind, count in found.items() if count)


def _reading_values(engine) -> set[str]:
    """Scorers that read values, on a model that stores latents."""
    return {"expected_attention", "gatesight+"} if compat.is_latent(engine.model.config) else set()


def test_the_oldest_and_the_newest_transformers_know_the_families_we_say():
    if Version(transformers.__version__) == compat.OLDEST:
        lacking = missing_model_types()
        assert {row.name for row in FAMILIES if lacking & set(row.model_types)} == NEW_IN_TRANSFORMERS
        assert set(tiny.FAMILIES) == set(tiny.CONFIGS) - NEW_IN_TRANSFORMERS
    if Version(transformers.__version__) >= Version("5.24"):
        assert missing_model_types() == frozenset()
        assert set(tiny.FAMILIES) == {row.name for row in FAMILIES}


def page() -> str:
    spec = importlib.util.spec_from_file_location("generate_families", DOCS / "generate_families.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.families_page(verdicts)


def test_the_page_of_families_is_current():
    if missing_model_types():
        pytest.skip("the page lists every family; this transformers lacks some")
    if len(verdicts) < CELLS:
        pytest.skip(f"the page needs all {CELLS} results of this file, and {len(verdicts)} were run")
    stale = "docs/families.md is stale; type: .venv/bin/python docs/generate_families.py"
    assert (DOCS / "families.md").read_text() == page(), stale
