"""What is logged equals transformers' own attention, summed up by plain loops, on every family."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from wakesight.errors import RequestError
from wakesight.policy import Policy
from wakesight.testing import tiny
from wakesight.traces.recorder import Options, record, stacked
from wakesight.traces.regimes import Script, prompt_of
from wakesight.traces.retrieval import Retrieval
from wakesight.traces.schema import check
from wakesight.traces.store import load_traces
from wakesight.traces.writing import writing

TEXT = "Some words before it. The key is 4711. And then a good many more words, so that there is a past to look at."
NEEDLE = (TEXT.index("The key"), TEXT.index(" And"))
SCRIPT = Script("run", "niah", TEXT, (NEEDLE,), "What is the key?", "It is", "4711", 0, "English", 0.5)


def recorded(engine, folder, script=SCRIPT, **options):
    with writing(folder, {}) as run:
        outcome = record(engine, run, script, Options(**{"new_tokens": 9, "past_end": True, **options}))
    return outcome, load_traces(folder)[script.name]


def attention_of(engine, tokens):
    """float64 [layer, query_head, query, position], by transformers' own eager attention on a model of its own."""
    family = engine.name.removeprefix("tiny-")
    model = tiny.model(family).to(torch.float32)
    model.set_attn_implementation("eager")
    weights = model(input_ids=torch.tensor([list(tokens)]), output_attentions=True).attentions
    layers = [weight for weight in weights if weight is not None]
    if len(layers) != len(engine.geometry.attention_layers):
        layers = [layers[index] for index in engine.geometry.attention_layers]
    return np.stack([layer[0].double().numpy() for layer in layers])


def expected_scores(row, needle, tokens, token):
    """(Eq. 1, Eq. 2) in loops over positions; row: the attention of the newest position's query."""
    query = len(row) - 1
    inside = {at for start, end in needle for at in range(start, end)}
    best = max(range(len(row)), key=lambda at: row[at])
    left_out = ({0, 1, 2, 3} | set(range(query - 32, query))) - inside
    below = sum(row[at] for at in range(len(row)) if at not in left_out)
    above = sum(row[at] for at in inside if at < len(row))
    return best in inside and tokens[best] == token, above / max(below, 1e-6)


def test_the_log_equals_transformers_attention(engine, tmp_path):
    if engine.only_whole is not None:
        with pytest.raises(RequestError, match="no trace can be recorded on"):
            recorded(engine, tmp_path / "run")
        return
    outcome, trace = recorded(engine, tmp_path / "run")

    check(trace)
    prompt = prompt_of(engine, SCRIPT)
    text = [*prompt.tokens, *trace.tokens.tolist()]
    rows = attention_of(engine, text[:-1])
    first = len(prompt.tokens)
    assert outcome.steps == trace.steps == 9
    assert trace.ctx_len.tolist() == list(range(first, first + 9))
    assert trace.kv_heads == engine.geometry.kv_heads
    mass = rows[:, :, first - 32 : first, :first].sum(axis=2)
    assert trace.prompt_mass == pytest.approx(mass, abs=1e-3)
    for step in range(9):
        seen = first + step
        here = rows[:, :, seen - 1, :seen]
        for place in np.ndindex(here.shape[:2]):
            kept = min(64, seen)
            idx, val = trace.topk_idx[(step, *place)], trace.topk_val[(step, *place)]
            assert (idx[kept:] == -1).all()
            assert (np.diff(val[:kept]) <= 0).all()
            assert val[:kept] == pytest.approx(here[place][idx[:kept]], abs=1e-4)
            assert val[:kept] == pytest.approx(np.sort(here[place])[::-1][:kept], abs=1e-4)
            copies, share = expected_scores(here[place], prompt.needles, text, text[seen])
            assert trace.needle[(step, *place)] == pytest.approx(share, rel=2e-2, abs=1e-4)
            if np.diff(np.sort(here[place])[-2:]) > 1e-4:  # else the most attended position is a matter of rounding
                assert bool(trace.copy[(step, *place)]) == copies


