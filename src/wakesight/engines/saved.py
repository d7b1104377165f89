"""A session as a file: what goes in, and what must fit before anything comes out.

`cache/files.py` knows the format and its checksum; this page knows sessions. Slots is written with its
growth slack, so that a mapped session can be asked at once: the operating system copies a page of the file
when an answer is first written to it.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wakesight.arguments import file_path, shown
from wakesight.cache import files
from wakesight.cache.residency.flexi_slots import HeadGroups
from wakesight.cache.residency.paged import PagedSlots
from wakesight.cache.residency.plan import PagePlan
from wakesight.cache.slots import Slots
from wakesight.cache.state import SessionState
from wakesight.core import KeptSet
from wakesight.engines.base import Engine
from wakesight.engines.recording import ON_REQUEST, Recording
from wakesight.engines.session import Session
from wakesight.errors import RequestError
from wakesight.estimator.digest import digest
from wakesight.models.chat import Frame
from wakesight.policy import Policy
from wakesight.signals.attention_sums import AttentionSums
from wakesight.signals.gates import OutputGate
from wakesight.signals.precision import working_dtype
from wakesight.signals.query_moments import QueryMoments
from wakesight.signals.rows import Rows


def save(session: Session, path: str | os.PathLike[str]) -> None:
    """Write `session`; see `Session.save`."""
    path = file_path(path)
    engine, state, recording = session.engine, session.state, session.recording
    if any(isinstance(slots, HeadGroups) for slots in state.slots):
        raise RequestError(
            "a demoted session whose heads differ (dense_heads) cannot be saved yet; save the whole session, and "
            "demote it after loading"
        )
    tensors: dict[str, Tensor] = {"tokens": torch.tensor(state.tokens, dtype=torch.int32)}
    late: dict[str, Callable[[], Tensor]] = {}
    for layer, slots in enumerate(state.slots):
        if isinstance(slots, PagedSlots):
            tensors.update({f"paged.{layer}.{name}": tensor for name, tensor in slots.saved().items()})
            late.update({f"paged.{layer}.{name}": read for name, read in slots.saved_pages().items()})
            continue
        slots.zero_slack()
        tensors.update({f"slots.{layer}.{name}": slots.storage(name) for name in slots.names})
    if state.kept is not None:
        for layer, heads in enumerate(state.kept.positions):
            tensors.update({f"kept.{layer}.{head}": where.to(torch.int32) for head, where in enumerate(heads)})
    tensors.update({f"state.{name}": lease.tensor for name, lease in state.states.items()})
    tensors.update(_recorded(recording))
    frame = session.frame
    header = {
        "model": {
            "name": _loadable(engine.name),
            "family": engine.geometry.family,
            "dtype": _name(engine.dtype),
            "fingerprint": engine.fingerprint(),
        },
        "artifact": _estimator(engine),
        "prefix": state.prefix,
        "whole": state.kept is None,
        "demoted": state.demoted,
        "frame": {"head": list(frame.head), "tail": list(frame.tail), "separator": frame.separator},
        "policy": session.policy and session.policy.to_json(),
        "seconds": {"prefill": session.prefill_s, "score": session.score_s, "compact": session.compact_s},
        "layers": [_about(slots) for slots in state.slots],
        "states": sorted(state.states),
        "recording": {
            "window": recording.window,
            "record": list(recording.record),
            "scaling": [float(layer.scaling) for layer in recording.layers],
        },
    }
    files.write(path, header, tensors, version=2 if state.demoted else 1, late=late)


def _about(slots: Slots) -> dict[str, Any]:
    """One layer for the header."""
    if isinstance(slots, PagedSlots):
        settled, step = slots.counters
        return {"plan": dataclasses.asdict(slots.plan), "settled": settled, "step": step}
    return {
        "lengths": list(slots.lengths),
        "capacities": list(slots.capacities),
        "heads": {name: payload.heads for name, payload in slots.payloads.items()},
    }


def load(path: str | os.PathLike[str], engine: Engine) -> Session:
    """Open a saved session; see `Session.load`."""
    if not hasattr(engine, "check_open"):
        raise RequestError(f"{shown(engine)} is no engine; give the one that wakesight.load made")
    engine.check_open()
    saved = files.read(file_path(path))
    check_model(saved, engine)
    tokens = tuple(saved.tensor("tokens", [None], torch.int32).tolist())
    demoted = saved.header.get("demoted", False) is True  # absent in files of an older version
    layers = [_layer(saved, layer, engine, demoted) for layer in range(len(engine.geometry.attention_layers))]
    kept = None if saved.field(bool, "whole") else _kept(saved, layers)
    prefix = saved.field(int, "prefix")
    _check_lengths(saved, layers, kept, prefix, len(tokens))
    states = _states(saved, engine)
    frame = Frame(
        tuple(saved.list_of(int, "frame", "head")),
        tuple(saved.list_of(int, "frame", "tail")),
        saved.field(str, "frame", "separator"),
    )
    recording = _unheard(saved, engine) if demoted else _recording(saved, engine, len(tokens))
    policy = _policy(saved)
    prefill_s, score_s, compact_s = (saved.field(float, "seconds", name) for name in ("prefill", "score", "compact"))
    # Everything is checked; only now does it enter the pool's ledger.
    slots = _stored(engine, layers)
    leases = {name: engine.pool.adopt(tensor) for name, tensor in states.items()}
    return Session(
        engine, SessionState(engine.pool, slots, leases, tokens, prefix, kept), frame, recording,
        prefill_s=prefill_s, policy=policy, score_s=score_s, compact_s=compact_s,
    )  # fmt: skip


class Made(NamedTuple):
    """What a saved session was made with: the model's name and dtype, and the estimator that was named for it.

    artifact: folder and digest; None where it was the model's own or there was none.
    """

    file: str
    model: str
    dtype: str
    artifact: tuple[str, str] | None

    def estimator(self) -> str | None:
        """The folder of that estimator. Raises RequestError if it holds something else by now."""
        if self.artifact is None:
            return None
        folder, expected = self.artifact
        try:
            found = digest(folder)
        except RequestError:
            found = "nothing"
        if found != expected:
            raise RequestError(
                f"{self.file} was saved with the estimator in {folder}, which is gone or has changed since; say with "
                "--artifact which one to use now"
            )
        return folder


def about(path: str | os.PathLike[str]) -> Made:
    """What the session in that file was made with."""
    saved = files.read(path)
    artifact = None
    if saved.header.get("artifact") is not None:  # absent in files of an older version
        artifact = (saved.field(str, "artifact", "folder"), saved.field(str, "artifact", "sha256"))
    return Made(os.fspath(path), model_name(saved), saved.field(str, "model", "dtype"), artifact)


def _estimator(engine: Engine) -> dict[str, str] | None:
    """Which estimator was named when the model was loaded; None for the model's own, which is found again anyway."""
    from wakesight.models.load import own_artifact  # here, because it needs transformers

    folder = engine.artifact_folder
    if folder is None or folder == own_artifact(engine.name):
        return None
    return {"folder": os.path.abspath(folder), "sha256": digest(folder)}


