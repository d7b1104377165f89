"""Pages that leave fast memory come back as they were, or are refused by name."""

from __future__ import annotations

import errno
import gc
import io
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakesight.cache.pool import Pool
from wakesight.cache.residency import page_file
from wakesight.cache.residency.page_file import HEADER_BYTES, RECORD, FileReservoir
from wakesight.cache.residency.reservoir import HostReservoir, check_reservoir, deliver, make_reservoir
from wakesight.errors import RequestError, WorkError

LAWS = settings(deadline=None, derandomize=True, max_examples=40)
CPU = torch.device("cpu")
HEADS, SIZE, KEY, VALUE = 3, 4, 6, 2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RECORD_BYTES = RECORD.size + SIZE * (KEY + VALUE) * 4


def pages(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of closed pages; bits of all kinds, NaN and infinities among them."""
    noise = torch.Generator().manual_seed(seed)
    width = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    made = [
        torch.randint(torch.iinfo(width).min, torch.iinfo(width).max, (HEADS, count, SIZE, dim), generator=noise).to(
            width
        )
        for dim in (KEY, VALUE)
    ]
    return made[0].view(dtype), made[1].view(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def fetched(reservoir, moves: list[tuple[int, int]], dtype: torch.dtype = torch.float32):
    """(unit, page) moves into rows in falling order; keys and values [move, page_size, dim] in the moves' order."""
    count = len(moves)
    key, value = torch.zeros((count, SIZE, KEY), dtype=dtype), torch.zeros((count, SIZE, VALUE), dtype=dtype)
    units, ids = torch.tensor(moves, dtype=torch.int64).view(-1, 2).T
    reservoir.fetch(units, ids, torch.arange(count - 1, -1, -1), key, value)
    return key.flip(0), value.flip(0)


def all_moves(count: int) -> list[tuple[int, int]]:
    return [(unit, page) for page in range(count) for unit in range(HEADS)]


def expected(kept: torch.Tensor, moves: list[tuple[int, int]]) -> torch.Tensor:
    return torch.stack([kept[unit, page] for unit, page in moves])


@pytest.fixture(params=["host", "file"])
def where(request, tmp_path) -> str:
    return "host" if request.param == "host" else f"file:{tmp_path}"


@pytest.fixture
def file(tmp_path) -> FileReservoir:
    """Three pages in a file."""
    made = FileReservoir(tmp_path)
    made.append(*pages(3))
    return made


@pytest.mark.parametrize("dtype", DTYPES)
def test_demote_then_fetch_is_bit_exact(where, dtype):
    reservoir = make_reservoir(where, Pool(poison=True), SIZE, CPU)
    key, value = pages(7, dtype)
    for start, stop in ((0, 1), (1, 2), (2, 6), (6, 7)):
        reservoir.append(key[:, start:stop], value[:, start:stop])
    moves = all_moves(7)[::-1]

    got = fetched(reservoir, moves, dtype)

    assert same_bits(got[0], expected(key, moves))
    assert same_bits(got[1], expected(value, moves))
    reservoir.release()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=12), st.sampled_from(["host", "file"]))
@LAWS
def test_any_history_equals_the_pages_that_it_left(tmp_path_factory, history, kind):
    """append and truncate in any order; afterwards every page is the one that was written last under its id."""
    pool = Pool(poison=True)
    folder = tmp_path_factory.mktemp("pages")
    reservoir = make_reservoir("host" if kind == "host" else f"file:{folder}", pool, SIZE, CPU)
    key, value = pages(0)
    for index, (grow, count) in enumerate(history):
        if grow:
            fresh = pages(count, seed=index)
            reservoir.append(*fresh)
            key, value = torch.cat([key, fresh[0]], dim=1), torch.cat([value, fresh[1]], dim=1)
        else:
            left = min(count, reservoir.pages)
            reservoir.truncate(left)
            key, value = key[:, :left], value[:, :left]
        moves = all_moves(reservoir.pages)
        assert reservoir.pages == key.shape[1]
        if moves:
            got = fetched(reservoir, moves)
            assert same_bits(got[0], expected(key, moves))
            assert same_bits(got[1], expected(value, moves))
    reservoir.release()
    assert (pool.held_bytes, pool.reservoir_bytes, pool.leases) == (0, 0, 0)
    assert list(folder.iterdir()) == []


