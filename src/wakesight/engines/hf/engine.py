"""The engine on transformers: chunked prefill with taps, greedy answers, caches for one's own loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wakesight.arguments import (
    check_text,
    chunk_size,
    mask_of,
    several_contexts,
    shown,
    text_or_ids,
    token_ids,
    whole_number,
)
from wakesight.cache.pool import Pool
from wakesight.cache.slots import Slots
from wakesight.cache.state import SessionState
from wakesight.core import LayerIndex, ModelGeometry
from wakesight.engines.base import Asked, Followed, Generation, StateShape, Thinking
from wakesight.engines.batch import SessionBatch
from wakesight.engines.hf import branching, compat
from wakesight.engines.hf.attach import attach, check_finite, forward_keywords, left_pads
from wakesight.engines.hf.cache import SessionCache
from wakesight.engines.hf.closing import NextTokens, closing, foretold
from wakesight.engines.hf.decay import DecayWeights, decay_weights
from wakesight.engines.hf.following import collected, following
from wakesight.engines.hf.latent import stored
from wakesight.engines.hf.listening import Ears
from wakesight.engines.hf.projection import output_projection
from wakesight.engines.hf.sampling import Sampling, draw
from wakesight.engines.probe import Instruction, Overhearing
from wakesight.engines.recording import OVERHEARD, WINDOW, Recording, wanted_signals
from wakesight.engines.session import Session
from wakesight.errors import RequestError, WakesightError, WorkError, is_out_of_memory
from wakesight.estimator.artifact import Artifact
from wakesight.models.chat import Frame, chat_frame, encode_plain, encode_template, plain_frame
from wakesight.models.fingerprint import fingerprint
from wakesight.models.load import LoadedModel, load_model
from wakesight.models.words import check_words
from wakesight.signals.chunk import Tap


def load(
    name_or_path_or_model: Any, *, tokenizer: Any = None, device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None, attention: str = "sdpa", growth: int = 256,
    artifact: str | os.PathLike[str] | None = None, memory: int | None = None,
) -> HFEngine:  # fmt: skip
    """Load a model for long documents.

    name_or_path_or_model: bundled name ("smollm2"), local folder, GGUF file, hub id, or a transformers
    model object (which from then on uses our attention function; `engine.close()` restores it).
    device: "cpu" or "cuda". dtype: float32 (the CPU default), bfloat16, float16. attention: "sdpa" (fused
    kernel) or "eager" (plain products, the reference). growth: slack slots in new storage, tokens.
    artifact: the folder of an estimator and tables made for this model (`wakesight fit`, `wakesight calibrate`);
    None takes the one that came with a bundled model, or the folder "wakesight" beside a model's weights.
    memory: bytes of fast memory that all sessions together may hold; a prefill or child that would pass them is a
    WorkError and leaves nothing behind. None: no limit. Reservoirs of demoted sessions do not count.

    Raises RequestError for anything that cannot be loaded, and names an unsupported family.
    """
    compat.check_version()
    growth = whole_number(growth, "growth", 0, usual=256)
    limit = None if memory is None else whole_number(memory, "memory", 1)
    loaded = load_model(name_or_path_or_model, tokenizer=tokenizer, device=device, dtype=dtype)
    if artifact is not None:
        loaded = dataclasses.replace(loaded, artifact=Path(artifact))
    engine = HFEngine(loaded, attention=attention, growth=growth, pool=Pool(limit_bytes=limit))
    if artifact is not None:
        _ = engine.artifact  # one for another model is refused now, not after a long prefill
    return engine


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
        self.only_whole = loaded.family.only_whole
        self.repeat_instruction: Instruction | None = None
        if loaded.repeat is not None:
            self.repeat_instruction = functools.partial(loaded.repeat.ids, self.encode)
        self._latent = compat.is_latent(self.model.config)
        self._stepwise = loaded.family.one_at_a_time is not None
        self._rope_switch = compat.rope_switch(self.model.config)
        self.geometry, self.layer_devices, self.state_shapes = _measure(loaded)
        self.dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        self._fingerprint: str | None = None
        self.artifact_folder = loaded.artifact
        self._decoder = self.model.get_decoder()
        self._family = loaded.family
        self._ears = Ears(self.model, loaded.family, self.geometry)
        self._ends = compat.end_tokens(self.model, self.tokenizer)
        self._detach: Callable[[], None] | None = attach(self.model, attention)

    @functools.cached_property
    def artifact(self) -> Artifact | None:
        """What was learned about this model offline, read when first asked for; None if there is nothing.

        Raises RequestError for a damaged folder, or one made for another model.
        """
        if self.artifact_folder is None:
            return None
        found = Artifact.load(self.artifact_folder)
        found.check(self.geometry, self.weights_fingerprint())
        return found

    @property
    def device(self) -> torch.device:
        found: torch.device = self.model.device
        return found

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end a reply."""
        return self._ends

    def check_open(self) -> None:
        """Raise RequestError after `close`."""
        if self._detach is None:
            raise RequestError("this engine is closed; load the model again")

    def close(self) -> None:
        """Give the model back as it was before `load`; sessions of this engine cannot be asked any more."""
        if self._detach is not None:
            self._detach()
            self._detach = None

    def prefill(
        self, text: str | Sequence[int], *, instruction: str | None = None, chat: bool = True, chunk: int = 512,
        query_window: int = WINDOW, record: Sequence[str] = (), on_chunk: Callable[[int, int], None] | None = None,
    ) -> Session:  # fmt: skip
        """Read a context once, in chunks; no question is needed and none is seen.

        text: a document, or token ids (a list, a 1-d tensor or array) that are used as they are; chat and
        instruction then do not apply.
        instruction: text placed before the document, protected from eviction with the template.
        chunk: tokens per forward pass, a multiple of 64; memory beyond the cache is linear in chunk * n.
        query_window: how many last queries to record per layer, for snapkv. record: further signals, or the
        scorers that will read them, for example "h2o" or ["h2o", "query_mean"]. on_chunk(done, total) reports progress.

        Raises RequestError for an empty context, one over the model's limit, or a bad chunk; WorkError when
        memory runs out (nothing stays allocated).
        """
        if isinstance(text, (list, tuple)) and any(isinstance(part, (str, list, tuple)) for part in text):
            raise RequestError("prefill reads one context; for several use prefill_batch")
        if getattr(text, "ndim", 1) == 2 and len(text) > 1:
            raise RequestError(f"prefill reads one context, not {shown(text)}; for several use prefill_batch")
        text, chunk = text_or_ids(text, "the context"), chunk_size(chunk)
        if not isinstance(instruction, (str, type(None))):
            raise RequestError(f"instruction must be a text, not {shown(instruction)}; leave it out for none")
        query_window = whole_number(query_window, "query_window", 1, usual=WINDOW)
        wanted = wanted_signals(record, self)
        self.check_record(wanted)
        frame, context = self._tokens(text, instruction, chat)
        if not context:
            raise RequestError("the context is empty; give a document of at least one token")
        tokens = (*frame.head, *context)
        self._check_room(len(tokens), self._limit(len(tokens)))
        whole = (len(tokens) + self.growth) * self.geometry.token_bytes
        self.pool.check_room(whole, f"a prefill of {len(tokens):,} tokens")
        start = time.perf_counter()
        state = self.empty_state(len(tokens), frame.prefix)
        try:
            recording = self._read(state, tokens, self.recording(query_window, wanted), chunk, on_chunk)
        except BaseException as error:
            state.release()
            raise _explained(error, "prefill") from error
        return Session(self, state, frame, recording, prefill_s=time.perf_counter() - start)

    def prefill_batch(
        self, texts: Sequence[str | Sequence[int]] | Tensor, *,
        attention_mask: Tensor | Sequence[Sequence[int]] | None = None, **options: Any,
    ) -> SessionBatch:  # fmt: skip
        """Read several contexts; their rows are compacted, asked and decoded together.

        texts: documents or id lists, or ids [batch, token] (tensor, array or equal rows) padded on the left with
        their attention_mask of the same shape.
        options: as for `prefill`. Each row is read alone, without its pads, so it equals a prefill of its
        own; see docs/design/batches.md. Raises RequestError as `prefill` does; then no row stays.
        """
        contexts = several_contexts(texts, attention_mask is not None)
        if attention_mask is not None:
            mask, shape = mask_of(attention_mask), [len(contexts), max(map(len, contexts), default=0)]
            if list(mask.shape) != shape:
                raise RequestError(
                    f"attention_mask has the shape {list(mask.shape)}, but the ids have {shape}; give one row of 0 and "
                    "1 per row of ids"
                )
            pads = left_pads(mask, shape[1])
            contexts = [row[count:] for row, count in zip(contexts, pads, strict=True)]
        sessions: list[Session] = []
        try:
            for text in contexts:
                sessions.append(self.prefill(text, **options))
        except BaseException:
            for session in sessions:
                session.close()
            raise
        return SessionBatch(sessions)

    def extend(self, state: SessionState, tokens: Sequence[int], recording: Recording, chunk: int = 512) -> Recording:
        """Read `tokens` behind `state` for good; returns what was overheard. If it fails, the state is as before.

        Raises RequestError for no tokens or too many for the model; WorkError on lack of memory.
        """
        tokens, chunk = self._checked_ids(tokens), chunk_size(chunk)
        self.check_extension(state, tokens)
        held = state.physical_lengths
        try:
            return self._read(state, tokens, self._continued(recording, state), chunk, None)
        except BaseException as error:
            state.truncate(held)
            raise _explained(error, "append") from error

    def _continued(self, recording: Recording, state: SessionState) -> Recording:
        """Ready to hear what comes next; of a demoted state nothing is heard, because it is not compacted again."""
        return self.recording(recording.window, ()) if state.demoted else recording.continued(state)

    def check_extension(self, state: SessionState, tokens: Sequence[int]) -> None:
        """Raise the RequestError that `extend` would, before anything is read."""
        if not tokens:
            raise RequestError("there is nothing to append; give at least one token")
        self._checked_ids(tokens)
        self._check_room(state.logical_length + len(tokens), self._limit(state.logical_length))

    def _read(
        self, state: SessionState, tokens: Sequence[int], recording: Recording, chunk: int,
        on_chunk: Callable[[int, int], None] | None,
    ) -> Recording:  # fmt: skip
        """Run the decoder over `tokens` behind `state`; the state changes only once all of them are read."""
        cache = self.continuing([state])
        for layer, recorder in zip(cache.attention, recording.layers, strict=True):
            layer.recorder = None if state.demoted else recorder
        before = state.logical_length
        ids = torch.tensor([list(tokens)], device=self.device)
        start = 0
        with self._ears.open(recording) as listening:
            for part in torch.split(ids, self._chunk(chunk, before, len(tokens)), dim=1):
                with listening:
                    read = self.forward(self._decoder, part, cache, before + start)
                start += part.shape[1]
                if on_chunk is not None:
                    on_chunk(start, len(tokens))
        recording.check_heard(before + start)
        if before:
            check_finite(read.last_hidden_state[:, -1])
        fixed = {name: self.pool.adopt(tensor) for name, tensor in cache.state_tensors().items()}
        state.read_on(tokens, fixed)
        return recording

    def overhear(self, state: SessionState, tokens: Sequence[int], taps: Sequence[Tap], chunk: int = 512) -> None:
        """Read `tokens` behind `state` and forget them again; taps[layer] watches every chunk of that attention layer.

        The pass runs on clones of the recurrent states, and its entries are cut off, also after an error: the state
        is left bit for bit as it was, though its storage keeps the room it grew to. A tap with `wants_rotation =
        True` also gets RoPE's rotation.
        Raises RequestError for a model whose attention cannot be watched, for no tokens or too many, and for another
        number of taps; WorkError on lack of memory, or for numbers that are not finite.
        """
        if self.only_whole is not None:
            raise RequestError(f"no extra pass can be watched on {self.name}: {self.only_whole}")
        _check_in_place(state, "watched")
        tokens, chunk = self._checked_ids(tokens), chunk_size(chunk)
        self._check_pass(state, tokens, len(taps))
        held, before = state.physical_lengths, state.logical_length
        try:
            cache = self.continuing([state])
            for layer, recorder in zip(cache.attention, self._overhearing(state, taps), strict=True):
                layer.recorder = recorder
            ids, start = torch.tensor([tokens], device=self.device), before
            for part in torch.split(ids, self._chunk(chunk, before, len(tokens)), dim=1):
                read = self.forward(self._decoder, part, cache, start)
                start += part.shape[1]
            check_finite(read.last_hidden_state[:, -1])
        except BaseException as error:
            raise _explained(error, "a second pass") from error
        finally:
            state.truncate(held)

    def stepping(self, state: SessionState, token: int, taps: Sequence[Tap]) -> Generator[int, None, None]:
        """Greedy decoding seen step by step: feeds `token` behind `state`, then every token chosen; yields each one.

        taps: as for `overhear`; each has watched a step before its token is yielded. An end-of-sequence id is yielded
        like any other: the caller stops by closing the iterator, which leaves the state as it was. It ends at the
        model's limit. Raises what `overhear` does.
        """
        if self.only_whole is not None:
            raise RequestError(f"no decoding can be watched on {self.name}: {self.only_whole}")
        _check_in_place(state, "watched")
        self._check_pass(state, self._checked_ids([token]), len(taps))
        held, position = state.physical_lengths, state.logical_length
        try:
            cache = self.continuing([state])
            for layer, recorder in zip(cache.attention, self._overhearing(state, taps), strict=True):
                layer.recorder = recorder
            for at in range(position, self._limit(position)):
                ids = torch.tensor([[token]], device=self.device)
                ((token, _),) = _chosen(self.forward(self.model, ids, cache, at, logits_to_keep=1).logits)
                yield token
        except Exception as error:
            raise _explained(error, "decoding") from error
        finally:
            state.truncate(held)

    def _overhearing(self, state: SessionState, taps: Sequence[Tap]) -> list[Overhearing]:
        kept = [None] * len(taps) if state.kept is None else state.kept.positions
        places = zip(taps, self.geometry.attention_layers, kept, strict=True)
        return [
            Overhearing(tap, functools.partial(compat.rotation, self.model, layer), held, state.logical_length)
            for tap, layer, held in places
        ]

    def _check_pass(self, state: SessionState, tokens: Sequence[int], taps: int) -> None:
        limit, total = self._limit(state.logical_length), state.logical_length + len(tokens)
        if not tokens:
            raise RequestError("there is nothing to read behind the context; give at least one token")
        if taps != len(self.geometry.attention_layers):
            raise RequestError(
                f"there are {taps} taps for {len(self.geometry.attention_layers)} attention layers; give one for each"
            )
        if total > limit:
            raise RequestError(
                f"the second pass reads {len(tokens)} tokens behind a context of {state.logical_length}, but "
                f"{self.name} reads at most {limit}; shorten the context, or repeat it in smaller parts "
                "(--scorer kvzip:chunk=500)"
            )

    def forward(self, module: Any, ids: Tensor, cache: SessionCache, position: int, **keywords: Any) -> Any:
        """One forward pass over `ids` [1, q] at logical positions position, position + 1, ..."""
        self.check_open()
        if torch.is_autocast_enabled(ids.device.type):
            raise RequestError("autocast mixes dtypes in a cache; leave it, and load the model with dtype='bfloat16'")
        positions = torch.arange(position, position + ids.shape[1], device=ids.device)[None]
        with compat.no_grad(), cache.forward_pass():
            return module(input_ids=ids, position_ids=positions, **forward_keywords(module, cache), **keywords)

    def generate(
        self, states: Sequence[SessionState], questions: Sequence[Sequence[int]], max_new_tokens: int,
        on_token: Callable[[int], None] | None = None, thinking: Thinking | None = None,
    ) -> list[Generation]:  # fmt: skip
        """Greedy answers, one row per state; every state is left bit for bit as it was.

        Questions are read row by row (no pads), then all rows decode together. A state may not occur twice.
        Raises RequestError when a question does not fit the model's limit; WorkError on lack of memory, or
        when the model computes numbers that are not finite.
        """
        max_new_tokens = whole_number(max_new_tokens, "max_new_tokens", 1, usual=128)
        questions = [self._checked_ids(tokens, "the question") for tokens in questions]
        if len({id(state) for state in states}) < len(states):
            raise RequestError("a session occurs twice in this batch; its rows would write into each other")
        for state, tokens in zip(states, questions, strict=True):
            self._check_question(state, tokens)
        held = [state.physical_lengths for state in states]
        try:
            return self._generate(states, questions, max_new_tokens, on_token, thinking)
        except BaseException as error:
            raise _explained(error, "answering") from error
        finally:
            for state, lengths in zip(states, held, strict=True):
                state.truncate(lengths)

    def _generate(
        self, states: Sequence[SessionState], questions: Sequence[Sequence[int]], wanted: int,
        on_token: Callable[[int], None] | None, thinking: Thinking | None,
    ) -> list[Generation]:  # fmt: skip
        caches, answers, before = [], [], [state.traffic for state in states]
        for state, tokens in zip(states, questions, strict=True):
            start = time.perf_counter()
            cache = self.continuing([state])
            ids = torch.tensor([list(tokens)], device=self.device)
            logits = self.forward(self.model, ids, cache, state.logical_length, logits_to_keep=1).logits
            room = self._limit(state.logical_length) - state.logical_length - len(tokens) + 1
            answers.append(Answering(self._ends, wanted, room, on_token, thinking))
            answers[-1].take(*_chosen(logits)[0])
            answers[-1].question_s = time.perf_counter() - start
            caches.append(cache)
        start = time.perf_counter()
        self._decode(caches, answers)
        seconds = time.perf_counter() - start
        moved = [state.traffic - already for state, already in zip(states, before, strict=True)]
        return [
            Generation(
                tuple(a.made), a.finish or "eos", a.question_s, seconds, a.steps, a.margin, t.misses, t.fetches,
                t.moved_bytes,
            )
            for a, t in zip(answers, moved, strict=True)
        ]  # fmt: skip

    def _decode(self, caches: list[SessionCache], answers: Sequence[Answering]) -> None:
        """One token per row and step; a row that is done leaves the batch."""
        active = [index for index, answer in enumerate(answers) if answer.finish is None]
        if not active:
            return
        cache = SessionCache.joined([caches[index] for index in active])
        while active:
            ids = torch.tensor([[answers[index].made[-1]] for index in active], device=self.device)
            with compat.no_grad():  # positions, and that every layer attended: attach.py sees to both
                logits = self.model(input_ids=ids, logits_to_keep=1, **forward_keywords(self.model, cache)).logits
            for index, (token, lead) in zip(active, _chosen(logits), strict=True):
                answers[index].steps += 1
                answers[index].take(token, lead)
            going = [at for at, index in enumerate(active) if answers[index].finish is None]
            if going and len(going) < len(active):
                cache.batch_select_indices(torch.tensor(going, dtype=torch.long, device=self.device))
            active = [active[at] for at in going]

    def logits(self, state: SessionState, tokens: Sequence[int]) -> Tensor:
        """Logits [token, vocabulary] of `tokens` fed after `state`; the state is left as it was.

        Raises RequestError for no tokens or too many; WorkError for numbers that are not finite.
        """
        tokens = self._checked_ids(tokens)
        self._check_question(state, tokens)
        held = state.physical_lengths
        try:
            ids = torch.tensor([list(tokens)], device=self.device)
            cache = self.continuing([state])
            found: Tensor = self.forward(self.model, ids, cache, state.logical_length).logits[0]
            return found
        except BaseException as error:
            raise _explained(error, "answering") from error
        finally:
            state.truncate(held)

    def sample(
        self, state: SessionState, tokens_after: Sequence[int], count: int, max_new_tokens: int, seed: int,
        past_end: bool = False,
    ) -> list[list[int]]:  # fmt: skip
        """`count` sampled continuations of `tokens_after` behind `state`, which is left bit for bit as it was.

        Drawn with the checkpoint's own sampling settings (`engines/hf/sampling.py`) from one generator. All rows
        decode as one batch and hold a copy of the entries each; a row stops before an end-of-sequence id, or with
        `past_end` goes on behind it.
        Raises RequestError for no tokens (the numbers behind the context's last token are not kept: hold that token
        back and give it here) or too many for the model; WorkError on lack of memory.
        """
        count, wanted = whole_number(count, "count", 1, usual=4), whole_number(max_new_tokens, "max_new_tokens", 1)
        tokens_after, seed = self._checked_ids(tokens_after, "tokens_after"), whole_number(seed, "seed", 0)
        self._check_question(state, tokens_after)
        wanted = min(wanted, self._limit(state.logical_length) - state.logical_length - len(tokens_after) + 1)
        held = state.physical_lengths
        try:
            noise = torch.Generator().manual_seed(seed)
            return self._sample(state, tokens_after, count, wanted, noise, () if past_end else self._ends)
        except BaseException as error:
            raise _explained(error, "sampling") from error
        finally:
            state.truncate(held)

    def _sample(
        self, state: SessionState, tokens_after: Sequence[int], count: int, wanted: int, noise: torch.Generator,
        ends: Collection[int],
    ) -> list[list[int]]:  # fmt: skip
        sampling = Sampling.of(getattr(self.model, "generation_config", None))
        cache = self.continuing([state])
        ids = torch.tensor([list(tokens_after)], device=self.device)
        logits = self.forward(self.model, ids, cache, state.logical_length, logits_to_keep=1).logits[:, -1]
        logits = logits.expand(count, -1)
        cache.repeat([0] * count)
        made: list[list[int]] = [[] for _ in range(count)]
        active = list(range(count))
        while True:
            drawn = draw(logits, sampling, noise)
            going = [at for at, token in enumerate(drawn) if token not in ends]
            for at in going:
                made[active[at]].append(drawn[at])
            active = [active[at] for at in going]
            if not active or len(made[active[0]]) == wanted:
                return made
            if len(going) < len(drawn):
                cache.batch_select_indices(torch.tensor(going, device=self.device))
            ids = torch.tensor([[made[row][-1]] for row in active], device=self.device)
            with compat.no_grad():
                logits = self.model(
                    input_ids=ids, logits_to_keep=1, **forward_keywords(self.model, cache)
                ).logits[:, -1]  # fmt: skip

    def sample_together(
        self, asked: Sequence[Asked], count: int, max_new_tokens: int, past_end: bool = False
    ) -> list[list[list[int]] | None]:
        """What `sample` draws for each context, drawn as one batch; the states are left bit for bit as they were.

        None where a context must be drawn alone, as on a GPU (`engines/hf/branching.py` says which), and for all if
        the batch failed: whose fault it was is for `sample` to say.
        """
        fit = [one for one in asked if branching.possible(self, one, max_new_tokens)]
        try:
            drawn = branching.drawn_together(self, fit, count=count, tokens=max_new_tokens, past_end=past_end)
        except WakesightError:
            return [None for _ in asked]
        made = {id(one): rows for one, rows in zip(fit, drawn, strict=True)}
        return [made.get(id(one)) for one in asked]

    def follow(self, state: SessionState, tokens: Sequence[int]) -> tuple[Followed, ...]:
        """Read `tokens` behind `state` for once; what every attention layer did with them. The state is left as it was.

        Everything returned is a copy, in size linear in the tokens read. Raises RequestError for no tokens or too
        many, and for models whose entries have no keys and values of their own; WorkError on lack of memory.
        """
        self._check_plain()
        _check_in_place(state, "followed")
        tokens = self._checked_ids(tokens)
        self._check_question(state, tokens)
        held = state.physical_lengths
        try:
            return self._follow(state, tokens, held)
        except BaseException as error:
            raise _explained(error, "following a continuation") from error
        finally:
            state.truncate(held)

    def _follow(
        self, state: SessionState, tokens: Sequence[int], held: Sequence[Sequence[int]]
    ) -> tuple[Followed, ...]:
        cache = self.continuing([state])
        layers = [self._decoder.layers[index] for index in self.geometry.attention_layers]
        ids, start = torch.tensor([list(tokens)], device=self.device), state.logical_length
        with following(cache, layers) as followers:
            for part in torch.split(ids, self._chunk(len(tokens), start, len(tokens)), dim=1):
                self.forward(self._decoder, part, cache, start)
                start += part.shape[1]
        return collected(followers, state, held)

    def output_projection(self, layer: int) -> Tensor:
        """W_O of attention layer `layer` by query head: [hidden, query_head, value_dim], a view of the weights."""
        self._check_plain()
        index = self.geometry.attention_layers[layer]
        return output_projection(self._decoder, index, self.geometry.value_dims[layer], self.name)

    def _check_plain(self) -> None:
        if self._latent or self.only_whole is not None:
            why = self.only_whole or "it stores latent keys and no values of their own"
            raise RequestError(f"the attention of {self.name} cannot be computed again: {why}; take another model")

    @property
    def has_output_gate(self) -> bool:
        """Whether attention outputs pass a gate that can be recorded."""
        return self._family.output_gate

    def closing(self, closed: Mapping[int, Sequence[int]]) -> contextlib.AbstractContextManager[None]:
        """While it is entered, passes of this thread run with some query heads' outputs set to 0 before W_O.

        closed: attention layer -> query heads. Raises RequestError for heads that the model does not have.
        """
        return closing(self._decoder, self.geometry, closed, self.name)

    def next_tokens(self, tokens: Sequence[int], chunk: int = 512) -> NextTokens:
        """How well the model foretells each of `tokens` but the first, read from scratch in chunks and forgotten.

        Raises RequestError for fewer than 2 tokens or too many; WorkError on lack of memory.
        """
        tokens, chunk = self._checked_ids(tokens), chunk_size(chunk)
        if len(tokens) < 2:
            raise RequestError(f"a text of {len(tokens)} tokens has no next one; give at least 2")
        self._check_room(len(tokens), self._limit(len(tokens)))
        state = self.empty_state(len(tokens))
        try:
            return self._next_tokens(state, tokens, chunk)
        except BaseException as error:
            raise _explained(error, "reading a text") from error
        finally:
            state.release()

    def _next_tokens(self, state: SessionState, tokens: Sequence[int], chunk: int) -> NextTokens:
        cache, found = self.continuing([state]), []
        ids, start = torch.tensor([list(tokens)], device=self.device), 0
        for part in torch.split(ids, self._chunk(chunk, 0, len(tokens)), dim=1):
            logits = self.forward(self.model, part, cache, start).logits[0]
            check_finite(logits)
            stop = min(start + part.shape[1], len(tokens) - 1)
            found.append(foretold(logits[: stop - start], ids[0, start + 1 : stop + 1]))
            start += part.shape[1]
        return NextTokens(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    def decay_weights(self) -> tuple[DecayWeights, ...] | None:
        """What the recurrent layers forget at zero input; None for families whose heads have no single decay."""
        return decay_weights(self._decoder, self.geometry, self._family)

    def frame(self, instruction: str | None = None, chat: bool = True) -> Frame:
        """The ids that `prefill` puts around a text. Raises RequestError without a tokenizer or a usable template."""
        return (chat_frame if chat else plain_frame)(self._need_tokenizer(), instruction)

    def template_ids(self, text: str) -> list[int]:
        """Ids of text in which control tokens mean what they say.

        Raises RequestError without a tokenizer, and for text that it cannot hold.
        """
        tokenizer = self._need_tokenizer()
        check_text(text)
        check_words(tokenizer, text, control=True)
        return encode_template(tokenizer, text)

    def cache(self, states: Sequence[SessionState]) -> SessionCache:
        """A copy of the states as one transformers Cache; its memory returns to the pool with the object."""
        self.check_open()
        return self.continuing([state.copy(self.growth) for state in states])

    def fingerprint(self) -> str:
        """Of architecture, weights and dtype, whatever the device."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.model)
        return self._fingerprint

    def weights_fingerprint(self) -> str:
        """The same for a checkpoint whatever dtype it was loaded in: what an artifact belongs to."""
        return fingerprint(self.model, any_dtype=True)

    def empty_state(self, tokens: int, prefix: int = 0) -> SessionState:
        """A state that has read nothing, with room for `tokens` and the growth slack."""
        slots = tuple(Slots(self.pool, tokens + self.growth) for _ in self.geometry.attention_layers)
        return SessionState(self.pool, slots, {}, (), prefix)

    def continuing(self, states: Sequence[SessionState]) -> SessionCache:
        """A cache on the states' own slots: what runs on it is appended to them."""
        return SessionCache(self.model.config, states, latent=self._latent, stepwise=self._stepwise)

    def _chunk(self, wanted: int, before: int, tokens: int) -> int:
        """Tokens per pass: as asked, but for models that transformers reads right in one pass only."""
        switch = self._rope_switch
        if self._stepwise:
            return 1 if before else tokens
        return tokens if switch is not None and before == 0 and tokens > switch[0] else wanted

    def _limit(self, tokens: int) -> int:
        """The longest sequence that may follow a context of `tokens`: RoPE must not change its frequencies midway."""
        if self._rope_switch is not None:
            limit, moving = self._rope_switch
            if tokens <= limit or moving:
                return min(limit, self.geometry.max_positions)
        return self.geometry.max_positions

    def check_demotable(self) -> None:
        """Raise the RequestError of a model whose pages cannot be demoted, by name."""
        why = "it stores latent keys, one head for all queries" if self._latent else self.only_whole
        if why is not None:
            raise RequestError(f"pages of {self.name} cannot be demoted: {why}; use --evicted drop")

    def recording(self, window: int, record: tuple[str, ...]) -> Recording:
        """Fresh recorders for all attention layers: the last `window` queries, and the signals of `record`."""
        rotations = [functools.partial(compat.rotation, self.model, layer) for layer in self.geometry.attention_layers]
        return Recording.start(rotations, window, record, stored if self._latent else None, self.geometry)

    def check_record(self, wanted: tuple[str, ...]) -> None:
        """Raise the RequestError of a signal that this model does not have."""
        if self.only_whole is not None and (names := [name for name in wanted if name not in OVERHEARD]):
            raise RequestError(
                f"{names[0]} cannot be recorded on {self.name}: {self.only_whole}; leave it out of record"
            )
        if "native" in wanted and not self.geometry.native_heads:
            raise RequestError(
                f"{self.name} ({self._family.name}) has no native signals: {self._family.no_signals}; "
                "leave native out of record"
            )
        if "output_gate" in wanted and not self._family.output_gate:
            raise RequestError(
                f"{self.name} ({self._family.name}) has no gate on its attention output; "
                "leave output_gate out of record"
            )

    def _check_room(self, tokens: int, limit: int) -> None:
        if tokens >= limit:
            raise RequestError(
                f"the context has {tokens} tokens with its template, but {self.name} reads at most {limit} "
                "and the question needs room too; shorten the document or use a model with a longer limit"
            )

    def _check_question(self, state: SessionState, tokens: Sequence[int]) -> None:
        limit, first = self._limit(state.logical_length), state.logical_length + len(tokens)
        if not tokens:
            raise RequestError("the question is empty; give at least one token")
        if first > limit:
            raise RequestError(
                f"context and question have {first} tokens, but {self.name} reads at most {limit}; shorten the question"
            )

    def thinking(self, tokens: int) -> Thinking:
        """How this model's thinking ends. Raises RequestError for a model whose chat template knows no thinking."""
        tokenizer = self._need_tokenizer()
        if "</think>" not in (getattr(tokenizer, "chat_template", None) or ""):
            raise RequestError(f"{self.name} is no thinking model: its chat template has no </think>; leave that out")
        return Thinking(tuple(encode_template(tokenizer, "</think>")), tokens)

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

    def _checked_ids(self, ids: Sequence[int], name: str = "the tokens") -> list[int]:
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        plain = token_ids(ids, name)
        if bad := [i for i in plain if not 0 <= i < vocabulary]:
            raise RequestError(f"token id {bad[0]} is outside the model's vocabulary of {vocabulary}")
        return plain

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer; give token ids, or load(model, tokenizer=...)")
        return self.tokenizer


class Answering:
    """One row's answer in the making. finish: None while it goes on."""

    def __init__(
        self, ends: frozenset[int], wanted: int, room: int, on_token: Callable[[int], None] | None,
        thinking: Thinking | None = None,
    ) -> None:  # fmt: skip
        self.made: list[int] = []
        self.finish: str | None = None
        self.question_s = 0.0
        self.steps = 0
        self.margin = float("inf")
        self._ends, self._wanted, self._room = ends, wanted, room
        self._on_token = on_token
        self._thinking = thinking  # None once the closing tag was written
        self._thought = 0

    def take(self, token: int, lead: float) -> None:
        """The model chose `token`, whose logit leads the next best by `lead`."""
        self.margin = min(self.margin, lead)
        if token in self._ends:
            self.finish = "eos"
            return
        self.made.append(token)
        if self._on_token is not None:
            self._on_token(token)
        if self._thinking is not None and tuple(self.made[-len(self._thinking.close) :]) == self._thinking.close:
            self._thought, self._thinking = len(self.made), None
        elif self._thinking is not None and len(self.made) == self._thinking.tokens:
            self.finish = "thinking"
        elif self._thinking is None and len(self.made) - self._thought == self._wanted:
            self.finish = "length"
        if self.finish is None and len(self.made) == self._room:
            self.finish = "limit"


def _chosen(logits: Tensor) -> list[tuple[int, float]]:
    """Per row the best token of the last position and its lead. Equal logits: the lower id, as argmax has it."""
    last = logits[:, -1].float()
    best, second = last.topk(2, dim=-1).values.unbind(dim=-1)
    return list(zip(last.argmax(dim=-1).tolist(), (best - second).tolist(), strict=True))


def _measure(loaded: LoadedModel) -> tuple[ModelGeometry, tuple[torch.device, ...], dict[str, StateShape]]:
    """Geometry, devices per attention layer and shapes of fixed states, of a real cache after one token."""
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
    kinds = [compat.kind(layer) for layer in layers]
    compat.check_kinds(kinds, loaded.name)
    attention = [i for i, kind in enumerate(kinds) if kind in compat.HOLDS_SLOTS]
    if not attention:
        raise RequestError(
            f"{loaded.name} has no layer that attends to its whole context, so there is no KV cache to compact; "
            "its sliding windows already drop what they passed"
        )
    keys, values = [layers[i].keys for i in attention], [layers[i].values for i in attention]
    recurrent = [states for layer in layers if (states := compat.state_tensors(layer))]
    geometry = ModelGeometry(
        family=loaded.family.name,
        n_layers=len(layers),
        attention_layers=tuple(LayerIndex(i) for i in attention),
        recurrent_layers=tuple(LayerIndex(i) for i, layer in enumerate(layers) if compat.state_tensors(layer)),
        query_heads=config.get_text_config(decoder=True).num_attention_heads,
        kv_heads=tuple(k.shape[1] for k in keys),
        key_dims=tuple(k.shape[3] for k in keys),
        value_dims=tuple(v.shape[3] for v in values),
        itemsize=keys[0].element_size(),
        max_positions=compat.position_limit(config),
        index_dims=tuple(layers[i].indexer_keys.shape[-1] for i in attention if kinds[i] == "indexed"),
        native_heads=tuple(states["recurrent.0"].shape[1] for states in recurrent if loaded.family.native_signals),
    )
    return geometry, tuple(k.device for k in keys), _state_shapes(layers)


def _state_shapes(layers: Sequence[Any]) -> dict[str, StateShape]:
    """By the names that `SessionCache.state_tensors` gives; None in a shape where it follows the context."""
    shapes: dict[str, StateShape] = {}
    for index, layer in enumerate(layers):
        for name, tensor in compat.state_tensors(layer).items():
            shapes[f"{index}/{name}"] = (tuple(tensor.shape), tensor.dtype, tensor.device)
        if compat.kind(layer) == "window":
            for name, tensor in (("key", layer.keys), ("value", layer.values)):
                shape = (tensor.shape[1], None, tensor.shape[3])
                shapes[f"{index}/window.{name}"] = (shape, tensor.dtype, tensor.device)
    return shapes


def _check_in_place(state: SessionState, what: str) -> None:
    if state.demoted:
        raise RequestError(
            f"a demoted session cannot be {what}: its entries are not in one piece; take the whole session, "
            "or one compacted with --evicted drop"
        )


def _explained(error: BaseException, work: str) -> BaseException:
    """Out-of-memory errors of torch as one sentence; everything else unchanged."""
    if not is_out_of_memory(error) or isinstance(error, WorkError):
        return error
    return WorkError(f"out of memory in {work}; use a shorter context, a smaller --chunk, or close other sessions")
