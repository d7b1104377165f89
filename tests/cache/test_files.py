"""Session files: tensors come back bit for bit, there is never half a file, and every damage has its sentence."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from wakesight.cache import files
from wakesight.errors import RequestError, WorkError

LAWS = settings(deadline=None, derandomize=True, max_examples=150)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
DTYPES = sorted(files.DTYPES.values(), key=str)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, list[int], bytes]:
    """Everything a file must keep of a tensor; NaNs compare by their bits."""
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return tensor.dtype, list(tensor.shape), fresh.view(-1).view(torch.uint8).numpy().tobytes()


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bit pattern the type has, NaNs and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


HEADER = {"model": {"name": "tiny", "layers": 2}, "tokens": [5, 6, 7], "text": "Verträge, 条約", "keep": 0.5}
TENSORS = {
    "layers.0.keys": noise((2, 6, 4), torch.bfloat16, 1)[:, :5],
    "layers.0.values": noise((2, 5, 4), torch.float32, 2),
    "positions": torch.arange(10).reshape(2, 5),
    "empty": torch.empty(2, 0, 4, dtype=torch.float16),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good file, alone in its folder."""
    good = tmp_path / "treaty.ws"
    files.write(good, HEADER, TENSORS)
    return good


def take_apart(blob: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(blob[:8], "little")
    return json.loads(blob[8 : 8 + length]), blob[8 + length :]


def put_together(listing: dict, data: bytes) -> bytes:
    text = json.dumps(listing).encode()
    return len(text).to_bytes(8, "little") + text + data


def edit(path: Path, change) -> None:
    """Apply `change` to the file's listing; the data stays."""
    listing, data = take_apart(path.read_bytes())
    change(listing)
    path.write_bytes(put_together(listing, data))


# --- what goes in comes out --------------------------------------------------------------------------------------


@st.composite
def tensors(draw) -> torch.Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    tensor = noise(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9)))
    match draw(st.sampled_from(["plain", "permuted", "strided", "expanded", "offset"])):
        case "permuted":
            return tensor.permute(draw(st.permutations(range(tensor.ndim))))
        case "strided" if tensor.ndim:
            return tensor[..., :: draw(st.integers(2, 6))]
        case "expanded":
            return tensor[None].expand(3, *shape)
        case "offset" if tensor.ndim:
            return tensor[1:]
    return tensor


plain_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__")


@given(st.dictionaries(st.text(), plain_json, max_size=4), st.dictionaries(names, tensors(), max_size=6))
@LAWS
def test_header_and_tensors_come_back_bit_for_bit(tmp_path_factory, header, held):
    path = tmp_path_factory.getbasetemp() / "law.ws"

    files.write(path, header, held)
    saved = files.read(path)

    assert (saved.path, saved.header) == (path, header)
    assert {name: bits(tensor) for name, tensor in saved.tensors.items()} == {n: bits(t) for n, t in held.items()}
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in saved.tensors.values())


