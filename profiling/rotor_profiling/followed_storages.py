"""Follow storages from creation to release and count their bytes, even those of fake tensors, which no allocator has.

A dispatch mode follows the results of operators. Code here also follows two changes of memory that it does not show:

* FSDP frees gathered parameters by resizing their storage to zero, and resizes it again to gather them.
* The engine adds a gradient to an earlier one in place if nothing else refers to that (`accumulate` in
  torch/csrc/autograd/input_buffer.cpp). Under a dispatch mode, the engine makes a new tensor instead.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from rotor_profiling import torch_compat
from rotor_profiling.storage import allocated, local, tensors_in
from rotor_profiling.torch_compat import TorchDispatchMode, engine_run_backward

_ADD = torch.ops.aten.add.Tensor
_ENGINE = engine_run_backward.__code__
# Files of torch whose functions may be on the stack between two dispatch modes: they disable TorchDynamo or dispatch.
_BETWEEN = ("/torch/_dynamo/", "/torch/_compile.py", "/torch/_ops.py")


class AddedGradients:
    """Detect sums of gradients that the engine would compute in place without a dispatch mode.

    Wrong for a gradient that an earlier backward retained (`retain_grad`): the engine adds to that out of place.
    """

    def __init__(self) -> None:
        # Name and sequence number of the last node that ran; not the node itself, which would keep its tensors alive
        self._node: tuple[str, int] | None = None
        # ids of tensors made since that node began: results of its formula, not gradients from earlier nodes
        self._made: set[int] = set()

    def first_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return the gradient to which the engine is about to add another one; None for any other operator call."""
        node = torch_compat.current_autograd_node()
        called = None if node is None else (node.name(), node._sequence_nr())
        if called != self._node:
            self._node = called
            self._made.clear()
        # With `create_graph`, the engine adds nothing in place.
        if func is not _ADD or node is None or kwargs or torch.is_grad_enabled():
            return None
        one, other = args
        given = [each for each in node.next_functions if each[0] is not None]
        # A gradient that the running node made is an earlier one only if the node returns two gradients for one input.
        if id(one) in self._made and len({*given}) == len(given):
            return None
        if not (_is_plain(one) and _is_plain(other) and _called_by_engine(sys._getframe(2))):
            return None
        shared = one.untyped_storage()._cdata == other.untyped_storage()._cdata
        return None if shared or not torch.ops.aten.is_non_overlapping_and_dense.default(one) else one

    def made(self, tensors: list[torch.Tensor]) -> None:
        if self._node is not None:
            self._made.update(map(id, tensors))


def _is_plain(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and local(tensor) is tensor and tensor.layout == torch.strided


def _called_by_engine(frame: FrameType | None) -> bool:
    """Return whether autograd's engine called the operator that a dispatch mode has received, and not a node's code."""
    while frame is not None and (
        frame.f_code.co_name == "__torch_dispatch__"
        or any(each in frame.f_code.co_filename.replace("\\", "/") for each in _BETWEEN)
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE


class FollowedStorages(TorchDispatchMode):
    """Dispatch mode that follows storages of real, fake or meta tensors that operators make, until their release."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        # Maps the address of each live storage's C++ object, which is reused after its release, to a unique number
        self._followed: dict[int, int] = {}
        self._count = 0
        self._added = AddedGradients()
        # Key in `_followed` of a first summand, and the sum's storage, until it is known if the sum would be in place
        self._sum: tuple[int, torch.UntypedStorage] | None = None

    def taken(self, number: int, size: int) -> None:
        """Called when an operator has made a storage of `size` bytes, to which `number` belongs until its release."""

    def freed(self, number: int) -> None:
        """Called when the storage `number` is released."""

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Called after an operator has returned `out`, and after `taken` for its new storages."""

    def follows(self, tensor: torch.Tensor) -> bool:
        """Return whether to follow the storage of `tensor`, an operator's result."""
        return True

    def follow(self, storage: torch.UntypedStorage) -> None:
        handle = storage._cdata  # fake tensors have no address
        if handle in self._followed or not storage.nbytes():
            return
        self._take(handle, storage.nbytes())
        # A dispatch mode sees creations, but not releases.
        weakref.finalize(storage, self._end, handle).atexit = False

    def forget(self) -> None:
        """Stop following all present storages."""
        self.settle()
        self._followed.clear()

    def settle(self) -> None:
        """If other code keeps the first summand of the last sum alive, count the sum's memory as newly allocated."""
        if self._sum is not None:
            (_, storage), self._sum = self._sum, None
            self.follow(storage)

    def __enter__(self) -> FollowedStorages:
        # FSDP2 resizes storages by this method, which is no operator, so dispatch modes do not see it.
        before = self._resize = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            result = before(storage, size)
            handle = storage._cdata
            if handle in self._followed:  # count it as freed and made again; it already has a finalizer
                self.freed(self._followed[handle])
                self._take(handle, storage.nbytes())
            else:  # it existed before this mode was entered: count it as made
                self.follow(storage)
            return result

        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010  # mypy refuses the assignment
        super().__enter__()  # type: ignore[no-untyped-call]  # as above
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # as above
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010  # as above
        self.settle()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have `torch.compile` compile under this mode, instead of running the code uncompiled."""
        return True

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.settle()
        first = self._added.first_of(func, args, kwargs)
        # Of a DTensor, read the local part's storage: the mode is off while DTensor infers shapes at global size.
        given = {local(tensor).untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        out = func(*args, **kwargs)
        made = tensors_in(out)
        self._added.made(made)
        for tensor in made:
            storage = local(tensor).untyped_storage()
            # An operator that returns its argument, or a view of it, makes no new storage.
            if storage._cdata not in given and self.follows(tensor):
                if first is None:
                    self.follow(storage)
                else:
                    self._await(first.untyped_storage(), storage)
        self.ran(func, args, kwargs, out)
        return out

    def _await(self, first: torch.UntypedStorage, total: torch.UntypedStorage) -> None:
        """Count no new memory for the sum `total` if its `first` summand is freed before the next operator."""
        if first._cdata not in self._followed:  # a followed storage already has a finalizer
            weakref.finalize(first, self._end, first._cdata).atexit = False
        self._sum = first._cdata, total

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


# A function of (operator, arguments, keyword arguments, result) that returns the temporary bytes of the kernel
OperatorBytes = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]


class LiveBytes(FollowedStorages):
    """Count the bytes of storages that operators make on devices of the types `kinds` while the mode is active.

    Rounds each size as the allocator of the device type `kind` does. `scratch` returns the temporary bytes of a kernel.
    """

    def __init__(self, kinds: set[str], kind: str, scratch: OperatorBytes = lambda *_: 0) -> None:
        super().__init__()
        self.now = 0  # Live bytes of storages created since construction or `reset`
        self.peak = 0  # Most live bytes since construction, `reset` or `begin_peak`
        self._kinds, self._kind, self._scratch = kinds, kind, scratch
        self._sizes: dict[int, int] = {}

    def reset(self) -> None:
        """Forget all storages, and count those that are created from now on."""
        self.forget()
        self._sizes.clear()
        self.now = self.peak = 0

    def begin_peak(self) -> None:
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


class Touched(TorchDispatchMode):
    """Dispatch mode that collects in `found` those of `parameters` that share memory with an operator's argument."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._parameters = {each.untyped_storage()._cdata: each for each in parameters}
        self.found: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        taken = [each.untyped_storage()._cdata for each in tensors_in((args, kwargs)) if each.layout == torch.strided]
        self.found += [self._parameters[address] for address in taken if address in self._parameters]
        return func(*args, **(kwargs or {}))
