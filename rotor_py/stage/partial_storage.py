"""Store a stage in part: keep some of its saved values in the forward, and recompute the others in the backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch.fx.node import map_aggregate
from torch.multiprocessing.reductions import StorageWeakRef

from rotor_py.errors import InvalidStateError
from rotor_py.stage.compressing_hooks import innermost_keeping
from rotor_py.stage.forward_state import autocast_now, restored_autocast
from rotor_py.stage.saved_tensors import Saved, SavedAsItIs, innermost_run, tensor_of


@dataclass(frozen=True, slots=True)
class Value:
    number: int


@dataclass(frozen=True, slots=True)
class Call:
    """An operator call that recomputes a value. It records a graph that ends at the values `wanted`, if not None."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    wanted: frozenset[int] | None = None

    def __call__(self, values: Mapping[int, Any]) -> Any:
        def read(each: Any) -> Any:
            if not isinstance(each, Value):
                return each
            found = values[each.number]
            return found.detach().requires_grad_() if self.wanted and each.number in self.wanted else found

        with torch.set_grad_enabled(self.wanted is not None):
            args, kwargs = map_aggregate((self.args, self.kwargs), read)
            made = self.function(*args, **kwargs)
        return made if self.wanted is None else made.detach()


# Gathers parameters' shards before an operator call, given the numbers (indices of graph nodes) of its arguments.
Reading = Callable[[Collection[int]], None]
Around = Callable[[], AbstractContextManager[Reading | None]]  # returns a context, inside which values are recomputed


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to recompute values: the operator call for each, and the kept values that each dropped value `needs`."""

    calls: dict[int, Call]
    needs: dict[int, frozenset[int]]


class PartialSaving:
    """Context for one run of a stage, some of whose saved values are dropped, and recomputed by `recipe`.

    The run calls `keep` or `drop` for a value as soon as it has computed it; no two of these values share memory. In
    place of a dropped value, autograd saves an object that recomputes it. Other tensors are saved as without this
    context. Values are recomputed inside the context that `around` returns.
    """

    def __init__(self, recipe: Recipe, devices: Iterable[torch.device], around: Around | None = None) -> None:
        self.recipe = recipe
        self.around = around
        self._keeper = innermost_keeping.get()
        self.autocast = autocast_now(devices)
        # Weak references: only objects that autograd saves keep a value, which is released with the last of them.
        self.dropped: WeakValueDictionary[int, _Dropped] = WeakValueDictionary()
        self._kept: dict[int, Callable[[], Any]] = {}  # maps numbers to functions that return the kept value
        self._storages: dict[int, tuple[StorageWeakRef, int, torch.dtype]] = {}
        # by address, objects saved before a `drop` of their storage; the last entry prevents the address's reuse
        self._early: dict[int, list[tuple[ref[_Saved], _View, torch.dtype, StorageWeakRef]]] = {}
        self._to_drop = len(recipe.needs)
        self._handing_over = innermost_run.get()
        self._hooks: Any = None

    def __enter__(self) -> PartialSaving:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, tensor_of)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(*error)
        # The run is over, and each `_Dropped` refers to the values that it needs: release all other values.
        self._storages.clear()
        self._early.clear()
        self._kept.clear()

    def keep(self, number: int, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            self._kept[number] = lambda: value
        elif self._keeper is None:
            self._kept[number] = SavedAsItIs(value).tensor
        else:
            self._kept[number] = self._keeper.save(value, for_numbers=True).tensor

    def drop(self, number: int, value: torch.Tensor) -> None:
        # By address, since autograd saves views and aliases of `value`. The weak reference prevents its reuse.
        storage = value.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage), number, value.dtype
        # Some operators save their result before they return it.
        for early, view, dtype, _ in self._early.pop(storage._cdata, ()):
            saved = early()
            if saved is not None and dtype == value.dtype:
                saved.content = self._dropped(number), view
        self._to_drop -= 1
        self._end_if_complete()

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        storage, saved = tensor.untyped_storage(), _Saved()
        view = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        found = self._storages.get(storage._cdata)
        # Save a view in another dtype unchanged: `_Saved.tensor` returns views in the dtype of the recomputed value.
        if found is not None and found[2] == tensor.dtype:
            saved.content = self._dropped(found[1]), view
        else:
            saved.content = SavedAsItIs(tensor) if self._keeper is None else self._keeper.save(tensor)
            if found is None:
                early = ref(saved), view, tensor.dtype, StorageWeakRef(storage)
                self._early.setdefault(storage._cdata, []).append(early)
        if self._handing_over is not None:
            self._handing_over.hand_over(saved, tensor)
            self._end_if_complete()
        return saved

    def _end_if_complete(self) -> None:
        # Do not end the run before its last `drop`, which may replace tensors that were saved earlier.
        undecided = self._keeper is not None and self._keeper.undecided
        if self._handing_over is not None and not self._to_drop and not undecided:
            self._handing_over.end_if_complete()

    def _dropped(self, number: int) -> _Dropped:
        if (found := self.dropped.get(number)) is None:
            kept = {each: self._kept[each] for each in self.recipe.needs[number]}
            found = self.dropped[number] = _Dropped(self, number, kept)
        return found


class _Dropped:
    """A dropped value. All saved tensors that are views of it share this object, so that it is recomputed once."""

    __slots__ = ("__weakref__", "kept", "made", "number", "run")

    def __init__(self, run: PartialSaving, number: int, kept: dict[int, Callable[[], Any]]) -> None:
        self.run = run
        self.number = number
        self.kept = kept
        self.made: Any = None

    def value(self) -> torch.Tensor:
        if self.made is None:
            available, missing = self._plan()
            # Do not cache weights that autocast casts here, without a graph: a later forward would use them.
            autocast = restored_autocast(self.run.autocast, cache=False)
            around = nullcontext() if self.run.around is None else self.run.around()
            with torch.no_grad(), autocast, around as reading:
                self._make(available, missing, reading)
        return self.made  # type: ignore[no-any-return]  # a tensor

    def _plan(self) -> tuple[dict[int, Any], list[int]]:
        """Return the values that exist, by number, and the numbers of those to compute from them, in order."""
        available: dict[int, Any] = {}
        missing: set[int] = set()
        pending = [self.number]
        while pending:
            number = pending.pop()
            if number in available or number in missing:
                continue
            shared = self.run.dropped.get(number)
            if number in self.kept:
                available[number] = self.kept[number]()
            elif shared is not None and shared.made is not None:
                available[number] = shared.made
            else:
                missing.add(number)
                pending.extend(self.run.recipe.calls[number].reads)
        return available, sorted(missing)  # numbers are indices of graph nodes, and a node reads only earlier ones

    def _make(self, values: dict[int, Any], missing: list[int], reading: Reading | None) -> None:
        calls = self.run.recipe.calls
        last = {read: number for number in missing for read in calls[number].reads}
        for number in missing:
            if reading is not None:
                reading(calls[number].reads)
            values[number] = calls[number](values)
            shared = self.run.dropped.get(number)
            if shared is not None:
                shared.made = values[number]
            for read in {*calls[number].reads, number}:
                if last.get(read, number) == number:
                    del values[read]


_View = tuple[torch.Size, tuple[int, ...], int]  # shape, strides and storage offset of a saved tensor


class _Saved:
    # No `__init__`, which would take time for every saved tensor.
    __slots__ = ("__weakref__", "content")
    content: Saved | tuple[_Dropped, _View]

    def tensor(self) -> torch.Tensor:
        content = self.content
        if not isinstance(content, tuple):
            return content.tensor()
        if torch.is_grad_enabled():
            raise InvalidStateError(
                "raise the memory limit until nothing is recomputed, or train this loss without Checkpointable: "
                "create_graph=True cannot go through recomputed tensors",
                kind="create_graph",
            )
        dropped, view = content
        return dropped.value().as_strided(*view)
