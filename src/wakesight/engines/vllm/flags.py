"""Which of vLLM's flags go with sessions: what is set, what is refused, and the sentence for it.

Works on vLLM's EngineArgs, VllmConfig and SamplingParams by attribute, so it needs no vLLM itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wakesight.engines.vllm.keys import Ask, Attach, Fork, Keep
from wakesight.errors import RequestError

SCHEDULER = "wakesight.engines.vllm.patches.SessionScheduler"


@dataclass(frozen=True)
class Flag:
    """An engine argument. fits: values that go with sessions; the first is set where none was given (None).

    why: what would go wrong, for the sentence that refuses any other.
    """

    name: str
    fits: tuple[Any, ...]
    why: str

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


FLAGS = (
    Flag("enable_prefix_caching", (False,), "its block hashes would describe compacted blocks"),
    Flag("async_scheduling", (False,), "the next step would be planned before blocks are returned"),
    Flag("scheduler_cls", (SCHEDULER,), "sessions are kept by a scheduler of their own"),
    Flag("speculative_config", (None,), "draft tokens would be written into compacted layers"),
    Flag("kv_transfer_config", (None,), "a connector would move blocks whose layers differ in length"),
    Flag("tensor_parallel_size", (1,), "every rank would score other KV heads"),
    Flag("pipeline_parallel_size", (1,), "scheduler and workers would see different layers"),
    Flag("data_parallel_size", (1,), "a session lives in one engine"),
    Flag("decode_context_parallel_size", (1,), "entries of one layer would lie on several ranks"),
    Flag("prefill_context_parallel_size", (1,), "entries of one layer would lie on several ranks"),
    Flag("kv_cache_dtype", ("auto",), "entries are moved as they are stored, and fp8 comes with scales"),
    Flag("disable_hybrid_kv_cache_manager", (False,), "every layer needs a block group of its own"),
    Flag("enable_lora", (False,), "an adapter changes keys and values, and sessions do not know it"),
)


ALIASES = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
           "-dcp": "decode_context_parallel_size", "-pcp": "prefill_context_parallel_size"}  # fmt: skip


def check_words(words: Sequence[str]) -> None:
    """The same for flags on a command line, before anything starts. Raises RequestError for one that conflicts."""
    known = {flag.option: flag for flag in FLAGS}
    for at, word in enumerate(words):
        option, equals, value = word.partition("=")
        option = "--" + ALIASES[option].replace("_", "-") if option in ALIASES else option.replace("_", "-")
        flag = known.get(option.split(".")[0])
        if flag is None:
            continue
        if isinstance(flag.fits[0], bool) and not equals:
            given: Any = True
        else:
            given = value if equals else words[at + 1] if at + 1 < len(words) else ""
            given = {"true": True, "false": False}.get(str(given).lower(), given)
        if str(given) not in map(str, flag.fits):
            raise _conflict(flag, given)


def _conflict(flag: Flag, given: Any) -> RequestError:
    return RequestError(
        f"{flag.option}={given!r} does not go with sessions: {flag.why}; leave it out, or serve without "
        "WAKESIGHT_VLLM=1"
    )


def prepare(arguments: Any) -> None:
    """Set what sessions need in vLLM's EngineArgs. Raises RequestError for a flag that was set against them."""
    for flag in FLAGS:
        given = getattr(arguments, flag.name, flag.fits[0])
        if given is not None and given not in flag.fits:
            raise _conflict(flag, given)
        if given != flag.fits[0]:
            setattr(arguments, flag.name, flag.fits[0])
    arguments.enforce_eager = True  # hooks run in eager mode only
    if hasattr(arguments, "disable_cascade_attn"):
        arguments.disable_cascade_attn = True
    if getattr(arguments, "mamba_ssm_cache_dtype", None) == "auto":
        arguments.mamba_ssm_cache_dtype = "float32"  # what the recurrence computes in


def check(config: Any) -> None:
    """What only shows in vLLM's whole config. Raises RequestError."""
    if getattr(config, "use_v2_model_runner", False):
        raise RequestError(
            "this vLLM would take its V2 model runner, which wakesight does not know; set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    mode = getattr(config.cache_config, "mamba_cache_mode", "none")
    if mode != "none":
        raise RequestError(f"mamba_cache_mode={mode!r} does not go with sessions; leave --mamba-cache-mode out")


def check_params(ask: Ask | None, params: Any) -> None:
    """What sampling settings a request of ours may have. Raises RequestError."""
    if ask is None:
        return
    if isinstance(ask, Keep) and params.max_tokens != 1:
        raise RequestError(
            "ws_session keeps a context, so its request generates one token: send max_tokens=1, not "
            f"{params.max_tokens}"
        )
    if isinstance(ask, (Keep, Fork)) and getattr(params, "n", 1) != 1:
        raise RequestError("ws_session and ws_fork make one session, so they take n=1; ask n questions by ws_attach")
    if isinstance(ask, (Attach, Fork)) and getattr(params, "prompt_logprobs", None) is not None:
        raise RequestError("the context is not read again, so there are no prompt_logprobs; leave them out")