def model_name(saved: files.SavedFile) -> str:
    """The name of the model the session was made with, as it was loaded then."""
    return saved.field(str, "model", "name")


def check_model(saved: files.SavedFile, engine: Engine) -> None:
    """Refuse a session of another model or dtype, by name."""
    name, dtype = model_name(saved), saved.field(str, "model", "dtype")
    family = saved.field(str, "model", "family")
    if family != engine.geometry.family:
        raise RequestError(
            f"{saved.path} is a session of the {family} model {name}, and {engine.name} is "
            f"a {engine.geometry.family} model; load the model it was made with"
        )
    if dtype != _name(engine.dtype):
        raise RequestError(
            f"{saved.path} was made with dtype {dtype}, and {engine.name} is loaded as {_name(engine.dtype)}; "
            f"load it with --dtype {dtype}"
        )
    if saved.field(str, "model", "fingerprint") != engine.fingerprint():
        raise RequestError(
            f"{saved.path} was made with other weights than those of {engine.name} (it was called {name} then); "
            "load the very model it was made with, or prefill again"
        )


class _Layer(NamedTuple):
    """One attention layer's storage, as `Slots.adopt` takes it."""

    tensors: dict[str, Tensor]
    heads: dict[str, int]
    lengths: list[int]
    capacities: list[int]


