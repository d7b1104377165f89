"""A JSON header and named tensors in one file: written whole or not at all, checked before anything is believed.

The file is an ordinary safetensors file: 8 bytes with the header's length (little endian), the header as
JSON, then the tensors' bytes without gaps. Its `__metadata__` holds four texts:

    format    "wakesight-session"
    version   "1", or "2" where a session has demoted pages, which older versions do not know
    header    the caller's header as JSON
    checksum  sha256 of the JSON list [header, [[name, dtype, shape, sha256 of the bytes], ...]], names sorted

**Why we lay the bytes out ourselves.** `safetensors.torch.save_file` takes contiguous tensors only, and all at
once: a cache with growth slack, or on a GPU, would exist twice in memory while it is saved. `write` goes tensor by
tensor, copies at most `PIECE` bytes where it must copy at all, and fills the checksum in at the end (its width is
fixed). Reading goes through the library's own checks (gaps, overlaps, sizes, exact length) before ours.

**Why sha256.** Measured on 86 MB from a warm page cache, one core of an AMD EPYC: sha256 48 ms, sha1 45, blake2b 91,
sha512 100, md5 113, blake2s 166, sha3 170. Without the processor's SHA instructions sha256 takes 159 ms, still well
under 0.3 s. crc32 takes 21 ms but promises little for gigabytes. Every tensor has a digest of its own, so that
torch's number of threads (hashing releases the interpreter lock) shares them out. It finds accidents; it is no
signature.

**Mapped, not read.** `read` maps the file privately: tensors are writable, a page is copied when it is first written,
and the file never changes. Two things follow. If another process shortens the file in place, touching a lost page
kills this process (SIGBUS), and nothing here can prevent that; if it writes in place, the change may show in pages
not yet copied. `write` never does either: it renames a finished file over the old one, and who has the old one
mapped keeps it. A process killed outright leaves its temporary file, `.wakesight-*.tmp`, which can be deleted.

There is no pickle here, so a file can be wrong but it cannot run code.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import mmap
import os
import re
import secrets
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wakesight.errors import RequestError, WakesightError, WorkError

FORMAT = "wakesight-session"
VERSION = 2  # the newest that is read
PIECE = 4 << 20  # bytes: what is copied at a time of a tensor that is strided or on a GPU
ALIGN = 64  # bytes: the data starts at a multiple, and wider types come first, so every tensor is aligned to its type
MAX_HEADER = 100_000_000  # bytes: the library reads no longer header
THREADED = 8 << 20  # bytes: below this, starting threads costs more than they save
TRIES = 3  # maps of a file that others replace meanwhile, before reading gives up

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

AGAIN = "copy it again, or prefill and save the session again"
OTHER = "give a file that a session was saved to"
RESAVE = "save the session again with this version of wakesight"

# how files that are often mistaken for ours begin
BEGINNINGS = {
    b"PK\x03\x04": "a zip archive or PyTorch file",
    b"\x80": "a pickle",
    b"GGUF": "a GGUF model",
    b"\x89PNG": "a picture",
    b"%PDF": "a PDF document",
    b"\x1f\x8b": "a gzip archive",
    b"version https://git-lfs": "a Git LFS pointer",
}
KINDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}

T = TypeVar("T")


@dataclass(frozen=True)
class SavedFile:
    """What a file held; the methods turn what a caller expects of it into sentences.

    tensors: on the CPU, writable, backed by a private map of the file that lives as long as any of them.
    """

    path: Path
    header: dict[str, Any]
    tensors: dict[str, Tensor]

    def field(self, kind: type[T], *keys: str) -> T:
        """The header's value under `keys`, one key per level of nesting; RequestError if absent or of another kind.

        True and false do not count as whole numbers.
        """
        value: Any = self.header
        for key in keys:
            if not isinstance(value, dict) or key not in value:
                raise RequestError(f"{self.path} lacks the field {'.'.join(keys)!r} in its header; {RESAVE}")
            value = value[key]
        return self._typed(value, kind, ".".join(keys))

    def list_of(self, kind: type[T], *keys: str) -> list[T]:
        """Like `field`, for a list whose items are all of one kind."""
        name = ".".join(keys)
        return [self._typed(item, kind, f"{name}[{index}]") for index, item in enumerate(self.field(list, *keys))]

    def tensor(self, name: str, shape: Sequence[int | None], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of that name; RequestError if it is absent or differs from `shape` (None: any size) or `dtype`."""
        if name not in self.tensors:
            raise RequestError(f"{self.path} lacks the tensor {name!r}; {RESAVE}")
        found = self.tensors[name]
        fits = len(shape) == found.ndim and all(
            want in (None, have) for want, have in zip(shape, found.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise RequestError(
                f"{self.path} holds the tensor {name!r} of shape {list(found.shape)}, expected [{wanted}]; {RESAVE}"
            )
        if dtype not in (None, found.dtype):
            raise RequestError(
                f"{self.path} holds the tensor {name!r} as {_plain(found.dtype)}, expected {_plain(dtype)}; {RESAVE}"
            )
        return found

    def _typed(self, value: Any, kind: type[T], name: str) -> T:
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        raise RequestError(
            f"{self.path} holds {_short(value)} as field {name!r} of its header, "
            f"expected {KINDS.get(kind, kind.__name__)}; {RESAVE}"
        )


def write(
    path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor], *, version: int = 1,
    late: Mapping[str, Callable[[], Tensor]] | None = None,
) -> None:  # fmt: skip
    """Save `header` (plain JSON) and `tensors` (any device, strides and sizes, types in `DTYPES`) as one file.

    late: makes a tensor when its turn comes, for those that stand in `tensors` on the meta device, by shape alone.

    All or nothing: the bytes go to a temporary file in the same folder, which is renamed over `path` once they
    are on the disk. Whatever was at `path` stays as it is until then, and for good if anything fails or Ctrl-C
    comes; nothing else is left behind. A link is followed, and an existing file's permissions are kept. The tensors
    must not change meanwhile. Needs `PIECE` bytes of extra memory, however large they are.

    Raises RequestError if `path` cannot be written or `check_replaceable` refuses it, WorkError if the disk fails,
    and TypeError or ValueError if `header` is not JSON, or a name is not text or "__metadata__".
    """
    path = Path(path)
    layout = _Layout(path, json.dumps(header, allow_nan=False), tensors, version)
    late = late or {}
    target = Path(os.path.realpath(path))
    temporary = target.parent / f".wakesight-{secrets.token_hex(8)}.tmp"
    try:
        mode = check_replaceable(path)
        with open(temporary, "xb") as file:
            if mode is not None:
                with contextlib.suppress(OSError):  # some file systems have no permissions to set
                    os.chmod(temporary, mode)
            file.write(layout.preamble(checksum="0" * 64))
            scratch, digests = torch.empty(PIECE, dtype=torch.uint8), []
            for name in layout.names:
                digest = hashlib.sha256()
                tensor = late[name]() if name in late else tensors[name]
                for piece in _pieces(tensor.detach(), scratch):
                    digest.update(piece)
                    file.write(piece)
                digests.append(digest.hexdigest())
            file.seek(0)
            file.write(layout.preamble(layout.checksum(digests)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise _not_saved(path, target.parent, error, layout.size) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()  # gone already if the renaming succeeded
    _sync_folder(target.parent)


def check_replaceable(path: str | os.PathLike[str]) -> int | None:
    """RequestError unless `write` may put a session at `path`: nothing is there, an empty file or another session.

    Returns the permissions of the file that is there, None if there is none.
    """
    path, target = Path(path), Path(os.path.realpath(path))
    try:
        about = target.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _not_saved(path, target.parent, error, size=0) from error
    mode = about.st_mode
    if stat.S_ISDIR(mode):
        raise RequestError(f"cannot save {path}: it is a folder; give a file name, for example {path / 'session.ws'}")
    if not stat.S_ISREG(mode):
        raise RequestError(f"cannot save {path}: it is a device or a pipe, not a file; give another file name")
    if not os.access(target, os.W_OK):
        raise RequestError(
            f"cannot save {path}: the file there is write-protected; give another name, "
            f"or type chmod u+w {shlex.quote(str(target))}"
        )
    if about.st_size and not _is_session(target):
        raise RequestError(f"cannot save {path}: it holds another file that is no session; give another name")
    return stat.S_IMODE(mode)


def read(path: str | os.PathLike[str]) -> SavedFile:
    """Map a file that `write` made and check all of it: layout, format, version, header, checksum.

    The tensors read from the map and may be written; see the module's text for what that means for the file.
    Hashing touches every byte once and copies none. Raises RequestError if the file is missing, of another kind,
    newer or damaged in any way, and WorkError if there is no memory to map it or the disk fails.
    """
    path = Path(path)
    view = memoryview(_map(path))
    length = int.from_bytes(view[:8], "little")
    listing = json.loads(bytes(view[8 : 8 + length]))
    metadata = listing.pop("__metadata__", None) or {}
    header = _header(path, metadata)

    start = 8 + length
    parts = {name: view[start + a : start + b] for name, (a, b) in _offsets(listing)}
    rows = [
        (name, listing[name]["dtype"], listing[name]["shape"], digest)
        for name, digest in zip(parts, _digests([*parts.values()]), strict=True)
    ]
    if _checksum(metadata["header"], rows) != metadata["checksum"]:
        raise RequestError(f"{path} is damaged: its content does not match its checksum; {AGAIN}")
    return SavedFile(path, header, {name: _tensor(path, name, listing[name], parts[name]) for name in parts})


class _Layout:
    """Where everything goes in a file that is about to be written."""

    def __init__(self, path: Path, text: str, tensors: Mapping[str, Tensor], version: int) -> None:
        self.text = text
        self.version = version
        self.names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        self.listing: dict[str, Any] = {}
        end = 0
        for name in self.names:
            tensor = tensors[name]
            if name == "__metadata__":
                raise ValueError("a tensor cannot be called __metadata__: the format needs that name")
            if tensor.dtype not in NAMES:
                raise RequestError(
                    f"cannot save {path}: the tensor {name!r} is {_plain(tensor.dtype)}, which a session file cannot "
                    "hold; load the model with dtype='bfloat16' or 'float32'"
                )
            start, end = end, end + tensor.nbytes
            self.listing[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        preamble = len(self.preamble("0" * 64))
        if preamble - 8 > MAX_HEADER:
            raise RequestError(
                f"cannot save {path}: its header would take {preamble - 8:,} bytes and the format allows "
                f"{MAX_HEADER:,}; save a shorter context"
            )
        self.size = preamble + end

    def preamble(self, checksum: str) -> bytes:
        """Everything before the data; its length does not depend on the checksum."""
        metadata = {"format": FORMAT, "version": str(self.version), "header": self.text, "checksum": checksum}
        text = json.dumps({"__metadata__": metadata, **self.listing}, ensure_ascii=False, separators=(",", ":"))
        encoded = text.encode()
        encoded += b" " * (-(8 + len(encoded)) % ALIGN)
        return len(encoded).to_bytes(8, "little") + encoded

    def checksum(self, digests: Sequence[str]) -> str:
        rows = [
            (name, self.listing[name]["dtype"], self.listing[name]["shape"], digest)
            for name, digest in zip(self.names, digests, strict=True)
        ]
        return _checksum(self.text, rows)


def _checksum(text: str, rows: Iterable[tuple[str, str, list[int], str]]) -> str:
    """One digest over the header's text and every tensor's (name, dtype, shape, digest of the bytes)."""
    return hashlib.sha256(json.dumps([text, sorted(rows)], separators=(",", ":")).encode()).hexdigest()


def _digests(parts: Sequence[memoryview]) -> list[str]:
    """sha256 of every part, in order, on as many threads as torch may use."""

    def digest(part: memoryview) -> str:
        return hashlib.sha256(part).hexdigest()

    threads = min(torch.get_num_threads(), len(parts))
    if threads < 2 or sum(part.nbytes for part in parts) < THREADED:
        return [digest(part) for part in parts]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(digest, parts))


def _pieces(tensor: Tensor, scratch: Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in row-major order: one view if they lie so in CPU memory, else copies that fit in `scratch`.

    scratch: bytes, every piece overwrites it, so use one before asking for the next.
    """
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        flat = tensor.as_strided((tensor.numel(),), (1,))  # a view() may keep an odd stride of a single element
        yield flat.view(torch.uint8).numpy().data
    elif tensor.nbytes <= len(scratch):
        piece = scratch[: tensor.nbytes]
        piece.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        yield piece.numpy().data
    elif len(tensor) == 1:
        yield from _pieces(tensor[0], scratch)
    else:
        half = len(tensor) // 2
        yield from _pieces(tensor[:half], scratch)
        yield from _pieces(tensor[half:], scratch)


def _is_session(file: Path) -> bool:
    """Whether the file's header can be read and names our format; the data may be damaged."""
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            text = opened.read(length) if length <= MAX_HEADER else b""
        return bool(json.loads(text)["__metadata__"]["format"] == FORMAT)
    except OSError as error:
        raise _not_read(file, error) from error
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def _not_saved(path: Path, folder: Path, error: OSError, size: int) -> WakesightError:
    what = f"cannot save {path}"
    match error.errno:
        case errno.ENOENT if folder.is_dir():  # /proc and its like
            return RequestError(f"{what}: no file can be made in {folder}; save elsewhere")
        case errno.ENOENT | errno.ENOTDIR:
            quoted = shlex.quote(str(folder))
            return RequestError(f"{what}: there is no folder {folder}; type mkdir -p {quoted}, or save elsewhere")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return RequestError(f"{what}: writing in {folder} is not allowed ({error.strerror}); save elsewhere")
        case errno.ENAMETOOLONG | errno.EINVAL | errno.ELOOP:
            return RequestError(f"{what}: the name is not usable ({error.strerror}); give another file name")
        case errno.ENOSPC | errno.EDQUOT:
            return WorkError(
                f"{what}: the disk is full and the file needs {size:,} bytes; free some space, or save elsewhere"
            )
        case errno.EFBIG:
            return WorkError(
                f"{what}: files of {size:,} bytes are not allowed there; save elsewhere, or raise ulimit -f"
            )
    return WorkError(f"{what}: the disk reports {error.strerror or error}; try again, or save elsewhere")


def _sync_folder(folder: Path) -> None:
    """Make the renaming itself survive a power cut, on systems where folders can be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _map(path: Path) -> mmap.mmap:
    """A private, writable map of a file whose layout the library has accepted."""
    for _ in range(TRIES):
        if (mapped := _map_unless_replaced(path)) is not None:
            return mapped
    raise RequestError(f"{path} changed while it was being read; load it again when nobody writes it")


def _map_unless_replaced(path: Path) -> mmap.mmap | None:
    """None if the file changed meanwhile: the library may then have seen another one than we did."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise RequestError(f"{path} is a folder, not a session file; {OTHER}")
        if not stat.S_ISREG(mode):  # and opening a pipe would wait for its other end
            raise RequestError(f"{path} is a device or a pipe, not a session file; {OTHER}")
        with open(path, "rb") as file:
            opened = os.fstat(file.fileno())
            try:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except ValueError:
                raise RequestError(f"{path} is empty (0 bytes); {AGAIN}") from None
        refused = None
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            refused = error
        now = path.stat()
    except OSError as error:
        raise _not_read(path, error) from error
    unchanged = os.path.samestat(opened, now) and opened.st_mtime_ns == now.st_mtime_ns
    if not unchanged or len(mapped) != now.st_size:
        return None
    if isinstance(refused, OSError):
        raise _not_read(path, refused) from refused
    if refused is not None:
        raise RequestError(_what_is_wrong(path, memoryview(mapped), refused)) from refused
    return mapped


def _not_read(path: Path, error: OSError) -> WakesightError:
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return RequestError(f"there is no file {path}; check the name, or save a session there first")
        case errno.EACCES | errno.EPERM:
            return RequestError(f"reading {path} is not allowed; type chmod u+r {shlex.quote(str(path))}")
        case errno.ENAMETOOLONG | errno.EINVAL | errno.ELOOP:
            return RequestError(f"{path} is not a usable name ({error.strerror}); check the name")
        case errno.ENOMEM:
            return WorkError(f"out of memory: {path} cannot be mapped; close sessions you no longer need")
    return WorkError(f"cannot read {path}: the disk reports {error.strerror or error}; try again, or copy it elsewhere")


def _what_is_wrong(path: Path, view: memoryview, refused: SafetensorError) -> str:
    """The sentence for a file whose layout the library refused; assumes nothing about its bytes."""
    size = len(view)
    length = int.from_bytes(view[:8], "little")
    if size < 9 or view[8] != ord("{"):
        start = bytes(view[:64])
        kind = next((kind for beginning, kind in BEGINNINGS.items() if start.startswith(beginning)), None)
        return f"{path} is not a session file: it {f'looks like {kind}' if kind else 'has another format'}; {OTHER}"
    if length > MAX_HEADER:
        return f"{path} is damaged: its header claims {length:,} bytes, more than the format allows; {AGAIN}"
    if 8 + length > size:
        return f"{path} is cut off in its header: it has {size:,} of at least {8 + length:,} bytes; {AGAIN}"
    with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
        listing = json.loads(bytes(view[8 : 8 + length]))
        ends = [end for _, (_, end) in _offsets({name: listing[name] for name in listing if name != "__metadata__"})]
        whole = 8 + length + max(ends, default=0)
        if size < whole:
            return f"{path} is cut off: it has {size:,} of {whole:,} bytes; {AGAIN}"
        if size > whole:
            return f"{path} is damaged: it goes on for {size - whole:,} bytes after its end; {AGAIN}"
    return f"{path} is damaged: its header makes no sense ({refused}); {AGAIN}"


def _offsets(listing: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Where each tensor begins and ends, in bytes after the header."""
    for name, entry in listing.items():
        start, end = entry["data_offsets"]
        yield name, (start, end)


def _header(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The caller's header, once format and version are known to be ours and nothing is missing."""
    if metadata.get("format") != FORMAT:
        named = f"of format {_short(metadata['format'])}" if "format" in metadata else "that names no format"
        raise RequestError(f"{path} is not a session file but a safetensors file {named}; {OTHER}")
    version = metadata.get("version", "")
    if not re.fullmatch("[1-9][0-9]{0,8}", version):
        raise RequestError(f"{path} is damaged: its version {_short(version)} is not a number; {AGAIN}")
    if int(version) > VERSION:
        raise RequestError(
            f"{path} has format version {version} and this wakesight reads up to version {VERSION}; "
            "update it: pip install -U wakesight"
        )
    if "checksum" not in metadata:
        raise RequestError(f"{path} is damaged: its checksum is missing; {AGAIN}")
    try:
        header = json.loads(metadata.get("header", ""))
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise RequestError(f"{path} is damaged: the session's header in it is not a JSON object; {AGAIN}")
    return header


def _tensor(path: Path, name: str, entry: Mapping[str, Any], part: memoryview) -> Tensor:
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise RequestError(
            f"{path} holds the tensor {name!r} as {entry['dtype']}, which this wakesight does not know; "
            "update it: pip install -U wakesight"
        )
    if math.prod(entry["shape"]) == 0:
        return torch.empty(entry["shape"], dtype=dtype)  # frombuffer takes no empty buffer
    return torch.frombuffer(part, dtype=dtype).view(entry["shape"])


def _plain(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."
