"""Storages followed from outside, from when an operator makes one until it ends: what no allocator sees of tensors
without memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_profiling.predicted.added_gradients import AddedGradients
from rotor_profiling.predicted.resized_storages import resizes_told
from rotor_profiling.storage import local, tensors_in

if TYPE_CHECKING:  # Python has it from 3.11 on
    from typing_extensions import Self


class FollowedStorages(TorchDispatchMode):
    """Follows the storages that are made while the mode is active, until they end.

    What comes of that is for those who derive from it: they are told what is `taken`, `freed` and `ran`. Tensors are
    fake ones (`FakeTensorMode`), on the meta device, or real ones; either way only their sizes count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._followed: dict[int, int] = {}
        """Handles of storages, which are used again, and the numbers of those that have them now."""
        self._count = 0
        self._resizes = ExitStack()
        self._added = AddedGradients()
        self._sum: tuple[int, torch.UntypedStorage] | None = None
        """Handle of a gradient that something was added to, and the sum, until it is known whose memory that has."""

    def taken(self, number: int, size: int) -> None:
        """There is a storage of `size` bytes, which is called `number` until it ends."""

    def freed(self, number: int) -> None:
        """The storage that was called `number` has ended."""

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """An operator has run, and its result is followed."""

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whether what an operator has made is followed."""
        return True

    def follow(self, storage: torch.UntypedStorage) -> None:
        """Follow a storage that is there, if that has not begun."""
        handle = storage._cdata  # fake tensors have no address
        if handle in self._followed or not storage.nbytes():
            return
        self._take(handle, storage.nbytes())
        # A mode sees what is made, not what ends.
        weakref.finalize(storage, self._end, handle).atexit = False

    def forget(self) -> None:
        """Follow nothing of what there is so far."""
        self.settle()
        self._followed.clear()

    def settle(self) -> None:
        """Take a sum of gradients for memory of its own, if its first summand is still there: somebody holds that."""
        if self._sum is not None:
            (_, storage), self._sum = self._sum, None
            self.follow(storage)

    def __enter__(self) -> Self:
        # No mode sees a storage that is resized, by which FSDP2 frees what it has gathered, and takes it again.
        self._resizes.enter_context(resizes_told(self._resized))
        super().__enter__()  # type: ignore[no-untyped-call]  # as above
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # as above
        self._resizes.close()
        self.settle()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A model that TorchDynamo has captured is to run as captured while it is followed."""
        return True

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.settle()
        first = self._added.first_of(func, args, kwargs)
        # Of a DTensor, the part that is here: inside of its own operator, where it also makes tensors of global size
        # to learn their shapes, the mode is off.
        given = {local(tensor).untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        out = func(*args, **kwargs)
        made = tensors_in(out)
        self._added.made(made)
        for tensor in made:
            storage = local(tensor).untyped_storage()
            # An operator that returns what it was given, or a view of it, makes nothing.
            if storage._cdata not in given and self.follows(tensor):
                if first is None:
                    self.follow(storage)
                else:
                    self._await(first.untyped_storage(), storage)
        self.ran(func, args, kwargs, out)
        return out

    def _await(self, first: torch.UntypedStorage, total: torch.UntypedStorage) -> None:
        """Have the `total` go on with the memory of the `first` summand, if that ends before anything else runs."""
        if first._cdata not in self._followed:  # else its end has been asked for already
            weakref.finalize(first, self._end, first._cdata).atexit = False
        self._sum = first._cdata, total

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """It has another size: other memory than before, also where that was there when the mode began."""
        handle = storage._cdata
        if handle not in self._followed:
            self.follow(storage)
            return
        self.freed(self._followed[handle])
        self._take(handle, storage.nbytes())  # its end has been asked for already

    def _take(self, handle: int, size: int) -> None:
        self._count += 1
        self._followed[handle] = self._count
        self.taken(self._count, size)

    def _end(self, handle: int) -> None:
        number = self._followed.pop(handle, None)
        if self._sum is not None and self._sum[0] == handle:
            (_, total), self._sum = self._sum, None
            if number is not None:
                self._followed[total._cdata] = number
                weakref.finalize(total, self._end, total._cdata).atexit = False
        elif number is not None:
            self.freed(number)
