"""What a plan was made for: enough of a model and its input to refuse another one, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rotor_profiling import tensors_in
from rotor_py.chain import layers
from rotor_py.errors import PlanMismatchError


def model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Layers and parameters of a model, as plain data."""
    return {
        "layers": {name: type(layer).__name__ for name, layer in layers(model)},
        "parameters": {
            name: f"{list(p.shape)} {_dtype(p)}{'' if p.requires_grad else ' frozen'}"
            for name, p in model.named_parameters()
        },
    }


def input_fingerprint(value: Any, device: torch.device) -> dict[str, Any]:
    """Shapes and dtypes of an input, and the kind of device it is on, as plain data."""
    autocast = torch.is_autocast_enabled(device.type)
    return {
        "device": device.type,
        "autocast": _name(torch.get_autocast_dtype(device.type)) if autocast else "off",
        "tensors": [
            f"{list(tensor.shape)} {_dtype(tensor)}{' with gradient' if tensor.requires_grad else ''}"
            for tensor in tensors_in(value)
        ],
    }


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


def _dtype(tensor: torch.Tensor) -> str:
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
