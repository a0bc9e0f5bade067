"""Which step a plan is for: the state of the model, which is cheap to look at in every step, and its input."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rotor_py.distributed.shard_groups import at_rest
from rotor_py.plan.inputs.input_spec import gradients_of, same_kind


@dataclass(frozen=True, slots=True)
class ModelState:
    """Layers and their modes, parameters and what they are, autocast. Two states are equal if a plan serves both."""

    # Objects by their `id`: `==` of two parameters would compare their elements.
    modules: tuple[object, ...]
    """the id and the mode of every module, in turn"""
    parameters: tuple[tuple[int, bool, torch.device, torch.dtype], ...]
    """the id of every parameter, and whether it is trained, its device and dtype"""
    autocast: tuple[torch.dtype | None, ...]
    """its dtype on the CPU and on CUDA; None where it is off"""
    # What follows from the parameters, or is beside the plan.
    devices: frozenset[torch.device] = field(compare=False)
    trains: bool = field(compare=False)
    has_gradients: bool = field(compare=False)
    """whether a trained parameter has a gradient already"""

    def same_layers(self, other: ModelState) -> bool:
        """Whether layers and parameters are the same objects, whatever their modes."""
        mine, theirs = ([entry[0] for entry in state.parameters] for state in (self, other))
        return self.modules[::2] == other.modules[::2] and mine == theirs

    def looks_like(self, other: ModelState) -> bool:
        """Whether modes, dtypes and what is trained are the same, in a copy of the layers too."""
        mine, theirs = ([entry[1:] for entry in state.parameters] for state in (self, other))
        return self.modules[1::2] == other.modules[1::2] and mine == theirs

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        with at_rest(model):
            return cls._of(model)

    @classmethod
    def _of(cls, model: nn.Module) -> ModelState:
        modules: list[object] = []
        found: list[tuple[int, bool, torch.device, torch.dtype]] = []
        # Not by `modules()` and `parameters()`, which take longer, since they leave out what comes twice: this runs in
        # every step.
        pending = [model]
        has_gradients = False
        while pending:
            module = pending.pop()
            modules += (id(module), module.training)
            pending += [child for child in module._modules.values() if child is not None]
            for p in module._parameters.values():
                if p is not None:
                    needs_gradient = p.requires_grad
                    found.append((id(p), needs_gradient, p.device, p.dtype))
                    has_gradients = has_gradients or (needs_gradient and p.grad is not None)
        devices = frozenset([device for _, _, device, _ in found])
        return cls(
            modules=tuple(modules),
            parameters=tuple(found),
            autocast=tuple(
                torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda")
            ),
            devices=devices,
            trains=any(needs_gradient for _, needs_gradient, _, _ in found),
            has_gradients=has_gradients,
        )


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

    def same_gradients(self, other: StepSpec) -> bool:
        """Whether the same tensors of the input get a gradient."""
        return gradients_of(self.input) == gradients_of(other.input)
