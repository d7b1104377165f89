"""A saved session is the session: same bits, same answers, and never a file that is believed without a check."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch

from wakesight.cache import files
from wakesight.engines.hf.engine import load
from wakesight.engines.saved import about
from wakesight.engines.session import Session
from wakesight.errors import RequestError, WorkError
from wakesight.models.fingerprint import fingerprint
from wakesight.policy import Policy
from wakesight.testing import tiny
from wakesight.testing.laws import state_digest

N = 150
RECORD = ("h2o", "expected_attention")
QUESTION = tiny.tokens(6, seed=50)
KINDS = ("whole", "flat", "global", "page", "again", "continued", "continued whole")
SCORERS = ("h2o", "expected_attention", "snapkv", "keydiff")  # between them they read all that is recorded


def size(engine, keep: float) -> float:
    return 1.0 if engine.only_whole else keep


def make(engine, kind: str) -> Session:
    """One session of the kinds that can be saved."""
    whole = engine.prefill(tiny.tokens(N), record=RECORD if engine.only_whole is None else ())
    if kind == "continued whole":
        whole.append(tiny.tokens(70, seed=2))
    if kind.endswith("whole"):
        return whole
    if kind == "global":
        return whole.compact(Policy(scorer="knorm", keep=size(engine, 0.4), allocation="global"))
    if kind == "page":
        return whole.compact(Policy(scorer="h2o", keep=size(engine, 0.4), unit="page", page_size=16))
    child = whole.compact(Policy(scorer="snapkv:window=8", keep=size(engine, 0.5)))
    if kind == "again":
        return child.compact(Policy(scorer="keydiff", keep=size(engine, 0.2)))
    if kind == "continued":
        child.append(tiny.tokens(70, seed=2))
    return child


def same(one: Session, other: Session) -> None:
    """Everything a user can see of two sessions is equal, bit for bit."""
    assert state_digest(one.state) == state_digest(other.state)
    assert one.stats == other.stats
    assert (one.policy, one.frame, one.tokens, one.state.prefix) == (
        other.policy, other.frame, other.tokens, other.state.prefix,
    )  # fmt: skip
    assert (one.kept is None) == (other.kept is None)
    if one.kept is not None and other.kept is not None:
        for a, b in zip(one.kept.positions, other.kept.positions, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert torch.equal(one.logits(QUESTION), other.logits(QUESTION))
    answers = [session.ask(QUESTION, max_new_tokens=8) for session in (one, other)]
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].finish == answers[1].finish


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_session_comes_back_bit_for_bit(engine, kind, tmp_path):
    with make(engine, kind) as before:
        before.save(tmp_path / "a.ws")
        with Session.load(tmp_path / "a.ws", engine) as after:
            same(before, after)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_recorded_travels_along(engine, kind, tmp_path):
    """Both are read on and compacted by every kind of scorer; the file holds all that this needs."""
    before = make(engine, kind)
    before.save(tmp_path / "a.ws")
    after = Session.load(tmp_path / "a.ws", engine)
    for session in (before, after):
        session.append(tiny.tokens(40, seed=3))
    assert torch.equal(before.logits(QUESTION), after.logits(QUESTION))
    for scorer in SCORERS:
        policy = Policy(scorer=scorer, keep=size(engine, 0.3))
        if engine.only_whole is None and not set(policy.scorer_method.reads) <= set(before.signals().streams):
            continue  # latent attention has no values
        with before.compact(policy) as one, after.compact(policy) as other:
            assert state_digest(one.state) == state_digest(other.state)
            assert torch.equal(one.logits(QUESTION), other.logits(QUESTION))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "kimi_linear", "falcon_h1", "jamba"])
def test_a_child_opens_on_a_model_that_was_loaded_anew(family, tmp_path):
    if family not in tiny.FAMILIES:
        pytest.skip(f"this transformers has no {family}")
    before = make(tiny.engine(family), "continued")
    before.save(tmp_path / "a.ws")
    same(before, Session.load(tmp_path / "a.ws", tiny.engine(family)))


def test_a_document_keeps_its_template_and_its_prefix(tmp_path):
    engine = tiny.engine("llama")
    before = engine.prefill("The keeper wrote the log. " * 9, instruction="Be brief.").compact(Policy(keep=0.5))
    before.save(tmp_path / "a.ws")
    after = Session.load(tmp_path / "a.ws", engine)
    same(before, after)
    assert after.question_ids("Who wrote?") == before.question_ids("Who wrote?")
    assert after.state.prefix > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_number_types(dtype, tmp_path):
    engine = load(tiny.model("qwen3_5").to(dtype), growth=64)
    before = make(engine, "global")
    before.save(tmp_path / "a.ws")
    same(before, Session.load(tmp_path / "a.ws", engine))


def test_a_scorer_window_of_its_own_comes_back(tmp_path):
    engine = tiny.engine("llama")
    engine.prefill(tiny.tokens(N), query_window=100).save(tmp_path / "a.ws")
    after = Session.load(tmp_path / "a.ws", engine)
    assert after.compact(Policy(scorer="snapkv:window=100", keep=0.5)).kept is not None


# --- the file -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    return tiny.engine("llama")


@pytest.fixture
def child(llama):
    with make(llama, "global") as session:
        yield session


def digest(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_file_never_changes_and_two_readers_do_not_see_each_other(child, llama, tmp_path):
    path = tmp_path / "a.ws"
    child.save(path)
    file, expected = digest(path), state_digest(child.state)
    one, other = (Session.load(path, llama) for _ in range(2))

    one.ask(QUESTION, max_new_tokens=90)  # longer than the growth slack
    assert state_digest(one.state) == state_digest(other.state) == expected
    one.append(tiny.tokens(20, seed=4))
    one.compact(Policy(keep=0.3)).ask(QUESTION, max_new_tokens=5)
    one.save(tmp_path / "b.ws")
    one.close()

    assert digest(path) == file
    same(child, other)


def test_an_answer_is_written_into_the_slack_that_the_file_brought(child, llama, tmp_path):
    child.save(tmp_path / "a.ws")
    after = Session.load(tmp_path / "a.ws", llama)
    held = [[slots.storage(name).data_ptr() for name in slots.names] for slots in after.state.slots]
    assert [slots.capacities for slots in after.state.slots] == [slots.capacities for slots in child.state.slots]
    after.ask(QUESTION, max_new_tokens=8)
    assert [[slots.storage(name).data_ptr() for name in slots.names] for slots in after.state.slots] == held


def test_what_was_answered_is_not_in_the_file(child, tmp_path):
    """Growth slack is written as zeros: it may hold an earlier answer, or what another program left in memory."""
    child.save(tmp_path / "before.ws")
    child.ask(QUESTION, max_new_tokens=8)
    child.save(tmp_path / "after.ws")
    assert digest(tmp_path / "before.ws") == digest(tmp_path / "after.ws")
    held = files.read(tmp_path / "after.ws").tensors
    for layer, slots in enumerate(child.state.slots):
        start, unused = 0, held[f"slots.{layer}.key"]
        for length, capacity in zip(slots.lengths, slots.capacities, strict=True):
            assert not unused[start + length : start + capacity].any()
            start += capacity


def test_a_loaded_session_can_be_saved_over_its_own_file(child, llama, tmp_path):
    path = tmp_path / "a.ws"
    child.save(path)
    after = Session.load(path, llama)
    after.append(tiny.tokens(20, seed=4))
    after.save(path)
    same(after, Session.load(path, llama))
    assert [file.name for file in tmp_path.iterdir()] == ["a.ws"]


def test_a_file_of_another_kind_is_not_saved_over(child, tmp_path):
    document = tmp_path / "report.txt"
    document.write_text("The keeper wrote the log. " * 9)
    before = digest(document)
    with pytest.raises(RequestError, match=r"report\.txt: it holds another file that is no session; give another name"):
        child.save(document)
    assert digest(document) == before


def test_a_model_given_by_a_relative_place_is_named_by_its_absolute_one(child, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny.save("llama", tmp_path / "model").parent)
    (tmp_path / "smollm2").mkdir()
    for name, expected in (
        ("model", str(tmp_path / "model")),
        ("./model", str(tmp_path / "model")),
        ("smollm2", "smollm2"),  # bundled: what lies in this folder has nothing to do with it
        ("owner/name", "owner/name"),
    ):
        monkeypatch.setattr(child.engine, "name", name)
        child.save(tmp_path / "a.ws")
        assert about(tmp_path / "a.ws")[1:] == (expected, "float32", None)


def test_a_failed_save_leaves_the_old_file_and_the_session(child, llama, tmp_path, monkeypatch):
    path = tmp_path / "a.ws"
    child.save(path)
    before, expected = digest(path), child.ask(QUESTION).tokens

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(WorkError, match=r"a\.ws: the disk is full"):
            child.save(path)
    assert digest(path) == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.ws"]
    assert child.ask(QUESTION).tokens == expected


def test_no_pickle_is_written_or_read(child, llama, tmp_path, monkeypatch):
    def never(*args, **keywords):
        raise AssertionError("pickle")

    for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
        monkeypatch.setattr(f"pickle.{name}", never)
    monkeypatch.setattr(torch, "load", never)
    monkeypatch.setattr(torch, "save", never)
    child.save(tmp_path / "a.ws")
    same(child, Session.load(tmp_path / "a.ws", llama))


def test_a_session_is_not_saved_in_the_middle_of_an_answer(child, llama, tmp_path):
    with pytest.raises(RequestError, match="is answering"):
        child.ask(QUESTION, stream=lambda piece: child.save(tmp_path / "a.ws"))
    closed = make(llama, "whole")
    closed.close()
    with pytest.raises(RequestError, match="closed"):
        closed.save(tmp_path / "a.ws")
    assert list(tmp_path.iterdir()) == []


def test_closing_returns_what_loading_took(child, llama, tmp_path):
    child.save(tmp_path / "a.ws")
    gc.collect()
    ledger = (llama.pool.held_bytes, llama.pool.leases)
    with Session.load(tmp_path / "a.ws", llama) as after:
        assert after.stats.kv_bytes_kept == child.stats.kv_bytes_kept
        assert llama.pool.held_bytes - ledger[0] == sum(s.held_bytes + s.slack_bytes for s in after.state.slots)
        after.ask(QUESTION, max_new_tokens=90)
    assert (llama.pool.held_bytes, llama.pool.leases) == ledger


LOADING = """
    import json, sys
    import torch
    from wakesight.engines.hf.engine import load
    from wakesight.engines.session import Session

    def anonymous():
        rows = dict(line.split(":", 1) for line in open("/proc/self/status"))
        return int(rows["RssAnon"].split()[0]) * 1024

    torch.set_num_threads(1)
    engine, other = (load(sys.argv[1], growth=64) for _ in range(2))
    other.fingerprint(), engine.fingerprint()
    small = Session.load(sys.argv[2], engine)  # code and buffers that the first call needs
    small.ask([1, 2, 3], max_new_tokens=2)
    start = anonymous()
    session = Session.load(sys.argv[3], engine)
    loaded = anonymous()
    session.state.slots[0].append({n: torch.ones(6, 1, 256) for n in ("key", "value")})
    print(json.dumps({"loaded": loaded - start, "written": anonymous() - loaded}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_maps_the_file_and_copies_only_pages_that_are_written(tmp_path):
    wide = {"num_key_value_heads": 6, "head_dim": 256, "max_position_embeddings": 4096}
    folder = tiny.save("llama", tmp_path / "model", **wide)
    engine = load(folder, growth=64)
    for name, count in (("small.ws", 20), ("large.ws", 1200)):
        with engine.prefill(tiny.tokens(count), query_window=8) as session:
            session.save(tmp_path / name)
    large = (tmp_path / "large.ws").stat().st_size
    assert large > 40_000_000

    words = [str(folder), str(tmp_path / "small.ws"), str(tmp_path / "large.ws")]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(LOADING), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)

    assert grown["loaded"] < large / 10
    assert grown["written"] < large / 10  # one new slot in each of twelve strips


# --- the wrong model ----------------------------------------------------------------------------------------------


def refused(path, engine, expected: str) -> str:
    """The sentence of a refusal, which takes nothing from the pool, not even while the exception is looked at."""
    ledger = (engine.pool.held_bytes, engine.pool.leases)
    with pytest.raises(RequestError) as caught:
        Session.load(path, engine)
    assert (engine.pool.held_bytes, engine.pool.leases) == ledger
    sentence = str(caught.value)
    assert str(path) in sentence
    assert "\n" not in sentence
    assert expected in sentence
    return sentence


def test_another_family_is_named(child, tmp_path):
    child.save(tmp_path / "a.ws")
    sentence = refused(tmp_path / "a.ws", tiny.engine("qwen3"), "is a session of the llama model tiny-llama")
    assert "tiny-qwen3 is a qwen3 model" in sentence


def test_another_dtype_is_named_with_the_option(child, tmp_path):
    child.save(tmp_path / "a.ws")
    engine = load(tiny.model("llama").to(torch.bfloat16))
    refused(tmp_path / "a.ws", engine, "was made with dtype float32, and llama is loaded as bfloat16; load it with --")


@pytest.mark.parametrize("changes", [{"seed": 1}, {"num_hidden_layers": 4}, {"rope_theta": 5000.0}])
def test_another_model_of_the_family_is_refused(child, tmp_path, changes):
    child.save(tmp_path / "a.ws")
    refused(tmp_path / "a.ws", tiny.engine("llama", **changes), "was made with other weights than those of tiny-llama")


@pytest.mark.parametrize("name", ["model.layers.2.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"])
def test_a_model_with_one_other_weight_is_refused(child, tmp_path, name):
    child.save(tmp_path / "a.ws")
    model = tiny.model("llama")
    dict(model.named_parameters())[name].mul_(1.001)
    refused(tmp_path / "a.ws", load(model), "other weights")


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "falcon_h1", "jamba", "zamba2"])
def test_the_fingerprint_sees_every_parameter(family):
    model = tiny.model(family)
    seen = {"as made": fingerprint(model)}
    assert fingerprint(tiny.model(family)) == seen["as made"]
    for name, weight in model.named_parameters():
        before = weight.clone()
        weight.mul_(1.01).add_(0.001)
        seen[name] = fingerprint(model)
        weight.copy_(before)
    assert len(set(seen.values())) == len(seen)
    assert fingerprint(model) == seen["as made"]


