"""Allocation names -> classes, imported lazily."""

from __future__ import annotations

from wakesight.budget.base import Allocation
from wakesight.registry import name_of, resolve, spec_of

ALLOCATIONS = {
    "flat": "wakesight.budget.flat:Flat",
    "pyramid": "wakesight.budget.pyramid:Pyramid",
    "ada": "wakesight.budget.ada:Ada",
    "global": "wakesight.budget.pooled:Global",  # the module cannot be called global
    "gate": "wakesight.budget.gate:Gate",
    "gate_per_head": "wakesight.budget.gate_per_head:GatePerHead",
    "utility": "wakesight.budget.utility:Utility",
    "utility_global": "wakesight.budget.utility_global:UtilityGlobal",
    "utility_layer": "wakesight.budget.utility_layer:UtilityLayer",
}


def allocation(spec: str) -> Allocation:
    """The allocation that `spec` names, for example "flat" or "pyramid:beta=10"."""
    found: Allocation = resolve(spec, ALLOCATIONS, "allocation")
    return found


def allocation_spec(method: Allocation) -> str | None:
    """The text form of an allocation, for records; None for a class that no table names."""
    name = name_of(method, ALLOCATIONS)
    return name and spec_of(method, name)
