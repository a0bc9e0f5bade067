"""What autograd saves of a stage, kept in another form, from which it is made again when the backward asks.

# Note [What is kept in another form]
#
#  1. Memory, not tensors: autograd saves several views of one storage, and one tensor for several nodes. The form
#     gets each storage once, as a flat tensor of all its elements; views are made again of what it gives back.
#  2. Not what is in memory anyway. Parameters, buffers and what goes into the stage (`untouched`) are saved as they
#     are. So is what comes out of it, since the next stage reads it; that shows when the run is over (`spare`).
#  3. Not what is too small to be worth a call, nor what is no plain strided memory: subclasses such as DTensor, sparse
#     and lazily conjugated tensors. A second view of a storage in another dtype is saved as it is: what comes
#     back may not be the same bits.
#  4. A storage that was written to between two saves is another one: autograd saved its former content. What is
#     kept is the content of the time of the save, so nothing that is written later can harm it. What is saved
#     as it is can be harmed, and is checked when it is asked for: where there are hooks, autograd does not check.
#  5. Nothing here refers to the graph: an output that is saved with its history would hold its own node.
#  6. What comes back is held by whoever reads it. Nodes that read it at the same time share it, and nobody
#     holds it for one that may come later.
#  7. Of saved-tensor hooks that are inside each other, autograd calls the innermost alone. A stage that is stored in
#     part has hooks of its own, so these ask for what is around them (`saving_now`).
#  8. Autograd attaches the history to what comes back. So `create_graph=True` works, as precisely as the form does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

LEAST_BYTES = 4096
"""Storages with fewer bytes are saved as they are: a page, for which no call is worth its time."""


class Kept(Protocol):
    """A tensor in another form."""

    def tensor(self) -> torch.Tensor:
        """A tensor of the same elements, in their dtype and on their device, from the beginning of a storage on.

        May be called several times, or never.
        """
        ...


class Form(Protocol):
    """A form in which saved tensors are kept."""

    @property
    def name(self) -> str:
        """What the form is called in plans and reports."""
        ...

    @property
    def exact(self) -> bool:
        """Whether what comes back is what was kept, bit for bit."""
        ...

    def keep(self, memory: torch.Tensor) -> Kept | None:
        """Keep `memory`, the flat tensor of all elements of a storage; None if it is better saved as it is.

        What is returned must not hold `memory` for longer than it takes to copy it: whoever saved it lets go of it.
        """
        ...


class Saved(Protocol):
    """What autograd saves in the place of a tensor."""

    def tensor(self) -> torch.Tensor:
        """The tensor, as it was when it was saved. RuntimeError if it was overwritten since."""
        ...


class Keeping:
    """One run of a stage of which what autograd saves is kept in a form. The run happens inside it as a context.

    `untouched` are tensors that are in memory anyway: parameters, buffers and inputs of the stage.
    """

    def __init__(self, form: Form, untouched: Iterable[torch.Tensor] = (), *, least_bytes: int = LEAST_BYTES) -> None:
        self.form = form
        self._least_bytes = least_bytes
        # By address. The weak references keep addresses from being used again by other storages.
        self._untouched = {ref.cdata: ref for ref in map(_reference, filter(_is_plain, untouched))}
        self._references: dict[int, StorageWeakRef] = {}
        self._storages: WeakValueDictionary[tuple[int, int], _KeptStorage] = WeakValueDictionary()
        self._left: set[tuple[int, int]] = set()
        self._hooks: Any = None
        self._outside: Any = None

    def __enter__(self) -> Keeping:
        self._outside = _innermost.set(self)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.save, _tensor_of)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(*error)
        _innermost.reset(self._outside)
        self._untouched.clear()
        self._references.clear()
        self._storages.clear()
        self._left.clear()

    def save(self, tensor: torch.Tensor) -> Saved:
        """What autograd is to save in the place of `tensor`."""
        kept = self._storage_of(tensor) if _is_plain(tensor) else None
        if kept is None or kept.dtype != tensor.dtype:
            return SavedAsItIs(tensor)
        return _SavedView(kept, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def spare(self, tensors: Iterable[torch.Tensor]) -> None:
        """Save `tensors` as they are, the output of the run, whatever of them has been kept: they stay in memory."""
        for tensor in filter(_is_plain, tensors):
            found = self._storages.get((tensor.untyped_storage()._cdata, tensor._version))
            if found is not None and found.dtype == tensor.dtype:
                found.kept = SavedAsItIs(tensor)

    def _storage_of(self, tensor: torch.Tensor) -> _KeptStorage | None:
        """What is kept of the storage behind `tensor`; None if it is saved as it is."""
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        found = self._storages.get(key)
        if found is not None or key in self._left or key[0] in self._untouched or storage.nbytes() < self._least_bytes:
            return found
        self._references.setdefault(key[0], StorageWeakRef(storage))
        kept = self.form.keep(_memory(tensor))
        if kept is None:
            self._left.add(key)
            return None
        found = self._storages[key] = _KeptStorage(kept, tensor.dtype)
        return found


_innermost: ContextVar[Keeping | None] = ContextVar("innermost", default=None)


def saving_now() -> Callable[[torch.Tensor], Saved]:
    """What saves a tensor here and now: the innermost `Keeping` around this, or what saves everything as it is."""
    keeping = _innermost.get()
    return SavedAsItIs if keeping is None else keeping.save


class SavedAsItIs:
    """A tensor with the number of times that it had been written to."""

    __slots__ = ("_tensor", "_writes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # Rule 5
        self._writes = tensor._version

    def tensor(self) -> torch.Tensor:
        if self._tensor._version != self._writes:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._tensor.shape)} that is needed for the backward has been modified by "
                "an in-place operation since the forward; change it after the backward"
            )
        return self._tensor


class _KeptStorage:
    """What is kept of one storage. All that autograd saves of it shares this object; with the last of them it goes."""

    __slots__ = ("__weakref__", "_given", "dtype", "kept")

    def __init__(self, kept: Kept, dtype: torch.dtype) -> None:
        self.kept = kept
        self.dtype = dtype
        self._given: StorageWeakRef | None = None

    def tensor(self) -> torch.Tensor:
        """All elements of the storage, flat."""
        if (shared := self._still_held()) is not None:
            return shared
        made = _memory(self.kept.tensor())
        self._given = StorageWeakRef(made.untyped_storage())
        return made

    def _still_held(self) -> torch.Tensor | None:
        """What was given to somebody who still holds it (Rule 6)."""
        # By storage: a node holds views of what was given, and the tensor that they were made of is gone.
        if self._given is None or self._given.expired():
            return None
        # Another thread may let go of it in between.
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._given.cdata)
        if storage is None:
            return None
        whole = torch.empty(0, dtype=self.dtype, device=storage.device)
        return whole.set_(storage)


class _SavedView:
    """A view of a storage that is kept in another form."""

    __slots__ = ("_offset", "_size", "_storage", "_stride")

    def __init__(self, storage: _KeptStorage, size: torch.Size, stride: tuple[int, ...], offset: int) -> None:
        self._storage = storage
        self._size = size
        self._stride = stride
        self._offset = offset

    def tensor(self) -> torch.Tensor:
        return self._storage.tensor().as_strided(self._size, self._stride, self._offset)


def _tensor_of(saved: Saved) -> torch.Tensor:
    return saved.tensor()


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the storage behind `tensor`, in its dtype, flat and without history."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided memory, and its elements are those of its storage."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
