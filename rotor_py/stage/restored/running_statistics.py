"""Buffers that operators write without saying so: the running statistics of batch norms.

PyTorch declares what most operators write, and counts such writes in a tensor's version. For these operators it does
neither. Their writes show in the values alone, and not always: the mean of zeros is what it was before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_profiling import storages

_aten = torch.ops.aten
_WRITING = {
    _aten.native_batch_norm,
    _aten.cudnn_batch_norm,
    _aten.miopen_batch_norm,
    _aten.batch_norm_gather_stats,
    _aten.batch_norm_gather_stats_with_counts,
    _aten.batch_norm_update_stats,
}
_STATISTICS = ("running_mean", "running_var")


class WrittenStatistics(TorchDispatchMode):
    """While entered, notes where running statistics lie that are written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._addresses: set[int] = set()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory was written."""
        return not self._addresses.isdisjoint(storages([tensor]))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled layers be run compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in _WRITING:
            names = [argument.name for argument in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            if given.get("training", True):
                self._addresses.update(storages(given[name] for name in _STATISTICS if given[name] is not None))
        return func(*args, **(kwargs or {}))
