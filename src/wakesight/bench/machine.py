"""What stands beside every timing: versions, and the bandwidth that bounds a decode step."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

import wakesight


def versions() -> dict[str, Any]:
    return {
        "wakesight": wakesight.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


def machine() -> dict[str, Any]:
    """What ran it: processor, cores, memory in bytes, accelerators."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "devices": devices,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def commit() -> str | None:
    """The commit this package is run from, with "-dirty" if files differ from it; None outside a git checkout.

    An installed copy that happens to lie inside somebody else's repository is no checkout: git must know the file.
    """
    folder = Path(wakesight.__file__).parent
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(folder, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


def _git(folder: Path, *words: str) -> str | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # it only reads
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, env=environment, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def copy_bandwidth(device: torch.device, megabytes: int = 256, repeats: int = 7) -> float:
    """Bytes moved per second by a large copy (bytes read plus bytes written), the best of `repeats`."""
    source = torch.ones(megabytes * 2**20 // 4, device=device)
    target = torch.ones_like(source)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.numel() * 4 / best


def weight_bytes(model: Any) -> int:
    """Bytes of parameters that one decode step reads; an untied input embedding is only looked up."""
    unread = set()
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    if head is not None and head.weight is not embedding:
        unread.add(embedding.data_ptr())
    unique = {p.data_ptr(): p.nbytes for p in model.parameters() if p.data_ptr() not in unread}
    return sum(unique.values())
