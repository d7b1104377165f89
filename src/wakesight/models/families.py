"""One row per architecture family: where its attention and its recurrence live.

A family is named by transformers' `model_type`. Everything with a size (heads, dims, layers) is read
from the config and from cache shapes; a row only holds what neither of them says. To add a family,
add a row here and a tiny random config in `wakesight.testing.tiny`; the laws then run on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wakesight.errors import RequestError
from wakesight.registry import did_you_mean


@dataclass(frozen=True)
class Family:
    """recurrence: the module of a recurrent layer, or None for a plain attention model."""

    name: str
    model_types: tuple[str, ...]
    recurrence: str | None
    about: str


FAMILIES = (
    Family("llama", ("llama",), None, "plain attention in every layer (Llama, SmolLM2 and their kin)"),
    Family(
        "qwen3_5", ("qwen3_5_text", "qwen3_5"), "linear_attn",
        "hybrid: gated-delta-net layers, a gated full-attention layer every fourth",
    ),
)  # fmt: skip


def family_of(config: Any) -> Family:
    """The row for a transformers config. Raises RequestError that names an unknown model type."""
    model_type = getattr(config, "model_type", None) or type(config).__name__
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = [name for family in FAMILIES for name in family.model_types]
    raise RequestError(
        f"models of type {model_type!r} are not supported{did_you_mean(model_type, known)}: evicting entries from an "
        f"unknown architecture could be silently wrong; supported: {', '.join(known)}"
    )
