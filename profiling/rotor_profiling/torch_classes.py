"""Test for classes of torch whose modules are slow to import: nothing is of such a class before its import.

`import torch` leaves out TorchDynamo, DTensor and FSDP, and so does this project until a model needs them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from rotor_profiling.torch_compat import OptimizedModule


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a tensor distributed over processes."""
    return _is_of(value, "torch.distributed.tensor", "DTensor")


def is_fake(value: object) -> bool:
    return _is_of(value, "torch._subclasses.fake_tensor", "FakeTensor")


def is_optimized(module: object) -> TypeGuard[OptimizedModule]:
    return _is_of(module, "torch._dynamo.eval_frame", "OptimizedModule")


def is_fsdp_module(module: object) -> bool:
    return isinstance(module, _fsdp_classes())


def has_fsdp_module(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to any module of a model. Fast, since every step calls it."""
    classes = _fsdp_classes()
    # `fully_shard` derives a class for each type of module.
    if not any(each and each.__subclasses__() for each in classes):
        return False
    pending = [model]  # not by `modules()`, whose deduplication takes longer
    while pending:
        module = pending.pop()
        if isinstance(module, classes):
            return True
        pending += [child for child in module._modules.values() if child is not None]
    return False


def _fsdp_classes() -> tuple[Any, ...]:
    folders = "torch.distributed.fsdp", "torch.distributed._composable.fsdp"  # the second one before torch 2.6
    return tuple(_class(folder, "FSDPModule") for folder in folders)


def _is_of(value: object, module: str, name: str) -> bool:
    return isinstance(value, _class(module, name))


def _class(module: str, name: str) -> Any:
    """Return the class, or () if its module is not, or only partly, imported."""
    return getattr(sys.modules.get(module), name, ())
