"""The closed vocabulary as a tokenizer: one word is one token, and a word outside the list is an error."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from wakesight.evaluation.suites.closed import vocabulary as v

# The user's text stands between <user> and <assistant> as it is; a system message goes before it.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ ' <assistant> ' + message['content'] + ' ' + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ ' <system> ' + message['content'] }}"
    "{% else %}{{ ' <user> ' + message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' <assistant>' }}{% endif %}"
)


def build(longest: int) -> PreTrainedTokenizerFast:
    """Lower case, split at white space and punctuation. There is no unknown token: such text raises an error.

    Splitting at punctuation also keeps control tokens out of a user's text: "<eos>" there is no word of the list.
    """
    inner = Tokenizer(models.WordLevel(dict(v.IDS)))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(behavior="isolated")]
    )
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in v.SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=v.BOS, eos_token=v.EOS, pad_token=v.PAD, model_max_length=longest,
        clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def save(folder: Path, longest: int) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template."""
    build(longest).save_pretrained(str(folder))
