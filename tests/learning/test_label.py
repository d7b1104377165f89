"""Label folders: raw utility by the definition, the same bytes however a run was cut, and reasons for what fails."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from wakesight.errors import RequestError, WorkError
from wakesight.learning import label as module
from wakesight.learning.documents import Document
from wakesight.learning.folder import locked
from wakesight.learning.influence import influence_reference
from wakesight.learning.label import Settings, label, utilities
from wakesight.learning.labelled import (
    SPAN,
    file_name,
    first_label,
    load_labels,
    normalised,
    packed,
    read_labelled,
    read_skipped,
    unpacked,
)
from wakesight.learning.rollouts import document_seed
from wakesight.testing import tiny

FAMILIES = ("qwen3_5", "llama")
SHORT = {"continuations": 3, "tokens": 8}


def documents(count: int = 4) -> list[Document]:
    return [Document(f"doc {n}", ("a", "b")[n % 2], "", tuple(tiny.tokens(40 + 7 * n, seed=n))) for n in range(count)]


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request):
    return tiny.engine(request.param)


@pytest.fixture(scope="module")
def hybrid():
    return tiny.engine("qwen3_5")


@pytest.fixture(scope="module")
def whole(engine, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("labels") / "whole"
    label(engine, documents(), out, **SHORT)
    return out


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".lock")
    }


def test_a_folder_reads_back_as_documents_and_signals(engine, whole):
    found = list(load_labels(whole))
    geometry = engine.geometry
    head = len(engine.frame().head)

    assert [d.id for d in found] == ["doc 0", "doc 1", "doc 2", "doc 3"]
    assert [d.corpus for d in found] == ["a", "b", "a", "b"]
    for number, document in enumerate(found):
        n = head + 40 + 7 * number
        assert (document.tokens, document.prefix, document.signals.prefix) == (n, head, head)
        assert [u.shape for u in document.utility] == [(2, n)] * len(geometry.kv_heads)
        assert all(u.dtype == torch.float32 and bool((u >= 0).all()) and float(u.max()) > 0 for u in document.utility)
        assert len(document.about["continuations"]) <= 3
        assert document.about["reconstruction_error"] < 1e-5
        assert document.about["fingerprint"] == engine.weights_fingerprint()
        with engine.prefill([*engine.frame().head, *documents()[number].ids], record=document.about["record"][:1]) as s:
            signals = s.signals()
            for layer in range(len(geometry.kv_heads)):
                assert torch.allclose(document.signals["keys"][layer], signals["keys"][layer], atol=2e-2, rtol=1e-3)
                norms = signals["values"][layer].norm(dim=-1)
                assert torch.allclose(document.signals["value_norms"][layer], norms, rtol=1e-4)
            name = "native" if geometry.native_heads else "hidden"
            assert document.about["record"] == [name, "keys"]
            for mine, theirs in zip(document.signals[name], signals[name], strict=True):
                assert torch.allclose(mine, theirs, atol=2e-2 if name == "hidden" else 1e-4, rtol=1e-3)


def test_utility_is_the_largest_influence_over_tokens_and_continuations(engine):
    context, made, after = tiny.tokens(50), [tiny.tokens(5, seed=2), tiny.tokens(3, seed=3)], [9, 8]
    with engine.prefill(context) as session:
        found = utilities(engine, session.state, made, after)
        kept = [slots.lengths for slots in session.state.slots]
        expected = [torch.zeros(2, 50) for _ in kept]
        relative = [torch.zeros(2, 50) for _ in kept]
        for ids in made:
            rows = engine.follow(session.state, [*after, *ids])
            for layer, row in enumerate(rows):
                output = engine.output_projection(layer).transpose(0, 1)
                for head in range(2):
                    mine = slice(3 * head, 3 * head + 3)
                    slots = session.state.slots[layer]
                    change = influence_reference(
                        row.queries[mine, 2:].double(),
                        torch.cat([slots.strip("key", head), row.keys[head]]).double(),
                        torch.cat([slots.strip("value", head), row.values[head]]).double(),
                        output[mine].double(), row.scaling, 52, 50,
                    )  # fmt: skip
                    assert change.shape == (len(ids), 50)
                    stream = row.residual[2:, None]
                    expected[layer][head] = torch.maximum(expected[layer][head], change.amax(0).float())
                    relative[layer][head] = torch.maximum(relative[layer][head], (change / stream).amax(0).float())
    assert kept == [(50, 50)] * len(kept)
    for got, want in ((found.raw, expected), (found.relative, relative)):
        for mine, theirs in zip(got, want, strict=True):
            assert float((mine - theirs).abs().max()) < 1e-4 * float(theirs.max())


def test_labels_are_shares_of_the_largest_behind_the_prefix():
    utility = (torch.tensor([[9.0, 8.0, 2.0, 4.0, 1.0], [5.0, 5.0, 0.0, 0.0, 0.0]]),)
    (found,) = normalised(utility, 2)
    assert found.tolist() == [[0, 0, 0.5, 1.0, 0.25], [0, 0, 0, 0, 0]]
    (found,) = normalised(utility, 0)
    assert found.tolist() == [[0, 1.0, 0.25, 0.5, 0.125], [0, 1, 0, 0, 0]]
    assert (first_label(0), first_label(1), first_label(7)) == (1, 1, 7)


def test_labels_of_a_document_lie_between_0_and_1(whole):
    document = next(load_labels(whole))
    for layer in document.labels():
        assert float(layer.max()) == 1
        assert float(layer.min()) == 0
        assert not layer[:, : document.prefix].any()
    assert document.first_label() == document.prefix
    assert not document.labels(exclude_prefix=False)[0][:, 0].any()
    assert document.first_label(exclude_prefix=False) == 1


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(engine, whole, tmp_path):
    label(engine, documents(2), tmp_path / "again", **SHORT)
    label(engine, documents(2), tmp_path / "other", **SHORT, seed=1)
    first = file_name("doc 0")
    assert (tmp_path / "again" / "labels" / first).read_bytes() == (whole / "labels" / first).read_bytes()
    other = read_labelled(tmp_path / "other" / "labels" / first)
    assert not torch.equal(other.utility[0], next(load_labels(whole)).utility[0])


def test_shards_fill_one_folder_with_the_same_bytes(engine, whole, tmp_path):
    for index in (1, 0):
        progress = label(engine, documents(), tmp_path, **SHORT, shard=(index, 2))
        assert (progress.documents, progress.labelled) == (2, 2)
    assert content(tmp_path) == content(whole)


def test_a_document_alone_has_the_labels_it_has_among_others(engine, whole, tmp_path):
    label(engine, documents()[2:3], tmp_path, **SHORT)
    name = f"labels/{file_name('doc 2')}"
    assert content(tmp_path)[name] == content(whole)[name]


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("during", ["follow", "write"])
def test_a_killed_run_goes_on_to_the_same_bytes(engine, whole, tmp_path, monkeypatch, during):
    """Whether it was killed while it computed or while it wrote; nothing half-written is ever seen."""
    calls = []

    def killed(stock):
        def call(*args, **kwargs):
            calls.append(1)
            if len(calls) == (5 if during == "follow" else 2):
                raise _Killed
            return stock(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        if during == "follow":
            patch.setattr(engine, "follow", killed(engine.follow), raising=False)
        else:
            patch.setattr("os.fsync", lambda fd: killed(lambda f: None)(fd))
        with pytest.raises(_Killed):
            label(engine, documents(), tmp_path, **SHORT)
    before = content(tmp_path)
    assert {name: before[name] for name in before if name.endswith(".safetensors")}.items() <= content(whole).items()
    assert not [name for name in before if name.endswith(".tmp")]
    (tmp_path / "labels" / ".x.safetensors.1.tmp").write_bytes(b"what kill -9 leaves")

    if "labels.json" in before and any(name.startswith("labels/") for name in before):
        with pytest.raises(RequestError, match="add --resume"):
            label(engine, documents(), tmp_path, **SHORT)
    progress = label(engine, documents(), tmp_path, **SHORT, resume=True)

    assert progress.labelled + progress.resumed == 4
    assert content(tmp_path) == content(whole)


def test_resuming_with_other_settings_or_another_model_is_refused(engine, whole):
    before = content(whole)
    with pytest.raises(RequestError, match="holds labels with tokens=8, and now tokens=9"):
        label(engine, documents(), whole, continuations=3, tokens=9, resume=True)
    with pytest.raises(RequestError, match="fingerprint"):
        label(tiny.engine(engine.geometry.family, seed=5), documents(), whole, **SHORT, resume=True)
    with pytest.raises(RequestError, match="holds labels of 'doc 0' already; add --resume"):
        label(engine, documents(), whole, **SHORT)
    assert content(whole) == before


def _hold(folder: str, shard: tuple[int, int], ready, done) -> None:
    with locked(Path(folder), shard):
        ready.set()
        done.wait(60)


@pytest.mark.parametrize(
    ("theirs", "ours", "fine"),
    [((0, 1), (0, 1), False), ((0, 1), (1, 2), False), ((1, 2), (0, 1), False), ((1, 2), (1, 2), False),
     ((1, 2), (0, 2), True)],
)  # fmt: skip
def test_no_two_processes_write_the_same_documents(hybrid, tmp_path, theirs, ours, fine):
    (tmp_path / "labels").mkdir()
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(tmp_path), theirs, ready, done))
    other.start()
    try:
        assert ready.wait(60)
        if fine:
            assert label(hybrid, documents(1), tmp_path, continuations=1, tokens=2, shard=ours).documents == 1
        else:
            with pytest.raises(RequestError, match="another process is labelling into"):
                label(hybrid, documents(2), tmp_path, continuations=1, tokens=2, shard=ours)
    finally:
        done.set()
        other.join(60)


def test_a_document_that_cannot_run_becomes_a_line_with_the_reason(hybrid, tmp_path):
    given = [
        Document("empty", "a", ""),
        *documents(1),
        Document("long", "b", "", tuple(tiny.tokens(1100))),
        Document("wrong", "b", "", (1, 2, 100_000)),
    ]
    seen = []
    progress = label(hybrid, given, tmp_path, **SHORT, on_document=lambda p, d: seen.append((d.id, p.documents)))
    assert seen == [("empty", 1), ("doc 0", 2), ("long", 3), ("wrong", 4)]
    assert (progress.labelled, progress.skipped) == (1, 3)
    skipped = read_skipped(tmp_path)
    assert [row["id"] for row in skipped] == ["empty", "long", "wrong"]
    assert "has 0 tokens" in skipped[0]["reason"]
    assert "at most 1024" in skipped[1]["reason"]
    assert "vocabulary" in skipped[2]["reason"]
    label(hybrid, given, tmp_path, **SHORT, resume=True)
    assert len((tmp_path / "skipped.jsonl").read_text().splitlines()) == 3


def test_attention_that_cannot_be_recomputed_is_no_label(hybrid, tmp_path, monkeypatch):
    """A model whose attention does something else than its queries, keys and values say."""
    stock = module.influence_and_outputs

    def off(*args, **kwargs):
        change, outputs = stock(*args, **kwargs)
        return change, outputs * 1.06

    monkeypatch.setattr(module, "influence_and_outputs", off)
    label(hybrid, documents(1), tmp_path, **SHORT)
    assert "differ from the model's own by 6.0% (at most 5%" in read_skipped(tmp_path)[0]["reason"]
    with pytest.raises(RequestError, match="no labelled document yet"):
        list(load_labels(tmp_path))


def test_a_model_that_says_nothing_is_skipped(hybrid, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "rollouts", lambda engine, asked, **how: [[] for _ in asked])
    label(hybrid, documents(1), tmp_path, **SHORT)
    assert "ended every continuation at once" in read_skipped(tmp_path)[0]["reason"]


def test_replies_and_texts_in_between_change_what_follows(hybrid, tmp_path):
    found = {}
    for name, changes in {"more": {}, "reply": {"reply": True}, "after": {"after": "<|im_end|>"}}.items():
        label(hybrid, documents(1), tmp_path / name, **SHORT, **changes)
        (document,) = load_labels(tmp_path / name)
        found[name] = document.utility[0]
    assert len({u.shape for u in found.values()}) == 1
    assert not torch.equal(found["more"], found["reply"])
    assert not torch.equal(found["reply"], found["after"])


def test_a_document_may_bring_its_own_continuations(hybrid, tmp_path):
    """Its first ones, cut to the wanted tokens and read behind the context, control tokens as what they are."""
    (plain,) = documents(1)
    asked = ("what is it?<|im_end|>", "why?", "a third one is one too many")
    settings = Settings(given=True, continuations=2, tokens=7)
    label(hybrid, [dataclasses.replace(plain, continuations=asked)], tmp_path, settings=settings)

    (found,) = load_labels(tmp_path)
    said = [hybrid.template_ids(text)[:7] for text in asked[:2]]
    with hybrid.prefill([*hybrid.frame().head, *plain.ids]) as session:
        expected = utilities(hybrid, session.state, said)
    assert found.about["continuations"] == [len(ids) for ids in said]
    assert [mine.tolist() for mine in found.utility] == [theirs.tolist() for theirs in expected.raw]


def test_a_document_without_the_asked_continuations_is_skipped(hybrid, tmp_path):
    label(hybrid, documents(1), tmp_path, given=True)
    assert "has no continuations" in read_skipped(tmp_path)[0]["reason"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Settings(reply=True, after="x"), "--reply or --after"),
        (Settings(reply=True, chat=False), "without a chat template there is no reply"),
        (Settings(given=True, past_end=True), "leave --past-end or --given out"),
        (Settings(continuations=0), "continuations=0"),
        (Settings(tokens=0), "tokens=0"),
        (Settings(seed=-1), "seed=-1"),
        (Settings(chunk=65), "multiple of 64"),
        (Settings(record=("natives",)), "choose from native, hidden, keys"),
    ],
)
def test_settings_that_mean_nothing_are_refused(hybrid, tmp_path, settings, said):
    with pytest.raises(RequestError, match=said):
        label(hybrid, documents(1), tmp_path / "out", settings=settings)
    assert not (tmp_path / "out").exists()


def test_a_model_without_native_signals_cannot_store_them(tmp_path):
    with pytest.raises(RequestError, match="has no native signals"):
        label(tiny.engine("llama"), documents(1), tmp_path, record=("native",))


def test_what_is_stored_can_be_chosen(hybrid, tmp_path):
    label(hybrid, documents(1), tmp_path, **SHORT, record=("hidden",), half=False)
    (document,) = load_labels(tmp_path)
    assert set(document.signals.streams) == {"hidden", "value_norms"}
    with hybrid.prefill([*hybrid.frame().head, *documents(1)[0].ids], record=["hidden"]) as session:
        for mine, theirs in zip(document.signals["hidden"], session.signals()["hidden"], strict=True):
            assert torch.allclose(mine, theirs, atol=1e-4)


@pytest.mark.parametrize("shape", [(70, 5), (2, 32, 8), (1, 3)])
def test_bytes_say_a_number_to_a_256th_of_its_spans_range(shape):
    """Dims differ by orders of magnitude, one of them never changes, and one token stands far out."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 10.0 ** (torch.arange(shape[-1]) % 5 - 2)
    numbers[..., 0] = 0.3
    numbers[..., 0, 1:] *= 50
    stored = packed("hidden.0", numbers)
    assert {name: tensor.dtype for name, tensor in stored.items()} == {
        "hidden.0": torch.uint8, "hidden.0.low": torch.float16, "hidden.0.step": torch.float16,
    }  # fmt: skip

    found = unpacked(*stored.values())

    for start in range(0, shape[-2], SPAN):
        mine, theirs = found[..., start : start + SPAN, :], numbers[..., start : start + SPAN, :]
        room = theirs.amax(dim=-2) - theirs.amin(dim=-2)
        # half a step of the range, and the rounding of where it starts
        allowed = room / 254 * 0.51 + theirs.abs().amax(dim=-2) / 1000
        assert bool(((mine - theirs).abs().amax(dim=-2) <= allowed).all())


