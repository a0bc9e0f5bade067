"""Bytes of the storages that live while code runs, counted from outside: for tensors without memory, which no allocator
sees.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from rotor_profiling.storage import allocated, local, tensors_in

OperatorBytes = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]
"""Bytes that an operator's kernel allocates while it runs, and frees: of (operator, arguments, keywords, result)."""


def no_scratch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Of kernels of which nothing is known."""
    return 0


@dataclass(slots=True)
class _Held:
    now: int = 0
    peak: int = 0
    known: dict[int, int] = field(default_factory=dict)

    def take(self, key: int, size: int) -> None:
        self.known[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)

    def free(self, key: int) -> None:
        self.now -= self.known.pop(key, 0)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages on devices of `kinds` that are created while the mode is active.

    Sizes are those that the allocator of `kind` would count; `scratch` is what kernels need beside their results.
    """

    def __init__(self, kinds: set[str], kind: str, scratch: OperatorBytes = no_scratch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._kinds, self._kind, self._scratch = kinds, kind, scratch
        self._held = _Held()

    @property
    def now(self) -> int:
        """The bytes that are alive, of storages created since the mode was made, or since `reset`."""
        return self._held.now

    @property
    def peak(self) -> int:
        """The most bytes that were alive at once since the mode was made, or since `reset` or `begin_peak`."""
        return self._held.peak

    def reset(self) -> None:
        """Forget what is alive: only storages created from here on count."""
        self._held = _Held()  # a new object: older storages still report their end to the old one

    def begin_peak(self) -> None:
        """Have the peak begin anew at what is alive now."""
        self._held.peak = self._held.now

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {local(tensor).untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        result = func(*args, **kwargs)
        held = self._held
        for tensor in tensors_in(result):
            storage = local(tensor).untyped_storage()
            key = storage._cdata  # meta tensors have no address
            # A view, or a result written in place, lies in a storage that was there before.
            if tensor.device.type not in self._kinds or key in given or key in held.known:
                continue
            held.take(key, allocated(storage.nbytes(), self._kind))
            # A mode sees what is made, not what is freed.
            weakref.finalize(storage, held.free, key).atexit = False
        held.peak = max(held.peak, held.now + self._scratch(func, args, kwargs, result))
        return result
