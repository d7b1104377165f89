"""Labels -> an artifact: readers, tables, and how well the readers do beside simpler predictors.

All intermediate results lie in a folder beside the artifact, `<out>.partial`, under final names only when they are
complete: sampled rows, trained layers, the checkpoint of the layer in work. A fit that was killed and resumed gives the
same artifact, byte for byte; the folder goes when the artifact is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from wakesight.arguments import whole_number
from wakesight.core import Tables
from wakesight.errors import RequestError
from wakesight.estimator.artifact import Artifact, check_target, described
from wakesight.estimator.features import FeatureSpec, Window, reader_parts
from wakesight.estimator.net import TENSORS, LayerNets, Reader
from wakesight.learning import ridge
from wakesight.learning.dataset import ROWS, Drawn, Labels, LayerRows, Rows, open_labels, sample
from wakesight.learning.evaluate import Predictor, RidgeReader, always, by_fold, evaluate
from wakesight.learning.fit_report import write_report
from wakesight.learning.folder import make_folder
from wakesight.learning.survey import SLOW_TOKENS, Survey, survey
from wakesight.learning.train import Checkpoint, Recipe, train, write

STUDY_WINDOWS = (3, 6, 9, 12)
AGE = "age"
Group = tuple[str, tuple[str, ...]]  # documents of one corpus that are held out by the same folds
Progress = Callable[[int, int, str], None]  # steps done, steps in all, what is being done


@dataclass(frozen=True)
class Plan:
    """What decides the artifact. readers: names of `estimator.features.READERS`, the first one is compared by ridge.

    leave_one_out: judge by readers that did not see the document's corpus; otherwise the table says "in sample".
    """

    readers: tuple[str, ...] = ("signals",)
    window: int = 6
    recipe: Recipe = dataclasses.field(default_factory=Recipe)
    rows: int = ROWS
    leave_one_out: bool = True
    window_study: bool = False
    exclude_prefix: bool = True
    top_share: float = 0.2
    slow_tokens: float = SLOW_TOKENS
    k_frac: float = 0.1
    judge_every: int = 1

    def __post_init__(self) -> None:
        for name in self.readers:
            reader_parts(name)
        if not self.readers or len(set(self.readers)) < len(self.readers):
            raise RequestError("name each reader once, for example --readers signals,signals+keys")
        for name in ("rows", "judge_every", "window"):
            whole_number(getattr(self, name), name, least=1)
        whole_number(self.recipe.seed, "seed", least=0)

    def spec(self, reader: str) -> FeatureSpec:
        return FeatureSpec(reader_parts(reader), self.window)


def fit(
    labels: str | Path | Labels, out: str | Path, *, readers: Sequence[str] = ("signals",), seed: int = 0,
    window: int = 6, hidden: int = 64, epochs: int = 12, batch: int = 4096, leave_one_out: bool = True,
    window_study: bool = False, rows: int = ROWS, resume: bool = False, on_progress: Progress | None = None,
    **more: Any,
) -> Artifact:  # fmt: skip
    """Train the readers, measure tables and metrics, and write the artifact folder with report.json and report.md.

    labels: a folder of wakesight label, or what `open_labels` gave. readers: "signals", "signals+keys", "hidden",
    "hidden+keys", "age". more: other fields of `Plan`. An artifact of the same model at `out` keeps its gate table and
    query statistics (`calibrate` measures those). resume: go on with a fit that was stopped.

    Raises RequestError for labels or readers that do not go together, one corpus alone with leave_one_out, too few
    documents, an `out` that holds something else, or a stopped fit that is neither resumed nor the same.
    """
    recipe = Recipe(hidden=hidden, epochs=epochs, batch=batch, seed=seed)
    plan = Plan(tuple(readers), window, recipe, rows, leave_one_out, window_study, **more)
    found = labels if isinstance(labels, Labels) else open_labels(labels)
    target = Path(out)
    before = _before(target, found)
    for name in plan.readers:
        plan.spec(name).windows(found.geometry)  # raises where the model has nothing of the kind
    work = target.with_name(f"{target.name}.partial")
    _open(work, plan, found, resume)
    with _dropped_if_refused(work):
        artifact = _Job(plan, found, work, on_progress).artifact(before)
    artifact.save(target)
    write_report(target, artifact, plan.readers)
    shutil.rmtree(work)
    return artifact


def _before(target: Path, labels: Labels) -> Artifact | None:
    check_target(target)
    if not target.is_dir() or not any(target.iterdir()):
        return None
    found = Artifact.load(target)
    if found.fingerprint != labels.fingerprint:
        raise RequestError(f"{target} holds an estimator of another model; give a new folder with --out")
    return found


def _open(work: Path, plan: Plan, labels: Labels, resume: bool) -> None:
    """Make the work folder, or go on with one of the very same plan and labels."""
    about = {"plan": dataclasses.asdict(plan), "fingerprint": labels.fingerprint, "labels": labels.digest}
    config = json.loads(json.dumps(about))
    file = work / "plan.json"
    if file.exists():
        if not resume:
            raise RequestError(
                f"a stopped fit lies in {work}; go on with it by --resume, or start anew after: rm -r {work}"
            )
        before = json.loads(file.read_text("utf-8"))
        if {**before, "labels": labels.digest} != config:
            raise RequestError(f"the stopped fit in {work} was another one; repeat its arguments, or type rm -r {work}")
        if before.get("labels") != labels.digest:
            raise RequestError(
                f"the stopped fit in {work} was begun from other labels; give those, or start anew after: rm -r {work}"
            )
        return
    shutil.rmtree(work, ignore_errors=True)
    make_folder(work / "nets")
    _write_json(file, config)


@contextlib.contextmanager
def _dropped_if_refused(work: Path) -> Iterator[None]:
    """A refusal leaves no work folder behind that would block the corrected request; trained networks always stay."""
    try:
        yield
    except RequestError:
        if not any((work / "nets").iterdir()):
            shutil.rmtree(work)
        raise


@dataclass
class _Job:
    plan: Plan
    labels: Labels
    work: Path
    on_progress: Progress | None
    done: int = 0
    total: int = 0

    def artifact(self, before: Artifact | None) -> Artifact:
        plan = self.plan
        about = self._survey()
        folds = self._folds(about)
        parts = {part for name in (*plan.readers, AGE) for part in reader_parts(name)}
        parts |= {"native"} if plan.window_study else set()
        self._tell("sampling rows", 0)
        rows = sample(
            self.labels, self.work / "rows", sorted(parts), rows=plan.rows, seed=plan.recipe.seed,
            exclude_prefix=plan.exclude_prefix,
        )  # fmt: skip
        if [(one.id, one.corpus) for one in rows.documents] != list(about.documents):
            raise RequestError(f"the labels have changed since the fit was started; type rm -r {self.work}")
        specs = {name: plan.spec(name) for name in dict.fromkeys((*plan.readers, AGE))}
        studied = {f"signals, window {w}": FeatureSpec(reader_parts("signals"), w) for w in self._study()}
        layers = len(self.labels.geometry.attention_layers)
        judgements = (
            len(folds) * (len(specs) + len(studied)) if folds else len(specs) - len(plan.readers) + len(studied)
        )
        self.total = layers * (len(plan.readers) + judgements) + -(-len(about.documents) // plan.judge_every)
        fitted = {name: self._reader(name, specs[name], None, rows) for name in plan.readers}
        judged = {name: self._judged(name, spec, folds, rows, fitted.get(name)) for name, spec in specs.items()}
        judged |= {name: self._judged(name, spec, folds, rows, None) for name, spec in studied.items()}
        judged[f"ridge on {plan.readers[0]}"] = self._ridge(specs[plan.readers[0]], folds, rows)
        metrics = evaluate(
            self.labels, judged, self._windows(), about.slow(plan.slow_tokens), k_frac=plan.k_frac,
            exclude_prefix=plan.exclude_prefix, every=plan.judge_every, on_document=lambda _: self._tell("judging"),
        )  # fmt: skip
        metrics["judged"] = "leave one corpus out" if folds else "in sample"
        return Artifact(
            fingerprint=self.labels.fingerprint,
            geometry=described(self.labels.geometry),
            tables=self._tables(about.tables, before),
            readers={name: fitted[name] for name in plan.readers},
            query_stats=None if before is None else before.query_stats,
            training={**self._training(about, rows), **_calibrated(before)},
            metrics=metrics,
        )

    def _survey(self) -> Survey:
        file = self.work / "survey.json"
        if not file.exists():
            self._tell("reading labels", 0)
            found = survey(self.labels, top_share=self.plan.top_share, exclude_prefix=self.plan.exclude_prefix)
            _write_json(file, found.to_json())
        return Survey.from_json(json.loads(file.read_text("utf-8")))

    def _folds(self, about: Survey) -> list[str]:
        """Corpora that are left out in turn; none if documents are judged in sample.

        Raises RequestError where a fold has fewer documents than ridge needs: one to learn from, one held out.
        """
        folds = about.corpora if self.plan.leave_one_out else []
        if len(folds) == 1:
            raise RequestError(
                f"leave one corpus out needs two corpora or more, and all documents belong to {folds[0]!r}; "
                "name the corpora when labelling, or fit with --no-loco"
            )
        parts: list[str | None] = [*folds] or [None]
        for fold in parts:
            left = [one for one, corpus in about.documents if corpus != fold]
            if len(left) < 2:
                without = "" if fold is None else f" without the corpus {fold!r}"
                advice = "" if fold is None else ", or fit with --no-loco"
                raise RequestError(
                    f"{len(left)} labelled document{without} is too few to train on and to hold one out; "
                    f"label more documents{advice}"
                )
        return folds

    def _study(self) -> tuple[int, ...]:
        if not self.plan.window_study:
            return ()
        FeatureSpec(reader_parts("signals")).windows(self.labels.geometry)  # raises without native signals
        return STUDY_WINDOWS

    def _windows(self) -> tuple[Window, ...]:
        """Of the untrained signals: the paper's, whatever the readers see."""
        geometry = self.labels.geometry
        spec = FeatureSpec(("native",) if geometry.native_heads else ("age",), self.plan.window)
        return spec.windows(geometry)

    def _tables(self, mine: Tables, before: Artifact | None) -> Tables:
        return mine if before is None else dataclasses.replace(mine, gate=before.tables.gate)

    def _judged(
        self, name: str, spec: FeatureSpec, folds: Sequence[str], rows: Rows, whole: Reader | None
    ) -> Predictor:
        if folds:
            return by_fold({fold: self._reader(name, spec, fold, rows) for fold in folds})
        return always(self._reader(name, spec, None, rows) if whole is None else whole)

    def _reader(self, name: str, spec: FeatureSpec, fold: str | None, rows: Rows) -> Reader:
        """Trained on all corpora but `fold`, layer by layer; layers that are done already are only read."""
        windows = spec.windows(self.labels.geometry)
        chosen = rows.of(lambda one: one.corpus != fold)
        layers = tuple(
            self._layer(name, spec, window, layer, fold, rows, chosen) for layer, window in enumerate(windows)
        )
        return Reader(spec, windows, layers)

    def _layer(
        self, name: str, spec: FeatureSpec, window: Window, layer: int, fold: str | None, rows: Rows, chosen: Tensor
    ) -> LayerNets:
        unit = json.dumps([name, spec.window, fold, layer])
        place = "all" if fold is None else f"without-{rows.corpora.index(fold)}"
        file = self.work / "nets" / f"{name}.{spec.window}.{place}.{layer}.safetensors".replace(" ", "_")
        if not file.exists():
            about = f"{name}, {'all corpora' if fold is None else f'without {fold}'}, layer {layer}"
            nets = train(
                rows.layer(spec, layer, window), chosen, self.plan.recipe,
                Checkpoint(self.work / "current.safetensors", unit), on_epoch=lambda _: self._tell(about, 0),
            )  # fmt: skip
            write(file, nets.tensors(), {"shared": str(nets.shared)})
        self._tell(name)
        return _read_nets(file)

    def _ridge(self, spec: FeatureSpec, folds: Sequence[str], rows: Rows) -> Predictor:
        """Lines on the first reader's inputs, a penalty per head from a held-out tenth of the training documents."""
        windows = spec.windows(self.labels.geometry)
        lines: dict[str, list[tuple[ridge.Line, ...]]] = {fold: [] for fold in folds or [""]}
        for layer, window in enumerate(windows):
            data = rows.layer(spec, layer, window)
            for fold, found in _lines(data, rows, folds, self.plan.recipe.seed).items():
                lines[fold].append(found)
            self._tell(f"ridge, layer {layer}", 0)
        made = {fold: RidgeReader(spec, windows, tuple(found)) for fold, found in lines.items()}
        return by_fold(made) if folds else always(made[""])

    def _training(self, about: Survey, rows: Rows) -> dict[str, Any]:
        counts = {corpus: sum(one == corpus for _, one in about.documents) for corpus in about.corpora}
        return {
            "plan": json.loads(json.dumps(dataclasses.asdict(self.plan))),
            "labels": dict(self.labels.about.get("asked", {})),
            "utility": self.labels.utility,
            "documents": len(about.documents),
            "corpora": counts,
            "rows": rows.count,
            "slow_heads": sum(int(layer.sum()) for layer in about.slow(self.plan.slow_tokens) or []),
            "heads": sum(len(layer) for layer in about.half_lives),
            "torch": torch.__version__,
        }

    def _tell(self, what: str, steps: int = 1) -> None:
        self.done += steps
        if self.on_progress is not None:
            self.on_progress(self.done, self.total, what)


