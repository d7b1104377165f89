"""Gates of recurrent layers, output gates and attention inputs: recorded as the model computed them, and no more."""

from __future__ import annotations

import gc
import itertools
import sys
import threading

import pytest
import torch

from wakesight.engines.hf import listening
from wakesight.engines.recording import OVERHEARD, wanted_signals
from wakesight.engines.session import Session
from wakesight.errors import RequestError, WorkError
from wakesight.models.families import FAMILIES as ROWS
from wakesight.policy import Policy
from wakesight.testing import tiny
from wakesight.testing.native import native, recurrent_module

ROW = {row.name: row for row in ROWS}
NATIVE = tuple(f for f in tiny.FAMILIES if ROW[f].native_signals)
GATED = tuple(f for f in tiny.FAMILIES if ROW[f].output_gate)
N, MORE = 150, 71
DIFFERENT = tuple(f for f in ("qwen3_5", "zamba2", "kimi_linear", "qwen4_exp") if f in tiny.FAMILIES)


def all_of(family: str) -> list[str]:
    """Everything that can be overheard in a family."""
    row = ROW[family]
    return ["hidden"] + ["native"] * (row.native_signals is not None) + ["output_gate"] * row.output_gate


def ids(start: int = 0, stop: int = N + MORE) -> list[int]:
    return tiny.tokens(N + MORE)[start:stop]


def overheard(session: Session) -> dict[str, list[torch.Tensor]]:
    """Clones of what was overheard, read past `signals`, which an indexed model refuses."""
    streams = session.recording.signals(session.state).streams
    names = (*OVERHEARD, "output_gate_max")
    return {name: [tensor.clone() for tensor in streams[name]] for name in names if name in streams}


def same(found: dict[str, list[torch.Tensor]], expected: dict[str, list[torch.Tensor]], tolerance: float = 0.0) -> bool:
    return found.keys() == expected.keys() and all(
        len(found[name]) == len(expected[name])
        and all(
            a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=tolerance, atol=tolerance)
            for a, b in zip(found[name], expected[name], strict=True)
        )
        for name in expected
    )


