"""Every place where we touch a vLLM class, and nothing else; the only module here that imports vLLM.

    EngineArgs.create_engine_config        flags that do not go together are refused, ours are set
    InputProcessor._validate_params        a malformed request is refused where it is made (HTTP 400)
    kv_cache_utils.get_kv_cache_groups     one group per layer over the shared pool
    Scheduler (subclassed, scheduler_cls)  sessions; lengths that differ per layer (ShorterManager)
    MambaManager.add_local_computed_blocks a session's recurrent state is shared, and copied on write
    MultiGroupBlockTable.compute_slot_mapping, the metadata builders' build
                                           slots and lengths count what a layer holds; RoPE sees logical positions
    GPUModelRunner.initialize_kv_cache, execute_model, _prepare_inputs, sample_tokens
                                           the worker's half
    OutputProcessor.process_outputs        a refusal reaches an HTTP client as a sentence
    StatLoggerManager.record               our numbers appear on /metrics

`install` compares each signature with the one it was written for before it changes anything.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, KVCacheSpec, MambaSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.block_table import MultiGroupBlockTable
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from wakesight.engines.vllm import flags, keys
from wakesight.engines.vllm.facts import facts_of
from wakesight.engines.vllm.messages import Result, Step
from wakesight.engines.vllm.metrics import Exporter, numbers
from wakesight.engines.vllm.pages import Pages
from wakesight.engines.vllm.scheduling import REFUSED, Scheduling
from wakesight.engines.vllm.settings import Settings
from wakesight.engines.vllm.taps import Taps
from wakesight.engines.vllm.working import Worker
from wakesight.errors import RequestError

OURS = "wakesight"  # the attribute on vLLM's messages, and our entry in what a request brings back

# --- the scheduler's side


@dataclass(frozen=True, kw_only=True)
class LayerSpec(FullAttentionSpec):
    """Full attention of one layer: specs of two layers never compare equal, so no metadata is shared between them."""

    wakesight_layer: str = ""

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        """One group, one layer."""
        if any(spec != specs[0] for spec in specs):
            raise RuntimeError("wakesight keeps one KV-cache group per attention layer")
        return specs[0]


class ShorterManager(FullAttentionManager):
    """Blocks of one attention layer. offsets: per request, by how much it holds less than its logical length."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.offsets: dict[str, int] = {}

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[Any], total_computed_tokens: int,
        num_local_computed_tokens: int, num_tokens_main_model: int, apply_admission_cap: bool = False,
    ) -> int:  # fmt: skip
        """As vLLM counts, in slots."""
        shorter = self.offsets.get(request_id, 0)
        needed: int = super().get_num_blocks_to_allocate(
            request_id, num_tokens - shorter, new_computed_blocks, total_computed_tokens - shorter,
            num_local_computed_tokens - shorter, num_tokens_main_model - shorter, apply_admission_cap,
        )  # fmt: skip
        return needed

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[Any], num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:  # fmt: skip
        """A session's blocks: whole ones are shared, the last one is copied if it is not full."""
        with _sharing(self):
            super().add_local_computed_blocks(
                request_id, new_computed_blocks, num_local_computed_tokens - self.offsets.get(request_id, 0),
                num_external_computed_tokens,
            )  # fmt: skip

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        """As vLLM does, in slots."""
        shorter = self.offsets.get(request_id, 0)
        new: list[Any] = super().allocate_new_blocks(request_id, num_tokens - shorter, num_tokens_main_model - shorter)
        return new

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """The request ends or is preempted: nothing of it stays."""
        self.offsets.pop(request_id, None)
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        return blocks

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """None: blocks shared with a session are no common prefix of the batch."""
        return 0


@contextlib.contextmanager
def _sharing(manager: Any) -> Iterator[None]:
    """vLLM shares blocks only where prefix caching is on; with it off, sessions alone bring blocks along."""
    before, manager.enable_caching = manager.enable_caching, True
    try:
        yield
    finally:
        manager.enable_caching = before


def _add_recurrent_state(stock: Callable[..., None]) -> Callable[..., None]:
    def add_local_computed_blocks(self: Any, *args: Any, **kwargs: Any) -> None:
        with _sharing(self):
            stock(self, *args, **kwargs)

    return add_local_computed_blocks


