"""A second pass shows its taps what the model computed, and leaves no trace in the state."""

from __future__ import annotations

import pytest
import torch

from wakesight.engines.hf import compat
from wakesight.errors import RequestError, WorkError
from wakesight.models.families import FAMILIES as ROWS
from wakesight.policy import Policy
from wakesight.signals.chunk import Chunk
from wakesight.signals.queries import QueryWindow
from wakesight.signals.query_moments import QueryMoments
from wakesight.testing import tiny
from wakesight.testing.laws import state_digest

N, MORE = 110, 70
WHOLE_ONLY = tuple(row.name for row in ROWS if row.only_whole and row.name in tiny.FAMILIES)
OPEN = tuple(family for family in tiny.FAMILIES if family not in WHOLE_ONLY)


class Keeps:
    """Clones of all it is shown."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def watch(self, chunk: Chunk) -> None:
        keys = tuple(head.clone() for head in chunk.keys)
        self.chunks.append(
            Chunk(chunk.queries.clone(), keys, chunk.positions, chunk.start, chunk.scaling, chunk.rotation)
        )

    @property
    def queries(self) -> torch.Tensor:
        return torch.cat([chunk.queries for chunk in self.chunks], dim=1)


class KeepsTurned(Keeps):
    wants_rotation = True


class Fails(Keeps):
    def watch(self, chunk: Chunk) -> None:
        super().watch(chunk)
        if len(self.chunks) == 2:
            raise ValueError("the tap had enough")


@pytest.fixture(scope="module", params=OPEN)
def open_engine(request):
    return tiny.engine(request.param)


@pytest.fixture(scope="module")
def llama():
    return tiny.engine("llama")


def taps_of(engine, kind=Keeps) -> list:
    return [kind() for _ in engine.geometry.attention_layers]


def more() -> list[int]:
    return tiny.tokens(MORE, seed=9)


def sessions(engine):
    """A whole session, and a child whose heads hold different entries."""
    whole = engine.prefill(tiny.tokens(N))
    return whole, whole.compact(Policy(scorer="random", allocation="ada", keep=0.4))


def test_the_state_is_as_before_bit_for_bit(open_engine):
    for session in sessions(open_engine):
        before, expected = state_digest(session.state), session.logits(tiny.tokens(5))

        open_engine.overhear(session.state, more(), taps_of(open_engine), chunk=64)

        assert state_digest(session.state) == before
        assert torch.equal(session.logits(tiny.tokens(5)), expected)


def test_taps_see_what_reading_on_would_compute(open_engine):
    for session in sessions(open_engine):
        taps = taps_of(open_engine)
        open_engine.overhear(session.state, more(), taps)
        lengths = session.state.physical_lengths
        session.append(more())  # the same tokens for good

        stored = open_engine.recording(1, ()).latent_keys or (lambda slots: slots.strips("key"))
        for layer, (tap, held) in enumerate(zip(taps, lengths, strict=True)):
            last = tap.chunks[-1]
            assert last.start + last.queries.shape[1] == N + MORE
            window = session.recording.layers[layer].queries.rows
            torch.testing.assert_close(tap.queries[:, -window.shape[1] :], window, rtol=1e-4, atol=1e-4)
            for mine, strip, before in zip(last.keys, stored(session.state.slots[layer]), held, strict=False):
                assert torch.equal(mine[:before], strip[:before])
                torch.testing.assert_close(mine, strip, rtol=1e-4, atol=1e-4)


def test_positions_name_the_entries_of_a_child(open_engine):
    whole, child = sessions(open_engine)
    for session in (whole, child):
        taps = taps_of(open_engine)
        open_engine.overhear(session.state, more(), taps, chunk=64)
        for layer, tap in enumerate(taps):
            assert tap.chunks[0].start == N
            for chunk in tap.chunks:
                if session is whole:
                    assert chunk.positions is None
                    continue
                for head, where in enumerate(chunk.positions):
                    kept = child.kept.positions[layer][head]
                    fresh = torch.arange(N, chunk.start + chunk.queries.shape[1])
                    assert torch.equal(where, torch.cat([kept, fresh]))
                    assert len(where) == len(chunk.keys[head])


def test_chunks_of_any_size_show_the_same(open_engine):
    session = open_engine.prefill(tiny.tokens(N))
    seen = []
    for chunk in (64, 512):
        taps = taps_of(open_engine)
        open_engine.overhear(session.state, more(), taps, chunk=chunk)
        seen.append([tap.queries for tap in taps])
    for one, other in zip(*seen, strict=True):
        assert one.shape[1] == MORE
        torch.testing.assert_close(one, other, rtol=5e-4, atol=5e-4)


def test_an_error_in_a_tap_leaves_no_trace(open_engine):
    for session in sessions(open_engine):
        before, expected = state_digest(session.state), session.logits(tiny.tokens(5))
        taps = taps_of(open_engine)
        taps[-1] = Fails()

        with pytest.raises(ValueError, match="had enough"):
            open_engine.overhear(session.state, more(), taps, chunk=64)

        assert state_digest(session.state) == before
        assert torch.equal(session.logits(tiny.tokens(5)), expected)


def test_the_pass_may_be_longer_than_the_growth_slack(llama):
    for session in sessions(llama):
        before = state_digest(session.state)
        llama.overhear(session.state, tiny.tokens(400), taps_of(llama))
        assert state_digest(session.state) == before


def test_rotation_only_where_a_tap_asks(llama):
    session = llama.prefill(tiny.tokens(N))
    plain, turned = taps_of(llama), taps_of(llama, KeepsTurned)
    llama.overhear(session.state, more(), [plain[0], *turned[1:]], chunk=64)

    assert all(chunk.rotation is None for chunk in plain[0].chunks)
    for tap, layer in zip(turned[1:], llama.geometry.attention_layers[1:], strict=True):
        for chunk in tap.chunks:
            stop = chunk.start + chunk.queries.shape[1]
            assert torch.equal(chunk.rotation, compat.rotation(llama.model, layer, chunk.start, stop))


def test_the_taps_of_prefill_can_be_used(llama):
    session = llama.prefill(tiny.tokens(N), record=["query_mean"])
    moments, windows = taps_of(llama, QueryMoments), taps_of(llama, lambda: QueryWindow(16))
    llama.overhear(session.state, more(), moments)
    llama.overhear(session.state, more(), windows)
    session.append(more())
    for layer, (one, other) in enumerate(zip(moments, windows, strict=True)):
        mean, before = session.recording.layers[layer].moments, N - 4  # the first 4 are left out
        whole = (mean.mean * (before + MORE) - one.mean * MORE) / before
        fresh = llama.prefill(tiny.tokens(N), record=["query_mean"]).recording.layers[layer].moments.mean
        torch.testing.assert_close(whole, fresh, rtol=1e-3, atol=1e-3)
        assert other.rows.shape[1] == 16


def test_what_cannot_be_read_is_refused_before_anything_is_read(llama):
    state = llama.prefill(tiny.tokens(N)).state
    before = state_digest(state)
    for tokens, taps, reason in (
        ([], taps_of(llama), "nothing to read behind the context"),
        ([1], taps_of(llama)[1:], "2 taps for 3 attention layers"),
        ([1] * 1000, taps_of(llama), "reads 1000 tokens behind a context of 110, but tiny-llama reads at most 1024"),
        ([999], taps_of(llama), "outside the model's vocabulary"),
    ):
        with pytest.raises(RequestError, match=reason):
            llama.overhear(state, tokens, taps)
        assert not any(tap.chunks for tap in taps)
    with pytest.raises(RequestError, match="chunk"):
        llama.overhear(state, [1], taps_of(llama), chunk=7)
    assert state_digest(state) == before


@pytest.mark.parametrize("family", WHOLE_ONLY)
def test_a_model_whose_attention_cannot_be_watched_is_refused(family):
    engine = tiny.engine(family)
    session = engine.prefill(tiny.tokens(N))
    with pytest.raises(RequestError, match="no extra pass can be watched"):
        engine.overhear(session.state, more(), taps_of(engine))


def test_numbers_that_overflow_are_reported(llama, monkeypatch):
    session = llama.prefill(tiny.tokens(N))
    before = state_digest(session.state)
    norm = llama.model.get_decoder().norm
    monkeypatch.setattr(norm, "weight", torch.nn.Parameter(norm.weight * float("inf")))
    with pytest.raises(WorkError, match="not finite"):
        llama.overhear(session.state, more(), taps_of(llama))
    assert state_digest(session.state) == before
