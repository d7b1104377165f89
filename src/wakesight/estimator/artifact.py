"""What was learned about one model, as a folder: `artifact.json` and `artifact.safetensors`.

The JSON says which model it belongs to (fingerprint, geometry), what every input of a reader is, the tables, how the
readers were trained and how well they did. The tensors are the readers' weights and statistics; the JSON holds their
sha256, so that the two files cannot be mixed up, and one of itself (artifacts of older versions have none). There is no
time and no path of this machine in either: the same training gives the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from wakesight.core import ModelGeometry, Tables
from wakesight.errors import RequestError, WorkError
from wakesight.estimator.features import FeatureSpec
from wakesight.estimator.net import TENSORS, LayerNets, Reader

FORMAT = "wakesight-artifact"
VERSION = 1
JSON, WEIGHTS = "artifact.json", "artifact.safetensors"
# what must be equal; bytes per number and the longest context may differ
CHECKED = (
    "family", "n_layers", "attention_layers", "recurrent_layers", "query_heads", "kv_heads", "key_dims", "value_dims",
    "native_heads",
)  # fmt: skip
MAKE = "wakesight label ... and then: wakesight fit LABELS --out DIR"


@dataclass(frozen=True, eq=False)
class Artifact:
    """fingerprint: of the model. geometry: what `described` gives. tables: budgets measured offline.

    readers: by name ("signals", "signals+keys", "hidden", "hidden+keys", "age"). query_stats: TriAttention's,
    "mean.<layer>" float32 [query_head, band, 2] (real, imaginary) and "abs.<layer>" [query_head, band]; None if not
    measured. training, metrics: plain JSON.
    """

    fingerprint: str
    geometry: Mapping[str, Any]
    tables: Tables = field(default_factory=Tables)
    readers: Mapping[str, Reader] = field(default_factory=dict)
    query_stats: Mapping[str, Tensor] | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Artifact:
        """Read a folder that `save` made. Raises RequestError if it is missing, damaged or of another format."""
        folder = Path(path)
        about = _read_json(folder)
        tensors = _read_tensors(folder, about)
        try:
            found = cls(
                fingerprint=str(about["fingerprint"]),
                geometry=about["geometry"],
                tables=_tables(about["tables"]),
                readers={name: _reader(name, one, tensors) for name, one in about["readers"].items()},
                query_stats=_under("query_stats", tensors) or None,
                training=about["training"],
                metrics=about["metrics"],
            )
            found._check_shapes(about["readers"])
            return found
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise RequestError(
                f"{folder} is damaged: {JSON} does not describe its content ({error}); copy it again, or make one "
                f"with {MAKE}"
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the folder under a temporary name and rename it; an artifact that is there is replaced.

        Other files beside an artifact (its report) are kept. Raises RequestError if `path` is anything but an artifact
        or an empty folder, WorkError if the disk fails.
        """
        target = Path(path)
        check_target(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            try:
                self._write(scratch)
                if target.is_dir():
                    _carry_over(target, scratch)
                scratch.chmod(0o755)
                _swap(scratch, target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        except OSError as error:
            raise WorkError(f"the artifact could not be written to {target}: {error.strerror or error}") from error

    def check(self, geometry: ModelGeometry, fingerprint: str) -> None:
        """RequestError, saying what differs, unless this artifact belongs to that model."""
        here = described(geometry)
        for name in CHECKED:
            if self.geometry.get(name) != here[name]:
                raise RequestError(
                    f"this estimator belongs to another model: its {name} is {self.geometry.get(name)} and the loaded "
                    f"model has {here[name]}; make one for this model with {MAKE}"
                )
        if self.fingerprint != fingerprint:
            raise RequestError(
                "this estimator was fitted on other weights of a model of the same shape (fingerprint "
                f"{self.fingerprint[:12]}, the loaded model's is {fingerprint[:12]}); load that model, or make one "
                f"with {MAKE}"
            )

    def reader(self, name: str) -> Reader:
        """The reader of that name; RequestError names those that are there and the command that makes one."""
        try:
            return self.readers[name]
        except KeyError:
            have = ", ".join(self.readers) or "none"
            raise RequestError(
                f"this estimator has no reader {name!r} (it has {have}); make it with: "
                f"wakesight fit LABELS --out DIR --readers {name}"
            ) from None

    def replaced(self, **changes: Any) -> Artifact:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)

    def _check_shapes(self, readers: Mapping[str, Any]) -> None:
        """ValueError unless tables and readers have the layers and heads of the geometry, and the inputs it gives."""
        heads = list(restored(self.geometry).kv_heads)
        for name, table in vars(self.tables).items():
            if table is not None and [len(layer) for layer in table] != heads:
                raise ValueError(f"the table {name} has other layers or KV heads than the geometry")
        for name, reader in self.readers.items():
            if [nets.heads for nets in reader.layers] != heads or _described(reader, self.geometry) != readers[name]:
                raise ValueError(f"the reader {name} has other layers, KV heads or inputs than the geometry")
            if reader.windows != reader.features.windows(restored(self.geometry)):
                raise ValueError(f"the reader {name} reads other recurrent layers than its window gives")

    def _write(self, folder: Path) -> None:
        tensors = {
            f"readers.{name}.{layer}.{key}": tensor.contiguous()
            for name, reader in self.readers.items()
            for layer, nets in enumerate(reader.layers)
            for key, tensor in nets.tensors().items()
        }
        tensors |= {f"query_stats.{key}": tensor.contiguous() for key, tensor in (self.query_stats or {}).items()}
        data = save_tensors({name: tensors[name].cpu() for name in sorted(tensors)})
        about = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "geometry": dict(self.geometry),
            "tables": {name: value for name, value in vars(self.tables).items() if value is not None},
            "readers": {name: _described(reader, self.geometry) for name, reader in self.readers.items()},
            "training": dict(self.training),
            "metrics": dict(self.metrics),
            "weights_sha256": hashlib.sha256(data).hexdigest(),
        }
        about["json_sha256"] = _json_sha256(about)
        _put(folder / WEIGHTS, data)
        text = json.dumps(about, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
        _put(folder / JSON, text.encode())


# by preference: the scorer, and the readers of which one makes it possible
_SCORERS = (("gatesight+", {"signals+keys", "hidden+keys"}), ("gatesight", {"signals", "hidden"}))


def best_scorer(path: str | os.PathLike[str]) -> str | None:
    """The scorer that an artifact's readers allow, the one that looks at more first; None for tables alone.

    Reads no weights. Raises RequestError if the folder is missing or damaged.
    """
    readers = set(_read_json(Path(path)).get("readers", ()))
    return next((name for name, needed in _SCORERS if readers & needed), None)


def described(geometry: ModelGeometry) -> dict[str, Any]:
    """A geometry as plain JSON: tuples are lists."""
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(geometry).items()
    }