def test_the_tokens_are_those_the_engine_answers_with(engine, tmp_path):
    if engine.only_whole is not None:
        pytest.skip("its attention cannot be watched")
    prompt = prompt_of(engine, SCRIPT)
    with engine.prefill(list(prompt.tokens[:-1])) as session:
        before = [slots.read("key").clone() for slots in session.state.slots]
        answer = engine.generate([session.state], [prompt.tokens[-1:]], 9)[0]
        tokens = engine.stepping(session.state, prompt.tokens[-1], [Silent() for _ in before])
        stepped = [next(tokens) for _ in range(9)]
        tokens.close()
        assert all(torch.equal(a, slots.read("key")) for a, slots in zip(before, session.state.slots, strict=True))

    _, trace = recorded(engine, tmp_path / "run")

    assert stepped == trace.tokens.tolist()
    assert tuple(stepped[: len(answer.tokens)]) == answer.tokens


class Silent:
    def watch(self, chunk) -> None:
        assert chunk.queries.shape[1] == 1


@pytest.fixture(scope="module")
def llama():
    return tiny.engine("llama")


def test_an_end_token_is_logged_and_ends_the_trace(llama, tmp_path):
    _, whole = recorded(llama, tmp_path / "past", new_tokens=20)
    end = int(whole.tokens[4])
    first = whole.tokens.tolist().index(end)
    llama._ends, before = frozenset({end}), llama._ends
    try:
        outcome, trace = recorded(llama, tmp_path / "run", new_tokens=20, past_end=False)
        _, past = recorded(llama, tmp_path / "on", new_tokens=20, past_end=True)
    finally:
        llama._ends = before

    assert outcome.finish == trace.meta["finish"] == "eos"
    assert trace.tokens.tolist() == whole.tokens[: first + 1].tolist()
    assert outcome.steps == first
    assert past.tokens.tolist() == whole.tokens.tolist()


def test_decoding_ends_at_the_models_limit(tmp_path):
    engine = tiny.engine("llama", max_position_embeddings=320)
    room = 320 - len(prompt_of(engine, SCRIPT).tokens)

    outcome, trace = recorded(engine, tmp_path / "run", new_tokens=400)

    assert outcome.finish == "limit"
    assert trace.steps == room + 1  # the last step's token is chosen, and has no place any more
    assert trace.ctx_len[-1] == 320


@pytest.mark.parametrize("text", ["ab", "one short text"])
def test_prompts_shorter_than_the_window_sum_all_their_queries(llama, tmp_path, text):
    script = Script("short", "niah", text, ((0, 1),), "?", "", "", 0, "English")

    _, trace = recorded(llama, tmp_path / "run", script, chat=False)

    prompt = prompt_of(llama, script, chat=False)
    assert trace.prompt_len == len(prompt.tokens) < 32
    rows = attention_of(llama, prompt.tokens)
    assert trace.prompt_mass == pytest.approx(rows.sum(axis=2), abs=1e-4)


def test_meta_says_what_was_recorded(llama, tmp_path):
    with writing(tmp_path / "run", {}) as run:
        record(llama, run, SCRIPT, Options(new_tokens=2, past_end=True), {"commit": "abc"})
    meta = load_traces(tmp_path / "run")[0].meta

    assert meta["regime"] == "niah"
    assert meta["answer"] == "4711"
    assert meta["depth"] == 0.5
    assert meta["commit"] == "abc"
    assert meta["finish"] == "length"
    assert meta["reply"].startswith("It is")
    assert meta["retrieval"] == {"sinks": 4, "local": 32, "floor": 1e-6, "own": False}


def test_scores_of_the_prompt_are_those_a_session_is_compacted_by(llama, tmp_path):
    _, trace = recorded(llama, tmp_path / "run", scorers=("keydiff", "streaming"))

    assert list(trace.prompt_scores) == ["keydiff", "streaming"]
    tokens = prompt_of(llama, SCRIPT).tokens[:-1]
    with (
        llama.prefill(list(tokens)) as session,
        session.compact(Policy(scorer="keydiff", entries=7, protect=0)) as small,
    ):
        for layer, heads in enumerate(small.kept.positions):
            for head, kept in enumerate(heads):
                best = np.argsort(-trace.prompt_scores["keydiff"][layer, head], kind="stable")[:7]
                assert sorted(best.tolist()) == kept.tolist()


