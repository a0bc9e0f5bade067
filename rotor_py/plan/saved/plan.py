"""A plan: which stages, in which sequence, for which limit; and whether a model and an input are those it is for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from rotor_py.errors import PlanMismatchError
from rotor_py.measure.cut import Cut, Layer, joined, layers
from rotor_py.plan.saved import plan_file
from rotor_py.plan.saved.compiled_stages import CompiledStages
from rotor_py.plan.saved.fingerprint import refuse_difference, refuse_other_input
from rotor_py.plan.saved.plan_costs import PlanCosts
from rotor_py.stage.graph_effects import GraphEffects, remember_effects
from rotor_solver import Sequence


@dataclass(frozen=True, slots=True)
class Plan:
    """A sequence, and all that is needed to know that it fits: what it was made for, and for which limit.

    `prefix` and `stages` name the layers of each part; a stage is a list of layers. `answers` are those of the batch
    to what a captured model asks about its data, such as whether there is padding. `traits` are what runs without a
    graph do not show of each stage. `costs` are what was measured: a report needs nothing else. `limited` says that
    `mem_limit` is one that somebody set, or that the device has; a strategy by hand may have none. `compiled` is
    there where `compile=` was given, and `step_in_backward` where parameters are stepped in the backward.
    `predicted_for` names the device that costs were predicted for, if nothing was measured.
    """

    model: dict[str, Any]
    input: dict[str, Any]
    prefix: list[str]
    stages: list[list[str]]
    answers: list[bool]
    traits: list[GraphEffects]
    sequence: Sequence
    mem_limit: int
    peak_bytes: int
    fresh_grads: bool
    costs: PlanCosts
    limited: bool = True
    compiled: CompiledStages | None = None
    predicted_for: str | None = None
    step_in_backward: dict[str, Any] | None = None

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; `plan_file` says what the fields mean. OSError if the file cannot be written."""
        plan_file.write(path, {field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan.

        ValueError if the file is not one, or not as it was saved, PlanMismatchError if it has compiled stages and was
        made with another torch, OSError if it cannot be read.
        """
        return cls(**plan_file.read(path))

    def cut(self, model: nn.Module) -> Cut:
        """The chain that this plan makes of `model`. PlanMismatchError if it is not the model it was made for."""
        return self.cut_layers(layers(model))

    def cut_layers(self, named: list[Layer]) -> Cut:
        """`cut`, for layers in the order in which they run. PlanMismatchError if they are not those of the plan."""
        found = dict(named)
        planned = [name for group in [self.prefix, *self.stages] for name in group]
        # In order: a chain of the same layers in another order has the same names, and other costs.
        if planned != list(found):
            raise PlanMismatchError("the order of layers", ", ".join(planned), ", ".join(found))
        stages = tuple(joined([(name, found[name]) for name in group]) for group in self.stages)
        for (_, function), traits in zip(stages, self.traits, strict=True):
            remember_effects(function, traits)
        return Cut(tuple((name, found[name]) for name in self.prefix), stages)

    def refuse_other_steps(self, found: dict[str, Any] | None) -> None:
        """PlanMismatchError if parameters are not stepped where, and by what, they are in the plan."""
        if found != self.step_in_backward:
            field = "the optimizer that steps parameters in the backward (step_in_backward)"
            raise PlanMismatchError(field, self.step_in_backward or "none", found or "none")

    def refuse_fewer_bits(self, keep: str | None) -> None:
        """PlanMismatchError if something may be kept in fewer bits, and not in those that `keep` asks for."""
        asked = self.costs.measurement.fewer_bits
        if asked not in (None, keep):
            raise PlanMismatchError("keep=", repr(asked), repr(keep))

    def refuse_other(self, *, model: dict[str, Any] | None = None, value: dict[str, Any] | None = None) -> None:
        """PlanMismatchError if the fingerprint of a model or an input is not that of the plan."""
        if model is not None:
            refuse_difference(self.model, model)
        if value is not None:
            refuse_other_input(self.input, value)
