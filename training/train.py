"""Trains tiny-hybrid: python -m training.train --out out/tiny-hybrid --minutes 85

The folder holds `settings.json`, `log.jsonl` (one line about every 20 s) and `state/` (weights, optimisers, random
state and counters), written anew every two minutes and at the end. The same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training import initial
from training.fast import loss
from training.mixture import SHARES, Batch, Mixture
from wakesight.errors import RequestError

GATES = ("closed_keyvalue", "closed_dense", "closed_multikey", "closed_multivalue", "closed_tracking")
MEMORY = 0.98  # of the running accuracies, per answer
SLOW = ("in_proj_a", "A_log", "dt_bias")  # at full speed their decays collapse and no slow head is left


MOVABLE = ("minutes", "tokens", "shorter")  # may differ when a training goes on; each start is a line of the log


@dataclass(frozen=True)
class Settings:
    """One training. It ends after `minutes` of training time or `tokens` tokens, whichever is set and comes first.

    lengths: of the sequences, stage by stage; the next stage begins when the mean accuracy of GATES is above `gate`
    and the stage has had `stage_tokens`, or when `latest` (a share of the whole training per stage) has passed.
    shorter: share of batches at an earlier stage's length, the longer of two drawn. decay: share of the training, its
    end, in which rates fall to 3%. question: weight of a question's words in the loss.
    """

    minutes: float = 0.0
    tokens: int = 0
    seed: int = 0
    layers: int = 12
    hidden: int = 192
    intermediate: int = 256
    rate: float = 4e-3
    slow: float = 0.1
    weight_decay: float = 0.1
    batch: int = 2048
    warm_up: int = 20
    decay: float = 0.3
    clip: float = 1.0
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    latest: tuple[float, ...] = (0.08, 0.18, 0.3, 0.45, 0.65)
    gate: float = 0.85
    stage_tokens: int = 100_000
    shorter: float = 0.5
    constrained: bool = True
    question: float = 0.1

    def __post_init__(self) -> None:
        if self.minutes <= 0 and self.tokens <= 0:
            raise RequestError("the training has no end; give --minutes or --tokens")
        if len(self.latest) != len(self.lengths) - 1:
            raise RequestError(
                f"latest has {len(self.latest)} shares for {len(self.lengths)} lengths; give one less than lengths"
            )

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Those of a training's folder. Raises RequestError if it has none."""
        if not path.exists():
            raise RequestError(f"{path} is missing; give the folder that was --out of python -m training.train")
        found: dict[str, Any] = json.loads(path.read_text())
        values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in found.items()}
        return cls(**values)

    @property
    def shape(self) -> initial.Shape:
        return initial.Shape(layers=self.layers, hidden=self.hidden, intermediate=self.intermediate)


