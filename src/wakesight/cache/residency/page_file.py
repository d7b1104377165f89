"""A reservoir in a file: for contexts whose pages are too many for host memory.

One file per layer and sequence, made for this process alone and removed with its reservoir, at the latest when the
interpreter ends (a process that is killed outright leaves its `wakesight-*.pages`, which can be deleted). The file:

    header      64 bytes: magic, version, geometry, a random mark, crc32 of all that
    record 0    page 0 of KV head 0: crc32 of the rest, page, head (little-endian uint32 each), keys, values
    record 1    page 0 of KV head 1
    ...         page-major, so new pages go behind the old ones

**Nothing half-written is ever read.** `pages` rises only after all records of an `append` are written; records beyond
are as good as not there. And every record that is read must be of full length, name its own page and head, and have
its checksum: a flipped bit, a lost write, or a file that somebody else shortened, replaced or removed is a sentence
that names it, never a wrong page. crc32 (zlib) finds accidents; it is no signature.

**Read, not mapped.** A map whose file is shortened kills the process (SIGBUS); a short read is an error we can name.
No file stays open between calls: thirty layers of hundreds of sessions would pass the usual limit of open files.
Nothing is synced to the disk: the file is worth nothing after the process.
"""

from __future__ import annotations

import errno
import os
import secrets
import shlex
import struct
import weakref
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wakesight.cache.residency.reservoir import PageShape, Reservoir, deliver
from wakesight.errors import RequestError, WakesightError, WorkError

MAGIC = b"WSPAGES\x00"
VERSION = 1
HEADER = struct.Struct("<8s5I12s16sI")  # magic, version, kv_heads, page_size, key_dim, value_dim, dtype, mark, crc32
RECORD = struct.Struct("<III")  # crc32 of what follows, page, head
HEADER_BYTES = 64

AGAIN = "prefill and demote again"
Raw = bytes  # inside the class that word is a property


class FileReservoir(Reservoir):
    """Pages in a file of its own in `folder`.

    Raises RequestError for a folder that is not there or in which no file can be made.
    """

    def __init__(self, folder: Path) -> None:
        self._mark = secrets.token_bytes(16)  # a file that took our file's place does not have it
        self.path = folder / f"wakesight-{secrets.token_hex(16)}.pages"
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
            os.close(os.open(self.path, flags, 0o600))
        except OSError as error:
            raise _not_made(folder, error) from error
        self._remove = weakref.finalize(self, _remove, self.path, os.getpid())

    @property
    def bytes(self) -> int:
        if self.shape is None:
            return 0
        return HEADER_BYTES + self.pages * self.shape.kv_heads * _record_bytes(self.shape)

    @property
    def slack_bytes(self) -> int:
        return 0  # a file grows by what is written

    def append(self, key: Tensor, value: Tensor) -> None:
        shape, new = self._checked(key, value), key.shape[1]
        if new == 0:
            return
        first = self.shape is None
        data = (_header(shape, self._mark) if first else b"") + self._records(shape, key, value)
        try:
            self._write(0 if first else self.bytes, data)
        except OSError as error:
            self._cut()
            last = f"pages {self.pages} to {self.pages + new - 1}" if new > 1 else f"page {self.pages}"
            raise _not_written(self.path, last, len(data), error) from error
        except BaseException:  # Ctrl-C inside the write
            self._cut()
            raise
        self.shape = shape
        self.pages += new

    def fetch(self, units: Tensor, pages: Tensor, rows: Tensor, key: Tensor, value: Tensor) -> None:
        if len(rows) == 0:
            return
        units, pages = units.cpu(), pages.cpu()
        shape = self._check_held(units, pages)
        moves = list(zip(pages.tolist(), units.tolist(), strict=True))
        try:
            staged = self._read(shape, moves)
        except OSError as error:
            raise _not_read(self.path, moves[0][0], error) from error
        for part, target in zip(_split(staged, shape), (key, value), strict=True):
            deliver(part.pin_memory() if target.is_cuda else part, rows, target)

    def truncate(self, pages: int) -> None:
        self._check_cut(pages)
        if pages < self.pages:
            self.pages = pages
            self._cut()

    def release(self) -> None:
        self._remove()
        self.pages, self.shape = 0, None

    def _write(self, offset: int, data: Raw) -> None:
        """All of `data`, or OSError."""
        if not self._remove.alive:
            raise RuntimeError("this reservoir was released")
        with open(self.path, "r+b", buffering=0) as file:
            if offset:
                self._check_header(file.read(HEADER_BYTES))
            file.seek(offset)
            view = memoryview(data)
            while view:  # a disk that fills up takes a part first, and refuses the next
                view = view[file.write(view) :]

    def _read(self, shape: PageShape, moves: list[tuple[int, int]]) -> np.ndarray:
        """uint8 [move, keys and values], every record checked, before any of them is used."""
        size = _record_bytes(shape)
        raw = bytearray(len(moves) * size)
        with open(self.path, "rb", buffering=0) as file:
            self._check_header(file.read(HEADER_BYTES))
            for index, (page, head) in enumerate(moves):
                file.seek(HEADER_BYTES + (page * shape.kv_heads + head) * size)
                record = memoryview(raw)[index * size : (index + 1) * size]
                self._check_record(record, file.readinto(record), page, head)
        return np.frombuffer(raw, np.uint8).reshape(len(moves), size)[:, RECORD.size :]

    def _check_header(self, found: Raw) -> None:
        assert self.shape is not None
        if found != _header(self.shape, self._mark):
            raise WorkError(
                f"the reservoir file {self.path} no longer begins as it was written: it was damaged or replaced; "
                f"{AGAIN}, and leave the files of a running process alone"
            )

    def _check_record(self, record: memoryview, found: int | None, page: int, head: int) -> None:
        if found != len(record):
            raise WorkError(
                f"page {page} of KV head {head} in the reservoir file {self.path} is cut short ({found or 0:,} of "
                f"{len(record):,} bytes); {AGAIN}, and leave the files of a running process alone"
            )
        checksum, *name = RECORD.unpack_from(record)
        if zlib.crc32(record[4:]) != checksum or name != [page, head]:
            raise WorkError(
                f"page {page} of KV head {head} in the reservoir file {self.path} is damaged: its checksum does not "
                f"match; {AGAIN}, on another disk if it happens twice"
            )

    def _records(self, shape: PageShape, key: Tensor, value: Tensor) -> Raw:
        """The records of new pages, page-major."""
        new = key.shape[1]
        body = RECORD.size + shape.key_bytes
        table = np.empty((new, shape.kv_heads, _record_bytes(shape)), np.uint8)
        table[:, :, RECORD.size : body] = _bytes_of(key)
        table[:, :, body:] = _bytes_of(value)
        for index in range(new):
            for head in range(shape.kv_heads):
                record = memoryview(table[index, head])
                RECORD.pack_into(record, 0, 0, self.pages + index, head)
                struct.pack_into("<I", record, 0, zlib.crc32(record[4:]))
        return table.tobytes()

    def _cut(self) -> None:
        """Give the disk back what lies behind the pages held. If it will not: nobody ever reads it."""
        try:
            os.truncate(self.path, self.bytes)
        except OSError:
            return