def test_a_scorer_with_a_pass_of_its_own_is_refused():
    with pytest.raises(RequestError, match="--scorers kvzip makes a pass of its own"):
        Options(scorers=("kvzip",))


def test_half_precision_weights_are_those_rounded(llama, tmp_path):
    _, whole = recorded(llama, tmp_path / "whole")
    _, half = recorded(llama, tmp_path / "half", val_dtype="float16")

    assert half.topk_val.dtype == np.float16
    assert np.array_equal(np.asarray(half.topk_val), np.asarray(whole.topk_val).astype(np.float16))


def test_a_killed_recording_leaves_an_unfinished_trace_that_is_made_anew(llama, tmp_path, monkeypatch):
    import wakesight.traces.writing as module

    monkeypatch.setattr(module, "CHUNK", 4)
    append, count = module.Writer.append, iter(range(99))

    def dying(self, step):
        append(self, step)
        if next(count) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(module.Writer, "append", dying)
    with pytest.raises(KeyboardInterrupt):
        recorded(llama, tmp_path / "run")
    monkeypatch.setattr(module.Writer, "append", append)
    traces = load_traces(tmp_path / "run")
    assert (traces[0].steps, traces.finished("run")) == (4, False)

    with writing(tmp_path / "run", {}, resume=True) as run:
        record(llama, run, SCRIPT, Options(new_tokens=9, past_end=True))

    _, clean = recorded(llama, tmp_path / "clean")
    assert np.array_equal(np.asarray(load_traces(tmp_path / "run")[0].topk_val), np.asarray(clean.topk_val))


def test_a_needle_at_the_start_keeps_its_share_below_one():
    """Positions of the needle are in the denominator even where they are sinks or local: the ratio cannot explode."""
    rows = torch.full((1, 1, 40), 1e-9, dtype=torch.float64)
    rows[..., :4] = 0.25
    needle = torch.zeros(40, dtype=torch.bool)
    needle[:4] = True

    assert Retrieval().needle_share(rows, needle).item() == pytest.approx(1.0, abs=1e-6)
    assert Retrieval().needle_share(rows, torch.zeros_like(needle)).item() == 0


@pytest.mark.parametrize(("own", "expected"), [(False, 0.2 / 0.7), (True, 0.2 / 0.3)])
def test_the_querys_own_position_counts_unless_it_is_called_local(own, expected):
    rows = torch.zeros(60, dtype=torch.float64)
    rows[1], rows[10], rows[20], rows[40], rows[59] = 0.1, 0.2, 0.1, 0.2, 0.4
    needle = torch.zeros(60, dtype=torch.bool)
    needle[10] = True

    assert Retrieval(own=own).needle_share(rows, needle).item() == pytest.approx(expected)


def test_the_denominator_has_a_floor():
    needle = torch.zeros(50, dtype=torch.bool)
    needle[6] = True
    rows = torch.zeros(50, dtype=torch.float64)
    rows[6] = 1e-9

    assert Retrieval().needle_share(rows, needle).item() == pytest.approx(1e-3)


def test_heads_of_one_storage_are_stacked_without_a_copy():
    storage = torch.arange(2 * 9 * 4.0).view(2, 9, 4)
    view = stacked(storage[:, :5].unbind(0))

    assert torch.equal(view, storage[:, :5])
    assert view.data_ptr() == storage.data_ptr()
    apart = stacked((storage[0, :5], storage[1, 1:6].clone()))
    assert torch.equal(apart, torch.stack([storage[0, :5], storage[1, 1:6]]))
    backwards = stacked((storage[1], storage[0]))
    assert torch.equal(backwards, storage.flip(0))


def test_scores_are_finite_where_attention_is_on_one_position():
    rows = torch.zeros(1, 45)
    rows[0, 44] = 1

    share = Retrieval(own=True).needle_share(rows, torch.zeros(45, dtype=torch.bool))

    assert math.isfinite(share.item())
