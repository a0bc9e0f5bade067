"""Specify steps without holding their tensors: the input, and the model's state, which is cheap to read in every
step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rotor_profiling.storage import layout_of
from rotor_profiling.torch_compat import tree_flatten, tree_leaves, tree_map_only
from rotor_py.distributed.sharding import at_rest


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The properties of an input tensor that decide how much memory a step takes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    layout: Hashable = None
    """how processes share the tensor, if it is a `DTensor`"""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, layout_of(tensor))

    def covers(self, other: TensorSpec) -> bool:
        """Whether `other` differs at most by a smaller first dimension: a batch with fewer samples."""
        if not self._differs_in_size_alone(other):
            return False
        return other.shape[1:] == self.shape[1:] and other.shape[:1] <= self.shape[:1]  # scalars have empty shapes

    def reaches(self, other: TensorSpec) -> bool:
        """Whether `other` differs at most by smaller dimensions."""
        if not self._differs_in_size_alone(other):
            return False
        return all(size <= most for size, most in zip(other.shape, self.shape, strict=True))

    def _differs_in_size_alone(self, other: TensorSpec) -> bool:
        # Field by field: every step compares each tensor, and `replace` takes ten times as long.
        return (
            len(other.shape) == len(self.shape)
            and other.dtype == self.dtype
            and other.device == self.device
            and other.requires_grad == self.requires_grad
            and other.layout == self.layout
        )

    def __str__(self) -> str:
        gradient = " that needs a gradient" if self.requires_grad else ""
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')} on {self.device}{gradient}"


def spec_of(value: Any) -> Any:
    """Return `value` with a `TensorSpec` in the place of every tensor."""
    # Most inputs are nestings of these, and every step comes here: `tree_map_only` takes five times as long.
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    kind = type(value)
    if kind in (tuple, list):
        return kind(map(spec_of, value))
    if kind is dict:
        return {key: spec_of(each) for key, each in value.items()}
    return value if kind in _PLAIN else tree_map_only(torch.Tensor, TensorSpec.of, value)


_PLAIN = frozenset({type(None), bool, int, float, str, TensorSpec})


def covers(planned: Any, value: Any) -> bool:
    """Whether `value` needs no more memory than the input whose spec is `planned`."""
    return _agree(planned, spec_of(value), TensorSpec.covers)


def reaches(planned: Any, value: Any) -> bool:
    """Whether every tensor of `value` equals its counterpart in the spec `planned`, or is smaller."""
    return _agree(planned, spec_of(value), TensorSpec.reaches)


def same_kind(planned: Any, spec: Any) -> bool:
    """Whether a step on `spec` has the same graph as one on `planned`, as far as the input tells.

    It does if the same tensors need gradients, and all other values are equal. Shapes, dtypes and devices are not
    compared.
    """
    return _agree(planned, spec, lambda before, after: before.requires_grad == after.requires_grad)


def _agree(planned: Any, spec: Any, compare: Callable[[TensorSpec, TensorSpec], bool]) -> bool:
    expected, structure = tree_flatten(planned)
    found, other = tree_flatten(spec)
    return structure == other and all(
        compare(before, after)
        if isinstance(before, TensorSpec) and isinstance(after, TensorSpec)
        else _equal(before, after)
        for before, after in zip(expected, found, strict=True)
    )


def _equal(before: Any, after: Any) -> bool:
    """Whether two values that are not tensors are equal; NumPy arrays, if all of their elements are."""
    try:
        return bool(before == after)  # an array compares each element, and has no truth value of its own: ValueError
    except ValueError:
        return bool(np.array_equal(before, after))


def describe(spec: Any) -> str:
    """Format a spec for an error."""
    specs = [leaf for leaf in tree_leaves(spec) if isinstance(leaf, TensorSpec)]
    return " and ".join(map(str, specs)) or "without tensors"


_MODE, _TRAINED, _DTYPE, _DEVICE = map(attrgetter, ("training", "requires_grad", "dtype", "device"))
_GRADIENT = attrgetter("grad")


@dataclass(frozen=True, slots=True)
class ModelState:
    """Layers, parameters, their properties, and autocast. Two states are equal if one plan serves both."""

    # Objects by their `id`: `==` of two parameters would compare their elements.
    modules: tuple[int, ...]
    """the id of every module"""
    modes: tuple[bool, ...]
    """whether each module is in training mode"""
    parameters: tuple[int, ...]
    """the id of every parameter"""
    trained: tuple[bool, ...]
    """whether each parameter is trained"""
    dtypes: tuple[torch.dtype, ...]
    places: tuple[torch.device, ...]
    """the device of each parameter"""
    autocast: tuple[torch.dtype | None, ...]
    """autocast's dtype on the CPU and on CUDA; None where it is off"""
    has_gradients: bool = field(compare=False)
    """whether a trained parameter has a gradient already: not part of the kind of step"""

    @property
    def devices(self) -> frozenset[torch.device]:
        """The devices of the parameters."""
        return frozenset(self.places)

    @property
    def trains(self) -> bool:
        """Whether any parameter is trained."""
        return True in self.trained

    def same_layers(self, other: ModelState) -> bool:
        """Whether layers and parameters are the same objects, whatever their modes."""
        return self.modules == other.modules and self.parameters == other.parameters

    def looks_like(self, other: ModelState) -> bool:
        """Whether modes, dtypes and trained parameters are the same, also for a copy of the layers."""
        mine, theirs = ((each.modes, each.trained, each.dtypes, each.places) for each in (self, other))
        return mine == theirs

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        # Every step comes here. `modules()` and `parameters()` take longer, since they remove duplicates.
        with at_rest(model) if dist.is_initialized() else nullcontext():
            modules: list[Any] = [model]
            parameters: list[Any] = []
            for module in modules:  # grows while it is iterated
                modules += [each for each in module._modules.values() if each is not None]
                parameters += [each for each in module._parameters.values() if each is not None]
            trained = tuple(map(_TRAINED, parameters))
            gradients = map(_GRADIENT, parameters)
            return cls(
                modules=tuple(map(id, modules)),
                modes=tuple(map(_MODE, modules)),
                parameters=tuple(map(id, parameters)),
                # Not a tuple per parameter: these would trigger Python's garbage collection more often.
                trained=trained,
                dtypes=tuple(map(_DTYPE, parameters)),
                places=tuple(map(_DEVICE, parameters)),
                autocast=tuple(
                    torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
                    for kind in ("cpu", "cuda")
                ),
                has_gradients=any(needed and each is not None for needed, each in zip(trained, gradients, strict=True)),
            )


@dataclass(frozen=True, slots=True)
class StepSpec:
    """A step of the model in this state on an input of this spec (`spec_of`)."""

    model: ModelState
    input: Any
    answers: tuple[bool, ...] | None = None
    """the batch's answers to a captured model's questions about its data; None if not known yet"""

    def same_step(self, other: StepSpec) -> bool:
        """Whether one plan serves both, sizes aside: same state, and the same tensors need gradients."""
        alike = self.answers is None or other.answers is None or self.answers == other.answers
        return alike and self.model == other.model and same_kind(self.input, other.input)

    def identical(self, other: StepSpec) -> bool:
        """Whether both are equal by a cheap comparison: a plan for one then serves and covers the other."""
        alike = self.answers is None or other.answers is None or self.answers == other.answers
        if not alike or self.model != other.model:
            return False
        try:
            return bool(self.input == other.input)
        except (ValueError, RuntimeError):  # arrays and tensors in other containers have no truth value
            return False
