"""A bundled GGUF file, unpacked once into the user's cache folder as safetensors.

transformers reads a GGUF file four times over (config, tokenizer, weights), half a minute for a model of
135M parameters; the unpacked copy holds the same float32 numbers and opens in two seconds. Delete the
folder at any time: it is made again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

_COMPLETE = "complete"


def cache_folder() -> Path:
    """$WAKESIGHT_CACHE, else wakesight/ in the platform's user cache folder."""
    if own := os.environ.get("WAKESIGHT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wakesight"


def converted(name: str, gguf: Path, convert: Callable[[], tuple[Any, Any]]) -> Path | None:
    """Folder of the unpacked model, made by `convert` -> (model, tokenizer) if it is not there yet.

    A changed file or another transformers version gets a folder of its own. Written under a temporary
    name and renamed, so a half-written one is never read; None where the folder cannot be written.
    """
    about = gguf.stat()
    mark = f"{gguf.name} {about.st_size} {about.st_mtime_ns} {transformers.__version__}"
    folder = cache_folder() / f"{name}-{hashlib.sha256(mark.encode()).hexdigest()[:12]}"
    if (folder / _COMPLETE).is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    except OSError:
        return None
    try:
        model, tokenizer = convert()
        _plain(model).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        (scratch / _COMPLETE).touch()
        scratch.rename(folder)
    except OSError:  # no room, or another process was first
        return folder if (folder / _COMPLETE).is_file() else None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _plain(model: Any) -> Any:
    """The same numbers in a model that does not call itself quantised, which transformers refuses to save."""
    config = type(model.config).from_dict(
        {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    )
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.generation_config = model.generation_config
    return plain