def test_large_numbers_are_not_squeezed_into_bytes():
    assert list(packed("key.0", torch.tensor([[1e5], [1e6]]))) == ["key.0"]
    assert list(packed("key.0", torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16))) != ["key.0"]


def test_damaged_and_foreign_files_are_named(whole, tmp_path):
    (path,) = [p for p in (whole / "labels").iterdir() if p.name == file_name("doc 0")]
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(RequestError, match=r"cut\.safetensors is damaged"):
        read_labelled(cut)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(RequestError, match="holds no labels of this version"):
        read_labelled(tmp_path / "other.safetensors")
    with pytest.raises(RequestError, match=r"it has no labels\.json"):
        list(load_labels(tmp_path))


def test_names_of_files_and_seeds_keep_documents_apart():
    ids = ["a/b", "a_b", "A_b", "../x", ".", "", "ü" * 300, "con"]
    names = [file_name(i).casefold() for i in ids]
    assert len(set(names)) == len(ids)
    assert all("/" not in name and not name.startswith(".") and len(name) < 120 for name in names)
    assert len({document_seed(seed, i) for seed in (0, 1) for i in ids}) == 2 * len(ids)
    assert all(0 <= document_seed(0, i) < 2**56 for i in ids)


def test_the_command_labels_goes_on_and_says_what_it_did(tmp_path, capsys):
    from wakesight.cli.main import run

    folder = tiny.save("qwen3_5", tmp_path / "model")
    texts = tmp_path / "texts"
    (texts / "prose").mkdir(parents=True)
    (texts / "prose" / "one.txt").write_text("The keeper lit his lamp and wrote an hour into the book. " * 2)
    (texts / "rows.jsonl").write_text(json.dumps({"text": "tides and lamps " * 5, "corpus": "tides"}) + "\n")
    words = ["label", str(texts), "--model", str(folder), "--out", str(tmp_path / "out"), "--continuations", "2"]
    words += ["--tokens", "4", "--min-tokens", "20", "--max-tokens", "60"]

    assert run([*words, "--limit", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["progress"]["labelled"] == 1
    assert run(words) == 2
    assert "add --resume" in capsys.readouterr().err
    assert run([*words, "--resume"]) == 0
    assert "1 documents labelled in" in capsys.readouterr().out
    assert [(d.id, d.corpus) for d in load_labels(tmp_path / "out")] == [
        ("prose/one.txt", "prose"), ("rows.jsonl:1", "tides"),
    ]  # fmt: skip
    for bad, said in (
        (["--shard", "2/2"], "is no shard"), (["--limit", "0"], "--limit 0"), (["--min-tokens", "5000"], "leave no"),
        (["--min-tokens", "0"], "--min-tokens 0 must be at least 1"), (["--record", "keyes"], "choose from"),
        (["--min-tokens", "30"], "min_tokens=20, and now min_tokens=30"),
        (["--max-tokens", "50"], "max_tokens=60, and now max_tokens=50"),
        (["--dtype", "bfloat16"], "dtype='float32', and now dtype='bfloat16'"),
    ):  # fmt: skip
        assert run([*words, "--resume", *bad]) == 2
        assert said in capsys.readouterr().err


def test_the_command_fails_when_nothing_could_be_labelled(tmp_path, capsys, monkeypatch):
    from wakesight.cli.main import run

    folder = tiny.save("llama", tmp_path / "model")
    (tmp_path / "one.txt").write_text("The keeper lit his lamp. " * 4)

    def fail(*args):
        raise WorkError("no room")

    monkeypatch.setattr(module, "_labelled", fail)
    words = ["label", str(tmp_path / "one.txt"), "--model", str(folder), "--out", str(tmp_path / "out")]
    assert run([*words, "--min-tokens", "10"]) == 1
    assert "the only document could not be labelled: no room" in capsys.readouterr().err


def test_a_document_of_unknown_words_is_skipped_by_name_and_short_ones_are_counted(tmp_path, capsys):
    """On a tokenizer of whole words; one bad document stops no run."""
    from wakesight.cli.main import run
    from wakesight.models.load import load_model

    tokenizer = load_model("tiny-hybrid").tokenizer
    known = sorted(word for word in tokenizer.get_vocab() if word.isalpha())
    rows = [
        {"id": "good", "text": " ".join(known[100:130])},
        {"id": "bad", "text": " ".join([*known[100:130], "xylophones"])},
        {"id": "short", "text": " ".join(known[100:104])},
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["label", str(tmp_path / "d.jsonl"), "--model", "tiny-hybrid", "--out", str(tmp_path / "out")]
    words += ["--continuations", "1", "--tokens", "2", "--min-tokens", "20", "--past-end"]

    assert run(words) == 0
    assert "1 skipped, 1 too short" in capsys.readouterr().out
    (row,) = read_skipped(tmp_path / "out")
    assert row["id"] == "bad"
    assert "'xylophones'" in row["reason"]
    assert run([*words, "--resume", "--after", "xylophones"]) == 2
    assert "'xylophones'" in capsys.readouterr().err
    assert run([*words, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["too_short"] == 1


def test_another_text_under_the_same_id_is_refused(hybrid, tmp_path):
    label(hybrid, documents(2), tmp_path, **SHORT)
    changed = [documents(2)[0], Document("doc 1", "b", "", tuple(tiny.tokens(47, seed=9)))]

    with pytest.raises(RequestError, match=r"labels of 'doc 1' in .* were made from another text"):
        label(hybrid, changed, tmp_path, **SHORT, resume=True)


def test_a_folder_of_an_older_version_goes_on(hybrid, tmp_path):
    """Its labels.json does not say how documents were cut, nor the dtype."""
    label(hybrid, documents(1), tmp_path, **SHORT)
    about = json.loads((tmp_path / "labels.json").read_text())
    for name in ("min_tokens", "max_tokens", "dtype"):
        del about["asked"][name]
    (tmp_path / "labels.json").write_text(json.dumps(about))

    assert label(hybrid, documents(2), tmp_path, **SHORT, resume=True, min_tokens=20).resumed == 1


def test_labels_mix_with_nothing_else(hybrid, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("years")

    for name, said in (
        ("file", "is a file"),
        ("work", r"holds other files \(thesis\.txt\)"),
        ("file/x", "cannot be made"),
    ):
        with pytest.raises(RequestError, match=said):
            label(hybrid, documents(1), tmp_path / name, **SHORT)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["thesis.txt"]
