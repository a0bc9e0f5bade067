"""`torch.compile(Checkpointable(model))`: what it asks for is seen in the first forward, by who calls it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rotor_profiling.torch_classes import is_optimized

_FRAMES = 40
"""How far up the stack is looked. torch 2.13 has eight frames in between, and DistributedDataParallel ten more."""


def inductor_around(module: nn.Module) -> torch._TorchCompileInductorWrapper | None:
    """The compiler of a `torch.compile` around `module` that has called it, directly or through others.

    None if there is none, or if it has another backend than Inductor.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:  # nobody has compiled anything
        return None
    callers = dynamo.__file__, nn.modules.module.__file__  # the files in which a module is called
    # `torch.compile` leaves no trace in the module that it is given, and hands nothing over when it calls it.
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        # Of torch's own frames alone: a frame that was asked for its locals holds them until it ends, even those that
        # are deleted, and a training loop does not end.
        caller = frame.f_locals.get("self") if frame.f_code.co_filename in callers else None
        if is_optimized(caller) and _is_around(caller._orig_mod, module):
            return _inductor(caller.dynamo_ctx)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def inductor_of(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> torch._TorchCompileInductorWrapper | None:
    """The compiler that `torch.compile` makes of these arguments; None if it is another one than Inductor."""
    around: Any = torch.compile(nn.Identity(), *arguments, **keywords)
    return _inductor(around.dynamo_ctx)


def _is_around(outer: Any, module: nn.Module) -> bool:
    while isinstance(outer, DistributedDataParallel):
        outer = outer.module
    return outer is module


def _inductor(context: Any) -> torch._TorchCompileInductorWrapper | None:
    """The backend of a context of TorchDynamo, which wraps it several times."""
    found = getattr(context, "callback", None)
    while found is not None and not isinstance(found, torch._TorchCompileInductorWrapper):
        found = getattr(found, "_torchdynamo_orig_backend", None)
    return found
