"""Classes of torch whose modules take long to import: nothing is of such a class unless somebody has imported it.

`import torch` leaves TorchDynamo, DTensor and FSDP out, and so do we until a model needs them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch._dynamo.eval_frame import OptimizedModule
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a tensor that several processes share."""
    return _is_of(value, "torch.distributed.tensor", "DTensor")


def is_optimized(module: object) -> TypeGuard[OptimizedModule]:
    """Whether a module is what `torch.compile` makes of one."""
    return _is_of(module, "torch._dynamo.eval_frame", "OptimizedModule")


def is_fsdp_module(module: object) -> bool:
    """Whether `fully_shard` was applied to a module."""
    folders = "torch.distributed.fsdp", "torch.distributed._composable.fsdp"  # the second one before torch 2.6
    return any(_is_of(module, folder, "FSDPModule") for folder in folders)


def _is_of(value: object, module: str, name: str) -> bool:
    kind: Any = getattr(sys.modules.get(module), name, ())  # () also while the module is being imported
    return isinstance(value, kind)
