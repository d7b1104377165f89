"""One vLLM engine in this process, asked by token ids, beside the transformers engine on the same weights."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from wakesight.cache.state import SessionState
from wakesight.core import KeptSet
from wakesight.engines.session import Session


class Offline:
    """vLLM with the plugin. Engines do not share a process well: one per test file, and a process per file."""

    def __init__(self, folder: Path, **options: Any) -> None:
        os.environ.update(
            WAKESIGHT_VLLM="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1",
            VLLM_LOGGING_LEVEL="CRITICAL",
        )  # fmt: skip
        from vllm import LLM

        self.llm = LLM(
            str(folder), disable_log_stats=True, **{"max_num_batched_tokens": 256, "block_size": 32, **options}
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.sessions = self.scheduler.sessions
        self.worker = self.core.model_executor.driver_worker.worker.model_runner.wakesight
        self._requests = iter(range(10**9))

    def params(self, max_tokens: int, keys: dict[str, Any], **more: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=5, extra_args=keys, detokenize=False, **more
        )

    def ask(self, *prompts: Sequence[int], max_tokens: int = 16, **keys: Any) -> list[Any]:
        """All prompts in one batch, with the same keys."""
        tokens = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(tokens, self.params(max_tokens, keys), use_tqdm=False)

    def told(self, prompt: Sequence[int], max_tokens: int = 1, **keys: Any) -> dict[str, Any]:
        """What one request brought back in our name."""
        found: dict[str, Any] = self.ask(prompt, max_tokens=max_tokens, **keys)[0].kv_transfer_params["wakesight"]
        return found

    def prefill(self, context: Sequence[int], **keys: Any) -> str:
        session = secrets.token_hex(16)
        assert "refused" not in self.told(context, ws_session=session, **keys)
        return session

    def fork(self, session: str, prompt: Sequence[int], **keys: Any) -> tuple[str, Any]:
        """The child's id, and the answer to what followed the context."""
        child = secrets.token_hex(16)
        (output,) = self.ask(prompt, ws_fork=session, ws_child=child, **keys)
        assert output.outputs[0].finish_reason != "error", output.outputs[0].stop_reason
        return child, output

    def kept(self, child: str) -> KeptSet:
        layers = self.told([1], ws_info=child)["kept"]
        return KeptSet(tuple(tuple(torch.tensor(head) for head in layer) for layer in layers))

    def drop(self, *sessions: str) -> None:
        for session in sessions:
            assert self.told([1], ws_drop=session)["dropped"]

    def drop_all(self) -> None:
        for held in self.sessions.table.all():
            self.sessions.table.drop(held.id)
        self.ask([1], max_tokens=1)  # a step, so that the worker hears of it

    # --- single requests, step by step

    def add(self, prompt: Sequence[int], max_tokens: int = 16, **keys: Any) -> str:
        name = f"r{next(self._requests)}"
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, self.params(max_tokens, keys))
        return name

    def step(self) -> Iterator[Any]:
        """Outputs that came to their end in this step."""
        return iter([output for output in self.llm.llm_engine.step() if output.finished])

    def run(self) -> dict[str, Any]:
        """Until nothing is left; outputs by request."""
        done = {}
        while self.llm.llm_engine.has_unfinished_requests():
            done.update((output.request_id, output) for output in self.step())
        return done

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def check_empty(self) -> None:
        """Nothing of any session or request is left, on either side, and every block is free."""
        self.drop_all()
        status = self.sessions.status()
        assert status["sessions"] == []
        assert status["requests"] == 0
        assert status["free_blocks"] == status["pool_blocks"]
        assert self.worker.recordings == {}
        assert self.worker.running == {}
        for manager in self.sessions.managers:
            assert dict(manager.req_to_blocks) == {}
            assert getattr(manager, "offsets", {}) == {}
            assert manager.num_cached_block == {}


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def replayed(whole: Session, kept: KeptSet | None) -> SessionState:
    """The transformers engine's state with exactly these entries."""
    return whole.state.copy(64) if kept is None else whole.state.compacted(kept, 64)


def distance(whole: Session, kept: KeptSet | None, question: Sequence[int], output: Any) -> float:
    """Mean |difference of log-probability| over the top 5 of every generated token, teacher-forced."""
    made = tokens_of(output)
    state = replayed(whole, kept)
    logits = whole.engine.logits(state, [*question, *made[:-1]])[len(question) - 1 :]
    theirs = logits.float().log_softmax(dim=-1)
    gaps = [
        abs(float(row[token]) - found.logprob)
        for row, step in zip(theirs, output.outputs[0].logprobs, strict=True)
        for token, found in step.items()
    ]
    return sum(gaps) / len(gaps)