def _one_group_per_layer(stock: Callable[..., Any]) -> Callable[..., Any]:
    def get_kv_cache_groups(vllm_config: Any, kv_cache_spec: dict[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
        if vllm_config.scheduler_config.scheduler_cls != flags.SCHEDULER:
            groups: list[KVCacheGroupSpec] = stock(vllm_config, kv_cache_spec)
            return groups
        ours = {name: _layer_spec(name, spec) for name, spec in kv_cache_spec.items()}
        even = kv_cache_utils.unify_kv_cache_spec_page_size(ours)
        return [KVCacheGroupSpec([name], spec) for name, spec in even.items()]

    return get_kv_cache_groups


def _layer_spec(name: str, spec: Any) -> KVCacheSpec:
    if isinstance(spec, MambaSpec):
        return spec
    if type(spec) is not FullAttentionSpec or spec.sliding_window is not None or spec.attention_chunk_size is not None:
        raise RequestError(
            f"the layer {name} keeps its cache as {type(spec).__name__}, and wakesight compacts plain full attention "
            "only (no sliding windows, no latent attention); serve this model without WAKESIGHT_VLLM=1"
        )
    return LayerSpec(**{f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec)}, wakesight_layer=name)


class SessionScheduler(Scheduler):
    """vLLM's scheduler with sessions; requests without our keys run through it as they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config
        heads = config.model_config.get_num_attention_heads(config.parallel_config)
        manager = self.kv_cache_manager
        self.sessions = Scheduling(
            facts_of(self.kv_cache_config, config.model_config, heads), manager.coordinator.single_type_managers,
            manager.block_pool, Settings.from_environment(),
        )  # fmt: skip
        self._answers: list[tuple[int, EngineCoreOutput]] = []
        self._stuck = False
        self._told: tuple[float, ...] = ()  # what the metrics last showed

    def add_request(self, request: Request) -> None:
        """Let it in, or answer it with the next step."""
        params = request.sampling_params
        try:
            answer = self.sessions.arrive(request.request_id, params and params.extra_args, request.prompt_token_ids)
        except RequestError as error:
            self.sessions.totals["refused"] += 1
            self._answer(request, {REFUSED: str(error)})
            return
        if answer is None:
            super().add_request(request)
        else:
            self._answer(request, answer)

    def _answer(self, request: Request, told: dict[str, Any]) -> None:
        refusal = told.get(REFUSED)
        output = EngineCoreOutput(
            request_id=request.request_id, new_token_ids=[], stop_reason=refusal, kv_transfer_params={OURS: told},
            finish_reason=FinishReason.STOP if refusal is None else FinishReason.ERROR,
        )  # fmt: skip
        self._answers.append((request.client_index, output))

    def has_requests(self) -> bool:
        """Answers wait for the next step too."""
        return bool(self._answers) or bool(super().has_requests())

    def has_finished_requests(self) -> bool:
        """The same for engines that ask this."""
        return bool(self._answers) or bool(super().has_finished_requests())

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[Any, int, int, bool]:
        found = self.sessions.hit(request.request_id)
        if found is None:
            stock: tuple[Any, int, int, bool] = super()._get_local_prefix_cache_hit(request)
            return stock
        blocks, tokens = found
        return KVCacheBlocks(tuple(blocks)), tokens, 0, False

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """One step, with our word for the worker."""
        self.sessions.table.expire()
        output = super().schedule(*args, **kwargs)
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        step = self.sessions.step([*(new.req_id for new in output.scheduled_new_reqs), *resumed])
        if step:
            setattr(output, OURS, step)
        self._unstick(output)
        return output

    def _unstick(self, output: SchedulerOutput) -> None:
        """A request that cannot begin though nothing runs waits for sessions' blocks: one goes; else it is refused."""
        blocked = not output.total_num_scheduled_tokens and not self.running and bool(self.waiting)
        if not blocked or self.sessions.make_room():
            self._stuck = False
        elif not self._stuck:
            self._stuck = True  # what was just freed counts from the next step on
        else:
            self._stuck = False
            self._refuse(
                self.waiting.peek_request(),
                f"the request does not fit: {self.kv_cache_manager.block_pool.get_num_free_blocks()} blocks of "
                f"{self.sessions.facts.block_size} tokens are free and sessions in use hold the others; drop sessions, "
                "or start with a larger pool",
            )

    def _refuse(self, request: Request, why: str) -> None:
        self.sessions.totals["refused"] += 1
        self._answer(request, {REFUSED: why})
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """Requests whose compaction failed end before their token counts."""
        result: Result | None = getattr(model_runner_output, OURS, None)
        if result is not None:
            for request_id, why in self.sessions.heard(result).items():
                if request_id in self.requests:
                    self._refuse(self.requests[request_id], why)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        answers, self._answers = self._answers, []
        for client, output in answers:
            outputs.setdefault(client, EngineCoreOutputs(outputs=[])).outputs.append(output)
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """With our numbers in the one field that takes anybody's, whenever a session came or went."""
        stats = super().make_stats(*args, **kwargs)
        changed = self.sessions.changes()
        if stats is not None and changed != self._told:
            self._told = changed
            ours = numbers(self.sessions.status(), self.sessions.facts.geometry.token_bytes)
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), OURS: ours}
        return stats

    def _connector_finished(self, request: Request) -> tuple[bool, Any]:
        """Called before the blocks of a request that ended are freed."""
        delay, params = super()._connector_finished(request)
        well = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        told = self.sessions.finished(
            request.request_id, well, request.prompt_token_ids or (), request.num_computed_tokens
        )
        return delay, params if told is None else {**(params or {}), OURS: told}


