"""Describe a step by the spec of its input and the state of its model, which hold no tensors. Every step makes both.

`arguments_of` turns a sample into the arguments of a forward. Fingerprints describe model and input in plan files, so
that an error can name what differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from rotor_profiling import torch_compat
from rotor_profiling.backends import prediction
from rotor_profiling.storage import layout_of
from rotor_profiling.torch_compat import is_dtensor
from rotor_profiling.value_tree import Structure, tree_flatten, tree_unflatten
from rotor_py.distributed.sharding import at_rest
from rotor_py.errors import PlanMismatchError, UnsupportedModelError
from rotor_py.measure.cut import is_chain, layers, opened
from rotor_py.stage.first_run import hooks_on_all_modules
from rotor_py.stage.replayed_routing import streams_kept


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    layout: Hashable = None  # how processes share the tensor, if it is a `DTensor`

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        if tensor.is_nested:
            text = "give padded rows and a mask, or concatenated rows and offsets: no plan covers nested tensors"
            raise UnsupportedModelError(text, kind="nested_tensor", name="input")
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, layout_of(tensor))

    def covers(self, other: TensorSpec) -> bool:
        """Whether `other` differs at most by a smaller first dimension: a batch with fewer samples."""
        smaller = other.shape[1:] == self.shape[1:] and other.shape[:1] <= self.shape[:1]  # scalars have empty shapes
        return smaller and self._differs_in_size_alone(other)

    def reaches(self, other: TensorSpec) -> bool:
        """Whether `other` differs at most by smaller dimensions."""
        smaller = self._differs_in_size_alone(other)
        return smaller and all(size <= most for size, most in zip(other.shape, self.shape, strict=True))

    def _differs_in_size_alone(self, other: TensorSpec) -> bool:
        # Compare the fields singly: every step does this for each tensor, and `replace` would take ten times as long.
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
    """Return `value` with a `TensorSpec` for every tensor, and its other objects in a form that compares by content."""
    # Most inputs take this fast path, since every step calls this, and flattening takes five times as long.
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    kind = type(value)
    if kind in (tuple, list):
        return kind(map(spec_of, value))
    if kind is dict:
        return {key: spec_of(each) for key, each in value.items()}
    if kind in _PLAIN:
        return value
    leaves, structure = tree_flatten(value, every=True)
    specs = [_leaf_spec(leaf) for leaf in leaves]
    # Return such objects as their parts: each step may have a new object, which would equal only itself.
    return (structure, specs) if isinstance(structure, Structure) else tree_unflatten(specs, structure)


_PLAIN = frozenset({type(None), bool, int, float, str, TensorSpec, Structure})


def _leaf_spec(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorSpec.of(leaf)
    if isinstance(leaf, FunctionType | MethodType):  # each step may make a new function of the same code
        return getattr(leaf, "__code__", type(leaf))
    compared: Any = type(leaf).__eq__
    equals_itself_only = compared is object.__eq__ and not isinstance(leaf, nn.Module | type | torch.dtype)
    return type(leaf) if equals_itself_only or isinstance(leaf, ref) else leaf


def reaches(planned: Any, value: Any) -> bool:
    """Whether `value` differs from the input with the spec `planned` at most by smaller tensors and other strings."""
    return specs_agree(planned, spec_of(value), TensorSpec.reaches, texts=False)


def same_kind(planned: Any, spec: Any, *, texts: bool = True) -> bool:
    """Whether the same tensors of two specs need gradients, and other values are equal: then one graph may serve both.

    With texts=False, strings may differ, such as file names in a batch: capturing shows whether these matter.
    """
    return specs_agree(planned, spec, lambda before, after: before.requires_grad == after.requires_grad, texts=texts)


def specs_agree(
    planned: Any, spec: Any, compare: Callable[[TensorSpec, TensorSpec], bool], *, texts: bool = True
) -> bool:
    """Whether `compare` is true of all pairs of tensors in two specs, and other values are equal (see `same_kind`)."""
    expected, structure = torch_compat.tree_flatten(planned)
    found, other = torch_compat.tree_flatten(spec)
    return structure == other and all(
        compare(before, after)
        if isinstance(before, TensorSpec) and isinstance(after, TensorSpec)
        else _equal(before, after) or (not texts and isinstance(before, str) and isinstance(after, str))
        for before, after in zip(expected, found, strict=True)
    )


def _equal(before: Any, after: Any) -> bool:
    try:
        return bool(before == after)  # raises ValueError for arrays, which compare each element
    except ValueError:
        return bool(np.array_equal(before, after))
    except Exception:  # the user's `__eq__` may raise anything
        return False


def describe(spec: Any) -> str:
    specs = [leaf for leaf in torch_compat.tree_leaves(spec) if isinstance(leaf, TensorSpec)]
    return " and ".join(map(str, specs)) or "without tensors"


_MODE, _TRAINED, _DTYPE, _DEVICE = map(attrgetter, ("training", "requires_grad", "dtype", "device"))


@dataclass(frozen=True, slots=True)
class ModelState:
    """Modules, parameters, their properties, and autocast. A plan serves only steps whose states are equal."""

    # Modules and parameters by their `id`: `==` of two parameters would compare their elements.
    modules: tuple[int, ...]
    modes: tuple[bool, ...]  # whether each module is in training mode
    parameters: tuple[int, ...]
    trained: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]
    autocast: tuple[torch.dtype | None, ...]  # autocast's dtype on the CPU and on CUDA; None where it is off
    opened: tuple[str, ...]  # names of a chain's containers whose layers are stages; one with a hook is itself a stage
    # ids of the hooks registered for all modules, which a capture includes; empty for a chain, whose layers call them
    hooks: tuple[int, ...]
    # whether a trained parameter has a gradient already; not compared, since a plan serves steps with and without
    has_gradients: bool = field(compare=False)

    def looks_like(self, other: ModelState) -> bool:
        """Whether training modes, dtypes, devices and `requires_grad` are equal, as they are for a model's copy."""
        mine, theirs = ((each.modes, each.trained, each.dtypes, each.devices, each.opened) for each in (self, other))
        return mine == theirs

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        # Every step calls this, so do not use `modules()` and `parameters()`, which take longer to remove duplicates.
        with at_rest(model) if dist.is_initialized() else nullcontext():
            modules: list[Any] = [model]
            parameters: list[Any] = []
            for module in modules:  # grows while it is iterated
                modules += [each for each in module._modules.values() if each is not None]
                parameters += [each for each in module._parameters.values() if each is not None]
            trained = tuple(map(_TRAINED, parameters))
            # `functional_call` may replace parameters by tensors that are not leaves: reading their `grad` would warn.
            gradients = [each.grad if each.is_leaf else None for each in parameters]
            return cls(
                modules=tuple(map(id, modules)),
                modes=tuple(map(_MODE, modules)),
                parameters=tuple(map(id, parameters)),
                # Make a tuple per property: a tuple per parameter would trigger Python's garbage collector more often.
                trained=trained,
                dtypes=tuple(map(_DTYPE, parameters)),
                devices=tuple(map(_DEVICE, parameters)),
                autocast=tuple(
                    torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
                    for kind in ("cpu", "cuda")
                ),
                opened=opened(model),
                hooks=() if is_chain(model) else hooks_on_all_modules(),
                has_gradients=any(needed and each is not None for needed, each in zip(trained, gradients, strict=True)),
            )


