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

INDEXER = (
    "its sparse indexer keeps keys of its own for every token and picks entries by slot number, "
    "so an evicted entry would shift every later one"
)
MAMBA1 = (
    "transformers starts its Mamba-1 scan from an empty state, so a pass of several tokens forgets everything before it"
)


@dataclass(frozen=True)
class Family:
    """What is known of one architecture.

    recurrence: the attribute of a decoder layer that holds its recurrent module, None for plain attention.
    only_whole: why keep < 1 is refused, None where entries can be evicted.
    one_at_a_time: why tokens behind a state must be fed one by one, None where a pass may continue with many.
    native_signals: the kind of recurrence whose gates and states a scorer can read ("gated_delta", "kda",
    "mamba2"), else None, and no_signals says why.
    output_gate: its query projection gives a gate on the attention output too.
    """

    name: str
    model_types: tuple[str, ...]
    recurrence: str | None
    about: str
    only_whole: str | None = None
    one_at_a_time: str | None = None
    native_signals: str | None = None
    no_signals: str = "it has no recurrent layers"
    output_gate: bool = False


FAMILIES = (
    Family("llama", ("llama",), None, "plain attention in every layer (Llama, SmolLM2 and their kin)"),
    Family("qwen2", ("qwen2",), None, "plain attention, biased query and key projections (Qwen2, Qwen2.5)"),
    Family("qwen3", ("qwen3",), None, "plain attention, normed queries and keys"),
    Family("mistral", ("mistral",), None, "plain attention (Mistral without a sliding window)"),
    Family("gemma3", ("gemma3_text", "gemma3"), None, "mostly sliding-window layers, which keep their own window"),
    Family("phi3", ("phi3",), None, "plain attention, one fused projection (Phi-3, Phi-4)"),
    Family("qwen3_next", ("qwen3_next",), "linear_attn", "hybrid: 3 gated-delta-net layers to 1 gated attention layer, "
           "experts", native_signals="gated_delta", output_gate=True),
    Family("qwen3_5", ("qwen3_5_text", "qwen3_5"), "linear_attn", "hybrid: gated-delta-net layers, "
           "a gated full-attention layer every fourth", native_signals="gated_delta", output_gate=True),
    Family("qwen3_5_moe", ("qwen3_5_moe_text", "qwen3_5_moe"), "linear_attn", "qwen3_5 with experts",
           native_signals="gated_delta", output_gate=True),
    Family("olmo_hybrid", ("olmo_hybrid",), "linear_attn", "hybrid: 3 gated-delta-net layers to 1 attention layer",
           native_signals="gated_delta"),
    Family("kimi_linear", ("kimi_linear",), "self_attn", "hybrid: Kimi delta attention, and latent attention that "
           "caches one latent head", native_signals="kda"),
    Family("granitemoehybrid", ("granitemoehybrid",), "mamba", "hybrid: Mamba-2 and attention layers, experts "
           "(Granite 4)", native_signals="mamba2"),
    Family("falcon_h1", ("falcon_h1",), "mamba", "hybrid: attention and Mamba-2 side by side in every layer",
           native_signals="mamba2"),
    Family("nemotron_h", ("nemotron_h",), "mixer", "hybrid: Mamba-2, attention, MLP and expert layers",
           native_signals="mamba2"),
    Family("jamba", ("jamba",), "mamba", "hybrid: Mamba-1 and attention layers, experts",
           one_at_a_time=MAMBA1, no_signals="it is Mamba-1, whose state no scorer of ours reads"),
    Family("zamba2", ("zamba2",), "mamba", "hybrid: Mamba-2, and attention modules shared between layers",
           native_signals="mamba2"),
    Family("bamba", ("bamba",), "mamba", "hybrid: Mamba-2 and attention layers", native_signals="mamba2"),
    Family("lfm2", ("lfm2",), "conv", "hybrid: short convolutions and attention layers",
           no_signals="its convolutions see three tokens, it has no recurrent memory"),
    Family("qwen4_exp", ("qwen4_exp_text", "qwen4_exp"), "linear_attn", "hybrid: gated-delta-net layers, attention "
           "behind a sparse indexer", only_whole=INDEXER, native_signals="gated_delta", output_gate=True),
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


def missing_model_types() -> frozenset[str]:
    """The model types above that the installed transformers does not know (kimi_linear came after 5.16)."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    types = [name for family in FAMILIES for name in family.model_types]
    return frozenset(name for name in types if name not in CONFIG_MAPPING_NAMES)