class Inputs:
    """What entered some modules, all passes in a row: [token, hidden] each."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self.seen: list[list[torch.Tensor]] = [[] for _ in modules]
        self.hooks = [
            module.register_forward_pre_hook(self._hook(at), with_kwargs=True) for at, module in enumerate(modules)
        ]

    def _hook(self, at: int):
        def hook(module, args, kwargs):
            self.seen[at].append((args[0] if args else kwargs["hidden_states"])[0].clone())

        return hook

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()


@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.parametrize("chunk", [64, 512])
def test_native_signals_equal_a_float64_recomputation(family, chunk):
    """Over chunks, and over what a session appends, one token at once included."""
    engine = tiny.engine(family)
    layers = engine.model.get_decoder().layers
    modules = [recurrent_module(layers[i]) for i in engine.geometry.recurrent_layers]
    with Inputs(modules) as inputs:
        session = engine.prefill(ids(0, N), record=["native"], chunk=chunk)
        session.append(ids(N, N + 1))
        session.append(ids(N + 1), chunk=chunk)

    found = overheard(session)["native"]

    assert len(found) == len(modules)
    for rows, module, seen, heads in zip(found, modules, inputs.seen, engine.geometry.native_heads, strict=True):
        expected = native(engine.model, module, torch.cat(seen))
        assert rows.shape == expected.shape == (N + MORE, heads, 3)
        assert rows.dtype == torch.float32
        assert torch.allclose(rows.double(), expected, rtol=2e-5, atol=1e-6)
        assert (rows[..., 1] <= 0).all()
        assert rows[..., 2].std() > 0


@pytest.mark.parametrize("family", [f for f in ("granitemoehybrid", "nemotron_h", "zamba2") if f in NATIVE])
def test_mamba2_steps_are_those_behind_the_clamp(family):
    """A limit that bites: transformers clamps in passes of several tokens, and so does what is recorded."""
    limits = {"time_step_limit": (0.6, 0.9)} if family == "granitemoehybrid" else {"time_step_min": 0.6}
    engine = tiny.engine(family, **limits)
    rows = overheard(engine.prefill(ids(0, N), record=["native"]))["native"]
    steps = torch.stack([layer[..., 0] for layer in rows])
    assert steps.min() == pytest.approx(0.6)
    assert family != "granitemoehybrid" or steps.max() == pytest.approx(0.9)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_chunks_a_single_pass_and_an_append_give_the_same(family):
    engine = tiny.engine(family)
    names = all_of(family)
    whole = overheard(engine.prefill(ids(), record=names, chunk=512))
    chunked = overheard(engine.prefill(ids(), record=names, chunk=64))
    session = engine.prefill(ids(0, N), record=names)
    session.append(ids(N))

    expected = set(names) | ({"output_gate_max"} if "output_gate" in names else set())
    assert set(whole) == expected
    assert all(len(rows) == N + MORE for name in ("native", "hidden") for rows in whole.get(name, []))
    assert same(chunked, whole, 1e-3)
    assert same(overheard(session), whole, 1e-3)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_hidden_is_what_entered_each_attention_module(family):
    """Shared modules (zamba2) are told apart by the layer they ran in."""
    engine = tiny.engine(family)
    layers = engine.model.get_decoder().layers
    modules = {}
    for i in engine.geometry.attention_layers:
        modules.setdefault(id(listening.attention_module(layers[i])), listening.attention_module(layers[i]))
    with Inputs(list(modules.values())) as inputs:
        found = overheard(engine.prefill(ids(0, N), record=["hidden"], chunk=512))["hidden"]

    used = [list(modules).index(id(listening.attention_module(layers[i]))) for i in engine.geometry.attention_layers]
    rest = [iter(seen) for seen in inputs.seen]
    assert len(found) == len(engine.geometry.attention_layers)
    for rows, at in zip(found, used, strict=True):
        assert torch.equal(rows, next(rest[at]))
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("family", GATED)
def test_the_output_gate_is_what_the_attention_output_is_multiplied_by(family):
    """Read off the model: what goes into the output projection over what attention gave."""
    engine = tiny.engine(family)
    layers = engine.model.get_decoder().layers
    heads, dim = engine.geometry.query_heads, engine.geometry.value_dims[0]
    modules = [layers[i].self_attn for i in engine.geometry.attention_layers]
    projected: list[torch.Tensor] = []
    hooks = [m.q_proj.register_forward_hook(lambda _, args, output: projected.append(output[0])) for m in modules]
    session = engine.prefill(ids(0, N), record=["output_gate"], chunk=512)
    for hook in hooks:
        hook.remove()
    found = overheard(session)
    for layer, output in enumerate(projected):
        gate = output.double().view(N, heads, 2 * dim)[..., dim:].sigmoid()
        assert found["output_gate"][layer].dtype == torch.float32
        assert torch.allclose(found["output_gate"][layer].double(), gate.mean(dim=(0, 2)), atol=1e-6)
        kv_heads = engine.geometry.kv_heads[layer]
        grouped = gate.view(N, kv_heads, heads // kv_heads, dim)
        assert torch.allclose(found["output_gate_max"][layer].double(), grouped.amax(2).mean(dim=(0, 2)), atol=1e-6)


@pytest.mark.parametrize("family", GATED)
def test_closing_a_gate_shows_in_its_head_only(family):
    """The second half of a head's rows in q_proj is its gate: a bias there moves that head's mean alone."""
    engine = tiny.engine(family)
    dim = engine.geometry.value_dims[0]
    before = overheard(engine.prefill(ids(0, N), record=["output_gate"]))["output_gate"][0]
    module = engine.model.get_decoder().layers[engine.geometry.attention_layers[0]].self_attn
    module.q_proj.bias = torch.nn.Parameter(torch.zeros(module.q_proj.out_features))
    module.q_proj.bias[2 * dim * 3 + dim : 2 * dim * 4] = -30.0
    after = overheard(engine.prefill(ids(0, N), record=["output_gate"]))["output_gate"][0]
    assert after[3] < 1e-9
    rest = torch.arange(len(after)) != 3
    assert torch.allclose(after[rest], before[rest], atol=1e-6)


@pytest.mark.parametrize("family", NATIVE)
def test_nothing_but_the_floats_is_kept(family):
    engine = tiny.engine(family)

    def held() -> set[tuple[int, int]]:
        gc.collect()
        tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
        return {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors}

    for read in (False, True):  # in chunks, and joined
        session = engine.prefill(ids(), record=["native"], chunk=64)
        if read:
            session.recording.signals(session.state)
        before = held()
        native_bytes = sum(
            chunk.untyped_storage().nbytes() for rows in session.recording.native for chunk in rows._chunks
        )
        session.recording.native.clear()
        freed = sum(size for _, size in before - held())
        expected = 3 * 4 * (N + MORE) * sum(engine.geometry.native_heads)
        assert native_bytes == freed == expected


@pytest.mark.parametrize("family", DIFFERENT)
def test_recording_changes_nothing_and_leaves_nothing_behind(family):
    engine = tiny.engine(family)
    decoder = engine.model.get_decoder()
    file = vars(sys.modules[type(decoder.layers[0]).__module__])
    names = list(listening.KERNELS[ROW[family].native_signals])
    stock = [file[name] for name in names]

    def clean() -> bool:
        hooks = [hook for m in engine.model.modules() for d in (m._forward_hooks, m._forward_pre_hooks) for hook in d]
        return not hooks and [file[name] for name in names] == stock and not listening._swapped

    plain = engine.prefill(ids(0, N), chunk=64)
    heard = engine.prefill(ids(0, N), chunk=64, record=all_of(family))
    assert clean()
    assert torch.equal(heard.logits(ids(N, N + 5)), plain.logits(ids(N, N + 5)))

    inside = []

    def stop(done: int, total: int) -> None:
        inside.append(clean())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.prefill(ids(0, N), chunk=64, record=all_of(family), on_chunk=stop)
    assert inside == [False]
    assert clean()


def test_another_prefill_between_two_chunks_is_not_heard():
    engine, other = tiny.engine("qwen3_5"), tiny.engine("qwen3_5", seed=1)
    names = all_of("qwen3_5")
    expected = overheard(engine.prefill(ids(0, N), chunk=64, record=names))
    beside = []

    def read_another(done: int, total: int) -> None:
        engine.prefill(ids(5, 20))
        beside.append(other.prefill(ids(5, 20), record=names))

    found = overheard(engine.prefill(ids(0, N), chunk=64, record=names, on_chunk=read_another))

    assert same(found, expected)
    alone = overheard(other.prefill(ids(5, 20), record=names))
    assert all(same(overheard(session), alone) for session in beside)


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_threads_hear_their_own_contexts(family):
    """Two models of one family share a modeling file; some threads record, some do not, all at once."""
    engines = [tiny.engine(family), tiny.engine(family, seed=1)]
    names = all_of(family)
    jobs = [(engines[i % 2], tiny.tokens(130 + i, seed=i), names if i % 3 else []) for i in range(6)]
    expected = [overheard(e.prefill(tokens, chunk=64, record=record)) for e, tokens, record in jobs]
    found: list[dict] = [{} for _ in jobs]
    failed: list[BaseException] = []

    def run(at: int) -> None:
        engine, tokens, record = jobs[at]
        try:
            for _ in range(3):
                found[at] = overheard(engine.prefill(tokens, chunk=64, record=record))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failed
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))
    assert not listening._swapped


def test_a_recurrence_that_runs_another_way_is_noticed(monkeypatch):
    engine = tiny.engine("qwen3_5")
    monkeypatch.setattr(listening, "_heard", lambda stock, reader: stock)
    with pytest.raises(RuntimeError, match="of 150 tokens, wakesight overheard 0 to 0"):
        engine.prefill(ids(0, N), record=["native"])
    gc.collect()
    assert engine.pool.held_bytes == 0


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_rows_of_a_padded_batch_equal_rows_read_alone(family):
    engine = tiny.engine(family)
    rows = [tiny.tokens(90, seed=3), tiny.tokens(150, seed=4)]
    width = max(map(len, rows))
    padded = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    batch = engine.prefill_batch(padded, attention_mask=mask, record=all_of(family), chunk=64)
    for session, row in zip(batch, rows, strict=True):
        assert same(overheard(session), overheard(engine.prefill(row, record=all_of(family), chunk=64)))
        assert all(len(layer) == len(row) for layer in overheard(session)["native"])


@pytest.mark.parametrize("family", [f for f in DIFFERENT if ROW[f].only_whole is None])
def test_what_was_given_out_never_changes_and_a_child_reads_on_alone(family):
    engine = tiny.engine(family)
    names = all_of(family)
    parent = engine.prefill(ids(0, N), record=names)
    child, sibling = (parent.compact(Policy(scorer="random", keep=keep)) for keep in (1.0, 0.3))
    given_out = [tensor for tensors in (parent.signals()["native"], parent.signals()["hidden"]) for tensor in tensors]
    clones = [tensor.clone() for tensor in given_out]
    before = overheard(parent)
    assert child.recording is parent.recording
    assert same(overheard(sibling), before)

    child.append(ids(N))

    assert same(overheard(child), overheard(engine.prefill(ids(), record=names)), 1e-3)
    assert same(overheard(parent), before)
    assert same(overheard(sibling), before)
    parent.append(ids(N, N + 3))
    sibling.append(ids(N, N + 2))
    assert all(torch.equal(a, b) for a, b in zip(given_out, clones, strict=True))
    assert [len(overheard(s)["native"][0]) for s in (parent, child, sibling)] == [N + 3, N + MORE, N + 2]


def test_a_failed_append_is_not_heard(monkeypatch):
    engine = tiny.engine("qwen3_5")
    session = engine.prefill(ids(0, N), record=all_of("qwen3_5"))
    before = overheard(session)
    stock, calls = engine.forward, []

    def second_fails(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise WorkError("out of memory")
        return stock(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "forward", second_fails)
        with pytest.raises(WorkError):
            session.append(ids(N), chunk=64)
    assert same(overheard(session), before)
    session.append(ids(N))
    assert same(overheard(session), overheard(engine.prefill(ids(), record=all_of("qwen3_5"))), 1e-3)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_saved_session_heard_the_same(family, tmp_path):
    engine = tiny.engine(family)
    names = all_of(family)
    session = engine.prefill(ids(0, N), record=names)
    session.save(tmp_path / "heard.ws")

    loaded = Session.load(tmp_path / "heard.ws", engine)

    assert same(overheard(loaded), overheard(session))
    for one in (loaded, session):
        one.append(ids(N))
    assert same(overheard(loaded), overheard(session))


def test_a_saved_session_of_before_has_no_such_signals(tmp_path):
    engine = tiny.engine("qwen3_5")
    engine.prefill(ids(0, N)).save(tmp_path / "plain.ws")
    loaded = Session.load(tmp_path / "plain.ws", engine)
    assert overheard(loaded) == {}
    with pytest.raises(RequestError, match=r"record=\['native'\]"):
        _ = loaded.signals()["native"]
    with pytest.raises(RequestError, match=r"record=\['output_gate'\]"):
        _ = loaded.signals()["output_gate_max"]


@pytest.mark.parametrize("family", [f for f in tiny.FAMILIES if ROW[f].native_signals is None])
def test_a_family_without_native_signals_is_refused_by_name(family):
    engine = tiny.engine(family)
    assert engine.geometry.native_heads == ()
    with pytest.raises(RequestError, match=rf"\({family}\) has no native signals: {ROW[family].no_signals}"):
        engine.prefill(ids(0, N), record=["native"])


@pytest.mark.parametrize("family", [f for f in tiny.FAMILIES if not ROW[f].output_gate])
def test_a_family_without_output_gate_is_refused_by_name(family):
    with pytest.raises(RequestError, match=rf"\({family}\) has no gate on its attention output"):
        tiny.engine(family).prefill(ids(0, N), record="output_gate")


@pytest.mark.skipif("qwen4_exp" not in tiny.FAMILIES, reason="this transformers has no qwen4_exp")
def test_an_indexed_model_is_heard_but_its_attention_is_not():
    engine = tiny.engine("qwen4_exp")
    with pytest.raises(RequestError, match="attention_sums cannot be recorded on tiny-qwen4_exp: its sparse indexer"):
        engine.prefill(ids(0, N), record=["attention_sums", "native"])
    assert set(overheard(engine.prefill(ids(0, N), record=all_of("qwen4_exp")))) == {*OVERHEARD, "output_gate_max"}


def test_names_are_known_and_others_refused_with_the_list():
    assert wanted_signals(["hidden", "native", "output_gate"]) == OVERHEARD
    with pytest.raises(RequestError, match=r"did you mean '?native'?.*signals: .*native, output_gate, hidden"):
        wanted_signals(["nativ"])
