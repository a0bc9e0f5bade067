"""Keep what autograd saves of a stage in another form, and restore it for the backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet, ref

import torch
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from rotor_profiling import torch_compat
from rotor_profiling.torch_classes import is_fake
from rotor_py.stage.saved_tensors import (
    AsItIs,
    Complete,
    Kept,
    Need,
    Saved,
    SavedAsItIs,
    Saving,
    handing_over_now,
    last_node,
    memory_of,
    need_of,
    nodes_behind,
    own_need,
    tensor_of,
)

# What is kept of a storage that autograd has saved, who reads it, and the views that autograd holds of it.
#
# Rules are those of the Note in `keeper`.


class KeptStorage:
    """What is kept of one storage. All that autograd saves of it shares this object; with the last of them it goes."""

    __slots__ = ("__weakref__", "_given", "_writes", "dtype", "kept", "need", "undecided")

    def __init__(self, tensor: torch.Tensor, need: Need = Need.NUMBERS) -> None:
        self.kept: Kept = SavedAsItIs(tensor)
        self.need = need
        """what those need of it who are known to read it"""
        self.undecided: set[int] = set()
        """the nodes that have saved it as well, by their numbers, and may need its numbers"""
        self.dtype = tensor.dtype
        self._writes = tensor.detach()
        """without memory: it is there for the count of writes, which it shares with the tensor"""
        self._writes.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._given: StorageWeakRef | None = None

    @property
    def is_as_it_is(self) -> bool:
        """Whether it is kept in no form."""
        return isinstance(self.kept, SavedAsItIs)

    def keep_as_it_is(self, tensor: torch.Tensor) -> None:
        """Keep it in no form, whatever it was kept in: `tensor` is the storage, or a view of it."""
        self.kept, self._given = SavedAsItIs(tensor), None

    def read_by(self, node: int | None) -> None:
        """A node has saved it, and may need its numbers; None if they are needed for sure."""
        if node is not None and self.need is not Need.NUMBERS:
            self.undecided.add(node)
        elif node is None:
            self._needs(Need.NUMBERS)

    def settle(self, found: Mapping[int, Node]) -> None:
        """Decide of the nodes that were found, by their numbers, what they need of it."""
        for number in self.undecided & found.keys():
            self.undecided.discard(number)
            self._needs(need_of(found[number], self._writes.device))

    def _needs(self, need: Need) -> None:
        self.need = self.need.together_with(need)
        if self.need is Need.NUMBERS:
            self.undecided = set()

    def counts_writes_to(self, tensor: torch.Tensor) -> bool:
        """Whether a write to `tensor`, a view of the storage, counts as one to what is kept, and the reverse (Rule 5).

        Both have been written to equally often.
        """
        with torch_compat.unsafe_preserve_version_counter(tensor):
            torch.autograd.graph.increment_version(tensor)
            return self._writes._version == tensor._version

    def tensor(self) -> torch.Tensor:
        """All elements of the storage, flat."""
        if (shared := self._still_held()) is not None:
            return shared
        made = memory_of(self.kept.tensor())
        self._given = StorageWeakRef(made.untyped_storage())
        return made

    def _still_held(self) -> torch.Tensor | None:
        """What was given to somebody who still holds it (Rule 8)."""
        # By storage: a node holds views of what was given, and the tensor that they were made of is gone.
        if self._given is None or self._given.expired():
            return None
        # Another thread may let go of it in between.
        storage: torch.UntypedStorage | None = torch_compat.new_with_weak_ptr(self._given.cdata)
        if storage is None:
            return None
        whole = torch.empty(0, dtype=self.dtype, device=self._writes.device)
        return whole.set_(storage)


class SavedView:
    """A view of a storage that is kept in another form."""

    __slots__ = ("_offset", "_size", "_storage", "_stride")

    def __init__(self, storage: KeptStorage, size: torch.Size, stride: tuple[int, ...], offset: int) -> None:
        self._storage = storage
        self._size = size
        self._stride = stride
        self._offset = offset

    def tensor(self) -> torch.Tensor:
        return self._storage.tensor().as_strided(self._size, self._stride, self._offset)


# What autograd saves of a stage, kept in another form, from which it is made again when the backward asks.
#
# Note [What is kept in another form]
#
#  1. Memory, not tensors: autograd saves several views of one storage, and one tensor for several nodes. The form
#     gets each storage once, as a flat tensor of all its elements; views are made again of what it gives back.
#  2. Not what is in memory anyway. Parameters, buffers and what goes into the stage (`untouched`) are saved as they
#     are. So is what comes out of it, since the next stage reads it; that shows when the run is over (`spare`).
#  3. Not what is too small to be worth a call, nor what is no plain strided memory: subclasses such as DTensor, sparse
#     and lazily conjugated tensors. A second view of a storage in another dtype is saved as it is: what comes
#     back may not be the same bits.
#  4. Autograd may save a tensor before it is whole: RReLU saves its noise, and then draws it. So a tensor is saved as
#     it is at first, and goes to its form when the next node saves something, or the run is over. If it was written to
#     in between, it stays as it is.
#  5. Two views are one memory only if writes to one of them count as writes to the other. An RNN cell writes to parts
#     of a storage that know nothing of each other, and saves each of them when it is written.
#  6. What is saved as it is, is checked when it is asked for: where there are hooks, autograd does not check whether it
#     was written to. What has gone to its form can no longer be harmed.
#  7. Nothing here refers to the graph: an output that is saved with its history would hold its own node.
#  8. What comes back is held by whoever reads it. Nodes that read it at the same time share it, and nobody
#     holds it for one that may come later.
#  9. Of saved-tensor hooks that are inside each other, autograd calls the innermost alone. A stage that is stored in
#     part has hooks of its own, so these ask for what is around them (`saving_now`).
# 10. Autograd attaches the history to what comes back. So `create_graph=True` works, as precisely as the form does.
# 11. ReLU needs of its result only where it is positive, leaky ReLU the same of its input, and a form may keep that
#     alone, if no other node needs the numbers. Pooling reads the shape alone. Which node it is that saves a tensor, is
#     known at once if it saves its own result, or else when something is saved that comes from it, or when the run is
#     over. So long, the tensor stays as it is; if it is not known then, its numbers are needed. A run that is to end
#     with the last tensor that is waited for goes on until it is known.
# 12. What a form leaves as it is, is offered to the form of the run around this one: for the same reason as in Rule 9,
#     that would see nothing of it. Packed first, the rest may leave memory.


LEAST_BYTES = 4096
"""Storages with fewer bytes are saved as they are: a page, for which no call is worth its time."""


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


@runtime_checkable
class FormOfSigns(Form, Protocol):
    """A form that takes less where it is all that is needed which of the numbers are positive."""

    def keep_sign(self, memory: torch.Tensor, need: Need) -> Kept | None:
        """Keep of floating `memory` what is needed, neither numbers nor their shape alone.

        What comes back is 1 where the answer is yes, and 0 or -1 elsewhere. None if it is better saved as it is.
        """
        ...


class Keeping:
    """One run of a stage of which what autograd saves is kept in a form. The run happens inside it as a context.

    `untouched` are tensors that are in memory anyway: parameters, buffers and inputs of the stage. Tensors without
    memory, by which a device is predicted, have no values: they are kept by a form that does not read them.
    """

    def __init__(
        self,
        form: Form,
        untouched: Iterable[torch.Tensor] = (),
        *,
        least_bytes: int = LEAST_BYTES,
        reads_values: bool = True,
    ) -> None:
        self.form = form
        self._signs = form if isinstance(form, FormOfSigns) else None
        self._least_bytes = least_bytes
        self._reads_values = reads_values
        # By address. The weak references keep addresses from being used again by other storages.
        self._untouched = {ref.cdata: ref for ref in map(_reference, filter(self._concerns, untouched))}
        self._references: dict[int, StorageWeakRef] = {}
        # Weak: what autograd has let go of is kept for nobody.
        self._storages: dict[tuple[int, int], WeakSet[KeptStorage]] = {}
        self._fresh: list[ref[KeptStorage]] = []
        self._node = -1
        """of the node that has saved what is fresh, by its number"""
        self._handing_over = handing_over_now()
        self._around: Keeping | None = None
        self._hooks: Any = None
        self._outside: Any = None

    def __enter__(self) -> Keeping:
        self._around = _innermost.get()
        self._outside = _innermost.set(self)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, tensor_of)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(*error)
        _innermost.reset(self._outside)
        if error[0] is None or error[0] is Complete:
            self._give_fresh(at_the_end=True)
        self._around = None
        self._untouched.clear()
        self._references.clear()
        self._storages.clear()
        self._fresh.clear()

    def _pack(self, tensor: torch.Tensor) -> Saved:
        saved = self.save(tensor)
        if self._handing_over is not None:
            self._handing_over.hand_over(saved, tensor)
            if not self.undecided:
                self._handing_over.end_if_complete()
        return saved

    @property
    def undecided(self) -> bool:
        """Whether something stays as it is because it is not known yet whether its numbers are needed (Rule 11)."""
        return any(kept.undecided for kept in self._waiting())

    def save(self, tensor: torch.Tensor, *, for_numbers: bool = False) -> Saved:
        """What autograd is to save in the place of `tensor`; or whoever computes with it, `for_numbers`."""
        concerned = self._concerns(tensor) and not _is_parameter(tensor)
        node, kept = last_node(), self._known(tensor) if concerned else None
        if kept is not None and kept.need is not Need.NUMBERS and kept.dtype == tensor.dtype:
            self._read_also(kept, tensor, None if for_numbers else node)
        if node != self._node:
            self.settle([tensor])
            self._give_fresh()
            self._node = node
        if concerned and kept is None:
            kept = self._storage_of(tensor, None if for_numbers else node)
        if kept is None or kept.dtype != tensor.dtype:
            return SavedAsItIs(tensor)
        return SavedView(kept, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _read_also(self, kept: KeptStorage, tensor: torch.Tensor, node: int | None) -> None:
        if not kept.is_as_it_is:
            kept.keep_as_it_is(tensor)
            self._fresh.append(ref(kept))
        kept.read_by(node)

    def settle(self, tensors: Iterable[torch.Tensor]) -> None:
        """Find out who reads what was saved, of the nodes behind `tensors`: at the end, the output of the run."""
        undecided = {number for kept in self._waiting() for number in kept.undecided}
        if undecided:
            found = nodes_behind(tensors, undecided)
            for kept in self._waiting():
                kept.settle(found)

    def _waiting(self) -> Iterator[KeptStorage]:
        """What has not gone to its form yet."""
        return (kept for kept in (each() for each in self._fresh) if kept is not None)

    def spare(self, tensors: Iterable[torch.Tensor]) -> None:
        """Save `tensors` as they are, the output of the run, whatever of them has been kept: they stay in memory."""
        tensors = list(tensors)
        self.settle(tensors)
        for tensor in filter(self._concerns, tensors):
            found = self._known(tensor)
            if found is not None and found.dtype == tensor.dtype:
                found.keep_as_it_is(tensor)
                self._fresh = [each for each in self._fresh if each() is not found]

    def _concerns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is memory that the form can keep: with values, if it reads them."""
        return is_plain(tensor) or (not self._reads_values and is_fake(tensor) and _is_strided(tensor))

    def _storage_of(self, tensor: torch.Tensor, node: int | None) -> KeptStorage | None:
        """What is kept of the storage behind `tensor`, from now on; None if it is saved as it is.

        A `node` saves it; None if its numbers are needed for sure.
        """
        storage = tensor.untyped_storage()
        if self._is_untouched(tensor):
            return None
        self._references.setdefault(storage._cdata, StorageWeakRef(storage))
        found = KeptStorage(tensor)
        if self._signs is not None and node is not None and tensor.is_floating_point():
            own = own_need(tensor, node)
            found.need = own or Need.SHAPE
            if own is None:
                found.read_by(node)
        self._storages.setdefault((storage._cdata, tensor._version), WeakSet()).add(found)
        self._fresh.append(ref(found))
        return found

    def _is_untouched(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return storage._cdata in self._untouched or storage.nbytes() < self._least_bytes

    def _known(self, tensor: torch.Tensor) -> KeptStorage | None:
        known = self._storages.get((tensor.untyped_storage()._cdata, tensor._version), ())
        return next((each for each in known if each.counts_writes_to(tensor)), None)

    def _give_fresh(self, *, at_the_end: bool = False) -> None:
        """Give to the form what was saved by a node that has run (Rule 4)."""
        waiting = list(self._waiting())
        self._fresh = [ref(found) for found in waiting if found.undecided and not at_the_end]
        for found in waiting:
            saved = found.kept
            if found.undecided and at_the_end:
                found.read_by(None)
            if not found.undecided and isinstance(saved, SavedAsItIs) and not saved.overwritten:
                memory = memory_of(saved.tensor())
                sign = self._signs if found.need not in (Need.NUMBERS, Need.SHAPE) else None
                kept = self.form.keep(memory) if sign is None else sign.keep_sign(memory, found.need)
                found.kept = kept or self._kept_around(memory) or saved

    def _kept_around(self, memory: torch.Tensor) -> Kept | None:
        """What the form of the run around this one keeps of `memory`, which this form has left as it is (Rule 12)."""
        around = self._around
        if around is None or around._is_untouched(memory) or not around._concerns(memory):
            return None
        return around.form.keep(memory) or around._kept_around(memory)


_innermost: ContextVar[Keeping | None] = ContextVar("innermost", default=None)


def saving_now() -> Saving:
    """What saves a tensor here and now: the innermost `Keeping` around this, or what saves everything as it is."""
    return _innermost.get() or AsItIs()


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one: sharded ones are gathered in the run, and not known before."""
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided memory, and its elements are those of its storage."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and _is_strided(tensor)


def _is_strided(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not torch_compat.is_functorch_wrapped_tensor(tensor)
    )
