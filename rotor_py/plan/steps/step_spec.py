"""Which step a plan is for: the state of the model, which is cheap to look at in every step, and its input."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from rotor_py.distributed.shard_groups import at_rest
from rotor_py.plan.inputs.input_spec import equal_at_sight, same_kind

_MODE, _TRAINED, _DTYPE, _DEVICE = map(attrgetter, ("training", "requires_grad", "dtype", "device"))
_GRADIENT = attrgetter("grad")


@dataclass(frozen=True, slots=True)
class ModelState:
    """Layers and their modes, parameters and what they are, autocast. Two states are equal if a plan serves both."""

    # Objects by their `id`: `==` of two parameters would compare their elements.
    modules: tuple[int, ...]
    """the id of every module"""
    modes: tuple[bool, ...]
    """whether it is in training mode"""
    parameters: tuple[int, ...]
    """the id of every parameter"""
    trained: tuple[bool, ...]
    """whether it is, each of them"""
    dtypes: tuple[torch.dtype, ...]
    places: tuple[torch.device, ...]
    """the device of each"""
    autocast: tuple[torch.dtype | None, ...]
    """its dtype on the CPU and on CUDA; None where it is off"""
    has_gradients: bool = field(compare=False)
    """whether a trained parameter has a gradient already: no part of the kind of step"""

    @property
    def devices(self) -> frozenset[torch.device]:
        """Those of the parameters."""
        return frozenset(self.places)

    @property
    def trains(self) -> bool:
        """Whether any parameter is trained."""
        return True in self.trained

    def same_layers(self, other: ModelState) -> bool:
        """Whether layers and parameters are the same objects, whatever their modes."""
        return self.modules == other.modules and self.parameters == other.parameters

    def looks_like(self, other: ModelState) -> bool:
        """Whether modes, dtypes and what is trained are the same, in a copy of the layers too."""
        mine, theirs = ((each.modes, each.trained, each.dtypes, each.places) for each in (self, other))
        return mine == theirs

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        with at_rest(model):
            return cls._of(model)

    @classmethod
    def _of(cls, model: nn.Module) -> ModelState:
        modules, parameters = _within(model)
        trained = tuple(map(_TRAINED, parameters))
        gradients = map(_GRADIENT, parameters)
        return cls(
            modules=tuple(map(id, modules)),
            modes=tuple(map(_MODE, modules)),
            parameters=tuple(map(id, parameters)),
            # Not a tuple for each parameter: Python's garbage collection would come more often.
            trained=trained,
            dtypes=tuple(map(_DTYPE, parameters)),
            places=tuple(map(_DEVICE, parameters)),
            autocast=tuple(
                torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda")
            ),
            has_gradients=any(needed and each is not None for needed, each in zip(trained, gradients, strict=True)),
        )


def _within(model: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """The modules and the parameters of a model; what is there twice comes twice."""
    # Every step comes here. `modules()` and `parameters()` take longer, since they leave out what comes twice.
    modules: list[nn.Module | None] = [model]
    parameters: list[nn.Parameter | None] = []
    for module in modules:  # grows as it goes
        if module is not None:
            modules += module._modules.values()
            parameters += module._parameters.values()
    return [each for each in modules if each is not None], [each for each in parameters if each is not None]


@dataclass(frozen=True, slots=True)
class StepSpec:
    """A step of the model in this state on an input of this spec (`input_spec.spec_of`)."""

    model: ModelState
    input: Any
    answers: tuple[bool, ...] | None = None
    """how the batch answers what a captured model asks about its data; None where that is not known yet"""

    def same_step(self, other: StepSpec) -> bool:
        """Whether one plan serves both, as far as sizes allow it: the same state, and gradients in the same places."""
        alike = self.answers is None or other.answers is None or self.answers == other.answers
        return alike and self.model == other.model and same_kind(self.input, other.input)

    def equals_at_sight(self, other: StepSpec) -> bool:
        """Whether all is equal, and that shows at once: a plan for the one then serves and covers the other."""
        alike = self.answers is None or other.answers is None or self.answers == other.answers
        return alike and self.model == other.model and equal_at_sight(self.input, other.input)