@given(tensors(), st.integers(1, 40))
@LAWS
def test_a_tensor_that_is_copied_by_pieces_gives_the_same_bytes(tensor, piece):
    scratch = torch.empty(max(piece, tensor.element_size()), dtype=torch.uint8)

    pieces = [bytes(one) for one in files._pieces(tensor, scratch)]

    assert b"".join(pieces) == bits(tensor)[2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_a_gpu_come_back_on_the_cpu(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 1000)
    held = {"plain": noise((3, 70, 9), dtype).cuda(), "sliced": noise((3, 70, 9), dtype).cuda()[:, 3:60].mT}

    files.write(tmp_path / "gpu.ws", {}, held)
    saved = files.read(tmp_path / "gpu.ws").tensors

    assert {name: bits(tensor) for name, tensor in saved.items()} == {n: bits(t) for n, t in held.items()}


def test_a_tensor_that_asks_for_gradients_is_saved_without_them(tmp_path):
    files.write(tmp_path / "g.ws", {}, {"a": torch.ones(3, requires_grad=True) * 2})

    assert files.read(tmp_path / "g.ws").tensors["a"].tolist() == [2, 2, 2]


def test_the_same_content_gives_the_same_bytes(path, tmp_path):
    backwards = dict(reversed(TENSORS.items()))
    files.write(tmp_path / "other.ws", HEADER, backwards)

    assert (tmp_path / "other.ws").read_bytes() == path.read_bytes()


# --- the format as documented ------------------------------------------------------------------------------------


def test_the_stock_library_reads_every_tensor_and_the_metadata(path):
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        found = {name: bits(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 (not a mapping)

    assert found == {name: bits(tensor) for name, tensor in TENSORS.items()}
    assert sorted(metadata) == ["checksum", "format", "header", "version"]
    assert (metadata["format"], metadata["version"]) == ("wakesight-session", "1")
    assert json.loads(metadata["header"]) == HEADER


def test_the_checksum_is_the_documented_one(path):
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        rows = [
            [name, file.get_slice(name).get_dtype(), file.get_slice(name).get_shape(), sha256(bits(TENSORS[name])[2])]
            for name in sorted(TENSORS)
        ]

    text = json.dumps([metadata["header"], rows], separators=(",", ":"))
    assert metadata["checksum"] == sha256(text.encode())


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_the_data_starts_at_a_multiple_of_64_bytes(path):
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 64 == 0


def test_a_copy_made_by_the_stock_library_is_still_good(path, tmp_path):
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), tmp_path / "copy.ws", metadata=metadata)

    assert files.read(tmp_path / "copy.ws").header == HEADER


# --- the map -----------------------------------------------------------------------------------------------------


def test_writing_into_a_loaded_tensor_changes_neither_the_file_nor_a_second_reader(path):
    before = path.read_bytes()
    first, second = files.read(path), files.read(path)

    first.tensors["layers.0.values"].zero_()
    first.tensors["positions"] += 1

    assert path.read_bytes() == before
    for reader in (second, files.read(path)):
        assert {n: bits(t) for n, t in reader.tensors.items()} == {n: bits(t) for n, t in TENSORS.items()}
    assert first.tensors["positions"].flatten().tolist() == list(range(1, 11))


def test_a_loaded_session_can_be_changed_and_saved_over_its_own_file(path):
    saved = files.read(path)
    saved.tensors["positions"] += 1

    files.write(path, saved.header, saved.tensors)

    assert files.read(path).tensors["positions"].flatten().tolist() == list(range(1, 11))
    assert bits(saved.tensors["layers.0.values"]) == bits(TENSORS["layers.0.values"])


def test_a_loaded_tensor_outlives_the_file(path):
    saved = files.read(path)
    path.unlink()

    assert bits(saved.tensors["layers.0.keys"]) == bits(TENSORS["layers.0.keys"])


@LINUX
def test_the_map_goes_with_the_last_tensor(path):
    saved = files.read(path)
    kept = saved.tensors["positions"]
    del saved
    gc.collect()
    assert str(path) in Path("/proc/self/maps").read_text()

    del kept
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_several_threads_hash_to_the_same_checksum(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "THREADED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    held = {str(index): noise((index, 50), torch.float32, index) for index in range(9)}
    files.write(tmp_path / "many.ws", {}, held)

    assert {n: bits(t) for n, t in files.read(tmp_path / "many.ws").tensors.items()} == {
        n: bits(t) for n, t in held.items()
    }


# --- all or nothing ----------------------------------------------------------------------------------------------


def disk_says(number: int):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    return refuse


def interrupt(tensor, scratch):
    yield b"half"
    signal.raise_signal(signal.SIGINT)


def no_memory(tensor, scratch):
    yield b"half"
    raise MemoryError


@pytest.mark.parametrize(
    ("where", "what", "expected"),
    [
        ("_pieces", interrupt, KeyboardInterrupt),
        ("_pieces", no_memory, MemoryError),
        ("os.fsync", disk_says(errno.ENOSPC), WorkError),
        ("os.replace", disk_says(errno.EIO), WorkError),
    ],
)
def test_a_failure_leaves_the_old_file_and_nothing_else(path, monkeypatch, where, what, expected):
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(f"wakesight.cache.files.{where}", what)
        with pytest.raises(expected):
            files.write(path, {"new": True}, {"a": torch.zeros(1000)})

    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_failure_where_there_was_no_file_leaves_none(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_pieces", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write(tmp_path / "new.ws", {}, {"a": torch.zeros(1000)})

    assert os.listdir(tmp_path) == []


def test_the_old_file_stands_until_the_new_one_is_on_the_disk(path, monkeypatch):
    before, seen = path.read_bytes(), []
    replace = os.replace

    def look(source, target):
        seen.append((path.read_bytes(), Path(source).parent, files.read(source).header))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    files.write(path, {"new": True}, TENSORS)

    assert seen == [(before, path.parent, {"new": True})]
    assert files.read(path).header == {"new": True}


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_process_killed_while_it_saves_leaves_the_old_file(path):
    process = python(
        """
        import sys, time, torch
        from wakesight.cache import files

        plain = files._pieces
        def slow(tensor, scratch):
            for piece in plain(tensor, scratch):
                yield piece[: len(piece) // 2]
                print("half", flush=True)
                time.sleep(60)
        files._pieces = slow
        files.write(sys.argv[1], {}, {"a": torch.ones(1 << 20)})
        """,
        path,
    )
    assert process.stdout.readline() == "half\n"
    process.kill()
    process.communicate()

    assert files.read(path).header == HEADER
    left = sorted(os.listdir(path.parent))
    assert len(left) == 2
    assert left[0].startswith(".wakesight-")
    assert left[0].endswith(".tmp")
    files.write(path, {"new": True}, {})  # what was left is in nobody's way
    assert files.read(path).header == {"new": True}


@LINUX
def test_saving_and_loading_make_no_second_copy(tmp_path):
    process = python(
        """
        import json, re, sys, torch
        from wakesight.cache import files

        def memory(name):
            return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

        held = {str(i): torch.ones(4, 1 << 12, 1 << 10)[:, : 3 << 10] for i in range(4)}  # 64 MiB each, 48 saved
        held["2"], held["3"] = held["2"].mT, held["3"].permute(1, 2, 0)
        files.write(sys.argv[1], {}, {"a": torch.ones(1)})
        before = memory("VmHWM")
        files.write(sys.argv[1], {}, held)
        saving = memory("VmHWM") - before
        before = memory("RssAnon")
        saved = files.read(sys.argv[1])
        loading = memory("RssAnon") - before
        saved.tensors["0"][0, :, 0] = 2  # one of four blocks of 12 MiB
        print(json.dumps([saving, loading, memory("RssAnon") - before]))
        """,
        tmp_path / "big.ws",
    )
    saving, loading, touched = json.loads(process.communicate()[0])

    assert saving < 2 * files.PIECE  # of 192 MiB
    assert loading < 4 << 20
    assert 12 << 20 <= touched < 20 << 20


def test_86_megabytes_are_read_and_checked_in_a_fraction_of_a_second(tmp_path):
    files.write(tmp_path / "big.ws", {}, {str(i): torch.full((43_000_00,), i, dtype=torch.int16) for i in range(10)})

    def seconds() -> float:
        start = time.process_time()
        files.read(tmp_path / "big.ws")
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 0.3  # 0.05 here, 0.16 without SHA instructions


# --- where a file may go -----------------------------------------------------------------------------------------


def refusal(call, *arguments, error: type[Exception] = RequestError) -> str:
    with pytest.raises(error) as caught:
        call(*arguments)
    return str(caught.value)


def test_a_missing_folder_is_named_with_the_command_that_makes_it(tmp_path):
    target = tmp_path / "no such" / "a.ws"

    assert refusal(files.write, target, {}, {}) == (
        f"cannot save {target}: there is no folder {target.parent}; type mkdir -p '{target.parent}', or save elsewhere"
    )


def test_a_folder_is_not_replaced(tmp_path):
    assert refusal(files.write, tmp_path, {}, {}) == (
        f"cannot save {tmp_path}: it is a folder; give a file name, for example {tmp_path}/session.ws"
    )


def nested(path: Path) -> None:
    text = b"[" * 100_000
    path.write_bytes(len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize(
    "content",
    [
        lambda path: path.write_text("The treaty of 1648. " * 40),
        lambda path: path.write_text("short"),
        lambda path: path.write_bytes((10**15).to_bytes(8, "little") + b"{"),
        lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"),
        lambda path: path.write_bytes((19).to_bytes(8, "little") + b'{"__metadata__": 1}'),
        lambda path: save_file({"a": torch.ones(2)}, path),
        lambda path: save_file({"a": torch.ones(2)}, path, {"format": "pt"}),
        nested,
    ],
)
def test_only_a_session_is_replaced(tmp_path, content):
    file, link = tmp_path / "mine", tmp_path / "link"
    content(file)
    before = file.read_bytes()
    link.symlink_to(file)

    for name in (file, link):
        assert refusal(files.write, name, {}, {}) == (
            f"cannot save {name}: it holds another file that is no session; give another name"
        )
    assert file.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["link", "mine"]


@pytest.mark.parametrize("change", [lambda blob: b"", lambda blob: blob[:-7], lambda blob: blob[:-1] + b"?"])
def test_an_empty_file_and_a_damaged_session_may_be_replaced(path, change):
    path.write_bytes(change(path.read_bytes()))
    files.write(path, {"new": True}, {})

    assert files.read(path).header == {"new": True}


def test_a_pipe_is_neither_replaced_nor_opened(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    assert refusal(files.write, pipe, {}, {}) == (
        f"cannot save {pipe}: it is a device or a pipe, not a file; give another file name"
    )
    assert refusal(files.read, pipe) == (
        f"{pipe} is a device or a pipe, not a session file; give a file that a session was saved to"
    )
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_write_protected_file_is_kept(path, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anything, so permissions cannot show it

    assert refusal(files.write, path, {}, {}) == (
        f"cannot save {path}: the file there is write-protected; give another name, or type chmod u+w {path}"
    )
    assert path.read_bytes() == before


def test_a_folder_without_permission(path, monkeypatch):
    monkeypatch.setattr(files, "open", disk_says(errno.EACCES), raising=False)
    new = path.with_name("new.ws")

    assert refusal(files.write, new, {}, {}) == (
        f"cannot save {new}: writing in {path.parent} is not allowed (Permission denied); save elsewhere"
    )
    assert refusal(files.write, path, {}, {}) == f"reading {path} is not allowed; type chmod u+r {path}"


@LINUX
def test_a_folder_that_takes_no_files():
    assert refusal(files.write, "/proc/a.ws", {}, {}) == (
        "cannot save /proc/a.ws: no file can be made in /proc; save elsewhere"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write anything")
def test_real_permissions(path):
    path.parent.chmod(0o500)
    try:
        assert "is not allowed (Permission denied)" in refusal(files.write, path.parent / "new.ws", {}, {})
    finally:
        path.parent.chmod(0o700)
    path.chmod(0)
    assert refusal(files.read, path) == f"reading {path} is not allowed; type chmod u+r {path}"


def test_a_name_that_is_too_long(tmp_path):
    target = tmp_path / ("a" * 300)

    assert refusal(files.write, target, {}, {}) == (
        f"cannot save {target}: the name is not usable (File name too long); give another file name"
    )
    assert refusal(files.read, target) == f"{target} is not a usable name (File name too long); check the name"


def test_a_full_disk(path, monkeypatch):
    monkeypatch.setattr(os, "fsync", disk_says(errno.ENOSPC))
    blob = path.read_bytes()

    assert refusal(files.write, path, HEADER, TENSORS, error=WorkError) == (
        f"cannot save {path}: the disk is full and the file needs {len(blob):,} bytes; "
        "free some space, or save elsewhere"
    )


def test_a_failing_disk(path, monkeypatch):
    monkeypatch.setattr(os, "fsync", disk_says(errno.EIO))
    assert refusal(files.write, path, {}, {}, error=WorkError) == (
        f"cannot save {path}: the disk reports Input/output error; try again, or save elsewhere"
    )
    monkeypatch.setattr(files, "open", disk_says(errno.EIO), raising=False)
    assert refusal(files.read, path, error=WorkError) == (
        f"cannot read {path}: the disk reports Input/output error; try again, or copy it elsewhere"
    )


def test_a_real_limit_that_is_met_in_the_middle_of_the_data(path):
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        sentence = refusal(files.write, path, {}, {"a": torch.zeros(100_000)}, error=WorkError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert sentence == (
        f"cannot save {path}: files of 400,256 bytes are not allowed there; save elsewhere, or raise ulimit -f"
    )
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_link_stays_and_its_file_is_replaced(path, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.ws"
    link.symlink_to(path)

    files.write(link, {"new": True}, {})

    assert link.is_symlink()
    assert files.read(path).header == files.read(link).header == {"new": True}
    assert os.listdir(link.parent) == ["link.ws"]


def test_permissions_are_those_of_the_old_file_or_of_any_new_one(path):
    path.chmod(0o600)
    files.write(path, {}, {})
    other, fresh = path.with_name("other.ws"), path.with_name("fresh")
    files.write(other, {}, {})
    fresh.touch()

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert other.stat().st_mode == fresh.stat().st_mode


def test_a_relative_name_is_saved_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files.write("here.ws", {"a": 1}, {})

    assert os.listdir() == ["here.ws"]
    assert files.read("here.ws").header == {"a": 1}


# --- what cannot be saved ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "held", "error"),
    [
        ({"a": torch.float32}, {}, TypeError),
        ({"a": float("nan")}, {}, ValueError),
        ({}, {"__metadata__": torch.ones(1)}, ValueError),
        ({}, {"\ud800": torch.ones(1)}, ValueError),
    ],
)
def test_a_callers_mistake_is_noticed_before_the_disk_is_touched(tmp_path, header, held, error):
    with pytest.raises(error):
        files.write(tmp_path / "a.ws", header, held)

    assert os.listdir(tmp_path) == []


def test_a_type_the_format_lacks_is_refused(tmp_path):
    sentence = refusal(files.write, tmp_path / "a.ws", {}, {"k": torch.ones(2, dtype=torch.complex64)})

    assert sentence == (
        f"cannot save {tmp_path}/a.ws: the tensor 'k' is complex64, which a session file cannot hold; "
        "load the model with dtype='bfloat16' or 'float32'"
    )


def test_a_header_the_library_could_not_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_HEADER", 1000)

    assert refusal(files.write, tmp_path / "a.ws", {"text": "a" * 1000}, {}) == (
        f"cannot save {tmp_path}/a.ws: its header would take 1,208 bytes and the format allows 1,000; "
        "save a shorter context"
    )
    assert os.listdir(tmp_path) == []


def test_the_header_limit_is_the_librarys(path):
    path.write_bytes((files.MAX_HEADER + 1).to_bytes(8, "little") + b"{" + b" " * 99)
    with pytest.raises(Exception, match=r"(?i)header ?too ?large"), safe_open(path, framework="pt"):
        pass


# --- damage ------------------------------------------------------------------------------------------------------

AGAIN = "copy it again, or prefill and save the session again"
OTHER = "give a file that a session was saved to"


def torch_file(path: Path) -> None:
    torch.save({"a": torch.ones(2)}, path)


def zip_file(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", "hello")


@pytest.mark.parametrize(
    ("content", "looks"),
    [
        (torch_file, "it looks like a zip archive or PyTorch file"),
        (zip_file, "it looks like a zip archive or PyTorch file"),
        (b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00]", "it looks like a pickle"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "it looks like a picture"),
        (b"GGUF" + bytes(100), "it looks like a GGUF model"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it looks like a Git LFS pointer"),
        (b"Article 1. The parties agree.\n", "it has another format"),
        (b"hello", "it has another format"),
        (bytes(4096), "it has another format"),
        (bytes(8), "it has another format"),
    ],
)
def test_a_file_of_another_kind(path, content, looks):
    content(path) if callable(content) else path.write_bytes(content)

    assert refusal(files.read, path) == f"{path} is not a session file: {looks}; {OTHER}"


def test_json_text_is_no_session_file(path):
    path.write_text('        {"a": 1}')  # its ninth byte is the brace a safetensors header begins with

    assert refusal(files.read, path) == (
        f"{path} is damaged: its header claims 2,314,885,530,818,453,536 bytes, more than the format allows; {AGAIN}"
    )


def test_a_missing_file(tmp_path):
    for missing in (tmp_path / "treaty.ws", tmp_path / "no" / "treaty.ws"):
        assert refusal(files.read, missing) == (
            f"there is no file {missing}; check the name, or save a session there first"
        )


def test_a_dangling_link(tmp_path):
    (tmp_path / "link.ws").symlink_to("gone")

    assert refusal(files.read, tmp_path / "link.ws").startswith(f"there is no file {tmp_path}/link.ws; ")


def test_a_folder(tmp_path):
    assert refusal(files.read, tmp_path) == f"{tmp_path} is a folder, not a session file; {OTHER}"


def test_an_unreadable_file(path, monkeypatch):
    monkeypatch.setattr(files, "open", disk_says(errno.EACCES), raising=False)

    assert refusal(files.read, path) == f"reading {path} is not allowed; type chmod u+r {path}"


def test_no_memory_to_map(path, monkeypatch):
    monkeypatch.setattr("wakesight.cache.files.mmap.mmap", disk_says(errno.ENOMEM))

    assert refusal(files.read, path, error=WorkError) == (
        f"out of memory: {path} cannot be mapped; close sessions you no longer need"
    )


def test_an_empty_file(path):
    path.write_bytes(b"")

    assert refusal(files.read, path) == f"{path} is empty (0 bytes); {AGAIN}"


def test_a_file_cut_off_in_its_header(path):
    blob = path.read_bytes()
    whole = 8 + int.from_bytes(blob[:8], "little")
    path.write_bytes(blob[:300])

    assert refusal(files.read, path) == (
        f"{path} is cut off in its header: it has 300 of at least {whole:,} bytes; {AGAIN}"
    )


def test_a_file_cut_off_in_its_data(path):
    blob = path.read_bytes()
    path.write_bytes(blob[:-7])

    assert refusal(files.read, path) == f"{path} is cut off: it has {len(blob) - 7:,} of {len(blob):,} bytes; {AGAIN}"


def test_bytes_after_the_end(path):
    path.write_bytes(path.read_bytes() + b"more")

    assert refusal(files.read, path) == f"{path} is damaged: it goes on for 4 bytes after its end; {AGAIN}"


def test_an_absurd_header_length(path):
    blob = bytearray(path.read_bytes())
    blob[6] ^= 0x10
    path.write_bytes(blob)

    claimed = int.from_bytes(blob[:8], "little")
    assert refusal(files.read, path) == (
        f"{path} is damaged: its header claims {claimed:,} bytes, more than the format allows; {AGAIN}"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda listing: listing["positions"].update(data_offsets=[8, 88]),  # overlaps or leaves a gap
        lambda listing: listing["positions"].update(data_offsets=[5, 3]),
        lambda listing: listing["positions"].update(data_offsets="here"),
        lambda listing: listing["positions"].update(shape=[2, 6]),  # not that many bytes
        lambda listing: listing["positions"].update(dtype="I65"),
        lambda listing: listing["positions"].pop("shape"),
        lambda listing: listing.update(__metadata__={"format": 1}),
    ],
)
def test_a_layout_the_library_refuses(path, change):
    edit(path, change)
    sentence = refusal(files.read, path)

    assert sentence.startswith(f"{path} is damaged: its header makes no sense (")
    assert sentence.endswith(f"; {AGAIN}")


def test_a_header_that_is_not_json(path):
    path.write_bytes(path.read_bytes().replace(b'{"__metadata__":', b'{"__metadata__";', 1))

    assert refusal(files.read, path).startswith(f"{path} is damaged: its header makes no sense (")


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        (None, "that names no format"),
        ({"lr": "0.1"}, "that names no format"),
        ({"format": "pt"}, "of format 'pt'"),
    ],
)
def test_a_safetensors_file_of_another_program(path, metadata, named):
    save_file({"weight": torch.ones(3)}, path, metadata=metadata)

    assert refusal(files.read, path) == f"{path} is not a session file but a safetensors file {named}; {OTHER}"


def test_a_newer_version(path):
    edit(path, lambda listing: listing["__metadata__"].update(version="3"))

    assert refusal(files.read, path) == (
        f"{path} has format version 3 and this wakesight reads up to version 2; update it: pip install -U wakesight"
    )


@pytest.mark.parametrize("version", ["one", "", "0", "-1", "1.0", " 1", "\u0661", "9" * 5000])
def test_a_version_that_is_not_a_number(path, version):
    edit(path, lambda listing: listing["__metadata__"].update(version=version))
    sentence = refusal(files.read, path)

    assert sentence.startswith(f"{path} is damaged: its version '{version[:30]}")
    assert sentence.endswith(f" is not a number; {AGAIN}")
    assert len(sentence) < len(str(path)) + 140


def test_no_version(path):
    edit(path, lambda listing: listing["__metadata__"].pop("version"))

    assert refusal(files.read, path) == f"{path} is damaged: its version '' is not a number; {AGAIN}"


@pytest.mark.parametrize("text", ["", "{", '{"a": 1', "[1, 2]", "null", "[" * 100_000])
def test_a_session_header_that_is_not_a_json_object(path, text):
    edit(path, lambda listing: listing["__metadata__"].update(header=text))

    assert refusal(files.read, path) == (f"{path} is damaged: the session's header in it is not a JSON object; {AGAIN}")


def test_no_session_header(path):
    edit(path, lambda listing: listing["__metadata__"].pop("header"))

    assert refusal(files.read, path) == (f"{path} is damaged: the session's header in it is not a JSON object; {AGAIN}")


def test_no_checksum(path):
    edit(path, lambda listing: listing["__metadata__"].pop("checksum"))

    assert refusal(files.read, path) == f"{path} is damaged: its checksum is missing; {AGAIN}"


def rename(listing: dict) -> None:
    listing["layers.0.kezs"] = listing.pop("layers.0.keys")


@pytest.mark.parametrize(
    "change",
    [
        rename,
        lambda listing: listing["positions"].update(shape=[5, 2]),
        lambda listing: listing["positions"].update(dtype="F64"),
        lambda listing: listing["positions"].update(dtype="U64"),  # a type we never write
        lambda listing: listing["empty"].update(shape=[2, 4, 0]),
        lambda listing: listing.pop("empty"),
        lambda listing: listing.update(more=listing["empty"]),
        lambda listing: listing["__metadata__"].update(
            header=listing["__metadata__"]["header"].replace("tiny", "tony")
        ),
        lambda listing: listing["__metadata__"].update(checksum="0" * 64),
        lambda listing: listing["__metadata__"].update(checksum=listing["__metadata__"]["checksum"].upper()),
        lambda listing: listing["__metadata__"].update(checksum=""),
    ],
)
def test_a_change_that_still_makes_sense_is_found_by_the_checksum(path, change):
    edit(path, change)

    assert refusal(files.read, path) == f"{path} is damaged: its content does not match its checksum; {AGAIN}"


def test_a_bit_of_the_data_is_found_by_the_checksum(path):
    blob = bytearray(path.read_bytes())
    blob[-3] ^= 1
    path.write_bytes(blob)

    assert refusal(files.read, path) == f"{path} is damaged: its content does not match its checksum; {AGAIN}"


def test_two_tensors_that_changed_places_are_found_by_the_checksum(tmp_path):
    path = tmp_path / "two.ws"
    files.write(path, {}, {"a": torch.zeros(4), "b": torch.ones(4)})

    def swap(listing):
        listing["a"], listing["b"] = listing["b"], listing["a"]

    edit(path, swap)

    assert refusal(files.read, path) == f"{path} is damaged: its content does not match its checksum; {AGAIN}"


def test_a_type_of_a_later_wakesight(path):
    """Not damage: the checksum is right, made by someone who knows one type more."""
    with pytest.MonkeyPatch.context() as later:
        later.setitem(files.NAMES, torch.float8_e5m2, "F8_E5M2")
        files.write(path, {}, {"k": torch.ones(2).to(torch.float8_e5m2)})

    assert refusal(files.read, path) == (
        f"{path} holds the tensor 'k' as F8_E5M2, which this wakesight does not know; "
        "update it: pip install -U wakesight"
    )


def test_no_flipped_bit_and_no_cut_goes_unnoticed(tmp_path):
    """Every bit of a small file, and every length: always a sentence with the file's name, nothing else."""
    path = tmp_path / "small.ws"
    files.write(path, {"a": 1}, {"k": noise((3,), torch.int16), "p": torch.tensor([True])})
    blob = path.read_bytes()

    with open(path, "r+b", buffering=0) as file:  # in place: emptying a file and filling it again waits for the disk
        for bit in range(8 * len(blob)):
            place = bit // 8
            os.pwrite(file.fileno(), bytes([blob[place] ^ 1 << bit % 8]), place)
            assert str(path) in refusal(files.read, path)
            os.pwrite(file.fileno(), blob[place : place + 1], place)
        assert files.read(path).header == {"a": 1}
        for length in reversed(range(len(blob))):
            file.truncate(length)
            assert str(path) in refusal(files.read, path)


# --- somebody else is faster -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meanwhile", "expected"),
    [
        (lambda path: path.unlink(), "there is no file {}; check the name, or save a session there first"),
        (
            lambda path: files.write(path, {}, {}),
            "{} changed while it was being read; load it again when nobody writes it",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes() + b"more"),
            "{} changed while it was being read; load it again when nobody writes it",
        ),
    ],
)
def test_a_file_that_goes_or_changes_between_the_map_and_the_check(path, monkeypatch, meanwhile, expected):
    def late(*arguments, **keywords):
        meanwhile(path)
        return safe_open(*arguments, **keywords)

    monkeypatch.setattr(files, "safe_open", late)

    assert refusal(files.read, path) == expected.format(path)


@pytest.mark.parametrize(("times", "enough"), [(files.TRIES - 1, True), (files.TRIES, False)])
def test_a_file_that_is_replaced_meanwhile_is_mapped_again(path, monkeypatch, times, enough):
    replaced = []

    def late(*arguments, **keywords):
        if len(replaced) < times:
            replaced.append(len(replaced))
            files.write(path, {"new": len(replaced)}, {})
        return safe_open(*arguments, **keywords)

    monkeypatch.setattr(files, "safe_open", late)

    if enough:
        assert files.read(path).header == {"new": times}
    else:
        assert "changed while it was being read" in refusal(files.read, path)


# --- what a caller expects of a file -----------------------------------------------------------------------------

RESAVE = "save the session again with this version of wakesight"


def test_fields_and_tensors_that_are_as_expected(path):
    saved = files.read(path)

    assert saved.field(str, "model", "name") == "tiny"
    assert saved.field(dict, "model") == HEADER["model"]
    assert saved.field(float, "keep") == 0.5
    assert saved.list_of(int, "tokens") == [5, 6, 7]
    assert saved.tensor("positions", (2, None), torch.int64).tolist() == [list(range(5)), list(range(5, 10))]
    assert saved.tensor("empty", [None, 0, 4]).numel() == 0


@pytest.mark.parametrize("keys", [("size",), ("model", "size"), ("text", "size"), ("tokens", "0")])
def test_a_missing_field(path, keys):
    assert refusal(files.read(path).field, int, *keys) == (
        f"{path} lacks the field '{'.'.join(keys)}' in its header; {RESAVE}"
    )


@pytest.mark.parametrize(
    ("kind", "keys", "found"),
    [
        (int, ("model", "name"), "'tiny' as field 'model.name' of its header, expected a whole number"),
        (int, ("keep",), "0.5 as field 'keep' of its header, expected a whole number"),
        (list, ("model", "layers"), "2 as field 'model.layers' of its header, expected a list"),
        (bool, ("model", "layers"), "2 as field 'model.layers' of its header, expected true or false"),
        (dict, ("tokens",), "[5, 6, 7] as field 'tokens' of its header, expected an object"),
    ],
)
def test_a_field_of_another_kind(path, kind, keys, found):
    assert refusal(files.read(path).field, kind, *keys) == f"{path} holds {found}; {RESAVE}"


def test_true_is_not_a_whole_number(path):
    files.write(path, {"layers": True, "fits": True}, {})
    saved = files.read(path)

    assert saved.field(bool, "fits") is True
    assert "holds True as field 'layers'" in refusal(saved.field, int, "layers")


def test_an_item_of_another_kind(path):
    files.write(path, {"tokens": [1, 2, "3"]}, {})

    assert refusal(files.read(path).list_of, int, "tokens") == (
        f"{path} holds '3' as field 'tokens[2]' of its header, expected a whole number; {RESAVE}"
    )


def test_a_missing_tensor(path):
    assert refusal(files.read(path).tensor, "layers.1.keys", (2,)) == (
        f"{path} lacks the tensor 'layers.1.keys'; {RESAVE}"
    )


@pytest.mark.parametrize("shape", [(2, 4), (2, None, 1), (10,)])
def test_a_tensor_of_another_shape(path, shape):
    wanted = ", ".join("any" if size is None else str(size) for size in shape)

    assert refusal(files.read(path).tensor, "positions", shape) == (
        f"{path} holds the tensor 'positions' of shape [2, 5], expected [{wanted}]; {RESAVE}"
    )


def test_a_tensor_of_another_type(path):
    assert refusal(files.read(path).tensor, "positions", (2, 5), torch.int32) == (
        f"{path} holds the tensor 'positions' as int64, expected int32; {RESAVE}"
    )