class _Paged(NamedTuple):
    """One demoted layer, as `PagedSlots.load` takes it."""

    tensors: dict[str, Tensor]
    plan: PagePlan
    settled: int
    step: int

    @property
    def lengths(self) -> list[int]:
        """Entries per KV head."""
        rest = self.tensors["rest_key"]
        return [self.settled * self.plan.page_size + rest.shape[1]] * rest.shape[0]


def _stored(engine: Engine, layers: Sequence[_Layer | _Paged]) -> tuple[Slots, ...]:
    """The layers in the pool's ledger, or nothing there. Raises WorkError on lack of memory or disk."""
    made: list[Slots] = []
    try:
        for layer in layers:
            if isinstance(layer, _Layer):
                made.append(Slots.adopt(engine.pool, *layer))
                continue
            rest = (layer.tensors["rest_key"], layer.tensors["rest_value"])
            paged = PagedSlots(engine.pool, layer.plan, *rest)
            made.append(paged)
            paged.load(layer.tensors, layer.settled, layer.step)
    except BaseException:
        for slots in made:
            slots.release()
        raise
    return tuple(made)


def _paged(saved: files.SavedFile, layer: int, engine: Engine, about: dict[str, Any]) -> _Paged:
    """A demoted layer, checked: its plan, its sizes, and that its slots name pages there are."""
    geometry, device = engine.geometry, engine.layer_devices[layer]
    heads, dims = geometry.kv_heads[layer], (geometry.key_dims[layer], geometry.value_dims[layer])
    numbers = [about.get("settled"), about.get("step")]
    try:
        plan = PagePlan(**about["plan"])
        plan.check()
        settled, step = (number for number in numbers if type(number) is int and number >= 0)
    except (TypeError, ValueError, KeyError) as error:
        raise _no_pages(saved, layer, engine) from error
    size = plan.page_size

    def tensor(name: str, *shape: int | None, dtype: torch.dtype) -> Tensor:
        return saved.tensor(f"paged.{layer}.{name}", shape, dtype).to(device)

    tensors = {name: tensor(name, heads, plan.slots, dtype=torch.int32) for name in ("slot_page", "last_use")}
    tensors["last_weight"] = tensor("last_weight", heads, plan.slots, dtype=torch.float32)
    for name, dim in zip(("key", "value"), dims, strict=True):
        tensors[f"page_{name}"] = tensor(f"page_{name}", heads, None, size, dim, dtype=engine.dtype)
        tensors[f"rest_{name}"] = tensor(f"rest_{name}", heads, None, dim, dtype=engine.dtype)
    found, pages, rest = tensors["slot_page"], tensors["page_key"].shape[1], tensors["rest_key"].shape[1]
    in_tail = rest - plan.strip * size
    fits = (
        tensors["page_value"].shape[1] == pages
        and tensors["rest_value"].shape[1] == rest
        and in_tail <= plan.tail * size
        and pages == settled + max(0, in_tail) // size
        and bool(((found >= -1) & (found < max(settled, 1))).all())
    )
    if not fits:
        raise _no_pages(saved, layer, engine)
    return _Paged(tensors, plan, settled, step)


def _no_pages(saved: files.SavedFile, layer: int, engine: Engine) -> RequestError:
    return RequestError(
        f"{saved.path} does not describe the demoted pages of attention layer {layer} of {engine.name}; "
        "prefill and save the session again"
    )


def _unheard(saved: files.SavedFile, engine: Engine) -> Recording:
    """Of a demoted session nothing is recorded: it is not scored again."""
    window = saved.field(int, "recording", "window")
    if window < 1:
        raise RequestError(f"{saved.path} does not describe what was recorded; prefill and save the session again")
    return engine.recording(window, ())