def test_the_fingerprint_is_of_the_model_and_not_of_what_is_done_with_it(tmp_path):
    model = tiny.model("qwen3_5")
    before = fingerprint(model)
    engine = load(model)
    assert fingerprint(model) == before  # our attention function is no part of it
    engine.prefill(tiny.tokens(20)).ask(QUESTION, max_new_tokens=2)
    assert engine.fingerprint() == before
    engine.close()
    model.set_attn_implementation("eager")
    assert fingerprint(model) == before
    assert fingerprint(tiny.model("qwen3_5").to(torch.bfloat16)) != before

    folder = tiny.save("qwen3_5", tmp_path / "model")
    loaded = [load(str(folder)).fingerprint() for _ in range(2)]
    folder.rename(tmp_path / "moved")
    assert load(str(tmp_path / "moved")).fingerprint() == loaded[0] == loaded[1]


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """One file of a hybrid model's child with everything in it, as (engine, header, tensors, bytes)."""
    engine = tiny.engine("qwen3_5")
    path = tmp_path_factory.mktemp("good") / "good.ws"
    with make(engine, "flat") as session:
        session.save(path)
    held = files.read(path)
    return engine, held.header, held.tensors, path.read_bytes()


def cut(size):
    return lambda blob: blob[:size]


def flipped(at):
    """One bit, counted from the end."""
    return lambda blob: blob[: len(blob) - at] + bytes([blob[-at] ^ 1]) + blob[len(blob) - at + 1 :]