# --- the worker's side


def _initialized(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def initialize_kv_cache(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, kv_cache_config, *args, **kwargs)
        profiling = kwargs.get("is_profiling", args[0] if args else False)
        if profiling or not any(isinstance(g.kv_cache_spec, LayerSpec) for g in kv_cache_config.kv_cache_groups):
            return
        layers = self.compilation_config.static_forward_context
        facts = facts_of(self.kv_cache_config, self.model_config, self.num_query_heads)
        pages = [Pages(layers[name], facts.block_size) for name in facts.layers]
        setattr(self, OURS, Worker(facts, Taps(self.model, facts, layers), pages))
        self.wakesight_offsets = {}
        for group in facts.groups:
            for attention in self.attn_groups[group]:
                for builder in attention.metadata_builders:
                    builder.build = _shortened(self, group, builder.build)

    return initialize_kv_cache


def _shortened(runner: Any, group: int, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Metadata of one layer's group: lengths in slots."""

    def build(common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        offsets = runner.wakesight_offsets.get(group)
        if offsets is not None:
            common_attn_metadata = _with_slots(common_attn_metadata, offsets)
        return stock(common_prefix_len, common_attn_metadata, *args, **kwargs)

    return build


def _with_slots(common: Any, offsets: torch.Tensor) -> Any:
    changes: dict[str, Any] = {}
    for name in ("seq_lens", "_seq_lens_cpu", "_num_computed_tokens_cpu", "seq_lens_cpu_upper_bound"):
        lengths = getattr(common, name, None)
        if lengths is not None:
            shorter = lengths.clone()
            shorter[: len(offsets)] -= offsets.to(shorter.device, shorter.dtype)
            changes[name] = shorter
    changes["max_seq_len"] = int(changes["seq_lens"].max())
    return replace(common, **changes)


def _slots(stock: Callable[..., Any]) -> Callable[..., Any]:
    def compute_slot_mapping(self: Any, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
        by_group = getattr(self, "wakesight_offsets", None)
        if not by_group:
            stock(self, num_reqs, query_start_loc, positions)
            return
        counts = (query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]).long()
        row = torch.repeat_interleave(torch.arange(num_reqs, device=counts.device), counts)
        for group, table in enumerate(self.block_tables):
            places = positions
            if group in by_group:
                places = positions.clone()
                places[: len(row)] -= by_group[group].to(places.device)[row]
            table.compute_slot_mapping(num_reqs, query_start_loc, places)

    return compute_slot_mapping


def _executed(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        worker: Worker | None = getattr(self, OURS, None)
        if worker is None:
            return stock(self, scheduler_output, *args, **kwargs)
        step: Step | None = getattr(scheduler_output, OURS, None)
        worker.receive(step, scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or ())
        try:
            return _with_result(worker, stock(self, scheduler_output, *args, **kwargs))
        finally:
            worker.taps.rows = []

    return execute_model


def _sampled(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        worker: Worker | None = getattr(self, OURS, None)
        output = stock(self, *args, **kwargs)
        return output if worker is None else _with_result(worker, output)

    return sample_tokens


def _with_result(worker: Worker, output: Any) -> Any:
    """vLLM gives its output at once or, more often, once it has sampled."""
    if output is not None and worker.result:
        setattr(output, OURS, worker.take_result())
    return output


def _prepared(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _prepare_inputs(self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        worker: Worker | None = getattr(self, OURS, None)
        if worker is not None:
            batch = self.input_batch
            rows = worker.prepare(batch.req_ids[: batch.num_reqs], num_scheduled_tokens, batch.block_table.block_tables)
            self.wakesight_offsets = batch.block_table.wakesight_offsets = rows
        return stock(self, scheduler_output, num_scheduled_tokens)

    return _prepare_inputs


# --- the front's side


class Refused(VLLMClientError, ValueError):
    """A RequestError in the form that vLLM's server turns into HTTP 400."""


def _configured(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        flags.prepare(self)
        config = stock(self, *args, **kwargs)
        flags.check(config)
        return config

    return create_engine_config


def _validated(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _validate_params(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, params, *args, **kwargs)
        if isinstance(params, SamplingParams):
            try:
                flags.check_params(keys.read(params.extra_args), params)
            except RequestError as error:
                raise Refused(str(error)) from error

    return _validate_params


def _processed(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def process_outputs(self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        passed = []
        for output in engine_core_outputs:
            told = (output.kv_transfer_params or {}).get(OURS) or {}
            state = self.request_states.get(output.request_id)
            if REFUSED in told and state is not None and state.queue is not None:
                state.queue.put(Refused(told[REFUSED]))  # raised where the HTTP request is answered
                self._finish_request(state)
            else:
                passed.append(output)
        return stock(self, passed, *args, **kwargs)

    return process_outputs


_exporter = Exporter()


def _recorded(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def record(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> Any:
        told = scheduler_stats and scheduler_stats.kv_connector_stats
        if told and OURS in told:
            _exporter.show(told[OURS])
            others = {name: value for name, value in told.items() if name != OURS}
            scheduler_stats.kv_connector_stats = others or None
        return stock(self, scheduler_stats, *args, **kwargs)

    return record


# --- installation


@dataclass(frozen=True)
class Patch:
    """owner.name becomes wrap(owner.name), if its parameters are those it was written for."""

    owner: Any
    name: str
    parameters: tuple[str, ...]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None  # None: overridden in a subclass


LOCAL = ("self", "request_id", "new_computed_blocks", "num_local_computed_tokens", "num_external_computed_tokens")
NEEDED = (
    "self", "request_id", "num_tokens", "new_computed_blocks", "total_computed_tokens", "num_local_computed_tokens",
    "num_tokens_main_model", "apply_admission_cap",
)  # fmt: skip
PATCHES = (
    Patch(EngineArgs, "create_engine_config", ("self", "usage_context", "headless"), _configured),
    Patch(InputProcessor, "_validate_params", ("self", "params", "supported_tasks"), _validated),
    Patch(
        OutputProcessor,
        "process_outputs",
        ("self", "engine_core_outputs", "engine_core_timestamp", "iteration_stats"),
        _processed,
    ),
    Patch(
        StatLoggerManager,
        "record",
        ("self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
        _recorded,
    ),
    Patch(kv_cache_utils, "get_kv_cache_groups", ("vllm_config", "kv_cache_spec"), _one_group_per_layer),
    Patch(MambaManager, "add_local_computed_blocks", LOCAL, _add_recurrent_state),
    Patch(MultiGroupBlockTable, "compute_slot_mapping", ("self", "num_reqs", "query_start_loc", "positions"), _slots),
    Patch(GPUModelRunner, "initialize_kv_cache", ("self", "kv_cache_config", "is_profiling"), _initialized),
    Patch(GPUModelRunner, "execute_model", ("self", "scheduler_output", "intermediate_tensors"), _executed),
    Patch(GPUModelRunner, "sample_tokens", ("self", "grammar_output"), _sampled),
    Patch(GPUModelRunner, "_prepare_inputs", ("self", "scheduler_output", "num_scheduled_tokens"), _prepared),
    Patch(FullAttentionManager, "add_local_computed_blocks", LOCAL, None),
    Patch(FullAttentionManager, "get_num_blocks_to_allocate", NEEDED, None),
    Patch(
        FullAttentionManager, "allocate_new_blocks", ("self", "request_id", "num_tokens", "num_tokens_main_model"), None
    ),
    Patch(FullAttentionManager, "pop_blocks_for_free", ("self", "request_id"), None),
    Patch(Scheduler, "add_request", ("self", "request"), None),
    Patch(Scheduler, "_get_local_prefix_cache_hit", ("self", "request"), None),
    Patch(Scheduler, "schedule", ("self", "throttle_prefills"), None),
    Patch(Scheduler, "update_from_output", ("self", "scheduler_output", "model_runner_output"), None),
    Patch(Scheduler, "_connector_finished", ("self", "request"), None),
    Patch(
        Scheduler,
        "make_stats",
        ("self", "spec_decoding_stats", "kv_connector_stats", "cudagraph_stats", "perf_stats"),
        None,
    ),
)
_installed = False


def check(patches: Sequence[Patch] = PATCHES) -> None:
    """Raise RequestError, naming the function, unless every one takes what it was written for."""
    for patch in patches:
        found = getattr(patch.owner, patch.name, None)
        have = () if found is None else tuple(inspect.signature(found).parameters)
        if have != patch.parameters:
            name = f"{getattr(patch.owner, '__name__', patch.owner)}.{patch.name}"
            raise RequestError(
                f"vLLM's {name} takes ({', '.join(have)}) here and wakesight was written for "
                f"({', '.join(patch.parameters)}); install an unmodified vLLM, or leave out WAKESIGHT_VLLM=1"
            )


def install() -> None:
    """Change vLLM, once in a process; all or nothing."""
    global _installed
    if _installed:
        return
    check()
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(LayerSpec, ShorterManager)
    for patch in PATCHES:
        if patch.wrap is not None:
            setattr(patch.owner, patch.name, patch.wrap(getattr(patch.owner, patch.name)))
    _installed = True