def _layer(saved: files.SavedFile, layer: int, engine: Engine, demoted: bool) -> _Layer | _Paged:
    entries = saved.list_of(dict, "layers")
    if demoted and layer < len(entries) and "plan" in entries[layer]:
        return _paged(saved, layer, engine, entries[layer])
    geometry, device = engine.geometry, engine.layer_devices[layer]
    own = {"key": geometry.key_dims[layer], "value": geometry.value_dims[layer]}
    if geometry.index_dims:
        own["index"] = geometry.index_dims[layer]
    about = _sizes(saved, layer, geometry.kv_heads[layer])
    if about is None or about[2].keys() != own.keys():
        raise RequestError(
            f"{saved.path} does not describe attention layer {layer} of {engine.name} "
            f"({geometry.kv_heads[layer]} KV heads); prefill and save the session again"
        )
    lengths, capacities, heads = about
    tensors = {
        name: saved.tensor(f"slots.{layer}.{name}", [sum(capacities[:count]), own[name]], engine.dtype).to(device)
        for name, count in heads.items()
    }
    return _Layer(tensors, heads, lengths, capacities)


def _sizes(saved: files.SavedFile, layer: int, kv_heads: int) -> tuple[list[int], list[int], dict[str, int]] | None:
    """Lengths and capacities per KV head and heads per payload; None where they make no sense."""
    entries = saved.list_of(dict, "layers")
    about: dict[str, Any] = entries[layer] if layer < len(entries) else {}
    lengths, capacities, heads = _counts(about.get("lengths")), _counts(about.get("capacities")), about.get("heads")
    if len(lengths) != kv_heads or len(capacities) != kv_heads or not isinstance(heads, dict):
        return None
    if heads.get("key") != kv_heads or heads.get("value") != kv_heads:
        return None
    if not all(type(count) is int and count in (1, kv_heads) for count in heads.values()):
        return None
    fits = all(have <= room for have, room in zip(lengths, capacities, strict=True))
    return (lengths, capacities, heads) if fits else None


def _counts(value: object) -> list[int]:
    good = isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)
    return list(value) if good and isinstance(value, list) else []


def _kept(saved: files.SavedFile, layers: Sequence[_Layer | _Paged]) -> KeptSet:
    return KeptSet(
        tuple(
            tuple(
                saved.tensor(f"kept.{layer}.{head}", [count], torch.int32).to(
                    next(iter(one.tensors.values())).device, torch.int64
                )
                for head, count in enumerate(one.lengths)
            )
            for layer, one in enumerate(layers)
        )
    )


def _check_lengths(
    saved: files.SavedFile, layers: Sequence[_Layer | _Paged], kept: KeptSet | None, prefix: int, tokens: int
) -> None:
    """Entries, positions and the protected prefix must belong to the context's tokens."""
    if kept is None:
        fits = all(length == tokens for one in layers for length in one.lengths)
    else:
        heads = [head for layer in kept.positions for head in layer if len(head)]
        fits = all(int(head[0]) >= 0 and int(head[-1]) < tokens and bool((head.diff() > 0).all()) for head in heads)
    if not fits or not tokens or not 0 <= prefix <= tokens:
        raise RequestError(
            f"{saved.path} holds entries that do not belong to its {tokens} tokens; prefill and save the session again"
        )


def _states(saved: files.SavedFile, engine: Engine) -> dict[str, Tensor]:
    names, shapes = saved.list_of(str, "states"), engine.state_shapes
    if sorted(names) != sorted(shapes):
        raise RequestError(
            f"{saved.path} does not hold the recurrent states of {engine.name}; prefill and save the session again"
        )
    states = {}
    for name in names:
        shape, dtype, device = shapes[name]
        states[name] = saved.tensor(f"state.{name}", shape, dtype).to(device)
    return states


def _policy(saved: files.SavedFile) -> Policy | None:
    """The policy the session was compacted by; None, with a warning, where it needs a method that is not installed.

    It is a record of what was done: a plug-in that is missing today must not lose the session.
    """
    if saved.header.get("policy") is None:
        return None
    plain = saved.field(dict, "policy")
    try:
        return Policy.from_json(plain)
    except RequestError as error:
        warnings.warn(
            f"{saved.path} was compacted by a policy that cannot be made here ({error}); the session is whole, "
            "only its policy is left out",
            stacklevel=4,
        )
        return None


