"""Bytes of the storages that live while code runs, counted from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rotor_profiling.predicted.followed_storages import FollowedStorages
from rotor_profiling.storage import allocated

OperatorBytes = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]
"""Bytes that an operator's kernel allocates while it runs, and frees: of (operator, arguments, keywords, result)."""


def no_scratch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Of kernels of which nothing is known."""
    return 0


class LiveBytes(FollowedStorages):
    """Counts the bytes of storages on devices of `kinds` that are created while the mode is active.

    Sizes are those that the allocator of `kind` would count; `scratch` is what kernels need beside their results.
    """

    def __init__(self, kinds: set[str], kind: str, scratch: OperatorBytes = no_scratch) -> None:
        super().__init__()
        self.now = 0
        """The bytes that are alive, of storages created since the mode was made, or since `reset`."""
        self.peak = 0
        """The most bytes that were alive at once since the mode was made, or since `reset` or `begin_peak`."""
        self.peak_with_given = 0
        """The peak if nothing had been freed that was made between the last two calls of `begin_peak`."""
        self._kinds, self._kind, self._scratch = kinds, kind, scratch
        self._sizes: dict[int, int] = {}
        self._given: set[int] = set()
        self._made: set[int] = set()
        self._gone = 0

    def reset(self) -> None:
        """Forget what is alive: only storages created from here on count."""
        self.forget()
        self._sizes.clear()
        self.now = self.peak = self.peak_with_given = self._gone = 0
        self._given, self._made = set(), set()

    def begin_peak(self) -> None:
        """Have the peak begin anew at what is alive now."""
        self.peak = self.peak_with_given = self.now
        self._given, self._made, self._gone = self._made, set(), 0

    def follows(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type in self._kinds

    def taken(self, number: int, size: int) -> None:
        self._sizes[number] = allocated(size, self._kind)
        self.now += self._sizes[number]
        self._made.add(number)
        self._reach(self.now)

    def freed(self, number: int) -> None:
        size = self._sizes.pop(number)
        self.now -= size
        self._made.discard(number)
        if number in self._given:
            self._given.remove(number)
            self._gone += size

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self._reach(self.now + self._scratch(func, args, kwargs, out))

    def _reach(self, held: int) -> None:
        self.peak = max(self.peak, held)
        self.peak_with_given = max(self.peak_with_given, held + self._gone)