def replaced(old, new):
    def change(blob):
        assert blob.count(old) == 1
        return blob.replace(old, new)

    return change


BYTES = {
    "empty": (cut(0), "is empty (0 bytes)"),
    "cut in the header": (cut(300), "is cut off in its header"),
    "cut in the data": (cut(-1), "is cut off: it has"),
    "too long": (lambda blob: blob + b"\0", "goes on for 1 bytes after its end"),
    "a bit of the data": (flipped(1), "does not match its checksum"),
    "a bit of a key": (flipped(100_000), "does not match its checksum"),
    "a field edited by hand": (replaced(rb"\"keep\": 0.5", rb"\"keep\": 0.4"), "does not match its checksum"),
    "a newer format": (replaced(b'"version":"1"', b'"version":"3"'), "reads up to version 2; update it: pip install"),
    "another format": (replaced(b"wakesight-session", b"wakesight-sessiom"), "a safetensors file of format"),
    "a pickle": (lambda blob: b"\x80\x04}\x94." + blob, "looks like a pickle"),
    "a picture": (lambda blob: b"\x89PNG\r\n\x1a\n" + blob, "looks like a picture"),
}


@pytest.mark.parametrize("damage", BYTES)
def test_damage_to_the_bytes_is_named(good, damage, tmp_path):
    engine, _, _, blob = good
    change, expected = BYTES[damage]
    (tmp_path / "a.ws").write_bytes(change(blob))
    refused(tmp_path / "a.ws", engine, expected)