def test_only_the_rows_named_are_written(where):
    reservoir = make_reservoir(where, Pool(), SIZE, CPU)
    reservoir.append(*pages(2))
    key, value = torch.full((5, SIZE, KEY), 7.0), torch.full((5, SIZE, VALUE), 7.0)

    reservoir.fetch(torch.tensor([2]), torch.tensor([1]), torch.tensor([3]), key, value)

    assert same_bits(key[3], pages(2)[0][2, 1])
    assert bool((key[[0, 1, 2, 4]] == 7).all())
    assert bool((value[[0, 1, 2, 4]] == 7).all())
    reservoir.release()


def test_rows_may_lie_in_a_view_of_all_slots(where):
    reservoir = make_reservoir(where, Pool(), SIZE, CPU)
    reservoir.append(*pages(2))
    key, value = torch.zeros((HEADS, 4, SIZE, KEY)), torch.zeros((HEADS, 4, SIZE, VALUE))

    reservoir.fetch(
        torch.tensor([0, 2]), torch.tensor([1, 0]), torch.tensor([1, 2 * 4 + 3]), key.flatten(0, 1), value.flatten(0, 1)
    )

    assert same_bits(key[0, 1], pages(2)[0][0, 1])
    assert same_bits(value[2, 3], pages(2)[1][2, 0])
    reservoir.release()


def test_strided_pages_of_a_larger_tensor_are_taken(where):
    """What closes is a view of slots; its strides are not a page's."""
    whole = torch.arange(HEADS * 3 * SIZE * 2 * KEY, dtype=torch.float32).view(HEADS, 3, SIZE, 2 * KEY)
    key, value = whole[:, 1:, :, :KEY], whole[:, 1:, :, KEY : KEY + VALUE]
    reservoir = make_reservoir(where, Pool(), SIZE, CPU)

    reservoir.append(key, value)

    got = fetched(reservoir, all_moves(2))
    assert torch.equal(got[0], expected(key, all_moves(2)))
    assert torch.equal(got[1], expected(value, all_moves(2)))
    reservoir.release()


def test_nothing_is_fine(where):
    reservoir = make_reservoir(where, Pool(), SIZE, CPU)
    reservoir.append(*pages(0))
    assert (reservoir.pages, reservoir.bytes, reservoir.slack_bytes) == (0, 0, 0)
    none = torch.zeros(0, dtype=torch.int64)

    reservoir.fetch(none, none, none, torch.zeros(0, SIZE, KEY), torch.zeros(0, SIZE, VALUE))

    reservoir.truncate(0)
    reservoir.release()
    reservoir.release()


@pytest.mark.parametrize(("unit", "page"), [(0, 2), (0, -1), (HEADS, 0), (-1, 0)])
def test_a_page_that_is_not_there_is_a_bug_and_not_another_page(where, unit, page):
    reservoir = make_reservoir(where, Pool(), SIZE, CPU)
    reservoir.append(*pages(3))
    reservoir.truncate(2)

    with pytest.raises(RuntimeError, match="reservoir"):
        fetched(reservoir, [(0, 0), (unit, page)])
    reservoir.release()


def test_pages_of_another_shape_are_a_bug_and_change_nothing(where):
    reservoir = make_reservoir(where, Pool(), SIZE, CPU)
    reservoir.append(*pages(1))

    with pytest.raises(RuntimeError, match="do not fit"):
        reservoir.append(*(part[:2] for part in pages(1)))
    with pytest.raises(RuntimeError):
        reservoir.truncate(2)

    assert reservoir.pages == 1
    reservoir.release()


