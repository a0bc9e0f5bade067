"""What a plan was made for: enough of a model and its input to refuse another one, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from rotor_profiling.backends import prediction
from rotor_profiling.torch_classes import is_dtensor
from rotor_py.distributed.shard_groups import at_rest
from rotor_py.errors import PlanMismatchError
from rotor_py.measure.cut import is_chain, layers
from rotor_py.plan.inputs.input_spec import TensorSpec


def model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Layers and parameters of a model, as plain data; of one that is captured, its modules for its layers."""
    found = layers(model) if is_chain(model) else [(name or "(whole)", each) for name, each in model.named_modules()]
    # Of a captured model the modules are compared, since its layers are not known before it runs.
    with at_rest(model):
        return {
            "layers": {name: type(layer).__name__ for name, layer in found},
            "parameters": {
                name: f"{list(p.shape)} {_dtype(p)}{_spread(p)}{'' if p.requires_grad else ' frozen'}"
                for name, p in model.named_parameters()
            },
        }


def input_fingerprint(spec: Any, device: torch.device) -> dict[str, Any]:
    """Shapes and dtypes of an input (a value or the spec of one), its device and autocast, as plain data."""
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
    """PlanMismatchError if an input needs more than was planned for: anything but a batch with fewer samples."""
    for before, after in zip(planned.get("tensors", []), found["tensors"], strict=False):
        shape, expected = after["shape"], before.get("shape", [])
        # A smaller batch is compared as if it were of the planned size.
        if shape and len(expected) == len(shape) and shape[0] < expected[0]:
            after["shape"] = [expected[0], *shape[1:]]
    refuse_difference(planned, found)


def refuse_difference(planned: dict[str, Any], found: dict[str, Any]) -> None:
    """PlanMismatchError naming the first thing that differs."""
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
    """How processes share a parameter: with others beside it, a process has a part of another size."""
    if not is_dtensor(tensor):
        return ""
    return f" {' '.join(map(str, tensor.placements))} of {list(tensor.device_mesh.shape)}"


def _dtype(tensor: torch.Tensor) -> str:
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
