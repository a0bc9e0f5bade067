"""Storages followed from outside, from when an operator makes one until it ends: what no allocator sees of tensors
without memory.

Storages that are resized, which no dispatch mode sees.

FSDP lets whole parameters go by making their storage empty, and makes it as large as before to gather them again.

Sums of gradients that autograd's engine makes, which are in place where it has nothing but tensors.

Of a tensor that is used several times, the engine adds up the gradients as they come. It adds to the first of them in
place where nobody else holds that (`accumulate` in torch/csrc/autograd/input_buffer.cpp), but never while a dispatch
mode is active: then it makes a new tensor, and lets the old one go. What is predicted is a step without such a mode.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from rotor_profiling import torch_compat
from rotor_profiling.storage import local, tensors_in
from rotor_profiling.torch_compat import TorchDispatchMode, engine_run_backward

if TYPE_CHECKING:  # Python has it from 3.11 on
    from typing_extensions import Self

_RESIZE = "resize_"


@contextmanager
def resizes_told(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside, `tell` is called with every storage that has been resized. Contexts end in the reverse of their order."""
    before = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        result = before(storage, size)
        tell(storage)
        return result

    setattr(torch.UntypedStorage, _RESIZE, resize)
    try:
        yield
    finally:
        setattr(torch.UntypedStorage, _RESIZE, before)


_ADD = torch.ops.aten.add.Tensor
_ENGINE = engine_run_backward.__code__
_BETWEEN = ("/torch/_dynamo/", "/torch/_compile.py", "/torch/_ops.py")
"""Files whose functions are between modes, to keep TorchDynamo out of them, and to call the next one."""


class AddedGradients:
    """Tells which sums the engine would make in place, if nobody but the engine holds their first summand.

    One that it would not is taken for one that it would: where gradients are retained (`retain_grad`) from an earlier
    backward, the new one is added to them, and never in place.
    """

    def __init__(self) -> None:
        self._node: tuple[str, int] | None = None
        """What the node is called that ran last. Not the node itself: that would hold what it refers to."""
        self._made: set[int] = set()
        """ids of what was made since that node began: it is a part of a formula, and no gradient that waits"""

    def first_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The gradient that the engine is about to add another one to; None for any other call of an operator."""
        node = torch_compat.current_autograd_node()
        called = None if node is None else (node.name(), node._sequence_nr())
        if called != self._node:
            self._node = called
            self._made.clear()
        # With a graph of the backward, the engine adds nothing in place.
        if func is not _ADD or node is None or kwargs or torch.is_grad_enabled():
            return None
        one, other = args
        if id(one) in self._made and not _gives_twice(node):
            return None
        if not (_is_plain(one) and _is_plain(other) and _called_by_engine(sys._getframe(2))):
            return None
        shared = one.untyped_storage()._cdata == other.untyped_storage()._cdata
        return None if shared or not torch.ops.aten.is_non_overlapping_and_dense.default(one) else one

    def made(self, tensors: list[torch.Tensor]) -> None:
        """Operators have returned these."""
        if self._node is not None:
            self._made.update(map(id, tensors))


def _gives_twice(node: Any) -> bool:
    """Whether several gradients that a node returns are of the same tensor."""
    given = [each for each in node.next_functions if each[0] is not None]
    return len({*given}) < len(given)


def _is_plain(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and local(tensor) is tensor and tensor.layout == torch.strided


def _called_by_engine(frame: FrameType | None) -> bool:
    """Whether no code in Python is between the engine and the call of an operator, but for modes."""
    while frame is not None and _is_of_modes(frame):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE


def _is_of_modes(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name == TorchDispatchMode.__torch_dispatch__.__name__ or any(
        each in code.co_filename.replace("\\", "/") for each in _BETWEEN
    )


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