def test_host_memory_is_counted_to_the_byte_and_apart_from_fast_memory():
    pool = Pool()
    reservoir = HostReservoir(pool, CPU)
    page = HEADS * SIZE * (KEY + VALUE) * 4

    for held in range(1, 12):
        reservoir.append(*pages(1))
        assert reservoir.bytes == held * page
        assert pool.reservoir_bytes == reservoir.bytes + reservoir.slack_bytes
        assert reservoir.slack_bytes <= max(4, held // 4 + 4) * page
        assert pool.held_bytes == 0
    reservoir.truncate(2)
    assert reservoir.bytes == 2 * page
    reservoir.release()

    assert (pool.reservoir_bytes, pool.leases, reservoir.bytes) == (0, 0, 0)


def test_host_memory_grows_by_a_quarter():
    pool, leased = Pool(), []
    take, pool.lease = pool.lease, lambda *a, **k: leased.append(a[0][0] // HEADS) or take(*a, **k)
    reservoir = HostReservoir(pool, CPU)

    for _ in range(100):
        reservoir.append(*pages(1))

    assert leased[::2] == [4, 8, 12, 16, 20, 28, 36, 48, 60, 76, 96, 120]


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("held", [0, 4])
def test_a_host_without_memory_changes_nothing(run_out_at, call, held):
    pool = Pool()
    reservoir = HostReservoir(pool, CPU)
    reservoir.append(*pages(held))
    before = (pool.reservoir_bytes, pool.leases)
    run_out_at(pool, call)

    with pytest.raises(WorkError, match="out of memory"):
        reservoir.append(*pages(1, seed=9))

    assert (reservoir.pages, pool.reservoir_bytes, pool.leases) == (held, *before)
    if held:
        assert same_bits(fetched(reservoir, all_moves(held))[0], expected(pages(held)[0], all_moves(held)))


def test_pages_that_were_cut_off_turn_nan_under_poison():
    reservoir = HostReservoir(Pool(poison=True), CPU)
    reservoir.append(torch.zeros(HEADS, 2, SIZE, KEY), torch.zeros(HEADS, 2, SIZE, VALUE))

    reservoir.truncate(1)

    key, value = reservoir._storage()
    assert bool(key[HEADS:].isnan().all())
    assert bool(value[HEADS:].isnan().all())
    assert bool((key[:HEADS] == 0).all())


def test_file_bytes_are_what_the_file_holds(file):
    assert file.bytes == file.path.stat().st_size == HEADER_BYTES + 3 * HEADS * RECORD_BYTES
    file.truncate(1)
    assert file.bytes == file.path.stat().st_size == HEADER_BYTES + HEADS * RECORD_BYTES
    assert file.slack_bytes == 0


def test_a_file_is_its_owners_alone_and_its_name_is_not_guessed(tmp_path):
    one, other = FileReservoir(tmp_path), FileReservoir(tmp_path)

    assert one.path != other.path
    assert re.fullmatch(r"wakesight-[0-9a-f]{32}\.pages", one.path.name)
    if os.name == "posix":
        assert one.path.stat().st_mode & 0o777 == 0o600


def test_no_file_stays_open(file):
    """Hundreds of sessions of thirty layers would pass the limit of open files."""
    fetched(file, all_moves(3))

    links = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    assert str(file.path) not in links


def test_a_released_and_a_forgotten_file_are_removed(tmp_path):
    one, other = FileReservoir(tmp_path), FileReservoir(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2

    one.release()
    del other
    gc.collect()

    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="released"):
        one.append(*pages(1))


END = """
import os, sys
from pathlib import Path
import torch
from wakesight.cache.residency.page_file import FileReservoir
reservoir = FileReservoir(Path(sys.argv[1]))
reservoir.append(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2))
assert reservoir.path.exists()
{end}
"""


def test_the_end_of_the_interpreter_removes_the_file(tmp_path):
    """An error that nobody caught is an end like any other."""
    end = "raise ValueError('nobody catches this')"

    ran = subprocess.run(
        [sys.executable, "-c", END.format(end=end), str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert "nobody catches this" in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_does_not_remove_its_parents_file(tmp_path):
    end = textwrap.dedent("""
        if os.fork() == 0:
            sys.exit()  # runs the interpreter's own end
        os.wait()
        assert reservoir.path.exists()
        print("there")
    """)

    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", END.format(end=end), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.stdout.strip() == "there", ran.stderr
    assert list(tmp_path.iterdir()) == []


def flip(path, offset: int) -> None:
    with open(path, "r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 4]))


@given(st.integers(0, RECORD_BYTES - 1), st.integers(0, 2), st.integers(0, HEADS - 1))
@LAWS
def test_a_flipped_bit_is_refused_by_page_head_and_file(tmp_path_factory, offset, page, head):
    reservoir = FileReservoir(tmp_path_factory.mktemp("pages"))
    reservoir.append(*pages(3))
    flip(reservoir.path, HEADER_BYTES + (page * HEADS + head) * RECORD_BYTES + offset)

    with pytest.raises(WorkError, match=f"page {page} of KV head {head} .*{reservoir.path.name}.*checksum.*; prefill"):
        fetched(reservoir, all_moves(3))

    others = [move for move in all_moves(3) if move != (head, page)]
    assert same_bits(fetched(reservoir, others)[0], expected(pages(3)[0], others))
    reservoir.release()


def test_a_failed_fetch_writes_no_row(file):
    flip(file.path, HEADER_BYTES + (2 * HEADS + 1) * RECORD_BYTES + 40)
    key, value = torch.full((2, SIZE, KEY), 7.0), torch.full((2, SIZE, VALUE), 7.0)

    with pytest.raises(WorkError):
        file.fetch(torch.tensor([0, 1]), torch.tensor([0, 2]), torch.tensor([0, 1]), key, value)

    assert bool((key == 7).all())
    assert bool((value == 7).all())


def test_a_whole_record_in_anothers_place_is_refused(file):
    """Its checksum is right, but it is not the page that was asked for."""
    data = file.path.read_bytes()
    first, second = (data[HEADER_BYTES + i * RECORD_BYTES : HEADER_BYTES + (i + 1) * RECORD_BYTES] for i in range(2))
    file.path.write_bytes(data[:HEADER_BYTES] + second + first + data[HEADER_BYTES + 2 * RECORD_BYTES :])

    with pytest.raises(WorkError, match="page 0 of KV head 0"):
        fetched(file, [(0, 0)])


@pytest.mark.parametrize("cut", [HEADER_BYTES + 9 * RECORD_BYTES - 1, HEADER_BYTES + 8 * RECORD_BYTES])
def test_a_short_read_is_refused(file, cut):
    os.truncate(file.path, cut)

    with pytest.raises(WorkError, match=f"page 2 of KV head 2 in the reservoir file .*{file.path.name} is cut short"):
        fetched(file, [(0, 0), (2, 2)])


@pytest.mark.parametrize("offset", range(HEADER_BYTES))
def test_a_damaged_header_is_refused(file, offset):
    flip(file.path, offset)

    with pytest.raises(WorkError, match="no longer begins as it was written"):
        fetched(file, [(0, 0)])
    with pytest.raises(WorkError, match="no longer begins as it was written"):
        file.append(*pages(1))
    assert file.pages == 3


def test_another_sessions_file_of_the_same_shape_is_refused(tmp_path, file):
    other = FileReservoir(tmp_path)
    other.append(*pages(3, seed=5))
    os.replace(other.path, file.path)

    with pytest.raises(WorkError, match="replaced"):
        fetched(file, [(0, 0)])


def test_a_removed_file_is_refused(file):
    file.path.unlink()

    with pytest.raises(WorkError, match=r"page 0 cannot be read.*somebody removed it"):
        fetched(file, [(0, 0)])
    with pytest.raises(WorkError, match=r"page 3 cannot be written.*somebody removed it"):
        file.append(*pages(1))
    file.truncate(1)
    file.release()


class FullDisk:
    """A file that takes `room` more bytes, then none."""

    def __init__(self, file, room: int, code: int) -> None:
        self._file, self._room, self._code = file, room, code

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def write(self, data):
        if self._room == 0:
            raise OSError(self._code, os.strerror(self._code))
        taken = self._file.write(data[: self._room])
        self._room -= taken
        return taken


@pytest.mark.parametrize(
    ("code", "said"),
    [(errno.ENOSPC, "the disk is full"), (errno.EIO, "Input/output error"), (errno.EFBIG, "not allowed there")],
)
@pytest.mark.parametrize("room", [0, 1, RECORD_BYTES, 3 * RECORD_BYTES + 7])
@pytest.mark.parametrize("held", [0, 3])
def test_a_full_disk_changes_nothing(tmp_path, monkeypatch, held, room, code, said):
    reservoir = FileReservoir(tmp_path)
    reservoir.append(*pages(held))
    before = reservoir.path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(page_file, "open", lambda *a, **k: FullDisk(io.FileIO(a[0], a[1]), room, code), raising=False)
        with pytest.raises(WorkError, match=f"pages {held} to {held + 1} .*{reservoir.path.name}: .*{said}.*; .*host"):
            reservoir.append(*pages(2, seed=4))

    assert reservoir.pages == held
    assert reservoir.path.read_bytes() == before
    reservoir.append(*pages(2, seed=4))  # room again
    moves = [(unit, held + page) for unit, page in all_moves(2)]
    assert same_bits(fetched(reservoir, moves)[0], expected(pages(2, seed=4)[0], all_moves(2)))


def test_an_interrupted_write_changes_nothing(file, monkeypatch):
    def interrupted(record):
        raise KeyboardInterrupt

    before = file.path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(FileReservoir, "_write", lambda self, offset, data: interrupted(data))
        with pytest.raises(KeyboardInterrupt):
            file.append(*pages(1))

    assert (file.pages, file.path.read_bytes()) == (3, before)


def test_a_real_limit_on_the_files_size_is_a_sentence(tmp_path):
    """The operating system itself says no in the middle of a page."""
    resource = pytest.importorskip("resource", reason="limits of a process are POSIX")
    reservoir = FileReservoir(tmp_path)
    reservoir.append(*pages(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (reservoir.bytes + RECORD_BYTES + 7, hard))
        with pytest.raises(WorkError, match=r"page 1 cannot be written .* raise ulimit -f, or give host"):
            reservoir.append(*pages(1, seed=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert (reservoir.pages, reservoir.bytes) == (1, reservoir.path.stat().st_size)
    assert same_bits(fetched(reservoir, all_moves(1))[0], expected(pages(1)[0], all_moves(1)))


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("disk", "there is no reservoir 'disk'; give host, or file:"),
        ("file:", "there is no reservoir 'file:'"),
        ("file:{tmp}/nowhere", "there is no such folder; type mkdir -p"),
        ("file:{tmp}/taken", "that is no folder"),
        ("file:/proc", "cannot be made in /proc"),
    ],
)
def test_a_place_that_cannot_hold_pages_is_refused_at_once(tmp_path, where, said):
    (tmp_path / "taken").touch()

    with pytest.raises(RequestError, match=re.escape(said)):
        make_reservoir(where.format(tmp=tmp_path), Pool(), SIZE, CPU)
    with pytest.raises(RequestError, match=re.escape(said)):
        check_reservoir(where.format(tmp=tmp_path))


def test_a_folder_one_may_not_write_in_is_refused(tmp_path, monkeypatch):
    def refused(*args):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(page_file.os, "open", refused)

    with pytest.raises(RequestError, match=r"Permission denied\); give a folder you may write in, or host"):
        make_reservoir(f"file:{tmp_path}", Pool(), SIZE, CPU)


def test_checking_leaves_nothing(tmp_path):
    check_reservoir(f"file:{tmp_path}")
    check_reservoir("host")

    assert list(tmp_path.iterdir()) == []


def test_a_page_of_no_tokens_is_refused():
    with pytest.raises(RequestError, match="page_size=0"):
        make_reservoir("host", Pool(), 0, CPU)


def test_pages_arrive_in_their_rows():
    staged, target = torch.arange(8.0).view(2, 2, 2), torch.zeros(3, 2, 2)

    deliver(staged, torch.tensor([2, 0]), target)

    assert torch.equal(target, torch.stack([staged[1], torch.zeros(2, 2), staged[0]]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: pinned memory and a side stream")
@pytest.mark.parametrize("kind", ["host", "file"])
def test_pages_survive_the_way_from_a_gpu_and_back(tmp_path, kind):
    """Appends and fetches overlap kernels on the current stream; every fetch must still see what was appended."""
    device = torch.device("cuda")
    pool = Pool(poison=True)
    reservoir = make_reservoir("host" if kind == "host" else f"file:{tmp_path}", pool, SIZE, device)
    key, value = pages(64)
    for start in range(0, 64, 8):
        busy = torch.randn(1024, 1024, device=device)
        for _ in range(8):
            busy = busy @ busy
        reservoir.append(key[:, start : start + 8].to(device), value[:, start : start + 8].to(device))
        moves = [(unit, page) for page in range(start, start + 8) for unit in range(HEADS)]
        out = [torch.zeros((len(moves), SIZE, dim), device=device) for dim in (KEY, VALUE)]
        units, ids = torch.tensor(moves, device=device).T
        reservoir.fetch(units, ids, torch.arange(len(moves), device=device), *out)
        assert same_bits(out[0].cpu(), expected(key, moves))
        assert same_bits(out[1].cpu(), expected(value, moves))
    reservoir.release()
    assert (pool.reservoir_bytes, pool.leases) == (0, 0)
