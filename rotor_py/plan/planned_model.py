"""What is known of a model that has a planner: its settings, and the plan in use."""

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
from rotor_solver.progress import Progress

T = TypeVar("T")


class Setting(Generic[T]):
    """An attribute of a `PlannedModel` that is one of its settings, as it was given or set since."""

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
    """A model with a planner, as far as it is asked: nothing here measures."""

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

    # What is known about the plan in use; None, or an empty list, before anything has been measured.

    @property
    def _plan_in_use(self) -> StepPlan | None:
        return self._planner.plans.in_use

    @property
    def sequence(self) -> Sequence | None:
        """The sequence in use. Another one may be set, and is followed whatever memory it takes.

        Where forwards in flight follow different ones, it is that of the first, and its `beside` are the others.

        Setting it raises ValueError before anything has been measured. Where several processes train the model, they
        have to agree, so the next forward solves again.
        """
        return None if (plan := self._plan_in_use) is None else plan.sequence

    @sequence.setter
    def sequence(self, sequence: Sequence | None) -> None:
        self._planner.follow(sequence)

    @property
    def budget(self) -> Budget | None:
        """How the limit is divided."""
        return None if (plan := self._plan_in_use) is None else plan.budget

    @property
    def chain(self) -> Chain | None:
        """The measured chain, in seconds and bytes."""
        return None if self.budget is None else self.budget.chain

    @property
    def inspection_values(self) -> Measurement | None:
        """What was measured of every stage."""
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
        """Inside, what is compiled saves what the compiler would save without a limit: steps may take more memory.

        ValueError before anything has been measured.
        """
        return self._planner.in_use.without_budget()

    @property
    def functions(self) -> list[nn.Module]:
        """The stages."""
        return [] if (plan := self._plan_in_use) is None else plan.functions

    @property
    def captured(self) -> bool:
        """Whether TorchDynamo captures the model's graph; a nesting of `nn.Sequential` is a chain as it stands."""
        return self._planner.captured

    @property
    def device(self) -> torch.device:
        """The device that the model trains on, and whose memory the limit is about.

        UnsupportedModelError if there are several.
        """
        return self._planner.device

    def plan(self) -> Plan:
        """The plan in use, for a file.

        ValueError if nothing has been measured, if the model was changed for another kind of step since, or if
        `compile` has options that no file can hold.
        """
        with in_training(self):
            return file_of(self._planner.solved(), self._planner.model)

    def save_plan(self, path: str | Path) -> None:
        """Write the plan in use to a file, for `Checkpointable(..., plan=path)`. ValueError as from `plan`, OSError."""
        self.plan().save(path)

    def memory(self) -> PlanMemory:
        """What the plan in use keeps for the backward while the loss runs, and what it does not, stage by stage.

        ValueError before anything has been measured.
        """
        return memory_of(self._planner.solved())

    def report(self) -> Report:
        """The plan in use, to be printed, to be shown in a notebook, and to be written as a page (`to_html`).

        ValueError if there is no plan yet and nothing has been measured: before the first step.
        """
        return report_of(self._planner.solved(), self._planner.model)

    def summary(self) -> str:
        """One line about the plan in use: limit, fixed part, least possible, planned peak and overhead.

        ValueError before anything has been measured.
        """
        return summary_of(self._planner.solved(), self._planner.model)
