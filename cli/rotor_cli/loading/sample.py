"""The sample: from a file, a shape or a batch size to tensors on the device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from rotor_cli.errors import usage
from rotor_cli.loading.values import floating_dtype, no_floating_dtype, no_shape, shape_of
from rotor_profiling import tensors_in
from rotor_py.plan.inputs.sample import arguments_of

DEFAULT_BATCH = 8
"""For a function of the batch size that has no default of its own. A guess."""


def made_by(sample: Any, batch: int | None) -> Any:
    """`sample` itself, or what it makes if it is a function of the batch size."""
    if not callable(sample) or isinstance(sample, torch.Tensor):
        return sample
    required = [p for p in inspect.signature(sample).parameters.values() if p.default is p.empty]
    if batch is None and not required:
        return sample()
    return sample(DEFAULT_BATCH if batch is None else batch)


def with_batch(sample: Any, batch: int) -> Any:
    """The sample with `batch` rows, at least one: its own, repeated or cut."""

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        # A scalar has no rows, and none can be made out of none.
        if tensor.dim() == 0 or len(tensor) in (0, batch):
            return tensor
        return tensor.detach()[torch.arange(batch) % len(tensor)].requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, resized, sample)


def batches_of(given: Any, made: Any, model: nn.Module) -> Callable[[int], Any]:
    """A function of a number of samples that makes a sample of so many.

    It is `given`, if that is a function of the batch size. Otherwise `made` has its first dimension scaled, that of
    every tensor; Failure, when it is called, where they have not one first dimension in common.
    """
    if callable(given) and not isinstance(given, torch.Tensor) and inspect.signature(given).parameters:
        return partial(made_by, given)

    def scaled(batch: int) -> Any:
        sample = arguments_of(made, model)  # a DataLoader's is its first batch
        rows = {len(tensor) for tensor in tensors_in(sample) if tensor.dim()}
        if len(rows) != 1:
            said = " and ".join(map(str, sorted(rows))) or "none"
            raise usage(
                f"the inputs have no first dimension in common that could be the batch ({said}); write `sample` in the "
                "model file as a function of the batch size"
            )
        return with_batch(sample, batch)

    return scaled


def tensor_of(shape: str) -> torch.Tensor:
    """A random tensor of a shape such as `32,3,224,224`, or zeros for whole numbers, as in `8,128:int64`.

    Failure if `shape` is none.
    """
    dimensions, kind = shape_of(shape)
    dtype = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype):
        raise no_shape(shape)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(dimensions, dtype=dtype)
    return torch.zeros(dimensions, dtype=dtype)


def dtype_called(name: str, option: str = "--dtype") -> torch.dtype:
    """The kind of floating-point number called `name`: `bfloat16`, `bf16`; Failure of `option` for anything else."""
    found = getattr(torch, floating_dtype(name, option), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise no_floating_dtype(name, option)
    return found


def in_dtype(dtype: torch.dtype, sample: Any) -> Any:
    """The sample with its floating-point numbers as `dtype`."""
    return tree_map_only(torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, sample)


def moved_to(device: torch.device, sample: Any) -> Any:
    """The sample with every tensor on `device`; those that need a gradient are leaves there."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == device else tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, moved, sample)
