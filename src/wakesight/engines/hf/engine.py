"""The engine on transformers: chunked prefill with taps, greedy answers, caches for one's own loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wakesight.cache.pool import Pool
from wakesight.cache.slots import Slots
from wakesight.cache.state import SessionState
from wakesight.core import LayerIndex, ModelGeometry, Signals
from wakesight.engines.base import Generation
from wakesight.engines.hf import compat
from wakesight.engines.hf.attach import attach, forward_keywords
from wakesight.engines.hf.cache import SessionCache
from wakesight.engines.session import Session
from wakesight.errors import RequestError, WorkError
from wakesight.models.chat import Frame, chat_frame, encode_plain, plain_frame
from wakesight.models.load import LoadedModel, load_model
from wakesight.signals.queries import QueryWindow


def load(
    name_or_path_or_model: Any, *, tokenizer: Any = None, device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None, attention: str = "sdpa", growth: int = 256,
) -> HFEngine:  # fmt: skip
    """Load a model for long documents.

    name_or_path_or_model: bundled name ("smollm2"), local folder, GGUF file, hub id, or a transformers
    model object (which from then on uses our attention function; `engine.close()` restores it).
    device: "cpu" or "cuda". dtype: float32 (the CPU default), bfloat16, float16. attention: "sdpa" (fused
    kernel) or "eager" (plain products, the reference). growth: slack slots in new storage, tokens.

    Raises RequestError for anything that cannot be loaded, and names an unsupported family.
    """
    compat.check_version()
    loaded = load_model(name_or_path_or_model, tokenizer=tokenizer, device=device, dtype=dtype)
    return HFEngine(loaded, attention=attention, growth=growth)


class HFEngine:
    """One model, ready to prefill. Use `load()` to make one."""

    def __init__(
        self, loaded: LoadedModel, *, attention: str = "sdpa", growth: int = 256, pool: Pool | None = None
    ) -> None:
        self.name = loaded.name
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.growth = growth
        self.pool = pool or Pool()
        self.geometry = _measure(loaded)
        self._decoder = self.model.get_decoder()
        self._ends = compat.end_tokens(self.model, self.tokenizer)
        self._detach: Callable[[], None] | None = attach(self.model, attention)

    @property
    def device(self) -> torch.device:
        found: torch.device = self.model.device
        return found

    def close(self) -> None:
        """Give the model back as it was before `load`; sessions of this engine cannot be asked any more."""
        if self._detach is not None:
            self._detach()
            self._detach = None

    def prefill(
        self, text: str | Sequence[int], *, instruction: str | None = None, chat: bool = True, chunk: int = 512,
        query_window: int = 64, on_chunk: Callable[[int, int], None] | None = None,
    ) -> Session:  # fmt: skip
        """Read a context once, in chunks; no question is needed and none is seen.

        text: a document, or token ids that are used as they are (chat and instruction then do not apply).
        instruction: text placed before the document, protected from eviction with the template.
        chunk: tokens per forward pass, a multiple of 64; memory beyond the cache is linear in chunk * n.
        query_window: how many last queries to record per layer, for snapkv. on_chunk(done, total) reports progress.

        Raises RequestError for an empty or one-token context, one over the model's limit, or a bad chunk;
        WorkError when memory runs out (nothing stays allocated).
        """
        if chunk < 64 or chunk % 64:
            raise RequestError(f"chunk={chunk} must be a multiple of 64, at least 64; 512 is the default")
        if query_window < 1:
            raise RequestError(f"query_window={query_window} must be at least 1; 64 is the default")
        frame, context = self._tokens(text, instruction, chat)
        if len(context) < 2:
            found = "is empty" if not context else "has one token"
            raise RequestError(f"the context {found}; give a document of at least two tokens")
        tokens = (*frame.head, *context)
        limit = self.geometry.max_positions
        if len(tokens) >= limit:
            raise RequestError(
                f"the context has {len(tokens)} tokens with its template, but {self.name} reads at most {limit} "
                "and the question needs room too; shorten the document or use a model with a longer limit"
            )
        start = time.perf_counter()
        state = SessionState(self.pool, self._empty_slots(len(tokens)), {}, tokens, frame.prefix)
        try:
            signals = self._read(state, chunk, query_window, on_chunk)
        except BaseException as error:
            state.release()
            raise _explained(error, "prefill") from error
        return Session(self, state, frame, signals, prefill_s=time.perf_counter() - start)

    def _empty_slots(self, length: int) -> tuple[Slots, ...]:
        return tuple(Slots(self.pool, capacity=length + self.growth) for _ in self.geometry.attention_layers)

    def _read(
        self, state: SessionState, chunk: int, query_window: int, on_chunk: Callable[[int, int], None] | None
    ) -> Callable[[], Signals]:
        cache = SessionCache(self.model.config, state)
        taps = [QueryWindow(query_window) for _ in cache.attention]
        total = len(state.tokens)
        ids = torch.tensor([state.tokens], device=self.device)
        for start in range(0, total, chunk):
            stop = min(start + chunk, total)
            if stop > total - query_window:  # the last queries come from the last chunks only
                for layer, tap in zip(cache.attention, taps, strict=True):
                    layer.tap = tap
            self.forward(self._decoder, ids[:, start:stop], cache, start)
            if on_chunk is not None:
                on_chunk(stop, total)
        state.recurrent = {key: self.pool.adopt(tensor) for key, tensor in cache.recurrent_snapshot().items()}
        scaling = tuple(float(layer.scaling or 1.0) for layer in cache.attention)

        def signals() -> Signals:
            return Signals(
                tokens=total,
                prefix=state.prefix,
                scaling=scaling,
                streams={
                    "keys": tuple(slots.read("key")[0, :, :total] for slots in state.slots),
                    "values": tuple(slots.read("value")[0, :, :total] for slots in state.slots),
                    "queries": tuple(tap.rows for tap in taps if tap.rows is not None),
                },
            )

        return signals

    def forward(self, module: Any, ids: Tensor, cache: SessionCache, position: int, **keywords: Any) -> Any:
        """One forward pass over `ids` [1, q] at logical positions position, position + 1, ..."""
        if self._detach is None:
            raise RequestError("this engine is closed; load the model again")
        positions = torch.arange(position, position + ids.shape[1], device=ids.device)[None]
        with compat.no_grad():
            output = module(input_ids=ids, position_ids=positions, **forward_keywords(module, cache), **keywords)
        cache.check_attended()
        return output

    def generate(
        self, state: SessionState, tokens: Sequence[int], max_new_tokens: int, on_token: Callable[[int], None] | None
    ) -> Generation:
        """Greedy answer to `tokens` after `state`, which is left bit for bit as it was.

        Raises RequestError when the question does not fit the model's limit; WorkError on lack of memory.
        """
        limit = self.geometry.max_positions
        first = state.logical_length + len(tokens)
        if not tokens:
            raise RequestError("the question is empty; give at least one token")
        if first > limit:
            raise RequestError(
                f"context and question have {first} tokens, but {self.name} reads at most {limit}; shorten the question"
            )
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens={max_new_tokens} must be at least 1")
        held = state.physical_lengths
        try:
            return self._generate(state, tokens, min(max_new_tokens, limit - first + 1), max_new_tokens, on_token)
        except BaseException as error:
            raise _explained(error, "answering") from error
        finally:
            for slots, length in zip(state.slots, held, strict=True):
                slots.truncate(length)

    def _generate(
        self, state: SessionState, tokens: Sequence[int], room: int, wanted: int, on_token: Callable[[int], None] | None
    ) -> Generation:
        start = time.perf_counter()
        cache = SessionCache(self.model.config, state)
        position = state.logical_length
        ids = torch.tensor([list(tokens)], device=self.device)
        made: list[int] = []
        logits = self.forward(self.model, ids, cache, position, logits_to_keep=1).logits
        asked = time.perf_counter()
        position += len(tokens)
        while (token := int(logits[0, -1].argmax())) not in self._ends:
            made.append(token)
            if on_token is not None:
                on_token(token)
            if len(made) == room:
                break
            ids = torch.tensor([[token]], device=self.device)
            logits = self.forward(self.model, ids, cache, position, logits_to_keep=1).logits
            position += 1
        finish = "eos" if token in self._ends else "length" if room == wanted else "limit"
        steps = position - state.logical_length - len(tokens)
        return Generation(tuple(made), finish, asked - start, time.perf_counter() - asked, steps)

    def logits(self, state: SessionState, tokens: Sequence[int]) -> Tensor:
        """Logits [token, vocabulary] of `tokens` fed after `state`; the state is left as it was."""
        held = state.physical_lengths
        try:
            cache = SessionCache(self.model.config, state)
            ids = torch.tensor([list(tokens)], device=self.device)
            found: Tensor = self.forward(self.model, ids, cache, state.logical_length).logits[0]
            return found
        finally:
            for slots, length in zip(state.slots, held, strict=True):
                slots.truncate(length)

    def cache(self, state: SessionState) -> SessionCache:
        """A copy of `state` as a transformers Cache; its memory returns to the pool with the object."""
        return SessionCache(self.model.config, state.copy(self.growth))

    def encode(self, text: str) -> list[int]:
        return encode_plain(self._need_tokenizer(), text)

    def decode(self, tokens: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _tokens(self, text: str | Sequence[int], instruction: str | None, chat: bool) -> tuple[Frame, list[int]]:
        if not isinstance(text, str):
            return Frame(), self._checked_ids(text)
        tokenizer = self._need_tokenizer()
        frame = (chat_frame if chat else plain_frame)(tokenizer, instruction)
        return frame, encode_plain(tokenizer, text)

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        plain = [int(i) for i in ids]
        if bad := [i for i in plain if not 0 <= i < vocabulary]:
            raise RequestError(f"token id {bad[0]} is outside the model's vocabulary of {vocabulary}")
        return plain

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer; give token ids, or load(model, tokenizer=...)")
        return self.tokenizer


def _measure(loaded: LoadedModel) -> ModelGeometry:
    """Read the shapes a real cache takes from a one-token forward pass."""
    config = loaded.model.config
    layers = compat.empty_layers(config)
    from transformers.cache_utils import Cache

    cache = Cache(layers=layers)
    decoder = loaded.model.get_decoder()
    with compat.no_grad():
        decoder(
            input_ids=torch.zeros(1, 1, dtype=torch.long, device=loaded.model.device),
            **{compat.cache_keyword(decoder): cache, "use_cache": True},
        )
    attention = [i for i, layer in enumerate(layers) if compat.is_full_attention(layer)]
    if not attention:
        raise RequestError(f"{loaded.name} has no full-attention layers, so there is no KV cache to compact")
    keys, values = [layers[i].keys for i in attention], [layers[i].values for i in attention]
    return ModelGeometry(
        family=loaded.family.name,
        n_layers=len(layers),
        attention_layers=tuple(LayerIndex(i) for i in attention),
        recurrent_layers=tuple(LayerIndex(i) for i in range(len(layers)) if i not in attention),
        query_heads=config.get_text_config(decoder=True).num_attention_heads,
        kv_heads=tuple(k.shape[1] for k in keys),
        key_dims=tuple(k.shape[3] for k in keys),
        value_dims=tuple(v.shape[3] for v in values),
        itemsize=keys[0].element_size(),
        max_positions=compat.position_limit(config),
    )


def _explained(error: BaseException, work: str) -> BaseException:
    """Out-of-memory errors of torch as one sentence; everything else unchanged."""
    text = str(error).lower()
    memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    )
    if not memory or isinstance(error, WorkError):
        return error
    return WorkError(f"out of memory in {work}; use a shorter context, a smaller --chunk, or close other sessions")