def restored(about: Mapping[str, Any]) -> ModelGeometry:
    """The geometry that `described` wrote."""
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in about.items()}
    return ModelGeometry(**values)


def check_target(target: Path) -> None:
    """RequestError if saving an artifact at `target` would replace something else."""
    if target.exists() and not target.is_dir():
        raise RequestError(f"{target} is a file; an artifact is a folder, give another name with --out")
    if target.is_dir() and any(target.iterdir()) and not _is_artifact(target):
        raise RequestError(f"{target} is a folder that holds no artifact; give a new folder with --out")


def _is_artifact(folder: Path) -> bool:
    try:
        about = json.loads((folder / JSON).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and about.get("format") == FORMAT


def _carry_over(old: Path, new: Path) -> None:
    for file in old.iterdir():
        if file.name not in (JSON, WEIGHTS):
            copy: Callable[..., Any] = shutil.copytree if file.is_dir() else shutil.copy2
            copy(file, new / file.name)


def _swap(scratch: Path, target: Path) -> None:
    """Put `scratch` in the place of `target`; a folder that was there is put aside first and deleted last."""
    if not target.exists():
        scratch.replace(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent)) / target.name
    target.replace(aside)
    try:
        scratch.replace(target)
    except OSError:
        aside.replace(target)
        raise
    finally:
        shutil.rmtree(aside.parent, ignore_errors=True)


def _put(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_json(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / JSON).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        what = "it has no " + JSON if folder.is_dir() else "there is no such folder"
        raise RequestError(f"{folder} is no estimator: {what}; make one with {MAKE}") from None
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{folder / JSON} is damaged or cannot be read ({error}); copy the folder again, or make one with {MAKE}"
        ) from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise RequestError(f"{folder} is no estimator: {JSON} has another format; make one with {MAKE}")
    version = about.get("version")
    if version != VERSION:
        raise RequestError(
            f"{folder} has format version {version} and this wakesight reads version {VERSION}; update wakesight, or "
            f"make one with {MAKE}"
        )
    if about.get("json_sha256", digest := _json_sha256(about)) != digest:
        raise RequestError(
            f"{folder / JSON} is damaged: its content is not what was written; copy the folder again, or make one with "
            f"{MAKE}"
        )
    return about


def _json_sha256(about: Mapping[str, Any]) -> str:
    """Of the content, whatever the spacing and the order; the sum itself is left out."""
    plain = {name: value for name, value in about.items() if name != "json_sha256"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _read_tensors(folder: Path, about: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        data = (folder / WEIGHTS).read_bytes()
    except OSError as error:
        raise RequestError(
            f"{folder / WEIGHTS} cannot be read ({error.strerror}); copy the folder again, or make one with {MAKE}"
        ) from None
    damaged = f"{folder / WEIGHTS} is damaged or belongs to another artifact; copy the folder again"
    if hashlib.sha256(data).hexdigest() != about.get("weights_sha256"):
        raise RequestError(damaged)
    with contextlib.suppress(SafetensorError):
        return dict(load_tensors(data))
    raise RequestError(damaged)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _described(reader: Reader, geometry: Mapping[str, Any]) -> dict[str, Any]:
    known = restored(geometry)
    layers = []
    for layer, nets in enumerate(reader.layers):
        hidden = 0
        if "hidden" in reader.features.parts:
            hidden = nets.inputs - reader.features.width(known, layer)
        layers.append(
            {
                "inputs": nets.inputs,
                "shared": nets.shared,
                "window": list(reader.windows[layer]),
                "order": reader.features.blocks(known, layer, hidden),
            }
        )
    return {
        "parts": list(reader.features.parts),
        "window": reader.features.window,
        "parameters": reader.parameters,
        "layers": layers,
    }


def _reader(name: str, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Reader:
    spec = FeatureSpec(tuple(about["parts"]), int(about["window"]))
    layers = tuple(
        LayerNets(**{key: tensors[f"readers.{name}.{index}.{key}"] for key in TENSORS}, shared=int(layer["shared"]))
        for index, layer in enumerate(about["layers"])
    )
    windows = tuple(tuple(int(m) for m in layer["window"]) for layer in about["layers"])
    return Reader(spec, windows, layers)


def _tables(about: Mapping[str, Any]) -> Tables:
    return Tables(**{name: tuple(tuple(map(float, row)) for row in table) for name, table in about.items()})