def test_what_is_no_file_is_named(good, tmp_path):
    refused(tmp_path / "none.ws", good[0], "there is no file")
    refused(tmp_path, good[0], "is a folder")


def setting(*keys, to):
    """Change one field of the header."""

    def change(header, tensors):
        for key in keys[:-1]:
            header = header[key]
        header[keys[-1]] = to

    return change


def without(*keys):
    def change(header, tensors):
        for key in keys[:-1]:
            header = header[key]
        del header[keys[-1]]

    return change


def tensor(name, change):
    """Replace one tensor, or take it out if `change` gives None."""

    def apply(header, tensors):
        found = change(tensors[name].clone())
        if found is None:
            del tensors[name]
        else:
            tensors[name] = found

    return apply


def gone(found):
    return None


def one_less(found):
    return found[:-1]


def with_value(at, value):
    def change(found):
        found[at] = value
        return found

    return change


def emptied(header, tensors):
    tensors["tokens"] = tensors["tokens"][:0]


def one_key_head(header, tensors):
    """Consistent in itself, but not with the model."""
    layer = header["layers"][0]
    layer["heads"]["key"] = 1
    tensors["slots.0.key"] = tensors["slots.0.key"][: layer["capacities"][0]].clone()


NO_LAYER = "does not describe attention layer"
NOT_ITS = "holds entries that do not belong to its"
STATE = "2/recurrent.0"
HEADER = {
    "no model": (without("model"), "lacks the field 'model.name'"),
    "a model without a fingerprint": (without("model", "fingerprint"), "lacks the field 'model.fingerprint'"),
    "a model that is a text": (setting("model", to="tiny"), "lacks the field 'model.name'"),
    "no frame": (without("frame"), "lacks the field 'frame.head'"),
    "frame ids that are texts": (setting("frame", "tail", to=["a"]), "holds 'a' as field 'frame.tail[0]'"),
    "no separator": (setting("frame", "separator", to=None), "holds None as field 'frame.separator'"),
    "no prefix": (without("prefix"), "lacks the field 'prefix'"),
    "a negative prefix": (setting("prefix", to=-1), NOT_ITS),
    "a prefix beyond the context": (setting("prefix", to=N + 1), NOT_ITS),
    "whole is no bool": (setting("whole", to=1), "holds 1 as field 'whole'"),
    "a child that says it is whole": (setting("whole", to=True), NOT_ITS),
    "no layers": (setting("layers", to=[]), NO_LAYER),
    "a missing layer": (lambda header, tensors: header["layers"].pop(), f"{NO_LAYER} 1"),
    "a layer that is a number": (setting("layers", 0, to=3), "holds 3 as field 'layers[0]'"),
    "lengths beyond the capacity": (setting("layers", 0, "lengths", to=[500, 75]), NO_LAYER),
    "a length too few": (setting("layers", 0, "lengths", to=[75]), NO_LAYER),
    "a negative length": (setting("layers", 0, "lengths", to=[-1, 75]), NO_LAYER),
    "a length that is a bool": (setting("layers", 0, "lengths", to=[True, 75]), NO_LAYER),
    "lengths that fit no kept set": (setting("layers", 0, "lengths", to=[74, 75]), "'kept.0.0' of shape [75]"),
    "capacities that fit no tensor": (setting("layers", 0, "capacities", to=[128, 128]), "the tensor 'slots.0.key'"),
    "capacities that are a text": (setting("layers", 0, "capacities", to="many"), NO_LAYER),
    "no heads": (without("layers", 0, "heads"), NO_LAYER),
    "no value": (without("layers", 0, "heads", "value"), NO_LAYER),
    "heads as texts": (setting("layers", 0, "heads", to={"key": "2", "value": "2"}), NO_LAYER),
    "heads of another model": (setting("layers", 0, "heads", to={"key": 3, "value": 3}), NO_LAYER),
    "one key head of two": (one_key_head, NO_LAYER),
    "a payload of unknown heads": (setting("layers", 0, "heads", to={"key": 2, "value": 2, "x": 7}), NO_LAYER),
    "a payload that is not there": (setting("layers", 0, "heads", to={"key": 2, "value": 2, "x": 1}), NO_LAYER),
    "no states": (setting("states", to=[]), "does not hold the recurrent states"),
    "a state twice": (lambda header, tensors: header["states"].append(header["states"][0]), "the recurrent states"),
    "a state of another name": (setting("states", 0, to="0/other"), "does not hold the recurrent states"),
    "no recording": (without("recording"), "lacks the field 'recording.window'"),
    "a window of nothing": (setting("recording", "window", to=0), "does not describe what was recorded"),
    "another window": (setting("recording", "window", to=32), "holds the tensor 'queries.0' of shape"),
    "a scaling too few": (lambda header, tensors: header["recording"]["scaling"].pop(), "what was recorded"),
    "a scaling too many": (lambda header, tensors: header["recording"]["scaling"].append(1.0), "what was recorded"),
    "a scaling that is a text": (setting("recording", "scaling", 0, to="1"), "'recording.scaling[0]'"),
    "a policy that is a text": (setting("policy", to="keydiff"), "holds 'keydiff' as field 'policy'"),
    "no seconds": (without("seconds", "score"), "lacks the field 'seconds.score'"),
    "no tokens": (tensor("tokens", gone), "lacks the tensor 'tokens'"),
    "empty tokens": (emptied, NOT_ITS + " 0 tokens"),
    "tokens of another type": (tensor("tokens", torch.Tensor.long), "'tokens' as int64, expected int32"),
    "tokens in two rows": (tensor("tokens", lambda found: found.view(2, -1)), "'tokens' of shape [2, 75]"),
    "a key tensor gone": (tensor("slots.1.key", gone), "lacks the tensor 'slots.1.key'"),
    "keys of another dtype": (tensor("slots.0.key", torch.Tensor.bfloat16), "as bfloat16, expected float32"),
    "a row of values gone": (tensor("slots.0.value", one_less), "holds the tensor 'slots.0.value' of shape"),
    "keys of another width": (tensor("slots.0.key", lambda found: found[:, :8]), "'slots.0.key' of shape"),
    "kept positions gone": (tensor("kept.0.1", gone), "lacks the tensor 'kept.0.1'"),
    "a kept position too few": (tensor("kept.0.0", one_less), "holds the tensor 'kept.0.0' of shape [74]"),
    "a kept position below 0": (tensor("kept.0.0", with_value(0, -1)), NOT_ITS),
    "a kept position beyond the context": (tensor("kept.0.0", with_value(-1, N)), NOT_ITS),
    "kept positions that descend": (tensor("kept.0.0", lambda found: found.flip(0)), NOT_ITS),
    "a kept position twice": (tensor("kept.0.0", lambda found: torch.cat([found[:1], found[:-1]])), NOT_ITS),
    "kept positions as floats": (tensor("kept.0.0", torch.Tensor.float), "as float32, expected int32"),
    "a state gone": (tensor(f"state.{STATE}", gone), f"lacks the tensor 'state.{STATE}'"),
    "a state of another shape": (tensor(f"state.{STATE}", lambda found: found[:, :-1]), f"'state.{STATE}' of shape"),
    "a state of another dtype": (tensor(f"state.{STATE}", torch.Tensor.double), "as float64, expected float32"),
    "queries gone": (tensor("queries.1", gone), "lacks the tensor 'queries.1'"),
    "queries of too few heads": (tensor("queries.0", one_less), "holds the tensor 'queries.0' of shape"),
    "queries of another width": (tensor("queries.0", lambda found: found[..., :8]), "'queries.0' of shape"),
    "sums gone": (tensor("sums.0", gone), "lacks the tensor 'sums.0'"),
    "sums of too few tokens": (tensor("sums.0", lambda found: found[:, :-1]), "the tensor 'sums.0' of shape"),
    "moments gone": (tensor("scatter.1", gone), "lacks the tensor 'scatter.1'"),
    "a mean of another dtype": (tensor("mean.0", torch.Tensor.float), "'mean.0' as float32, expected float64"),
    "a count that is no number": (tensor("count.0", lambda found: found.float() * float("nan")), "expected int64"),
}  # fmt: skip