@dataclass
class Counters:
    """What a training has done. hits: running accuracy per task, not yet corrected for its start at 0."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stage: int = 0
    stage_start: int = 0
    hits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHARES, 0.0))
    answers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SHARES, 0))

    def accuracy(self, task: str) -> float:
        seen = self.answers[task]
        return self.hits[task] / (1 - MEMORY**seen) if seen else 0.0

    def count(self, batch: Batch, correct: Tensor) -> None:
        """correct: [B, T - 1], as `fast.loss` gives it. An answer counts if all its tokens are right."""
        for sequence, right, scale in zip(batch.sequences, correct, batch.scale.tolist(), strict=True):
            for start, end in sequence.answers if scale else ():
                hit = float(right[start - 1 : end - 1].all())
                self.hits[sequence.task] = MEMORY * self.hits[sequence.task] + (1 - MEMORY) * hit
                self.answers[sequence.task] += 1


class Training:
    """A training in a folder: begun by the first `Training(...)`, gone on with by a later one."""

    def __init__(self, out: Path, settings: Settings) -> None:
        self.out, self.settings = out, settings
        self.counters = Counters()
        self.random = random.Random(f"tiny-hybrid/{settings.seed}")
        self.mixture = Mixture(question=settings.question)
        self.model = initial.model(settings.shape, settings.seed)
        self.roles = initial.roles(settings.shape)
        self.optimisers = optimisers(self.model, settings)
        out.mkdir(parents=True, exist_ok=True)
        _settle(out / "settings.json", settings)
        _finish_swap(out)
        if (out / "state").exists():
            self._load(out / "state")

    @property
    def progress(self) -> float:
        """0 to 1, by whichever end is nearer."""
        done = [0.0]
        if self.settings.tokens > 0:
            done.append(self.counters.tokens / self.settings.tokens)
        if self.settings.minutes > 0:
            done.append(self.counters.seconds / 60 / self.settings.minutes)
        return max(done)

    def step(self) -> dict[str, float]:
        """One batch and one update."""
        began = time.perf_counter()
        settings, counters = self.settings, self.counters
        batch = self.mixture.batch(self.random, settings.batch, self._length())
        self._set_rates()
        value, correct = loss(self.model, batch.ids, batch.weights, batch.scale)
        value.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        if not torch.isfinite(norm):
            raise RequestError(f"the gradient is not finite at step {counters.step}; lower --rate")
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if settings.constrained:
            initial.constrain(self.model, self.roles)
        counters.count(batch, correct)
        counters.step += 1
        counters.tokens += batch.ids.numel()
        counters.seconds += time.perf_counter() - began
        self._maybe_next_stage()
        return {"loss": float(value.detach()), "norm": float(norm)}

    def _length(self) -> int:
        stage, rng = self.counters.stage, self.random
        lengths = self.settings.lengths
        if stage and rng.random() < self.settings.shorter:
            return lengths[max(rng.randrange(stage), rng.randrange(stage))]
        return lengths[stage]

    def _set_rates(self) -> None:
        settings = self.settings
        factor = min(1.0, (self.counters.step + 1) / settings.warm_up)
        if settings.decay > 0:
            factor *= min(1.0, max(0.03, (1 - self.progress) / settings.decay))
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = settings.rate * factor * group["share"]

    def _maybe_next_stage(self) -> None:
        counters, settings = self.counters, self.settings
        if counters.stage == len(settings.lengths) - 1:
            return
        mean = sum(counters.accuracy(task) for task in GATES) / len(GATES)
        ready = mean > settings.gate and counters.tokens - counters.stage_start >= settings.stage_tokens
        if ready or self.progress > settings.latest[counters.stage]:
            counters.stage += 1
            counters.stage_start = counters.tokens

    def save(self) -> None:
        """Write `state/` beside the old one, then swap: there is a whole one at any time."""
        new, old = self.out / "state.new", self.out / "state.old"
        for folder in (new, old):
            shutil.rmtree(folder, ignore_errors=True)
        new.mkdir()
        save_file(weights(self.model), new / "model.safetensors")
        save_file(dict(_optimiser_tensors(self.optimisers)), new / "optimisers.safetensors")
        version, inner, gauss = self.random.getstate()
        state = {"counters": asdict(self.counters), "random": [version, list(inner), gauss]}
        (new / "state.json").write_text(json.dumps(state))
        if (self.out / "state").exists():
            os.rename(self.out / "state", old)
        os.rename(new, self.out / "state")
        shutil.rmtree(old, ignore_errors=True)

    def _load(self, folder: Path) -> None:
        load_weights(self.model, folder / "model.safetensors")
        state = json.loads((folder / "state.json").read_text())
        counters = state["counters"]
        self.counters = Counters(**{each.name: counters[each.name] for each in fields(Counters)})
        version, inner, gauss = state["random"]
        self.random.setstate((version, tuple(inner), gauss))
        _set_optimiser_tensors(self.optimisers, load_file(folder / "optimisers.safetensors"))


def optimisers(model: Any, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for matrices; AdamW for the embedding, convolutions, norms and write gates, and slower for decays."""
    matrices, vectors, convolutions, slow = [], [], [], []
    for name, weight in model.named_parameters():
        if any(part in name for part in SLOW):
            slow.append(weight)
        elif weight.ndim == 2 and "embed" not in name and "in_proj_b" not in name:
            matrices.append(weight)
        elif "conv1d" in name or "in_proj_b" in name:
            convolutions.append(weight)
        else:
            vectors.append(weight)
    groups = [
        {"params": convolutions, "weight_decay": settings.weight_decay, "share": 1.0},
        {"params": vectors, "weight_decay": 0.0, "share": 1.0},
        {"params": slow, "weight_decay": 0.0, "share": settings.slow},
    ]
    return [
        torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95), eps=1e-8),
        torch.optim.Muon(
            [{"params": matrices, "share": 1.0}], lr=settings.rate, weight_decay=settings.weight_decay, momentum=0.95,
            nesterov=True, ns_steps=5, adjust_lr_fn="match_rms_adamw",
        ),
    ]  # fmt: skip


def weights(model: Any) -> dict[str, Tensor]:
    """The model's tensors by name, the tied head left out."""
    return {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}


