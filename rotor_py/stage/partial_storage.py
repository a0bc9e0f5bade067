"""Store a stage in part: keep some values, and recompute the rest in the backward."""

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
    """An operator call that recomputes a value; where `wanted` is given, with a graph in which these have gradients."""

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


# Called with the numbers of the values that a call is about to read; brings some into memory.
Reading = Callable[[Collection[int]], None]
Around = Callable[[], AbstractContextManager[Reading | None]]  # makes the context around a recomputation


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to recompute values: the `calls` for them and for intermediates, and the kept values that each `needs`."""

    calls: dict[int, Call]
    needs: dict[int, frozenset[int]]


# Saved-tensor hooks replace cheap tensors by handles, which recompute them from values that are often saved anyway.


class PartialSaving:
    """Context for one run of a stage that drops some values and recomputes them by a recipe.

    The run calls `keep` or `drop` for its values as soon as it has computed them; each has memory of its own. Other
    tensors are saved as without this context. `around` makes the context in which values are recomputed.
    """

    def __init__(self, recipe: Recipe, devices: Iterable[torch.device], around: Around | None = None) -> None:
        self.recipe = recipe
        self.around = around
        self._keeper = innermost_keeping.get()
        self.autocast = autocast_now(devices)
        # Weak: once autograd has released all parts of a value, it is not needed.
        self.dropped: WeakValueDictionary[int, _Dropped] = WeakValueDictionary()
        self._kept: dict[int, Callable[[], Any]] = {}  # functions that return kept values unchanged
        self._storages: dict[int, tuple[StorageWeakRef, int, torch.dtype]] = {}
        # tensors saved before `keep` or `drop` was called for their memory, whose address must not be reused
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
        # Nothing is saved from here on. Each dropped value holds its sources; release the rest.
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
        # By address, kept from reuse by the weak reference: autograd saves views and aliases, which are other objects.
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
        # A view in another dtype is kept: all parts of a recomputed value have the value's own dtype.
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
        # Until the last value is dropped, earlier saved tensors may still belong to it.
        undecided = self._keeper is not None and self._keeper.undecided
        if self._handing_over is not None and not self._to_drop and not undecided:
            self._handing_over.end_if_complete()

    def _dropped(self, number: int) -> _Dropped:
        if (found := self.dropped.get(number)) is None:
            kept = {each: self._kept[each] for each in self.recipe.needs[number]}
            found = self.dropped[number] = _Dropped(self, number, kept)
        return found


class _Dropped:
    """A value to recompute. All tensors saved of it share this object, so it is recomputed once."""

    __slots__ = ("__weakref__", "kept", "made", "number", "run")

    def __init__(self, run: PartialSaving, number: int, kept: dict[int, Callable[[], Any]]) -> None:
        self.run = run
        self.number = number
        self.kept = kept
        self.made: Any = None

    def value(self) -> torch.Tensor:
        if self.made is None:
            there, missing = self._plan()
            # No cache: a weight cast here has no history, and a later forward would find it so.
            autocast = restored_autocast(self.run.autocast, cache=False)
            around = nullcontext() if self.run.around is None else self.run.around()
            with torch.no_grad(), autocast, around as reading:
                self._make(there, missing, reading)
        return self.made  # type: ignore[no-any-return]  # a tensor

    def _plan(self) -> tuple[dict[int, Any], list[int]]:
        """Return the available values, and the numbers of those to compute from them, in order."""
        there: dict[int, Any] = {}
        missing: set[int] = set()
        pending = [self.number]
        while pending:
            number = pending.pop()
            if number in there or number in missing:
                continue
            shared = self.run.dropped.get(number)
            if number in self.kept:
                there[number] = self.kept[number]()
            elif shared is not None and shared.made is not None:
                there[number] = shared.made
            else:
                missing.add(number)
                pending.extend(self.run.recipe.calls[number].reads)
        return there, sorted(missing)  # numbers are positions in a graph: none reads a later one

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
            # Release each value after its last reader.
            for read in {*calls[number].reads, number}:
                if last.get(read, number) == number:
                    del values[read]


_View = tuple[torch.Size, tuple[int, ...], int]  # Size, strides and offset of a part of a value


class _Saved:
    # No `__init__`: one is made for every saved tensor.
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
