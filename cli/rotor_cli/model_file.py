"""Load the user's model file (`model`, `sample`, optional `loss` and `optimizer`) or a class of transformers."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
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

from rotor_cli.errors import model_code, usage
from rotor_cli.model_file_errors import WANTED_SAMPLE, no_module, split_target, unusable, wanted_model
from rotor_cli.option_values import (
    configuration,
    no_shape,
    optimizer_and_options,
    shape_of,
)
from rotor_cli.request import Request
from rotor_cli.target_device import LocalTarget, dtype_called
from rotor_profiling import tensors_in
from rotor_profiling.torch_compat import tree_map_only
from rotor_py.plan.sample import arguments_of

DEFAULT_BATCH = 8
"""Batch for a sample function without a default. A guess; larger may not fit."""
_LENGTH = 128
"""Sequence length of a sample text. A guess: the user sets --input for another."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Contents of a model file; `sample` is on the model's device already. `file` is where errors are reported.

    `sample_of` makes a sample of a given batch size, on the device as well.
    """

    file: str
    name: str
    model: nn.Module
    sample: Any
    sample_of: Callable[[int], Any]
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None


def load(request: Request, target: LocalTarget) -> ModelFile:
    """Read `file.py`, `file.py:name` or `package.module:name`, and move model and sample to `target`.

    Raises Failure if the file cannot be read or its contents cannot be used.
    """
    batch, shape, config = request.batch_size, request.shape, request.config
    location, name = split_target(request.model)
    named_dtype = None if request.dtype is None else dtype_called(request.dtype)
    named_optimizer = None if request.optimizer is None else optimizer_called(request.optimizer)
    with target.making():
        module, file = _import(location)
    _refuse_unknown(location, module, name)
    wanted = getattr(module, name, None)
    configurable = configuration_class(wanted)
    if config is not None and configurable is None:
        raise usage(
            f"--config is for a class of models of transformers, and {request.model} is none",
            kind="not_transformers",
            name="--config",
        )
    with model_code(file), target.making():
        model = _made(wanted, torch.nn.Module) if configurable is None else made_from(wanted, configurable, config)
    if not isinstance(model, nn.Module):
        raise unusable(file, vars(module), wanted_model(name))
    sample: Any
    with target.making():
        if configurable is not None:
            sample = example_of(model, None if shape is None else tensor_of(shape))
        else:
            sample = tensor_of(shape) if shape else _sample(module, file, batch)
        scaled = batches_of(None if shape or configurable is not None else module.sample, sample, model)
        sample = with_batch(sample, batch) if batch is not None else sample
    loss, make_optimizer = getattr(module, "loss", None), getattr(module, "optimizer", None)
    if configurable is not None:
        loss = make_optimizer = None
    if loss is not None and not callable(loss):
        raise usage(
            f"`loss` in {file} is {type(loss).__name__}; it has to be a function of the model's output",
            kind="not_a_function",
            name="loss",
        )
    make_optimizer = named_optimizer or make_optimizer

    def brought(made: Any) -> Any:
        return target.sample(made if named_dtype is None else in_dtype(named_dtype, made), model)

    with model_code(file):
        model = target.model(model if named_dtype is None else model.to(named_dtype), module).train()
        sample = brought(sample)
    with model_code(file), target.measuring():
        made_optimizer = _optimizer(make_optimizer, model, file) if make_optimizer is not None else None
    title = Path(location).name if location.endswith(".py") else location
    return ModelFile(
        file, title, model, sample, partial(_sample_of, target, scaled, brought, file), loss, made_optimizer
    )


def _sample_of(
    target: LocalTarget, make: Callable[[int], Any], brought: Callable[[Any], Any], file: str, batch: int
) -> Any:
    with model_code(file):
        with target.making():
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
    # As when Python runs the file: it may import its neighbours, and its classes are found by module name. A file named
    # like an imported module (torch.py) must not replace it.
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    with model_code(str(path)):
        spec.loader.exec_module(module)
    return module, str(path)


def _import_module(location: str) -> tuple[ModuleType, str]:
    # Search the current folder too, as `python -m` does.
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
    """`value`, or its result if it is a function or a class."""
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
            "returns a torch.optim.Optimizer",
            kind="not_an_optimizer",
            name="optimizer",
        )
    return made


def what_is_missing(file: str, module: ModuleType) -> tuple[str, str]:
    """What a model file lacks, in words, and a working example."""
    wanted = WANTED_SAMPLE if hasattr(module, "model") else wanted_model("model")
    said, _, example = unusable(file, vars(module), wanted).message.partition(". A file that works:\n\n")
    return said, example


def _refuse_unknown(target: str, module: ModuleType, name: str) -> None:
    """Raise Failure with the nearest names if a library lacks this name: it is no file to be written."""
    if target.endswith(".py") or hasattr(module, name):
        return
    near = get_close_matches(name, dir(module), n=3)
    raise usage(
        f"{target} has no {name}" + (f"; did you mean {' or '.join(near)}?" if near else ""),
        kind="no_such_name",
        name=name,
    )


def made_by(sample: Any, batch: int | None) -> Any:
    """`sample`, or its result if it is a function of the batch size."""
    if not callable(sample) or isinstance(sample, torch.Tensor):
        return sample
    required = [p for p in inspect.signature(sample).parameters.values() if p.default is p.empty]
    if batch is None and not required:
        return sample()
    return sample(DEFAULT_BATCH if batch is None else batch)


def with_batch(sample: Any, batch: int) -> Any:
    """The sample with `batch` rows, repeated or cut. Needs at least one row."""

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        # Scalars have no rows, and empty tensors cannot be repeated.
        if tensor.dim() == 0 or len(tensor) in (0, batch):
            return tensor
        return tensor.detach()[torch.arange(batch) % len(tensor)].requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, resized, sample)


def batches_of(given: Any, made: Any, model: nn.Module) -> Callable[[int], Any]:
    """A function of the batch size that makes a sample.

    Returns `given` if it is such a function. Otherwise scales the first dimension of every tensor of `made`; raises
    Failure, when called, if these differ.
    """
    if callable(given) and not isinstance(given, torch.Tensor) and inspect.signature(given).parameters:
        return partial(made_by, given)

    def scaled(batch: int) -> Any:
        sample = arguments_of(made, model)  # the first batch of a DataLoader
        rows = {len(tensor) for tensor in tensors_in(sample) if tensor.dim()}
        if len(rows) != 1:
            said = " and ".join(map(str, sorted(rows))) or "none"
            raise usage(
                f"the inputs have no first dimension in common that could be the batch ({said}); write `sample` in the "
                "model file as a function of the batch size",
                kind="no_batch_dimension",
                name="sample",
            )
        return with_batch(sample, batch)

    return scaled


def tensor_of(shape: str) -> torch.Tensor:
    """A random tensor of a shape such as `32,3,224,224`, or integer zeros, as in `8,128:int64`.

    Raises Failure for an invalid `shape`.
    """
    dimensions, kind = shape_of(shape)
    dtype = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype):
        raise no_shape(shape)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(dimensions, dtype=dtype)
    return torch.zeros(dimensions, dtype=dtype)


def in_dtype(dtype: torch.dtype, sample: Any) -> Any:
    """The sample with its floating-point tensors in `dtype`."""
    return tree_map_only(torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, sample)


def optimizer_called(name: str) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """A factory of the `torch.optim` optimizer with this lowercase name and variant.

    Raises Failure for an unknown name, or a variant that the optimizer does not take.
    """
    known: dict[str, Any] = {key.lower(): each for key, each in vars(torch.optim).items() if _is_optimizer(each)}
    base, options = optimizer_and_options(name, known, lambda base: inspect.signature(known[base]).parameters)
    return partial(known[base], **options)


def _is_optimizer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer


def configuration_class(found: Any) -> Any:
    """Configuration class of a model class; None for anything else."""
    return getattr(found, "config_class", None) if isinstance(found, type) and issubclass(found, nn.Module) else None


def made_from(model_class: Any, config_class: Any, config: str | None) -> nn.Module:
    """A model with random weights; `config` is JSON, or a file of it."""
    made: nn.Module = model_class(config_class(**configuration(config)))
    return made


def example_of(model: Any, given: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Keyword arguments of a training step: `given` or a default as the main input, and labels."""
    accepted = inspect.signature(model.forward).parameters
    name = model.main_input_name
    if given is None:
        if name != "input_ids":
            raise usage(
                f"the input of {type(model).__name__} is {name!r}; say its shape, as in --input 8,3,224,224",
                kind="no_shape",
                name="--input",
            )
        given = torch.zeros(8, _LENGTH, dtype=torch.int64)
    sample = {name: given}
    vocabulary = getattr(model.config, "vocab_size", None)
    if name == "input_ids" and vocabulary:
        sample[name] = torch.randint(int(vocabulary), tuple(given.shape))
    if "labels" in accepted:
        # Language models are labelled by the text itself, classifiers by one number per sample.
        words = name == "input_ids" and "Classification" not in type(model).__name__
        sample["labels"] = sample[name].clone() if words else torch.zeros(len(given), dtype=torch.int64)
    return sample
