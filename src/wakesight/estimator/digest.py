"""Which artifact is this? A digest of its JSON, which holds the digest of the tensors beside it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from wakesight.errors import RequestError
from wakesight.estimator.artifact import JSON


def digest(folder: str | os.PathLike[str]) -> str:
    """The same for the same readers and tables, wherever they lie. RequestError for a folder that cannot be read."""
    try:
        return hashlib.sha256((Path(folder) / JSON).read_bytes()).hexdigest()
    except OSError as error:
        raise RequestError(f"{folder} cannot be read ({error.strerror}); check --artifact") from None
