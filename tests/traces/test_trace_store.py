"""What is written is read back; a growing store can be read; damage is named and left out."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from small_traces import small_trace

from wakesight.errors import RequestError, WorkError
from wakesight.traces import store, writing
from wakesight.traces.schema import STEP_ARRAYS
from wakesight.traces.store import Damage, load_traces
from wakesight.traces.writing import Step, pack, write
from wakesight.traces.writing import writing as open_run

ASKED = {"regime": "niah", "seed": 0}


@pytest.fixture
def chunks_of_four(monkeypatch):
    monkeypatch.setattr(writing, "CHUNK", 4)


def recorded(folder, *traces):
    with open_run(folder, ASKED) as run:
        for trace in traces:
            write(run, trace)
    return folder


def same(read, written):
    for name in STEP_ARRAYS:
        assert np.array_equal(np.asarray(getattr(read, name)), getattr(written, name)), name
        assert getattr(read, name).dtype == getattr(written, name).dtype, name
    assert np.array_equal(read.prompt_mass, written.prompt_mass) or read.prompt_mass is written.prompt_mass is None
    assert read.prompt_scores.keys() == written.prompt_scores.keys()
    assert all(np.array_equal(read.prompt_scores[name], scores) for name, scores in written.prompt_scores.items())
    for name in ("name", "prompt_len", "kv_heads", "page_size"):
        assert getattr(read, name) == getattr(written, name), name
    assert list(read.needle_spans) == list(written.needle_spans)
    assert dict(read.meta) == dict(written.meta)


@pytest.mark.parametrize("steps", [1, 4, 9])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_trace_comes_back_as_it_was(tmp_path, chunks_of_four, steps, dtype):
    trace = small_trace(steps=steps, dtype=dtype, scored=36)

    traces = load_traces(recorded(tmp_path / "run", trace))

    assert traces.names == ("small",)
    assert dict(traces.asked) == ASKED
    same(traces["small"], trace)


def test_traces_come_by_name_and_in_order(tmp_path):
    folder = recorded(tmp_path / "run", small_trace(1, name="b"), small_trace(2, name="a", mass=False))

    traces = load_traces(folder)

    assert [trace.name for trace in traces] == ["a", "b"]
    assert traces[1].name == traces["b"].name == "b"
    with pytest.raises(RequestError, match="has no trace 'c'; it has a, b"):
        traces["c"]


@pytest.mark.parametrize(
    "key",
    [0, -1, slice(2, 7), slice(None, None, 3), slice(5, 5), (3, 1), (slice(1, 9), 0, slice(1, 3)), (Ellipsis, 0),
     np.array([8, 1, 1]), [True] * 5 + [False] * 4],
)  # fmt: skip
def test_stored_rows_index_as_arrays_do(tmp_path, chunks_of_four, key):
    trace = small_trace()

    read = load_traces(recorded(tmp_path / "run", trace))[0]

    assert np.array_equal(read.topk_idx[key], trace.topk_idx[key])


def test_damaged_scores_are_named_and_left_out(tmp_path):
    folder = recorded(tmp_path / "run", small_trace(scored=36))
    (chunk,) = (file for file in (folder / "small" / "scores-keydiff" / "c").rglob("*") if file.is_file())
    chunk.write_bytes(chunk.read_bytes()[:-1])

    trace, damage = load_traces(folder).open("small")

    assert dict(trace.prompt_scores) == {}
    assert trace.steps == 9
    assert damage == [Damage("small", "scores-keydiff", 0, 0, "the chunk's checksum is wrong")]


def test_stored_rows_take_part_in_arithmetic(tmp_path, chunks_of_four):
    trace = small_trace()

    read = load_traces(recorded(tmp_path / "run", trace))[0]

    assert np.array_equal(read.topk_idx // 16, trace.topk_idx // 16)
    assert len(read.topk_val) == trace.steps
    with pytest.raises(IndexError):
        read.topk_idx[trace.steps]


def test_a_growing_store_shows_whole_chunks_only(tmp_path, chunks_of_four):
    trace = small_trace(steps=9)
    folder, seen = tmp_path / "run", []
    with open_run(folder, ASKED) as run:
        writer = run.create(
            "small", layers=2, query_heads=4, top=8, prompt_len=37, kv_heads=(2, 4), needle_spans=[(5, 9)]
        )
        for at in range(9):
            writer.append(
                Step(
                    trace.topk_idx[at], trace.topk_val[at], trace.needle[at], trace.copy[at], int(trace.tokens[at]),
                    int(trace.ctx_len[at]),
                )
            )  # fmt: skip
            traces = load_traces(folder)
            assert not traces.finished("small")
            assert np.array_equal(np.asarray(traces[0].topk_val), trace.topk_val[: traces[0].steps])
            seen.append(traces[0].steps)
        writer.finish()

    assert seen == [0, 0, 0, 4, 4, 4, 4, 8, 8]
    assert load_traces(folder)[0].steps == 9
    assert load_traces(folder).finished("small")


def test_a_second_writer_is_refused(tmp_path):
    with open_run(tmp_path / "run", ASKED):
        code = (
            "import sys; from pathlib import Path; from wakesight.traces.writing import writing\n"
            f"with writing(Path({str(tmp_path / 'run')!r}), {ASKED!r}, resume=True): print('in')"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "another process is writing into" in done.stderr
        assert "in" not in done.stdout
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "in\n"


def test_resuming_keeps_what_is_finished_and_replaces_what_is_not(tmp_path, chunks_of_four):
    folder = recorded(tmp_path / "run", small_trace(1, name="whole"))
    with open_run(folder, ASKED, resume=True) as run:
        run.create("half", layers=2, query_heads=4, top=8, prompt_len=37, kv_heads=(2, 4), needle_spans=[])

    with pytest.raises(RequestError, match="holds traces already; type --resume"), open_run(folder, ASKED):
        pass
    with (
        pytest.raises(RequestError, match="was recorded with seed=0, and now seed=1 was asked for"),
        open_run(folder, {**ASKED, "seed": 1}, resume=True),
    ):
        pass
    with open_run(folder, ASKED, resume=True) as run:
        assert run.finished("whole")
        assert not run.finished("half")
        with pytest.raises(RequestError, match="holds a trace 'whole' already"):
            write(run, small_trace(1, name="whole"))
        write(run, small_trace(2, name="half"))
    same(load_traces(folder)["half"], small_trace(2, name="half"))


def damaged(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_a_damaged_chunk_is_named_and_left_out(tmp_path, chunks_of_four):
    trace = small_trace(steps=11)
    folder = recorded(tmp_path / "run", trace)
    damaged(folder / "small" / "topk_val" / "c" / "1" / "0" / "0" / "0")
    (folder / "small" / "copy" / "c" / "2" / "0" / "0").unlink()
    heard = []

    read = load_traces(folder, heard.append)[0]

    assert heard == [
        "the trace small: array topk_val, steps 4 to 7: the chunk's checksum is wrong; it is left out",
        "the trace small: array copy, steps 8 to 10: the chunk is missing; it is left out",
    ]
    assert read.step.tolist() == [0, 1, 2, 3]
    assert np.array_equal(np.asarray(read.topk_idx), trace.topk_idx[:4])
    assert np.array_equal(read.tokens, trace.tokens[:4])


def test_steps_behind_a_damaged_chunk_stay(tmp_path, chunks_of_four, capsys):
    trace = small_trace(steps=11)
    folder = recorded(tmp_path / "run", trace)
    damaged(folder / "small" / "topk_idx" / "c" / "1" / "0" / "0" / "0")

    read = load_traces(folder)[0]

    there = [0, 1, 2, 3, 8, 9, 10]
    assert read.step.tolist() == there
    assert np.array_equal(np.asarray(read.topk_idx), trace.topk_idx[there])
    assert np.array_equal(read.topk_idx[3:5, 1], trace.topk_idx[[3, 8], 1])
    assert np.array_equal(read.ctx_len, trace.ctx_len[there])
    assert "array topk_idx, steps 4 to 7" in capsys.readouterr().err


def test_damaged_prompt_attention_is_named_and_left_out(tmp_path):
    folder = recorded(tmp_path / "run", small_trace())
    damaged(folder / "small" / "prompt_mass" / "c" / "0" / "0" / "0")

    trace, damage = load_traces(folder).open("small")

    assert trace.prompt_mass is None
    assert damage == [Damage("small", "prompt_mass", 0, 0, "the chunk's checksum is wrong")]
    assert str(damage[0]) == "the trace small: array prompt_mass: the chunk's checksum is wrong"


def test_a_trace_whose_description_is_broken_is_named(tmp_path):
    folder = recorded(tmp_path / "run", small_trace())
    (folder / "small" / "needle" / "zarr.json").write_text("{")

    with pytest.raises(WorkError, match=r"the trace small of .* cannot be read"):
        load_traces(folder)["small"]


def test_a_zip_file_is_read_like_its_folder(tmp_path, chunks_of_four):
    trace = small_trace()
    folder = recorded(tmp_path / "run", trace)

    pack(folder, tmp_path / "run.zip")

    same(load_traces(tmp_path / "run.zip")[0], trace)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.zip"]


def test_a_packed_store_names_its_damage_too(tmp_path, chunks_of_four):
    folder = recorded(tmp_path / "run", small_trace(steps=8))
    damaged(folder / "small" / "needle" / "c" / "0" / "0" / "0")

    pack(folder, tmp_path / "run.zip")

    trace, damage = load_traces(tmp_path / "run.zip").open("small")
    assert [each.array for each in damage] == ["needle"]
    assert trace.step.tolist() == [4, 5, 6, 7]


def test_samples_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_packaged", lambda: tmp_path)
    pack(recorded(tmp_path.parent / "run", small_trace()), tmp_path / "niah.zip")

    assert store.samples() == ("sample:niah",)
    same(load_traces("sample:niah")[0], small_trace())
    with pytest.raises(RequestError, match="no sample sample:cot; it brings: sample:niah"):
        load_traces("sample:cot")


def test_what_is_no_store_is_refused(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a")

    with pytest.raises(RequestError, match="holds no traces; give a folder made by wakesight trace record"):
        load_traces(tmp_path / "text")
    with pytest.raises(RequestError, match="holds other files"), open_run(tmp_path / "text", ASKED):
        pass
    with pytest.raises(RequestError, match="is a file"), open_run(tmp_path / "text" / "a.txt", ASKED):
        pass


def test_another_schema_version_is_refused(tmp_path, monkeypatch):
    folder = recorded(tmp_path / "run", small_trace())

    monkeypatch.setattr(store, "VERSION", 2)

    with pytest.raises(RequestError, match="has the schema version 1, and this wakesight reads 2"):
        load_traces(folder)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".lock", "zarr.json", "a b"])
def test_names_that_no_folder_can_have_are_refused(name):
    with pytest.raises(RequestError, match="cannot name a trace"):
        writing.check_name(name)


def test_without_zarr_one_sentence_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)

    with pytest.raises(RequestError, match=r"needs the package zarr; type: pip install 'wakesight\[traces\]'"):
        load_traces(tmp_path)