@pytest.mark.parametrize("damage", HEADER)
def test_content_that_makes_no_sense_is_named_though_its_checksum_is_right(good, damage, tmp_path):
    engine, header, tensors, _ = good
    header, tensors = json.loads(json.dumps(header)), dict(tensors)
    change, expected = HEADER[damage]
    change(header, tensors)
    files.write(tmp_path / "a.ws", header, tensors)
    refused(tmp_path / "a.ws", engine, expected)


def test_the_good_file_is_good(good, tmp_path):
    engine, header, tensors, _ = good
    files.write(tmp_path / "a.ws", header, tensors)
    with make(engine, "flat") as expected, Session.load(tmp_path / "a.ws", engine) as found:
        assert state_digest(found.state) == state_digest(expected.state)
        assert torch.equal(found.logits(QUESTION), expected.logits(QUESTION))


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("scorer", "elsewhere", "unknown scorer 'elsewhere'"),
        ("scorer", "snapkv:stride=4", "no setting 'stride'"),
        ("allocation", "ada:left=2", "ada"),
        ("keep", 7, "keep=7"),
        ("later", True, "no field 'later'"),
    ],
)
def test_a_policy_that_cannot_be_made_here_does_not_lose_the_session(good, tmp_path, field, value, named):
    """It is a record of what was done; a plug-in that is gone today is no reason to read the document again."""
    engine, header, tensors, _ = good
    files.write(tmp_path / "a.ws", {**header, "policy": {**header["policy"], field: value}}, tensors)
    with pytest.warns(UserWarning, match="was compacted by a policy that cannot be made here") as caught:
        session = Session.load(tmp_path / "a.ws", engine)
    assert str(tmp_path / "a.ws") in str(caught[0].message)
    assert named in str(caught[0].message)
    assert caught[0].filename == __file__
    with session, make(engine, "flat") as expected:
        assert session.policy is None
        assert session.ask(QUESTION).tokens == expected.ask(QUESTION).tokens
        session.save(tmp_path / "again.ws")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Session.load(tmp_path / "again.ws", engine).policy is None


