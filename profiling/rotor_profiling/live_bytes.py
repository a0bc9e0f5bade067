"""Count the bytes of live storages while code runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rotor_profiling.followed_storages import FollowedStorages
from rotor_profiling.storage import allocated

OperatorBytes = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]
"""Returns the temporary bytes of an operator's kernel, from (operator, arguments, keywords, result)."""


def no_scratch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return 0: nothing is known of the kernel."""
    return 0


class LiveBytes(FollowedStorages):
    """Count the bytes of storages on devices of `kinds` that are created while the mode is active.

    Sizes are those that the allocator of `kind` would count; `scratch` gives the temporary bytes of kernels.
    """

    def __init__(self, kinds: set[str], kind: str, scratch: OperatorBytes = no_scratch) -> None:
        super().__init__()
        self.now = 0
        """live bytes of storages created since construction or `reset`"""
        self.peak = 0
        """most live bytes since construction, `reset` or `begin_peak`"""
        self._kinds, self._kind, self._scratch = kinds, kind, scratch
        self._sizes: dict[int, int] = {}

    def reset(self) -> None:
        """Forget live storages: only those created from now on count."""
        self.forget()
        self._sizes.clear()
        self.now = self.peak = 0

    def begin_peak(self) -> None:
        """Restart the peak at the present live bytes."""
        self.peak = self.now

    def follows(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type in self._kinds

    def taken(self, number: int, size: int) -> None:
        self._sizes[number] = allocated(size, self._kind)
        self.now += self._sizes[number]
        self.peak = max(self.peak, self.now)

    def freed(self, number: int) -> None:
        self.now -= self._sizes.pop(number)

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.peak = max(self.peak, self.now + self._scratch(func, args, kwargs, out))
