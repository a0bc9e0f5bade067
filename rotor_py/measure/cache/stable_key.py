"""Keys that mean the same in another process: of kinds of stages, and of what measuring them depends on."""

from __future__ import annotations

import enum
import hashlib
import operator
import os
import platform
import types
from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rotor_profiling import timing
from rotor_profiling.stage.kind import Unlike
from rotor_py.measure.cache.imported_code import code_of

_OWN_TYPES = ("rotor_py.capture.graph.", "rotor_py.models.")
"""Where classes of ours come from that say in their kind all that they do."""
_LIBRARIES = ("torch.", "_operator.", "math.", "builtins.")
"""Where functions and classes come from whose code changes with their version alone."""
_NAMESPACES = ("aten", "prims")


class UnstableKeyError(Exception):
    """Part of a key means something in this process alone: a function of the user's, an object that is only itself."""


def digest_of(key: Hashable) -> str:
    """A text that is equal for equal keys, in every process. UnstableKeyError if there is none."""
    return hashlib.sha256(_text(key).encode()).hexdigest()


def environment(device: torch.device) -> tuple[Hashable, ...]:
    """What seconds and bytes of a stage depend on beside the stage: versions, the device, settings of torch."""
    cuda = device.type == "cuda"
    autocast = tuple(
        (kind, str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None)
        for kind in ("cpu", "cuda")
    )
    return (
        torch.__version__,
        platform.python_version(),
        _code(),
        torch.cuda.get_device_name(device) if cuda else _processor(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        str(torch.get_default_dtype()),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        tuple(
            os.environ.get(name)
            for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
        ),
        autocast,
    )


@cache
def _code() -> str:
    """A digest of our own code: what is measured, and how, changes with it."""
    found = hashlib.sha256()
    for package in (Path(__file__).parents[2], Path(timing.__file__).parent):
        for file in sorted(package.rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def _text(value: Any) -> str:
    if isinstance(value, Unlike):
        raise UnstableKeyError("an object that is equal to itself alone")
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if value is None or value is Ellipsis or isinstance(value, bool | int | float | complex | str | bytes):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step))}"
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        if str(value).partition(".")[0] not in _NAMESPACES:
            raise UnstableKeyError(f"the operator {value}")
        return f"operator {value}"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType):
        return _name(value)
    raise UnstableKeyError(f"a {type(value).__name__}")


def _name(value: Any) -> str:
    """The full name of a class or a function of a library."""
    owner = getattr(value, "__self__", None)
    # Many functions of torch are methods of a class in C, and have no module.
    module = getattr(value, "__module__", None) or getattr(owner, "__module__", None) or ""
    name = getattr(value, "__qualname__", "")
    path = f"{module}.{name}"
    if isinstance(value, types.FunctionType) and (value.__closure__ or "<" in name):
        raise UnstableKeyError(f"the function {path}, which is bound to something")
    known = path.startswith(_LIBRARIES) or getattr(operator, name, None) is value
    if known or (isinstance(value, type) and path.startswith(_OWN_TYPES)):
        return path
    code = code_of(value) if isinstance(value, type) else None
    if code is None:
        raise UnstableKeyError(f"{path}, whose code may change")
    return f"{path} of {code}"