# --- the real model -----------------------------------------------------------------------------------------------

ASKING = """
    import json, sys
    import torch
    import wakesight as ws

    torch.set_num_threads(1)
    engine = ws.load("smollm2")
    session = ws.Session.load(sys.argv[1], engine)
    answer = session.ask("What does the text describe?", max_new_tokens=12)
    print(json.dumps({"tokens": answer.tokens, "kept": session.stats.kv_bytes_kept}))
"""


@pytest.mark.real
def test_a_child_of_smollm2_answers_alike_in_a_new_process(smollm2, tmp_path):
    """About 2,000 tokens; benchmarks/saved_session.py does 8,000 and measures."""
    import pydoc_data.topics

    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))[200_000:208_000]
    with smollm2.prefill(text) as whole, whole.compact(Policy(scorer="keydiff", keep=0.2)) as child:
        assert len(child.tokens) > 1500
        child.save(tmp_path / "a.ws")
        expected = child.ask("What does the text describe?", max_new_tokens=12)
        question = child.question_ids("What does the text describe?")
        with Session.load(tmp_path / "a.ws", smollm2) as again:
            assert torch.equal(again.logits(question), child.logits(question))
        kept = child.stats.kv_bytes_kept
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ASKING), str(tmp_path / "a.ws")], capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"tokens": list(expected.tokens), "kept": kept}