def _calibrated(before: Artifact | None) -> dict[str, Any]:
    """What says how the tables that stay were measured."""
    return {} if before is None else {name: before.training[name] for name in before.training if name == "calibrate"}


def _lines(data: LayerRows, rows: Rows, folds: Sequence[str], seed: int) -> dict[str, tuple[ridge.Line, ...]]:
    """Per fold ("" for none) the lines of one layer.

    Sums are taken once per group of documents that no fold tells apart: of one corpus, held out by the same folds.
    """
    groups = _groups(rows, folds, seed)
    of_group = {group: rows.of(_in(group, groups)) for group in set(groups.values())}
    inputs = [data.shared] if data.own is None else [torch.cat([data.shared, own], dim=1) for own in data.own]
    found: dict[str, list[ridge.Line]] = {fold: [] for fold in folds or [""]}
    for head, x in enumerate(inputs):
        label = data.label if data.own is None else data.label[head : head + 1]
        shift = x.double().mean(dim=0)
        sums = {group: ridge.sums(x, label, of_group[group], shift) for group in sorted(of_group)}
        for fold, lines in found.items():
            mine = {group: one for group, one in sums.items() if group[0] != fold or not folds}
            learn, choose = (
                _total(one for (_, held), one in mine.items() if (fold in held) == wanted) for wanted in (False, True)
            )
            lines.append(ridge.fit(learn, choose, shift))
    return {fold: tuple(lines) for fold, lines in found.items()}


def _total(parts: Iterator[ridge.Sums]) -> ridge.Sums:
    total = next(parts)
    for part in parts:
        total = total + part
    return total


def _in(group: Group, groups: Mapping[str, Group]) -> Callable[[Drawn], bool]:
    return lambda one: groups[one.id] == group


def _groups(rows: Rows, folds: Sequence[str], seed: int) -> dict[str, Group]:
    """Document id -> its corpus, and the folds ("" for none) in which it chooses the penalty.

    Each fold holds out a tenth of its own training documents, whatever corpora they are of.
    """
    held: dict[str, list[str]] = {one.id: [] for one in rows.documents}
    for fold in folds or [""]:
        ids = [one.id for one in rows.documents if one.corpus != fold or not folds]
        for document, out in zip(ids, ridge.held_out_tenth(ids, seed), strict=True):
            if out:
                held[document].append(fold)
    return {one.id: (one.corpus, tuple(held[one.id])) for one in rows.documents}


def _read_nets(file: Path) -> LayerNets:
    with safe_open(file, framework="pt") as saved:
        tensors = {name: saved.get_tensor(name) for name in TENSORS}
        return LayerNets(**tensors, shared=int(saved.metadata()["shared"]))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
    scratch.replace(path)
