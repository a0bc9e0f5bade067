"""Parse option texts: shape, dtype, optimizer, configuration."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rotor_cli.failure import usage

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_VARIANTS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False, "fused": False},
    "momentum": {"momentum": 0.9},
}


def tensor_factory(shape: str) -> Callable[[], torch.Tensor]:
    """Make random tensors of a shape such as `32,3,224,224`, or integer zeros, as for `8,128:int64`.

    Raises Failure for an invalid `shape`.
    """
    sizes, _, kind = shape.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    try:
        dimensions = [int(size) for size in sizes.split(",")]
    except ValueError:
        dimensions = [0]
    if min(dimensions) < 1 or not isinstance(dtype, torch.dtype):
        message = f"--input {shape!r} is not a shape; write for example 32,3,224,224 or 8,128:int64"
        raise usage("no_shape", "--input", message)
    make = torch.randn if dtype.is_floating_point or dtype.is_complex else torch.zeros
    return partial(make, dimensions, dtype=dtype)


def dtype_called(name: str, option: str) -> torch.dtype:
    """The floating-point dtype `name`: `bfloat16`, `bf16`. Raises Failure for `option` otherwise."""
    found = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        message = f"{option} {name!r} is no kind of floating-point number; write bfloat16, float16 or float32"
        raise usage("bad_value", option, message)
    return found


def autocast_dtype(name: str) -> torch.dtype:
    found = dtype_called(name, "--autocast")
    if found not in (torch.bfloat16, torch.float16):
        message = f"--autocast {name} casts to nothing lower; write bfloat16 or float16"
        raise usage("bad_value", "--autocast", message)
    return found


def optimizer_called(text: str) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """A factory of the `torch.optim` optimizer with this lowercase name and variant, such as `adamw-fused`.

    Raises Failure for an unknown name, or a variant that the optimizer does not take.
    """
    known: dict[str, Any] = {
        name.lower(): each
        for name, each in vars(torch.optim).items()
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    }
    base, _, variant = text.lower().partition("-")
    if base not in known:
        near = " or ".join(get_close_matches(base, known, n=3) or ["adamw", "sgd", "adafactor"])
        message = f"--optimizer {text!r} is none of torch.optim; did you mean {near}?"
        raise usage("bad_value", "--optimizer", message)
    if not variant:
        return partial(known[base])
    takes = inspect.signature(known[base]).parameters.keys()
    variants = {key: options for key, options in _VARIANTS.items() if options.keys() <= takes}
    if variant not in variants:
        there = ", ".join((base, *(f"{base}-{key}" for key in variants)))
        message = f"--optimizer {text!r}: there is no such variant; there is {there}"
        raise usage("bad_value", "--optimizer", message)
    return partial(known[base], **variants[variant])


def configuration(text: str | None) -> dict[str, Any]:
    """Settings from JSON text, or a file of it. Raises Failure if it is neither."""
    example, wrong = "'{\"n_layer\": 8}'", partial(usage, "bad_value", "--config")
    if text is None:
        return {}
    try:
        if not text.lstrip().startswith("{"):
            if not Path(text).is_file():
                raise wrong(f"--config {text!r} is neither JSON, such as {example}, nor a file of it")
            text = Path(text).read_text(encoding="utf-8")
        settings = json.loads(text)
    except ValueError as error:
        raise wrong(f"--config is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise wrong(f"--config is {type(settings).__name__}; it has to be an object, such as {example}")
    return settings
