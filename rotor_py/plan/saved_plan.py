"""Save a plan, and check that a model and an input are those it was made for.

The plan keeps enough of the model and its input to explain a mismatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rotor_profiling.backends import prediction
from rotor_profiling.torch_compat import is_dtensor, tree_leaves
from rotor_py.distributed.sharding import at_rest
from rotor_py.errors import PlanMismatchError
from rotor_py.measure.cut import Cut, Layer, is_chain, joined, layers
from rotor_py.plan import plan_file
from rotor_py.plan.plan_file import CompiledStages, PlanCosts
from rotor_py.plan.step_spec import TensorSpec
from rotor_py.stage.forward_state import GraphEffects, remember_effects
from rotor_solver import Sequence


def model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return layers and parameters of a model as plain data; for a captured model, its modules."""
    found = layers(model) if is_chain(model) else [(name or "(whole)", each) for name, each in model.named_modules()]
    # For a captured model, modules are compared: its layers are unknown before it runs.
    with at_rest(model):
        return {
            "layers": {name: type(layer).__name__ for name, layer in found},
            "parameters": {
                name: f"{list(p.shape)} {_dtype(p)}{_spread(p)}{'' if p.requires_grad else ' frozen'}"
                for name, p in model.named_parameters()
            },
        }


def input_fingerprint(spec: Any, device: torch.device) -> dict[str, Any]:
    """Return shapes and dtypes of an input (a value or its spec), its device and autocast, as plain data."""
    autocast = torch.is_autocast_enabled(device.type)
    predicted = prediction()
    return {
        "device": device.type if predicted is None else predicted.kind,
        "autocast": _name(torch.get_autocast_dtype(device.type)) if autocast else "off",
        "tensors": [
            {"shape": list(leaf.shape), "dtype": _name(leaf.dtype), "requires_grad": leaf.requires_grad}
            for leaf in tree_leaves(spec)
            if isinstance(leaf, torch.Tensor | TensorSpec)
        ],
    }


def refuse_other_input(planned: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise PlanMismatchError unless the input is the planned one or a batch with fewer samples."""
    for before, after in zip(planned.get("tensors", []), found["tensors"], strict=False):
        shape, expected = after["shape"], before.get("shape", [])
        # A smaller batch is compared as if it were of the planned size.
        if shape and len(expected) == len(shape) and shape[0] < expected[0]:
            after["shape"] = [expected[0], *shape[1:]]
    refuse_difference(planned, found)


def refuse_difference(planned: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise PlanMismatchError naming the first difference."""
    for field, before, after in _differences("", planned, found):
        raise PlanMismatchError(field, before, after)


def _differences(path: str, planned: Any, found: Any) -> Iterator[tuple[str, object, object]]:
    if isinstance(planned, dict) and isinstance(found, dict):
        for key in [*planned, *(key for key in found if key not in planned)]:
            yield from _differences(f"{path} {key}".strip(), planned.get(key, "absent"), found.get(key, "absent"))
    elif isinstance(planned, list) and isinstance(found, list) and len(planned) == len(found):
        for index, (before, after) in enumerate(zip(planned, found, strict=True)):
            yield from _differences(f"{path} {index}", before, after)
    elif planned != found:
        yield path, planned, found


def _spread(tensor: torch.Tensor) -> str:
    """Say how processes share a parameter: with other processes, the local part has another size."""
    if not is_dtensor(tensor):
        return ""
    return f" {' '.join(map(str, tensor.placements))} of {list(tensor.device_mesh.shape)}"


def _dtype(tensor: torch.Tensor) -> str:
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Plan:
    """A sequence, with the model, input and limit that it was made for.

    `prefix` and `stages` name the layers of each part; a stage is a list of layers. `answers` are the batch's answers
    to a captured model's questions about its data, such as whether there is padding. `traits` are facts of each stage
    that runs without a graph do not show. `costs` are the measurements, all that a report needs. `limited` says that
    `mem_limit` was set, or is the device's; a strategy by hand may have none. `compiled` is present if `compile=` was
    given, and `step_in_backward` if parameters are stepped in the backward. `predicted_for` names the device that costs
    were predicted for, if nothing was measured.
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
        """Write the plan as JSON; `plan_file` documents the fields. Raises OSError if the file cannot be written."""
        plan_file.write(path, {field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan.

        Raises ValueError if the file is not a plan or is damaged, PlanMismatchError if it has compiled stages and was
        made with another torch, OSError if it cannot be read.
        """
        return cls(**plan_file.read(path))

    def cut(self, model: nn.Module) -> Cut:
        """Cut `model` into this plan's chain. Raises PlanMismatchError if it is another model."""
        return self.cut_layers(layers(model))

    def cut_layers(self, named: list[Layer]) -> Cut:
        """Cut layers given in the order in which they run. Raises PlanMismatchError if they are not the plan's."""
        found = dict(named)
        planned = [name for group in [self.prefix, *self.stages] for name in group]
        # In order: the same layers in another order have the same names, and other costs.
        if planned != list(found):
            raise PlanMismatchError("the order of layers", ", ".join(planned), ", ".join(found))
        stages = tuple(joined([(name, found[name]) for name in group]) for group in self.stages)
        for (_, function), traits in zip(stages, self.traits, strict=True):
            remember_effects(function, traits)
        return Cut(tuple((name, found[name]) for name in self.prefix), stages)

    def refuse_other_steps(self, found: dict[str, Any] | None) -> None:
        """Raise PlanMismatchError if other parameters, or another optimizer, step in the backward than in the plan."""
        if found != self.step_in_backward:
            field = "the optimizer that steps parameters in the backward (step_in_backward)"
            raise PlanMismatchError(field, self.step_in_backward or "none", found or "none")

    def refuse_fewer_bits(self, keep: str | None) -> None:
        """Raise PlanMismatchError if the plan may compress saved tensors in another format than `keep`."""
        asked = self.costs.measurement.fewer_bits
        if asked not in (None, keep):
            raise PlanMismatchError("keep=", repr(asked), repr(keep))

    def refuse_other(self, *, model: dict[str, Any] | None = None, value: dict[str, Any] | None = None) -> None:
        """Raise PlanMismatchError if the fingerprint of a model or an input is not the plan's."""
        if model is not None:
            refuse_difference(self.model, model)
        if value is not None:
            refuse_other_input(self.input, value)