@dataclass(frozen=True, slots=True)
class StepSpec:
    """A kind of step: the state of the model, and the spec of the input (see `spec_of`)."""

    model: ModelState
    input: Any
    # results of a captured model's conditions on this batch, such as whether it has padding; None if not known yet
    answers: tuple[bool, ...] | None = None

    @classmethod
    def of(cls, model: nn.Module, value: Any) -> StepSpec:
        return cls(ModelState.of(model), spec_of(value))

    def same_step(self, other: StepSpec, *, texts: bool = True) -> bool:
        """Whether one plan may serve both if sizes allow: equal states, and the same input tensors need gradients."""
        return self._alike(other) and same_kind(self.input, other.input, texts=texts)

    def identical(self, other: StepSpec) -> bool:
        """Whether both are equal, sizes included, by a comparison that takes little time. False if it raises."""
        try:
            return self._alike(other) and bool(self.input == other.input)
        except Exception:  # arrays have no truth value, and the user's `__eq__` may raise anything
            return False

    def _alike(self, other: StepSpec) -> bool:
        return self.model == other.model and (None in (self.answers, other.answers) or self.answers == other.answers)


class ForwardArguments(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments_of(sample: Any, model: nn.Module) -> ForwardArguments:
    """Return the arguments of a forward on `sample`: a tensor, tuple, dict, or the first batch of a `DataLoader`."""
    if isinstance(sample, ForwardArguments):  # checked before tuples, since it is one
        return sample
    if isinstance(sample, DataLoader):
        # The loader draws a seed for its workers, its sampler an order, and its dataset what it likes.
        dataset: Any = sample.dataset
        generators = [sample.generator, getattr(sample.sampler, "generator", None)]
        with torch.random.fork_rng(devices=[]), streams_kept(dataset, generators):
            batch = next(iter(sample), None)
        if batch is None:
            text = "the sample is a DataLoader without a batch; its dataset is empty"
            raise UnsupportedModelError(text, kind="empty_loader", name="custom_input")
        sample = tuple(batch) if isinstance(batch, list) else batch
    if isinstance(sample, str | int | float):
        text = f"the sample must be a tensor, a tuple or a dict, got {sample!r}; write a limit as mem_limit={sample!r}"
        raise UnsupportedModelError(text, kind="not_a_sample", name="custom_input")
    if isinstance(sample, dict):
        return ForwardArguments((), sample)
    arguments = sample if isinstance(sample, tuple) else (sample,)
    _refuse_too_many(arguments, model)
    return ForwardArguments(arguments, {})


def _refuse_too_many(arguments: tuple[Any, ...], model: nn.Module) -> None:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (ValueError, TypeError):  # some callables have no signature
        return
    takes = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
    if len(arguments) > takes and not any(each.kind == each.VAR_POSITIONAL for each in parameters):
        took = f"{len(arguments)} items, and {type(model).__name__}.forward takes {takes}"
        text = f"drop the targets from the sample, and use them in `loss`: the sample has {took}"
        raise UnsupportedModelError(text, kind="too_many_arguments", name="custom_input", got=len(arguments))


def model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return a dict for JSON: "layers" maps names of layers to classes, "parameters" maps names to shape and dtype."""
    found = layers(model) if is_chain(model) else [(name or "(whole)", each) for name, each in model.named_modules()]
    # For a captured model, list all modules: which of them are layers is unknown before it runs.
    with at_rest(model):
        return {
            "layers": {name: type(layer).__name__ for name, layer in found},
            "parameters": {
                name: f"{list(p.shape)} {_name(p.dtype)}{_sharing(p)}{'' if p.requires_grad else ' frozen'}"
                for name, p in model.named_parameters()
            },
        }


def input_fingerprint(spec: Any, device: torch.device) -> dict[str, Any]:
    """Return a dict for JSON of an input or its spec: device type, autocast's dtype, and every tensor's properties."""
    autocast = torch.is_autocast_enabled(device.type)
    predicted = prediction()
    return {
        "device": device.type if predicted is None else predicted.kind,
        "autocast": _name(torch.get_autocast_dtype(device.type)) if autocast else "off",
        "tensors": [
            {"shape": list(leaf.shape), "dtype": _name(leaf.dtype), "requires_grad": leaf.requires_grad}
            for leaf in torch_compat.tree_leaves(spec_of(spec))
            if isinstance(leaf, TensorSpec)
        ],
    }


def refuse_other_input(planned: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise PlanMismatchError if device, autocast or tensors of `found` are not as `planned`, but for fewer samples."""
    for before, after in zip(planned.get("tensors", []), found["tensors"], strict=False):
        shape, expected = after["shape"], before.get("shape", [])
        # Compare a smaller batch as if it had the planned number of samples.
        if shape and len(expected) == len(shape) and shape[0] < expected[0]:
            after["shape"] = [expected[0], *shape[1:]]
    refuse_difference(planned, found)


def refuse_difference(planned: dict[str, Any], found: dict[str, Any]) -> None:
    for name, before, after in _differences("", planned, found):
        raise PlanMismatchError(name, before, after)


def _differences(path: str, planned: Any, found: Any) -> Iterator[tuple[str, object, object]]:
    if isinstance(planned, dict) and isinstance(found, dict):
        for key in [*planned, *(key for key in found if key not in planned)]:
            yield from _differences(f"{path} {key}".strip(), planned.get(key, "absent"), found.get(key, "absent"))
    elif isinstance(planned, list) and isinstance(found, list) and len(planned) == len(found):
        for index, (before, after) in enumerate(zip(planned, found, strict=True)):
            yield from _differences(f"{path} {index}", before, after)
    elif planned != found:
        yield path, planned, found


def _sharing(tensor: torch.Tensor) -> str:
    """Return text on how processes share a parameter: another number of processes gives its shards other sizes."""
    if not is_dtensor(tensor):
        return ""
    return f" {' '.join(map(str, tensor.placements))} of {list(tensor.device_mesh.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
