"""Keep the saved tensors of a stage packed, rounded or offloaded (in a "form"), and restore them for the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from rotor_profiling import torch_compat
from rotor_profiling.storage import storages
from rotor_profiling.torch_compat import is_fake
from rotor_py.stage.saved_tensors import (
    Complete,
    Need,
    Saved,
    SavedAsItIs,
    innermost_run,
    last_node,
    memory_of,
    need_of,
    nodes_behind,
    own_need,
    tensor_of,
)


class KeptStorage:
    """A saved storage, which is converted to a form later. All saved tensors that are views of it share this object."""

    __slots__ = ("__weakref__", "_given", "_writes", "dtype", "kept", "need", "undecided")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.kept: Saved = SavedAsItIs(tensor)
        self.need = Need.NUMBERS  # what the nodes that saved it read of it, as far as known: its shape, signs or values
        self.undecided: set[int] = set()  # sequence numbers of nodes that saved it, and of which this is not known yet
        self.dtype = tensor.dtype
        self._writes = tensor.detach()  # shares the version counter of the saved tensor, but, below, not its memory
        self._writes.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._given: StorageWeakRef | None = None

    def keep_as_it_is(self, tensor: torch.Tensor) -> None:
        """Keep the storage unchanged from now on. `tensor` is any tensor in it."""
        self.kept, self._given = SavedAsItIs(tensor), None

    def read_by(self, node: int | None) -> None:
        """Record that the node of this sequence number saves the storage; None stands for a node that reads values."""
        if node is None:
            self._needs(Need.NUMBERS)
        elif self.need is not Need.NUMBERS:
            self.undecided.add(node)

    def settle(self, found: Mapping[int, Node]) -> None:
        for number in self.undecided & found.keys():
            self.undecided.discard(number)
            self._needs(need_of(found[number], self._writes.device))

    def _needs(self, need: Need) -> None:
        self.need = self.need.together_with(need)
        if self.need is Need.NUMBERS:
            self.undecided = set()

    def counts_writes_to(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, a view, shares the version counter of the kept storage (Rule 5)."""
        with torch_compat.unsafe_preserve_version_counter(tensor):
            torch.autograd.graph.increment_version(tensor)
            return self._writes._version == tensor._version

    def tensor(self) -> torch.Tensor:
        if (shared := self._still_held()) is not None:
            return shared
        made = memory_of(self.kept.tensor())
        self._given = StorageWeakRef(made.untyped_storage())
        return made

    def _still_held(self) -> torch.Tensor | None:
        """Return the last restored tensor if a node still refers to its storage (Rule 8)."""
        # Ask for the storage: nodes refer to views of the restored tensor, which itself is freed.
        storage = None if self._given is None else torch_compat.new_with_weak_ptr(self._given.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=self.dtype, device=self._writes.device).set_(storage)


class SavedView:
    __slots__ = ("_storage", "_view")

    def __init__(self, storage: KeptStorage, *view: Any) -> None:
        self._storage, self._view = storage, view

    def tensor(self) -> torch.Tensor:
        return self._storage.tensor().as_strided(*self._view)


# Note [Forms of saved tensors]
#
#  1. A form (packed, rounded or offloaded) gets storages, not tensors: autograd saves several views of a storage, and
#     one tensor for several nodes. It gets each storage once, as a flat tensor of all its elements. Views are
#     recreated from the restored storage.
#  2. A form gets only memory that is allocated because a tensor is saved. Parameters, buffers and inputs of the stage
#     (`untouched`) are saved unchanged. So are outputs, which the next stage reads; `spare` gets them at the run's end.
#  3. A form gets only plain strided storages of at least `LEAST_BYTES`: no DTensor, sparse or lazily conjugated tensor.
#     A second view of a storage in another dtype is saved unchanged, since the restored bits may differ.
#  4. Autograd may save a tensor before an operator writes its values: RReLU saves its noise, then draws it. So a tensor
#     is converted when the next node saves a tensor or the run ends, unless it was written to in between.
#  5. Two views share a `KeptStorage` only if they share a version counter. An RNN cell writes to parts of a storage
#     with separate version counters, and saves each part when it is written.
#  6. Reading a tensor that was saved unchanged checks for in-place writes, since autograd does not check with hooks.
#  7. No object here refers to the graph: an output saved with its `grad_fn` would keep its own node alive.
#  8. Only nodes refer to a restored tensor. While one does, others get the same tensor; else, it is restored again.
#  9. Autograd calls only the innermost hooks. Those of a stage stored in part pass tensors to the enclosing form.
# 10. Autograd gives the restored tensor its `grad_fn`. So create_graph=True works, with the form's precision.
# 11. ReLU's backward reads only the signs of its result, leaky ReLU's those of its input, pooling's only a shape. A
#     form may keep only the signs if no node reads the values. The saving node is known at once if it saves its own
#     result, else when a tensor computed from it is saved or the run ends. Until then, the tensor stays unchanged, and
#     a run that may end early goes on. If the node remains unknown, it counts as reading the values.
# 12. A tensor that a form declines is offered to the form of the enclosing run: unpacked tensors may be offloaded.

# Minimum bytes of a storage to convert, one page. For smaller ones, the calls would take time and save little memory.
LEAST_BYTES = 4096


class Form(Protocol):
    """Converts saved storages: packs, rounds or offloads them. It may have a method `keep_sign` like `Packed`'s."""

    def keep(self, memory: torch.Tensor) -> Saved | None:
        """Return an object that restores `memory`, the flat tensor of a storage's elements; None to save it unchanged.

        The object may refer to `memory` only while it is being copied, so that its memory is freed.
        """


