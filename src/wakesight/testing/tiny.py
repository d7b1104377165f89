"""Random tiny models of each supported family, and a tokenizer whose tokens are bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from wakesight.models.families import FAMILIES as ROWS
from wakesight.models.families import family_of, missing_model_types

if TYPE_CHECKING:
    from wakesight.engines.hf.engine import HFEngine

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|pad|>")
VOCABULARY = 256 + len(SPECIALS)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# What every tiny model has, where its config knows the name.
SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,  # heads are wider than hidden_size / heads, as in real hybrids
    "num_hidden_layers": 8,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 32,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
}  # fmt: skip
FLOOR = 1e-6  # of Mamba-2 time steps: transformers clamps them there in longer passes but not in one-token ones
# family -> config class, what differs from SHARED
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 3}),
    "qwen2": ("Qwen2Config", {"num_hidden_layers": 3}),
    "qwen3": ("Qwen3Config", {"num_hidden_layers": 3}),
    "mistral": ("MistralConfig", {"num_hidden_layers": 3, "sliding_window": None}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6, "layer_types": [SLIDING, SLIDING, FULL] * 2, "sliding_window": 32,
            "query_pre_attn_scalar": 16,
        },
    ),
    "phi3": ("Phi3Config", {"num_hidden_layers": 3}),
    "qwen3_next": ("Qwen3NextConfig", {**DELTA, **EXPERTS, "mlp_only_layers": [0, 1, 2, 4, 5, 6]}),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**DELTA, **EXPERTS}),
    "olmo_hybrid": ("OlmoHybridConfig", DELTA),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            "layer_types": [LINEAR, LINEAR, FULL] * 2, "num_hidden_layers": 6, "num_key_value_heads": 6,
            "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
            "linear_head_dim": 16, "linear_num_heads": 4, "moe_intermediate_size": 24,
            "num_experts": 4, "num_experts_per_token": 2, "mlp_layer_types": ["dense"] * 5 + ["sparse"],
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA2, "layer_types": [LINEAR, LINEAR, FULL] * 2, "num_hidden_layers": 6, "num_local_experts": 4,
            "num_experts_per_tok": 2, "shared_intermediate_size": 48, "attention_multiplier": 0.25,
        },
    ),
    "falcon_h1": ("FalconH1Config", {**MAMBA2, "num_hidden_layers": 3, "mamba_d_ssm": 96}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": [LINEAR, "mlp", FULL, LINEAR, "moe", FULL], "num_hidden_layers": 6,
            "mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 32,
            "time_step_min": FLOOR, "n_routed_experts": 4, "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2, "num_experts": 4,
            "expert_layer_period": 6, "expert_layer_offset": 3, "mamba_d_state": 8,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            "layers_block_type": [LINEAR, LINEAR, "hybrid", "hybrid", "hybrid", LINEAR], "num_hidden_layers": 6,
            "num_mem_blocks": 2, "n_mamba_heads": 6, "mamba_ngroups": 2, "mamba_d_state": 16, "chunk_size": 32,
            "time_step_min": FLOOR, "use_mem_rope": True,
            "tie_word_embeddings": True,  # without it nothing is tied, attention weights neither
        },
    ),
    "bamba": ("BambaConfig", {**MAMBA2, "num_hidden_layers": 6, "attn_layer_indices": [2, 5]}),
    "lfm2": (
        "Lfm2Config",
        {"num_hidden_layers": 6, "layer_types": ["conv", "conv", FULL] * 2, "block_auto_adjust_ff_dim": False},
    ),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        {
            **DELTA, **EXPERTS, "hc_count": 2, "hc_lowrank": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1,
            "indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 8,
        },
    ),
}  # fmt: skip


def _installed(family: str) -> bool:
    return not missing_model_types() & set(next(row for row in ROWS if row.name == family).model_types)


FAMILIES = tuple(family for family in CONFIGS if _installed(family))


def config(family: str, **changes: Any) -> Any:
    """A transformers config of `family` (a key of CONFIGS) small enough for a test."""
    if family not in CONFIGS:
        raise ValueError(f"no tiny config for family {family!r}")
    name, own = CONFIGS[family]
    return getattr(transformers, name)(**{**SHARED, **own, **changes})


def model(family: str, *, seed: int = 0, peaky: float = 4.0, **changes: Any) -> Any:
    """A random model in eval mode.

    peaky: factor on the attention queries, so that attention is far from uniform and dropping an entry
    shows in the logits. Where queries are normed its root goes into the norm's weight instead, which some
    families store as its distance from one.
    """
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(config(family, **changes)).eval()
    settings = made.config.get_text_config(decoder=True)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "A_log" in name or "conv" in name:  # larger ones make a delta rule's keys alike, which costs digits
                continue
            if "embed" in name:
                weight.normal_(0, 1.0)
            elif weight.ndim > 1:
                weight.normal_(0, 0.7 / weight[0].shape[-1] ** 0.5)
            if "q_proj" in name:
                weight.mul_(peaky)
            elif "qkv_proj" in name:
                weight[: settings.num_attention_heads * settings.head_dim].mul_(peaky)
            elif name.endswith(("self_attn.q_norm.weight", "self_attn.q_layernorm.weight")):
                weight.add_(peaky**0.5 - 1)
    return made


def tokenizer() -> Any:
    """Byte-level: every byte is one token, plus three control tokens and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>", clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def engine(family: str, *, attention: str = "sdpa", growth: int = 64, poison: bool = True, **changes: Any) -> HFEngine:
    """An engine on a random tiny model; freed and unwritten cache memory is NaN unless poison=False."""
    from wakesight.cache.pool import Pool
    from wakesight.engines.hf.engine import HFEngine
    from wakesight.models.load import LoadedModel

    made = model(family, **changes)
    loaded = LoadedModel(f"tiny-{family}", made, tokenizer(), family_of(made.config))
    return HFEngine(loaded, attention=attention, growth=growth, pool=Pool(poison=poison))


def save(family: str, folder: Path, **changes: Any) -> Path:
    """Write a tiny model and its tokenizer as a model folder."""
    model(family, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokens(count: int, seed: int = 1) -> list[int]:
    """Random byte tokens."""
    noise = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randint(0, 256, (count,), generator=noise)]