def _recorded(recording: Recording) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(recording.layers):
        if layer.queries.rows is not None:
            tensors[f"queries.{index}"] = layer.queries.rows
        for tap in (layer.sums, layer.moments, layer.gate):
            if tap is not None:
                tensors.update({f"{name}.{index}": tensor for name, tensor in tap.tensors().items()})
        if layer.hidden is not None:
            tensors[f"hidden.{index}"] = layer.hidden.whole()
    tensors.update({f"native.{index}": rows.whole() for index, rows in enumerate(recording.native)})
    return tensors


def _recording(saved: files.SavedFile, engine: Engine, tokens: int) -> Recording:
    window = saved.field(int, "recording", "window")
    record = tuple(name for name in ON_REQUEST if name in saved.list_of(str, "recording", "record"))
    scaling = saved.list_of(float, "recording", "scaling")
    geometry = engine.geometry
    if window < 1 or len(scaling) != len(geometry.attention_layers):
        raise RequestError(f"{saved.path} does not describe what was recorded; prefill and save the session again")
    recording = engine.recording(window, record)
    _overheard(saved, recording, engine, tokens)
    if engine.only_whole is not None:
        return recording  # where nothing can be evicted, queries are not kept
    heads = geometry.query_heads
    for index, (layer, scale) in enumerate(zip(recording.layers, scaling, strict=True)):

        def tensor(name: str, *shape: int, dtype: torch.dtype, index: int = index) -> Tensor:
            return saved.tensor(f"{name}.{index}", shape, dtype).to(engine.layer_devices[index])

        dim = geometry.key_dims[index]
        if recording.latent_keys is not None:
            dim += geometry.value_dims[index]  # the two parts of a latent entry
        layer.scaling = scale
        layer.queries.rows = tensor("queries", heads, min(window, tokens), dim, dtype=engine.dtype)
        if layer.sums is not None:
            sums = tensor("sums", heads, tokens, dtype=working_dtype(engine.dtype))
            layer.sums = AttentionSums.restored({"sums": sums})
        if layer.moments is not None:
            moments = {
                "count": tensor("count", 1, dtype=torch.int64),
                "mean": tensor("mean", heads, dim, dtype=torch.float64),
                "scatter": tensor("scatter", heads, dim, dim, dtype=torch.float64),
            }
            layer.moments = QueryMoments.restored(moments, engine.dtype)
    return recording


def _overheard(saved: files.SavedFile, recording: Recording, engine: Engine, tokens: int) -> None:
    """Fill in what the model's own modules told."""
    geometry = engine.geometry
    for index, layer in enumerate(recording.layers):
        device = engine.layer_devices[index]
        if layer.gate is not None:
            shapes = {"gate.sizes": 2, "gate.sums": geometry.query_heads, "gate.peaks": geometry.kv_heads[index]}
            gate = {}
            for name, size in shapes.items():
                dtype = torch.int64 if name == "gate.sizes" else torch.float64
                gate[name] = saved.tensor(f"{name}.{index}", [size], dtype).to(device)
            layer.gate = OutputGate.restored(gate)
        if layer.hidden is not None:
            layer.hidden = Rows(saved.tensor(f"hidden.{index}", [tokens, None], engine.dtype).to(device))
    for index, heads in enumerate(geometry.native_heads if recording.native else ()):
        at = f"{geometry.recurrent_layers[index]}/recurrent.0"
        rows = saved.tensor(f"native.{index}", [tokens, heads, 3], torch.float32)
        recording.native[index] = Rows(rows.to(engine.state_shapes[at][2]))
    try:
        recording.check_heard(tokens)
    except RuntimeError as error:
        raise RequestError(
            f"{saved.path} holds signals of another number of tokens; prefill and save the session again"
        ) from error


def _loadable(name: str) -> str:
    """The name of a model, such that it can be loaded from any working directory."""
    from wakesight.models.load import BUNDLED  # here, because it needs transformers

    return os.path.abspath(name) if name not in BUNDLED and os.path.exists(name) else name


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
