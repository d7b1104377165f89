"""GateSight: the recurrence has already decided what is worth writing down; a small network reads it off."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from wakesight.core import Scores, Signals
from wakesight.errors import RequestError
from wakesight.estimator.artifact import MAKE, Artifact
from wakesight.estimator.features import FeatureSpec, reader_parts
from wakesight.scores.base import held_layers, only_held

# what a reader is called on a model without recurrent layers
TWINS = {"signals": "hidden", "signals+keys": "hidden+keys"}


@dataclass(frozen=True)
class GateSight:
    """s_i = f(signals of token i), f a network per (attention layer, KV head) fitted offline for this model.

    reader: which of the artifact's readers. "signals" is the paper's: beta, g and ||v|| of up to six recurrent layers
    before, and the entry's age. An artifact of a model without such signals has no reader "signals" but one called
    "hidden", which then takes its place ("hidden+keys" that of "signals+keys"): `resolved` says which one it is, and
    so which signals must be recorded. Source: GateSight, section on the estimator.
    """

    reader: str = "signals"
    natural_allocation: ClassVar[str] = "gate"
    needs_artifact: ClassVar[bool] = True
    normalised: ClassVar[bool] = True  # the network ends in a sigmoid: the share of the head's largest utility

    def __post_init__(self) -> None:
        reader_parts(self.reader)

    @property
    def reads(self) -> tuple[str, ...]:
        """Signals to record; keys and values, which some readers look at too, are always there."""
        return FeatureSpec(reader_parts(self.reader)).reads

    def resolved(self, artifact: Artifact | None) -> Self:
        """This scorer with the reader that `artifact` really has. Raises RequestError without one."""
        found = self._artifact(artifact)
        twin = TWINS.get(self.reader)
        if self.reader not in found.readers and twin is not None and twin in found.readers:
            return dataclasses.replace(self, reader=twin)
        found.reader(self.reader)
        return self

    def score(self, signals: Signals) -> Scores:
        artifact = self._artifact(signals.artifact)
        reader = artifact.reader(self.resolved(artifact).reader)
        layers = reader.scores(signals)
        return Scores(tuple(only_held(one, held) for one, held in zip(layers, held_layers(signals), strict=True)))

    def _artifact(self, artifact: Any) -> Artifact:
        if not isinstance(artifact, Artifact):
            raise RequestError(
                f"{'gatesight+' if isinstance(self, GateSightPlus) else 'gatesight'} needs an estimator fitted for "
                f"this model; make one with: {MAKE}"
            )
        return artifact


@dataclass(frozen=True)
class GateSightPlus(GateSight):
    """GateSight that looks at the keys too: their cosine to the mean key, key and value norms, and the key itself.

    Still without a second pass over the context. Ours, not the paper's.
    """

    reader: str = "signals+keys"
    natural_allocation: ClassVar[str] = "utility_global"
