"""Load the user's model file (`model`, `sample`, optional `loss` and `optimizer`) or a class of transformers."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from rotor_cli.failure import usage, user_code
from rotor_cli.model_file_errors import REQUIRED_SAMPLE, no_module, required_model, split_target, unusable
from rotor_cli.request import Request
from rotor_cli.target_device import Target, dtype_called
from rotor_profiling import tensors_in
from rotor_profiling.value_tree import tree_map_only
from rotor_py.plan.step_spec import arguments_of

DEFAULT_BATCH = 8  # batch size for a function `sample` whose parameter has no default. A guess; more may not fit.
_LENGTH = 128  # number of tokens in each sample text for a model of transformers. A guess; --input overrides it.

_VARIANTS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False, "fused": False},
    "momentum": {"momentum": 0.9},
}


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The contents of a model file, moved to the device to plan for. `sample_of(n)` makes a sample of batch size n."""

    file: str
    name: str
    model: nn.Module
    sample: Any
    sample_of: Callable[[int], Any]
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None


def load(request: Request, target: Target) -> ModelFile:
    """Import MODEL, and move its model and sample to `target`. Raises Failure if one is missing or unusable."""
    batch = request.batch if isinstance(request.batch, int) else None
    location, name = split_target(request.model)
    dtype = None if request.dtype is None else dtype_called(request.dtype, "--dtype")
    named_optimizer = None if request.optimizer is None else optimizer_called(request.optimizer)
    shape = None if request.input is None else tensor_factory(request.input)
    settings = configuration(request.config)
    with target.making():
        module, file = _import(location)
    if not location.endswith(".py") and not hasattr(module, name):
        near = get_close_matches(name, dir(module), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise usage("no_such_name", name, f"{location} has no {name}{hint}")
    found = getattr(module, name, None)
    of_transformers = isinstance(found, type) and issubclass(found, nn.Module) and hasattr(found, "config_class")
    if request.config is not None and not of_transformers:
        message = f"--config needs a model class of transformers, and {request.model} is none"
        raise usage("not_transformers", "--config", message)
    model: Any = found
    with user_code(file), target.making():
        if of_transformers:
            model = model(model.config_class(**settings))
        elif callable(model) and not isinstance(model, nn.Module):
            model = model()
    if not isinstance(model, nn.Module):
        raise unusable(file, vars(module), required_model(name))
    given, loss, make_optimizer = (
        None if of_transformers else getattr(module, each, None) for each in ("sample", "loss", "optimizer")
    )
    sample: Any
    with target.making():
        if of_transformers:
            sample = _example_of(model, shape() if shape else None)
        elif shape is not None:
            sample = shape()
        elif given is None:
            raise unusable(file, vars(module), REQUIRED_SAMPLE)
        else:
            with user_code(file):
                sample = _made_by(given, batch)
        scaled = batches_of(None if shape else given, sample, model)
        sample = sample if batch is None else with_batch(sample, batch)
    if loss is not None and not callable(loss):
        message = f"`loss` in {file} is {type(loss).__name__}; it has to be a function of the model's output"
        raise usage("not_a_function", "loss", message)

    def moved(made: Any) -> Any:
        if dtype is not None:
            made = tree_map_only(torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, made)
        return target.sample(made, model)

    def sample_of(batch: int) -> Any:
        with user_code(file):
            with target.making():
                made = scaled(batch)
            return moved(made)

    with user_code(file):
        model = target.model(model if dtype is None else model.to(dtype), module).train()
        sample = moved(sample)
    make, optimizer = named_optimizer or make_optimizer, None
    if make is not None:
        with user_code(file), target.measuring():
            optimizer = make(model.parameters()) if callable(make) else make
        if not isinstance(optimizer, torch.optim.Optimizer):
            message = f"`optimizer` in {file} must make a torch.optim.Optimizer of the parameters, got "
            raise usage("not_an_optimizer", "optimizer", f"{message}{type(optimizer).__name__}")
    title = Path(location).name if location.endswith(".py") else location
    return ModelFile(file, title, model, sample, sample_of, loss, optimizer)


def _import(location: str) -> tuple[ModuleType, str]:
    if not location.endswith(".py"):
        sys.path.insert(0, "")  # search the current folder too, as `python -m` does
        try:
            found = importlib.util.find_spec(location)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise no_module(location)
        with user_code(found.origin or location):
            return importlib.import_module(location), found.origin or location
    path = Path(location)
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    # Pickle looks modules of classes up by name here. `setdefault`: a file called torch.py must not replace torch.
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    with user_code(str(path)):
        spec.loader.exec_module(module)
    return module, str(path)


def _made_by(sample: Any, batch: int | None) -> Any:
    if not callable(sample) or isinstance(sample, torch.Tensor):
        return sample
    if batch is None and all(p.default is not p.empty for p in inspect.signature(sample).parameters.values()):
        return sample()
    return sample(DEFAULT_BATCH if batch is None else batch)


def with_batch(sample: Any, batch: int) -> Any:
    """Repeat or cut the rows of each tensor in `sample` to `batch` rows; scalars and empty tensors stay unchanged."""

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or len(tensor) in (0, batch):
            return tensor
        return tensor.detach()[torch.arange(batch) % len(tensor)].requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, resized, sample)


