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


@dataclass(slots=True)
class _Held:
    now: int = 0
    peak: int = 0
    known: set[int] = field(default_factory=set)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages on devices of `kinds` that are created while the mode is active.

    Sizes are those that the allocator of `kind` would count.
    """

    def __init__(self, kinds: set[str], kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._kinds, self._kind = kinds, kind
        self._held = _Held()

    @property
    def peak(self) -> int:
        """The most bytes that were alive at once since the mode was made, or since `reset`."""
        return self._held.peak

    def reset(self) -> None:
        """Forget what is alive: only storages created from here on count."""
        self._held = _Held()  # a new object: older storages still report their end to the old one

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {local(tensor).untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        held = self._held
        for tensor in tensors_in(result):
            storage = local(tensor).untyped_storage()
            key = storage._cdata  # meta tensors have no address
            # A view, or a result written in place, lies in a storage that was there before.
            if tensor.device.type not in self._kinds or key in given or key in held.known:
                continue
            size = allocated(storage.nbytes(), self._kind)
            held.known.add(key)
            held.now += size
            held.peak = max(held.peak, held.now)
            weakref.finalize(storage, _freed, held, key, size)  # a mode sees what is made, not what is freed
        return result


def _freed(held: _Held, key: int, size: int) -> None:
    held.known.discard(key)
    held.now -= size
