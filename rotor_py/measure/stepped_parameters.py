"""Parameters stepped in the backward, each as soon as its gradient is complete, and their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from rotor_profiling import bytes_like
from rotor_profiling.isolate import trained_parameters
from rotor_profiling.optimizer import scratch_alone
from rotor_profiling.stage.gradients import Stepped
from rotor_py.distributed.sharding import is_sharded
from rotor_py.measure.cut import Cut


@dataclass(frozen=True, slots=True)
class SteppedParameters:
    """The stepped `parameters`, and the scratch bytes of each one's step by its id. Empty if none is stepped.

    A parameter shared by stages gets its first gradient from the last of them. It is complete after the backward of the
    first of them.
    """

    scratch: Mapping[int, int] = field(default_factory=dict)
    parameters: tuple[torch.Tensor, ...] = ()
    sharded: bool = False
    """Whether `fully_shard` was applied to the model."""

    def __bool__(self) -> bool:
        return bool(self.scratch)

    def among(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of `parameters` that are stepped, each once."""
        return list({id(each): each for each in parameters if id(each) in self.scratch}.values())

    def others(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of `parameters` that are not stepped."""
        return [each for each in parameters if id(each) not in self.scratch]

    def by_stage(self, cut: Cut) -> list[Stepped]:
        """Return for each stage which of its parameters its backward steps."""
        if not self:
            return [()] * len(cut.stages)
        seen: set[int] = set()
        found = []
        for _, function in cut.stages:  # the first stage with a parameter is the last to go backward
            mine = [id(each) for each in trained_parameters(function)]
            found.append(tuple(None if each in seen else self.scratch.get(each) for each in mine))
            seen.update(mine)
        return found

    def waiting(self, cut: Cut) -> tuple[int, ...]:
        """Return gradient bytes that each backward leaves for earlier stages, less those that it finishes."""
        return _waiting([self.among(trained_parameters(function)) for _, function in cut.stages])

    def summed_up(self, cut: Cut) -> tuple[int, ...]:
        """Return the same for parameters not stepped, if their gradients exist before the step.

        The engine sums the gradients of stages that share a parameter, then accumulates into `grad`. (Without a `grad`,
        the sum becomes it.)
        """
        if self.sharded:
            return ()  # the groups that gather parameters hold whole gradients
        return _waiting([self.others(trained_parameters(function)) for _, function in cut.stages])


def _waiting(parameters: Sequence[Sequence[torch.Tensor]]) -> tuple[int, ...]:
    uses: dict[int, list[int]] = {}
    for number, mine in enumerate(parameters):
        for each in mine:
            uses.setdefault(id(each), []).append(number)
    nbytes = {id(each): bytes_like([each]) for mine in parameters for each in mine}
    found = [0] * len(parameters)
    for key, stages in uses.items():
        found[stages[-1]] += nbytes[key]
        found[stages[0]] -= nbytes[key]
    return tuple(found)


NONE_STEPPED = SteppedParameters()
"""No parameter is stepped before the backward is over."""


def stepped_parameters(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> SteppedParameters:
    """Return the trained parameters of `model` that `optimizer` steps in the backward; None steps none.

    Raises UnknownOptimizerError if the memory of a step cannot be found.
    """
    if optimizer is None:
        return SteppedParameters(sharded=is_sharded(model))
    scratch = scratch_alone(optimizer)
    found = tuple(each for each in model.parameters() if id(each) in scratch)
    return SteppedParameters({id(each): scratch[id(each)] for each in found}, found)