def batches_of(given: Any, made: Any, model: nn.Module) -> Callable[[int], Any]:
    """Return a function that makes a sample of a given batch size: `given`, or one that resizes `made`."""
    if callable(given) and not isinstance(given, torch.Tensor) and inspect.signature(given).parameters:
        return given  # type: ignore[no-any-return] # user code

    def scaled(batch: int) -> Any:
        sample = arguments_of(made, model)  # the first batch if `made` is a DataLoader
        rows = {len(tensor) for tensor in tensors_in(sample) if tensor.dim()}
        if len(rows) != 1:
            sizes = " and ".join(map(str, sorted(rows))) or "none"
            message = f"the inputs have no first dimension in common that could be the batch ({sizes}); write `sample`"
            raise usage("no_batch_dimension", "sample", f"{message} in the model file as a function of the batch size")
        return with_batch(sample, batch)

    return scaled


def _example_of(model: Any, given: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return a sample for a model of transformers: its main input, shaped like `given`, and labels if it takes any."""
    accepted = inspect.signature(model.forward).parameters
    name = model.main_input_name
    if given is None:
        if name != "input_ids":
            message = f"the input of {type(model).__name__} is {name!r}; give its shape, as in --input 8,3,224,224"
            raise usage("no_shape", "--input", message)
        given = torch.zeros(8, _LENGTH, dtype=torch.int64)
    sample = {name: given}
    if name == "input_ids" and (vocabulary := getattr(model.config, "vocab_size", None)):
        sample[name] = torch.randint(int(vocabulary), tuple(given.shape))
    if "labels" in accepted:
        words = name == "input_ids" and "Classification" not in type(model).__name__
        sample["labels"] = sample[name].clone() if words else torch.zeros(len(given), dtype=torch.int64)
    return sample


def tensor_factory(shape: str) -> Callable[[], torch.Tensor]:
    """Return a function that makes a tensor of `shape`: random floats for `32,3,224,224`, zeros for `8,128:int64`."""
    sizes, _, kind = shape.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    try:
        dimensions = [int(size) for size in sizes.split(",")]
    except ValueError:
        dimensions = [0]
    if min(dimensions) < 1 or not isinstance(dtype, torch.dtype):
        raise usage("no_shape", "--input", f"--input must be a shape, as 32,3,224,224 or 8,128:int64, got {shape!r}")
    make = torch.randn if dtype.is_floating_point or dtype.is_complex else torch.zeros
    return partial(make, dimensions, dtype=dtype)


def optimizer_called(text: str) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return a function of the parameters that makes the torch.optim optimizer called `text`, such as `adamw-fused`."""
    known: dict[str, Any] = {
        name.lower(): each
        for name, each in vars(torch.optim).items()
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    }
    base, _, variant = text.lower().partition("-")
    if base not in known:
        near = " or ".join(get_close_matches(base, known, n=3) or ["adamw", "sgd", "adafactor"])
        raise usage("bad_value", "--optimizer", f"--optimizer {text!r} is not in torch.optim; did you mean {near}?")
    if not variant:
        return partial(known[base])
    takes = inspect.signature(known[base]).parameters.keys()
    variants = {key: options for key, options in _VARIANTS.items() if options.keys() <= takes}
    if variant not in variants:
        there = ", ".join((base, *(f"{base}-{key}" for key in variants)))
        raise usage("bad_value", "--optimizer", f"--optimizer {text!r} is unknown; choose {there}")
    return partial(known[base], **variants[variant])


def configuration(text: str | None) -> dict[str, Any]:
    """Return the settings in `text`: a JSON object, or the name of a file that has one. Raises Failure for others."""
    example, wrong = "'{\"n_layer\": 8}'", partial(usage, "bad_value", "--config")
    if text is None:
        return {}
    try:
        if not text.lstrip().startswith("{"):
            if not Path(text).is_file():
                raise wrong(f"--config {text!r} is neither JSON, such as {example}, nor a file")
            text = Path(text).read_text(encoding="utf-8")
        settings = json.loads(text)
    except ValueError as error:
        raise wrong(f"--config is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise wrong(f"--config is {type(settings).__name__}; it has to be an object, such as {example}")
    return settings