class Keeping:
    """Context for one run of a stage whose saved tensors are kept in a form.

    `untouched`: tensors to save unchanged, which stay in memory: parameters, buffers and inputs of the stage. Without
    `reads_values`, the form also gets fake tensors. Into `seen`, the run puts the bytes of saved storages, by address.
    """

    def __init__(
        self,
        form: Form,
        untouched: Iterable[torch.Tensor] = (),
        *,
        least_bytes: int = LEAST_BYTES,
        reads_values: bool = True,
        seen: dict[int, int] | None = None,
    ) -> None:
        self.form = form
        self._keep_sign: Callable[[torch.Tensor, Need], Saved | None] | None = getattr(form, "keep_sign", None)
        self._seen = seen
        self._least_bytes = least_bytes
        self._reads_values = reads_values
        # By address. The weak references prevent its reuse by other storages.
        concerned = filter(self._concerns, untouched)
        self._untouched = {ref.cdata: ref for ref in (StorageWeakRef(each.untyped_storage()) for each in concerned)}
        self._references: dict[int, StorageWeakRef] = {}
        # By address and version. Weak references, since autograd may release a saved tensor during the run.
        self._storages: dict[tuple[int, int], WeakSet[KeptStorage]] = {}
        self._fresh: list[ref[KeptStorage]] = []
        self._node = -1  # sequence number of the node that saved the fresh tensors
        self._handing_over = innermost_run.get()
        self._around: Keeping | None = None
        self._hooks: Any = None
        self._outside: Any = None

    def __enter__(self) -> Keeping:
        self._around = innermost_keeping.get()
        self._outside = innermost_keeping.set(self)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, tensor_of)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(*error)
        innermost_keeping.reset(self._outside)
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
        """Whether it is still unknown what the backward reads of some saved tensor (Rule 11)."""
        return any(kept.undecided for kept in self._waiting())

    def save(self, tensor: torch.Tensor, *, for_numbers: bool = False) -> Saved:
        """Return the object to save instead of `tensor`. `for_numbers`: a recomputation reads its values."""
        if self._seen is not None and (is_plain(tensor) or is_fake(tensor)):
            self._seen.update(storages([tensor]))
        # Gathered parameters of a sharded model appear only during the run, so they are not in `untouched`.
        concerned = self._concerns(tensor) and not isinstance(tensor, nn.Parameter)
        concerned = concerned and not isinstance(tensor._base, nn.Parameter)
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
        if not isinstance(kept.kept, SavedAsItIs):
            kept.keep_as_it_is(tensor)
            self._fresh.append(ref(kept))
        kept.read_by(node)

    def settle(self, tensors: Iterable[torch.Tensor]) -> None:
        """Find the nodes that saved `undecided` storages in the graph of `tensors`, and record what they read."""
        undecided = {number for kept in self._waiting() for number in kept.undecided}
        if undecided:
            found = nodes_behind(tensors, undecided)
            for kept in self._waiting():
                kept.settle(found)

    def _waiting(self) -> Iterator[KeptStorage]:
        return (kept for kept in (each() for each in self._fresh) if kept is not None)

    def spare(self, tensors: Iterable[torch.Tensor]) -> None:
        """Save `tensors`, the outputs of the run, unchanged, since the next stage keeps them in memory."""
        tensors = list(tensors)
        self.settle(tensors)
        for tensor in filter(self._concerns, tensors):
            found = self._known(tensor)
            if found is not None and found.dtype == tensor.dtype:
                found.keep_as_it_is(tensor)
                self._fresh = [each for each in self._fresh if each() is not found]

    def _concerns(self, tensor: torch.Tensor) -> bool:
        """Whether the form may get the storage of `tensor`: if it is plain, or fake and the form reads no values."""
        return is_plain(tensor) or (not self._reads_values and is_fake(tensor) and _is_strided(tensor))

    def _storage_of(self, tensor: torch.Tensor, node: int | None) -> KeptStorage | None:
        """Return a new record of the storage of `tensor`, which `node` saves (None: a node that reads the values)."""
        storage = tensor.untyped_storage()
        if self._is_untouched(tensor):
            return None
        self._references.setdefault(storage._cdata, StorageWeakRef(storage))
        found = KeptStorage(tensor)
        if self._keep_sign is not None and node is not None and tensor.is_floating_point():
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
        """Convert the storages saved by the previous node (Rule 4), or at the end of the run, all that are left."""
        waiting = list(self._waiting())
        self._fresh = [ref(found) for found in waiting if found.undecided and not at_the_end]
        for found in waiting:
            saved = found.kept
            if found.undecided and at_the_end:
                found.read_by(None)
            if not found.undecided and isinstance(saved, SavedAsItIs) and not saved.overwritten:
                memory = memory_of(saved.tensor())
                sign = self._keep_sign if found.need not in (Need.NUMBERS, Need.SHAPE) else None
                kept = self.form.keep(memory) if sign is None else sign(memory, found.need)
                found.kept = kept or self._kept_around(memory) or saved

    def _kept_around(self, memory: torch.Tensor) -> Saved | None:
        """Convert `memory`, which this form declines, by the form of an enclosing run; None if none can (Rule 12)."""
        around = self._around
        if around is None or around._is_untouched(memory) or not around._concerns(memory):
            return None
        return around.form.keep(memory) or around._kept_around(memory)


innermost_keeping: ContextVar[Keeping | None] = ContextVar("rotor_py.innermost_keeping", default=None)


def owned_tensors(function: Callable[..., Any]) -> list[torch.Tensor]:
    return [*function.parameters(), *function.buffers()] if isinstance(function, nn.Module) else []


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain strided tensor that is not lazily conjugated, negated or quantized."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and _is_strided(tensor)


def _is_strided(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not torch_compat.is_functorch_wrapped_tensor(tensor)
    )
