"""The user's model file: `model`, `sample`, and if they are there `loss` and `optimizer`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from rotor_cli.errors import model_code, usage
from rotor_cli.loading.transformers_class import configuration_class, example_of, make

DEFAULT_BATCH = 8
EXAMPLE = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10))

def sample(batch):
    return torch.randn(batch, 1024)

def loss(output):                      # optional
    return output.square().mean()

def optimizer(parameters):             # optional
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What a model file defines; `sample` is on the model's device already. `file` is where errors are shown from."""

    file: str
    name: str
    model: nn.Module
    sample: Any
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None


def load(
    target: str, device: torch.device, batch: int | None, shape: str | None, config: str | None = None
) -> ModelFile:
    """Read `file.py`, `file.py:name` or `package.module:name`; Failure in words if that does not work."""
    location, name = _split(target)
    module, file = _import(location)
    wanted = getattr(module, name, None)
    configurable = configuration_class(wanted)
    if config is not None and configurable is None:
        raise usage(f"--config is for a class of models of transformers, and {target} is none")
    with model_code(file):
        model = _made(wanted, torch.nn.Module) if configurable is None else make(wanted, configurable, config)
    if not isinstance(model, nn.Module):
        raise usage(
            _unusable(file, name, module, f"a model called {name!r} (a torch.nn.Module, or a function that makes one)")
        )
    sample: Any
    if configurable is not None:
        sample = example_of(model, None if shape is None else _tensor(shape))
    else:
        sample = _tensor(shape) if shape else _sample(module, file, batch)
    sample = _with_batch(sample, batch) if batch is not None else sample
    loss, make_optimizer = getattr(module, "loss", None), getattr(module, "optimizer", None)
    if configurable is not None:
        loss = make_optimizer = None
    if loss is not None and not callable(loss):
        raise usage(f"`loss` in {file} is {type(loss).__name__}; it has to be a function of the model's output")
    with model_code(file):
        model = model.to(device).train()
        sample = tree_map_only(torch.Tensor, lambda tensor: _moved(tensor, device), sample)
        optimizer = _optimizer(make_optimizer, model, file) if make_optimizer is not None else None
    return ModelFile(
        file, f"{Path(location).name if location.endswith('.py') else location}", model, sample, loss, optimizer
    )


def _split(target: str) -> tuple[str, str]:
    if target.endswith(".py"):
        return target, "model"
    location, colon, name = target.rpartition(":")
    if not colon:
        if Path(target).exists():
            raise usage(f"{target} is not a Python file; write file.py, file.py:name or package.module:name")
        raise usage(f"{target!r} names no model; write file.py, file.py:name or package.module:name")
    return location, name


def _import(location: str) -> tuple[ModuleType, str]:
    if not location.endswith(".py"):
        return _import_module(location)
    path = Path(location)
    if not path.is_file():
        raise usage(f"there is no file {location}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    with model_code(str(path)):
        spec.loader.exec_module(module)
    return module, str(path)


def _import_module(location: str) -> tuple[ModuleType, str]:
    sys.path.insert(0, "")
    try:
        found = importlib.util.find_spec(location)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise usage(f"there is no module {location!r} to import, and no file of that name ending in .py")
    with model_code(found.origin or location):
        return importlib.import_module(location), found.origin or location


def _made(value: Any, kind: type) -> Any:
    """`value`, or what it makes if it is a function or a class."""
    return value() if callable(value) and not isinstance(value, kind) else value


def _sample(module: ModuleType, file: str, batch: int | None) -> Any:
    sample = getattr(module, "sample", None)
    if sample is None:
        raise usage(
            _unusable(
                file,
                "sample",
                module,
                "an input called 'sample' (a tensor, tuple or dict, or a function of the batch size)",
            )
        )
    if not callable(sample) or isinstance(sample, torch.Tensor):
        return sample
    with model_code(file):
        required = [p for p in inspect.signature(sample).parameters.values() if p.default is p.empty]
        if batch is None and not required:
            return sample()
        return sample(DEFAULT_BATCH if batch is None else batch)


def _with_batch(sample: Any, batch: int) -> Any:
    """The sample with `batch` rows, its own repeated or cut."""
    if batch < 1:
        raise usage(f"--batch is {batch}; a batch has at least one sample")

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or len(tensor) in (0, batch):
            return tensor
        return tensor.detach()[torch.arange(batch) % len(tensor)].requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, resized, sample)


def _tensor(shape: str) -> torch.Tensor:
    """A random tensor of a shape such as `32,3,224,224`, or whole numbers for `8,128:int64`."""
    sizes, _, kind = shape.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    try:
        dimensions = [int(size) for size in sizes.split(",")]
    except ValueError:
        dimensions = []
    if not dimensions or min(dimensions) < 1 or not isinstance(dtype, torch.dtype):
        raise usage(f"--input {shape!r} is not a shape; write for example 32,3,224,224 or 8,128:int64")
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(dimensions, dtype=dtype)
    return torch.zeros(dimensions, dtype=dtype)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if tensor.device == device else tensor.detach().to(device).requires_grad_(tensor.requires_grad)


def _optimizer(make: Any, model: nn.Module, file: str) -> torch.optim.Optimizer:
    made = make(model.parameters()) if callable(make) else make
    if not isinstance(made, torch.optim.Optimizer):
        raise usage(
            f"`optimizer` in {file} gives {type(made).__name__}; it has to be a function of the parameters that "
            "returns a torch.optim.Optimizer"
        )
    return made


def _unusable(file: str, name: str, module: ModuleType, wanted: str) -> str:
    defined = ", ".join(key for key in vars(module) if not key.startswith("_")) or "nothing"
    return f"{file} has to define {wanted}; it defines {defined}. A file that works:\n\n{EXAMPLE}"
