"""Bytes of the storages that live while code runs, counted from outside: for tensors without memory, which no allocator
sees.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_profiling.predicted.resized_storages import resizes_told
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
        self._resized = ExitStack()

    def __enter__(self) -> LiveBytes:
        self._resized.enter_context(resizes_told(self.resize))
        super().__enter__()  # type: ignore[no-untyped-call]  # as above
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # as above
        self._resized.close()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A model that TorchDynamo has captured is to run as captured while its bytes are counted."""
        return True

    def resize(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size now: other memory than before, also where that was there when the mode began."""
        if not (known := storage._cdata in self._held.known) and not storage.nbytes():
            return
        self._held.free(storage._cdata)
        self._take(storage, ends_here=known)

    def _take(self, storage: torch.UntypedStorage, *, ends_here: bool = False) -> None:
        """Count a storage, until it ends; `ends_here` says that its end has been asked for already."""
        key = storage._cdata
        self._held.take(key, allocated(storage.nbytes(), self._kind))
        if not ends_here:  # a mode sees what is made, not what is freed
            weakref.finalize(storage, self._held.free, key).atexit = False

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
            self._take(storage)
        held.peak = max(held.peak, held.now + self._scratch(func, args, kwargs, result))
        return result
