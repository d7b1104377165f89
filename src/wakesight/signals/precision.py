"""In which precision sums over stored numbers are taken."""

from __future__ import annotations

import torch


def working_dtype(stored: torch.dtype) -> torch.dtype:
    """float32 for float32, bfloat16 and float16 numbers; float64 for float64 ones, so that nothing is lost."""
    return torch.float64 if stored == torch.float64 else torch.float32
