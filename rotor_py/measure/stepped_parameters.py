"""Parameters that are stepped in the backward, each as soon as its gradient is whole, and what that takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from rotor_profiling import bytes_like
from rotor_profiling.isolate import trained_parameters
from rotor_profiling.optimizer import scratch_alone
from rotor_profiling.stage.stage_context import Stepped
from rotor_py.distributed.sharding import is_sharded
from rotor_py.measure.cut import Cut


@dataclass(frozen=True, slots=True)
class SteppedParameters:
    """The `parameters`, and the bytes that the step of each needs, by its id: `scratch`. Empty: none is stepped.

    A parameter that several stages share gets its gradient from the last of them first. The gradient waits until the
    first of them has gone backward: then it is whole.
    """

    scratch: Mapping[int, int] = field(default_factory=dict)
    parameters: tuple[torch.Tensor, ...] = ()
    sharded: bool = False
    """Whether `fully_shard` was applied to the model."""

    def __bool__(self) -> bool:
        return bool(self.scratch)

    def among(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `parameters` that are stepped, each once."""
        return list({id(each): each for each in parameters if id(each) in self.scratch}.values())

    def others(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `parameters` that are not."""
        return [each for each in parameters if id(each) not in self.scratch]

    def by_stage(self, cut: Cut) -> list[Stepped]:
        """For each stage, which of its parameters its backward steps."""
        if not self:
            return [()] * len(cut.stages)
        seen: set[int] = set()
        found = []
        for _, function in cut.stages:  # the first stage that has a parameter is the last one to go backward
            mine = [id(each) for each in trained_parameters(function)]
            found.append(tuple(None if each in seen else self.scratch.get(each) for each in mine))
            seen.update(mine)
        return found

    def waiting(self, cut: Cut) -> tuple[int, ...]:
        """Bytes of gradients that each stage's backward leaves for earlier stages, less those that it ends."""
        return _waiting([self.among(trained_parameters(function)) for _, function in cut.stages])

    def summed_up(self, cut: Cut) -> tuple[int, ...]:
        """The same of the parameters that are not stepped, where their gradients are there from before the step.

        The engine sums up what the stages that share a parameter give it, before it adds that to what is there. (Where
        nothing is there, the sum becomes the gradient.)
        """
        if self.sharded:
            return ()  # whole gradients are of the groups that gather parameters
        return _waiting([self.others(trained_parameters(function)) for _, function in cut.stages])


def _waiting(parameters: Sequence[Sequence[torch.Tensor]]) -> tuple[int, ...]:
    """Bytes of gradients that the backward of each stage leaves for earlier ones, less those that it ends, by the
    parameters that each of them uses.
    """
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
    """Those trained parameters of `model` that `optimizer` steps in the backward; None steps none.

    UnknownOptimizerError if what a step takes cannot be found.
    """
    if optimizer is None:
        return SteppedParameters(sharded=is_sharded(model))
    scratch = scratch_alone(optimizer)
    found = tuple(each for each in model.parameters() if id(each) in scratch)
    return SteppedParameters({id(each): scratch[id(each)] for each in found}, found)