def load_weights(model: Any, path: Path) -> None:
    """Raises RequestError if the file is for another model."""
    missing, unexpected = model.load_state_dict(load_file(path), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RequestError(f"{path} is for another model; give the settings it was trained with")


def _optimiser_tensors(chosen: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, Tensor]]:
    for number, optimiser in enumerate(chosen):
        for index, state in optimiser.state_dict()["state"].items():
            for name, value in state.items():
                yield f"{number}.{index}.{name}", torch.as_tensor(value).contiguous()


def _set_optimiser_tensors(chosen: Sequence[torch.optim.Optimizer], tensors: dict[str, Tensor]) -> None:
    for number, optimiser in enumerate(chosen):
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            owner, index, name = key.split(".")
            if int(owner) == number:
                state.setdefault(int(index), {})[name] = value
        optimiser.load_state_dict({**optimiser.state_dict(), "state": state})


def _settle(path: Path, settings: Settings) -> None:
    """Write the settings down, or check them against those there; MOVABLE ones may change."""
    now = json.loads(json.dumps(asdict(settings)))
    if path.exists():
        before = json.loads(json.dumps(asdict(Settings.read(path))))
        for name, value in now.items():
            if name not in MOVABLE and before[name] != value:
                raise RequestError(
                    f"{path.parent} was trained with {name}={before[name]!r}, and now {value!r} was asked for; "
                    "give the same settings or another --out"
                )
    path.write_text(json.dumps(now, indent=1))


def _finish_swap(out: Path) -> None:
    """A kill between the two renames of `save` leaves no `state/`, but a whole new one."""
    if not (out / "state").exists() and (out / "state.old").exists():
        new = out / "state.new"
        os.rename(new if (new / "state.json").exists() else out / "state.old", out / "state")


def run(training: Training, *, log_every: float = 20.0, save_every: float = 120.0, stop: int | None = None) -> None:
    """Train to the end, or for `stop` steps. Prints and logs; saves at the end."""
    logged = saved = time.perf_counter()
    losses: list[float] = []
    tokens = training.counters.tokens
    steps = 0
    _log_line(training, {"started": asdict(training.settings), "step": training.counters.step, "shares": dict(SHARES)})
    while training.progress < 1 and (stop is None or steps < stop):
        result = training.step()
        steps += 1
        losses.append(result["loss"])
        now = time.perf_counter()
        if now - logged >= log_every:
            _log(training, losses, result["norm"], (training.counters.tokens - tokens) / (now - logged))
            logged, tokens, losses = now, training.counters.tokens, []
        if now - saved >= save_every:
            training.save()
            saved = time.perf_counter()
    training.save()


def _log(training: Training, losses: Sequence[float], norm: float, speed: float) -> None:
    counters = training.counters
    line = {
        "minutes": round(counters.seconds / 60, 3),
        "step": counters.step,
        "tokens": counters.tokens,
        "length": training.settings.lengths[counters.stage],
        "loss": round(math.fsum(losses) / max(1, len(losses)), 5),
        "norm": round(norm, 4),
        "rate": training.optimisers[0].param_groups[0]["lr"],
        "speed": round(speed, 1),
        "accuracy": {task: round(counters.accuracy(task), 4) for task in SHARES if counters.answers[task]},
    }
    _log_line(training, line)
    accuracies = " ".join(f"{task.removeprefix('closed_')} {value:.2f}" for task, value in line["accuracy"].items())
    print(
        f"{line['minutes']:6.1f} min  step {counters.step}  T {line['length']}  {counters.tokens / 1e6:.3f} M  "
        f"{speed:.0f}/s  loss {line['loss']:.3f}  {accuracies}",
        flush=True,
    )


def _log_line(training: Training, line: dict[str, Any]) -> None:
    with (training.out / "log.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train tiny-hybrid; the same command goes on where it stopped.")
    parser.add_argument("--out", type=Path, required=True, help="folder of this training")
    parser.add_argument("--threads", type=int, default=1)
    defaults = Settings(minutes=1.0)
    for each in fields(Settings):
        value = getattr(defaults, each.name)
        flag = "--" + each.name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=value)
        elif isinstance(value, tuple):
            parser.add_argument(flag, type=type(value[0]), nargs="+", default=value)
        else:
            parser.add_argument(flag, type=type(value), default=0.0 if each.name == "minutes" else value)
    given: dict[str, Any] = vars(parser.parse_args())
    torch.set_num_threads(given.pop("threads"))
    out = given.pop("out")
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    run(Training(out, Settings(**values)))


if __name__ == "__main__":
    try:
        main()
    except RequestError as error:
        raise SystemExit(str(error)) from None
