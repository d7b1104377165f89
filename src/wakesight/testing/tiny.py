"""Random tiny models of each supported family, and a tokenizer whose tokens are bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from wakesight.cache.pool import Pool
from wakesight.engines.hf.engine import HFEngine
from wakesight.models.families import family_of
from wakesight.models.load import LoadedModel

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|pad|>")
VOCABULARY = 256 + len(SPECIALS)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config(family: str, **changes: Any) -> Any:
    """A transformers config of `family` ("llama", "qwen3_5") small enough for a test."""
    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,  # heads are wider than hidden_size / heads, as in real hybrids
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    if family == "llama":
        return transformers.LlamaConfig(**{**shared, "num_hidden_layers": 3, **changes})
    if family == "qwen3_5":
        hybrid = {
            "num_hidden_layers": 8,  # 3 gated-delta-net layers to 1 attention layer, twice
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
        return transformers.Qwen3_5TextConfig(**{**shared, **hybrid, **changes})
    raise ValueError(f"no tiny config for family {family!r}")


FAMILIES = ("llama", "qwen3_5")


def model(family: str, *, seed: int = 0, peaky: float = 4.0, **changes: Any) -> Any:
    """A random model in eval mode.

    peaky: factor on the query projections, so that attention is far from uniform and dropping an entry
    shows in the logits.
    """
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(config(family, **changes)).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.normal_(0, 0.7 / weight.shape[1] ** 0.5)
            if "embed" in name:
                weight.normal_(0, 1.0)
            if "q_proj" in name:
                weight.mul_(peaky)
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
