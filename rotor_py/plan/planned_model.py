"""Expose the settings of a model with a planner, and the plan in use."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from rotor_py.measure.budget import Budget
from rotor_py.measure.measurement import Measurement
from rotor_py.plan.description import file_of, memory_of, report_of, summary_of
from rotor_py.plan.planner import Planner
from rotor_py.plan.saved_plan import Plan
from rotor_py.plan.step_plan import StepPlan
from rotor_py.report import Report
from rotor_py.transparent import Transparent, in_training
from rotor_solver import Chain, Sequence
from rotor_solver.memory_timeline import PlanMemory
from rotor_solver.watching import Progress

T = TypeVar("T")


class Setting(Generic[T]):
    """An attribute of a `PlannedModel` that reads and sets one of its settings."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: PlannedModel, owner: type | None = None) -> T:
        found: T = getattr(instance._planner.settings, self._name)
        return found

    def __set__(self, instance: PlannedModel, value: T) -> None:
        settings = instance._planner.settings
        given: dict[str, Any] = {self._name: value}
        replace(settings, **given)  # for its errors, before it is set
        setattr(settings, self._name, value)


class PlannedModel(Transparent):
    """A model with a planner; its properties and methods never measure."""

    _planner: Planner

    mem_limit = Setting[float | str | None]()
    mem_slots = Setting[int]()
    verbosity = Setting[int]()
    preserve_rng_state = Setting[bool]()
    loss_tmp_memory_usage = Setting[int]()
    fresh_grads = Setting[bool]()
    progress = Setting[Progress | bool | None]()
    forwards_in_flight = Setting[int]()
    backward_order = Setting[str | None]()
    watch = Setting[bool | None]()

    # Facts about the plan in use; None, or an empty list, before anything has been measured.

    @property
    def _plan_in_use(self) -> StepPlan | None:
        return self._planner.plans.in_use

    @property
    def sequence(self) -> Sequence | None:
        """The sequence in use. A sequence that is set is followed whatever memory it takes.

        Where forwards in flight follow different sequences, it is that of the first, and `beside` holds the others.
        Several processes have to agree on a sequence, so after setting it there, the next forward solves again.

        Setting it raises ValueError before anything has been measured.
        """
        return None if (plan := self._plan_in_use) is None else plan.sequence

    @sequence.setter
    def sequence(self, sequence: Sequence | None) -> None:
        self._planner.follow(sequence)

    @property
    def budget(self) -> Budget | None:
        """The division of the limit."""
        return None if (plan := self._plan_in_use) is None else plan.budget

    @property
    def chain(self) -> Chain | None:
        """The measured chain, in seconds and bytes."""
        return None if self.budget is None else self.budget.chain

    @property
    def inspection_values(self) -> Measurement | None:
        """The measurements of every stage."""
        return None if (plan := self._plan_in_use) is None else plan.measurement

    @property
    def names(self) -> list[str]:
        """The names of the stages."""
        return [] if (plan := self._plan_in_use) is None else plan.names

    @property
    def step_in_backward(self) -> torch.optim.Optimizer | None:
        """The optimizer that steps parameters in the backward."""
        return self._planner.settings.step_in_backward

    @property
    def compiled(self) -> list[str]:
        """The names of the stages that run compiled."""
        return [] if (plan := self._plan_in_use) is None else plan.compiled

    def compiled_without_budget(self) -> AbstractContextManager[None]:
        """Inside the context, compiled stages save what the compiler saves without a limit: steps may take more memory.

        Raises ValueError before anything has been measured.
        """
        return self._planner.in_use.without_budget()

    @property
    def functions(self) -> list[nn.Module]:
        """The stages."""
        return [] if (plan := self._plan_in_use) is None else plan.functions

    @property
    def captured(self) -> bool:
        """Whether TorchDynamo captures the model's graph; a nesting of `nn.Sequential` is a chain already."""
        return self._planner.plans.blank.captured

    @property
    def device(self) -> torch.device:
        """The device that the model trains on, and whose memory the limit is about.

        Raises UnsupportedModelError if there are several.
        """
        return self._planner.device

    def plan(self) -> Plan:
        """Return the plan in use, for a file.

        Raises ValueError if nothing has been measured, if the model was changed for another kind of step since, or if
        `compile` has options that a file cannot hold.
        """
        with in_training(self):
            return file_of(self._planner.solved(), self._planner.model)

    def save_plan(self, path: str | Path) -> None:
        """Write the plan in use to a file, for `Checkpointable(..., plan=path)`. ValueError as from `plan`, OSError."""
        self.plan().save(path)

    def memory(self) -> PlanMemory:
        """Return, by stage, what the plan in use keeps for the backward while the loss runs, and what it does not.

        Raises ValueError before anything has been measured.
        """
        return memory_of(self._planner.solved())

    def report(self) -> Report:
        """Return a report of the plan in use: to print, to show in a notebook, or to write as a page (`to_html`).

        Raises ValueError if there is no plan yet and nothing has been measured: before the first step.
        """
        return report_of(self._planner.solved(), self._planner.model)

    def summary(self) -> str:
        """Return one line about the plan in use: limit, fixed part, least possible, planned peak and overhead.

        Raises ValueError before anything has been measured.
        """
        return summary_of(self._planner.solved(), self._planner.model)
