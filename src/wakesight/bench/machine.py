"""What stands beside every timing: versions, and the bandwidth that bounds a decode step."""

from __future__ import annotations

import platform
import time
from typing import Any

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
