"""The user's model file: `model`, `sample`, and if they are there `loss` and `optimizer`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from rotor_cli.errors import model_code, usage
from rotor_cli.loading.optimizers import optimizer_called
from rotor_cli.loading.place import Place
from rotor_cli.loading.sample import batches_of, dtype_called, in_dtype, made_by, tensor_of, with_batch
from rotor_cli.loading.target import no_module, split_target
from rotor_cli.loading.transformers_class import configuration_class, example_of, make
from rotor_cli.loading.wanted import WANTED_SAMPLE, unusable, wanted_model


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What a model file defines; `sample` is on the model's device already. `file` is where errors are shown from.

    `sample_of` makes a sample of as many rows as it is asked for, on the device as well.
    """

    file: str
    name: str
    model: nn.Module
    sample: Any
    sample_of: Callable[[int], Any]
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None


def load(
    target: str,
    place: Place,
    batch: int | None,
    shape: str | None,
    config: str | None = None,
    *,
    dtype: str | None = None,
    optimizer: str | None = None,
) -> ModelFile:
    """Read `file.py`, `file.py:name` or `package.module:name`, and bring the model and the sample to their `place`.

    `dtype` is what their numbers become, and `optimizer` the name of one that replaces the file's. Failure, with what
    is wrong in words, if it cannot be read or what it defines cannot be used.
    """
    location, name = split_target(target)
    named_dtype = None if dtype is None else dtype_called(dtype)
    named_optimizer = None if optimizer is None else optimizer_called(optimizer)
    with place.making():
        module, file = _import(location)
    _refuse_unknown(location, module, name)
    wanted = getattr(module, name, None)
    configurable = configuration_class(wanted)
    if config is not None and configurable is None:
        raise usage(f"--config is for a class of models of transformers, and {target} is none")
    with model_code(file), place.making():
        model = _made(wanted, torch.nn.Module) if configurable is None else make(wanted, configurable, config)
    if not isinstance(model, nn.Module):
        raise unusable(file, vars(module), wanted_model(name))
    sample: Any
    with place.making():
        if configurable is not None:
            sample = example_of(model, None if shape is None else tensor_of(shape))
        else:
            sample = tensor_of(shape) if shape else _sample(module, file, batch)
        scaled = batches_of(None if shape or configurable is not None else module.sample, sample, model)
        sample = with_batch(sample, batch) if batch is not None else sample
    place.adopt(module)
    loss, make_optimizer = getattr(module, "loss", None), getattr(module, "optimizer", None)
    if configurable is not None:
        loss = make_optimizer = None
    if loss is not None and not callable(loss):
        raise usage(f"`loss` in {file} is {type(loss).__name__}; it has to be a function of the model's output")
    make_optimizer = named_optimizer or make_optimizer

    def brought(made: Any) -> Any:
        return place.sample(made if named_dtype is None else in_dtype(named_dtype, made), model)

    with model_code(file):
        model = place.model(model if named_dtype is None else model.to(named_dtype)).train()
        sample = brought(sample)
    with model_code(file), place.measuring():
        made_optimizer = _optimizer(make_optimizer, model, file) if make_optimizer is not None else None
    title = Path(location).name if location.endswith(".py") else location
    return ModelFile(
        file, title, model, sample, partial(_sample_of, place, scaled, brought, file), loss, made_optimizer
    )


def _sample_of(place: Place, make: Callable[[int], Any], brought: Callable[[Any], Any], file: str, batch: int) -> Any:
    with model_code(file):
        with place.making():
            made = make(batch)
        return brought(made)


def _import(location: str) -> tuple[ModuleType, str]:
    if not location.endswith(".py"):
        return _import_module(location)
    path = Path(location)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As if Python ran the file: it may import its neighbours, and its classes are found by their module's name. A file
    # called like a module that is imported already (torch.py) must not take that module's place.
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    with model_code(str(path)):
        spec.loader.exec_module(module)
    return module, str(path)


def _import_module(location: str) -> tuple[ModuleType, str]:
    # As `python -m` finds modules: in the folder that it is called in, too.
    sys.path.insert(0, "")
    try:
        found = importlib.util.find_spec(location)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise no_module(location)
    with model_code(found.origin or location):
        return importlib.import_module(location), found.origin or location


def _made(value: Any, kind: type) -> Any:
    """`value`, or what it makes if it is a function or a class."""
    return value() if callable(value) and not isinstance(value, kind) else value


def _sample(module: ModuleType, file: str, batch: int | None) -> Any:
    sample = getattr(module, "sample", None)
    if sample is None:
        raise unusable(file, vars(module), WANTED_SAMPLE)
    with model_code(file):
        return made_by(sample, batch)


def _optimizer(make: Any, model: nn.Module, file: str) -> torch.optim.Optimizer:
    made = make(model.parameters()) if callable(make) else make
    if not isinstance(made, torch.optim.Optimizer):
        raise usage(
            f"`optimizer` in {file} gives {type(made).__name__}; it has to be a function of the parameters that "
            "returns a torch.optim.Optimizer"
        )
    return made


def what_is_missing(file: str, module: ModuleType) -> tuple[str, str]:
    """What a file would have to define to be a model file, in words; and one that works."""
    wanted = WANTED_SAMPLE if hasattr(module, "model") else wanted_model("model")
    said, _, example = unusable(file, vars(module), wanted).message.partition(". A file that works:\n\n")
    return said, example


def _refuse_unknown(target: str, module: ModuleType, name: str) -> None:
    """Failure that names the nearest names, where a library has none of this name: it is no file to be written."""
    if target.endswith(".py") or hasattr(module, name):
        return
    near = get_close_matches(name, dir(module), n=3)
    raise usage(f"{target} has no {name}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