def _remove(path: Path, process: int) -> None:
    """Not in a fork, whose interpreter ends too: the file is its parent's."""
    if os.getpid() == process:
        path.unlink(missing_ok=True)


def _record_bytes(shape: PageShape) -> int:
    return RECORD.size + shape.key_bytes + shape.value_bytes


def _header(shape: PageShape, mark: bytes) -> bytes:
    dtype = str(shape.dtype).removeprefix("torch.").encode()
    fields = (MAGIC, VERSION, *shape[:4], dtype, mark)
    whole = HEADER.pack(*fields, 0)[:-4]
    return (whole + struct.pack("<I", zlib.crc32(whole))).ljust(HEADER_BYTES, b"\0")


def _bytes_of(pages: Tensor) -> np.ndarray:
    """[kv_head, page, page_size, dim] -> uint8 [page, kv_head, bytes]."""
    laid = pages.transpose(0, 1).contiguous().cpu()
    flat: np.ndarray = laid.view(torch.uint8).reshape(*laid.shape[:2], -1).numpy()
    return flat


def _split(staged: np.ndarray, shape: PageShape) -> tuple[Tensor, Tensor]:
    """uint8 [move, bytes] -> keys and values [move, page_size, dim]."""
    parts = np.ascontiguousarray(staged[:, : shape.key_bytes]), np.ascontiguousarray(staged[:, shape.key_bytes :])
    key, value = (torch.from_numpy(part).view(shape.dtype).view(len(staged), shape.page_size, -1) for part in parts)
    return key, value


def _not_made(folder: Path, error: OSError) -> WakesightError:
    what = f"a reservoir file cannot be made in {folder}"
    match error.errno:
        case errno.ENOENT if not folder.exists():
            return RequestError(
                f"{what}: there is no such folder; type mkdir -p {shlex.quote(str(folder))}, or give another, or host"
            )
        case errno.ENOTDIR:
            return RequestError(f"{what}: that is no folder; give one after file:, or host")
        case errno.ENOSPC | errno.EDQUOT:
            return WorkError(f"{what}: the disk is full; free some space, or give another folder, or host")
        case errno.EMFILE | errno.ENFILE | errno.EIO:
            return WorkError(f"{what}: {error.strerror}; close some files or sessions, or give another folder, or host")
    return RequestError(f"{what} ({error.strerror or error}); give a folder you may write in, or host")


def _not_written(path: Path, what: str, size: int, error: OSError) -> WorkError:
    start = f"{what} cannot be written to the reservoir file {path}"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return WorkError(
                f"{start}: the disk is full and {size:,} bytes more are needed; free some space, or give another "
                "folder after file:, or host"
            )
        case errno.EFBIG:
            return WorkError(f"{start}: files that large are not allowed there; raise ulimit -f, or give host")
        case errno.ENOENT:
            return WorkError(f"{start}: somebody removed it; {AGAIN}, and leave the files of a running process alone")
    return WorkError(f"{start}: the disk reports {error.strerror or error}; give another folder after file:, or host")


def _not_read(path: Path, page: int, error: OSError) -> WorkError:
    start = f"page {page} cannot be read from the reservoir file {path}"
    if error.errno == errno.ENOENT:
        return WorkError(f"{start}: somebody removed it; {AGAIN}, and leave the files of a running process alone")
    return WorkError(f"{start}: the disk reports {error.strerror or error}; {AGAIN}, on another disk or with host")
