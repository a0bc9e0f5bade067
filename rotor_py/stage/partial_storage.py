"""Store a stage in part: what is kept, and how the backward recomputes the rest."""

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
from rotor_py.stage.compressing_hooks import saving_now
from rotor_py.stage.forward_state import autocast_now, restored_autocast
from rotor_py.stage.saved_tensors import AsItIs, Saved, SavedAsItIs, handing_over_now, tensor_of


@dataclass(frozen=True, slots=True)
class Value:
    """A value in the arguments of a `Call`, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Call:
    """An operator that makes a value again, from those that it `reads`.

    If `wanted` is not None, it runs with a graph, in which gradients are wanted of these values.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    wanted: frozenset[int] | None = None

    def __call__(self, values: Mapping[int, Any]) -> Any:
        """The value, made from `values`."""

        def read(each: Any) -> Any:
            if not isinstance(each, Value):
                return each
            found = values[each.number]
            return found.detach().requires_grad_() if self.wanted and each.number in self.wanted else found

        with torch.set_grad_enabled(self.wanted is not None):
            args, kwargs = map_aggregate((self.args, self.kwargs), read)
            made = self.function(*args, **kwargs)
        return made if self.wanted is None else made.detach()


Reading = Callable[[Collection[int]], None]
"""Called with the numbers of the values that a call is about to read: some may have to be brought into memory."""
Around = Callable[[], AbstractContextManager[Reading]]
"""What is around the making of values."""


def reading_all_there(numbers: Collection[int]) -> None:
    """The values that are read are in memory anyway."""


def nothing_around() -> AbstractContextManager[Reading]:
    """What is around the making of values that are in memory anyway."""
    return nullcontext(reading_all_there)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make values again: `calls` for them and for what is between, and the kept values that each `needs`."""

    calls: dict[int, Call]
    needs: dict[int, frozenset[int]]


# Stages stored in part: what is cheap to make is not saved, but made again when the backward asks for it.
#
# Autograd is told to save the way to such a tensor instead of the tensor (`torch.autograd.graph.saved_tensors_hooks`).
# Kept for it are the values that it is made from, and these are often kept anyway.



class PartialSaving:
    """One run of a stage of which some values are dropped, to be made again by a recipe.

    The run happens inside it as a context, on tensors on the CPU and on `devices`. It calls `keep` and `drop` for its
    values as soon as it has made them; each of these has memory of its own. What is not dropped is saved
    as it would be without this: as it is, or by a keeper. Values are made again inside of `around`.
    """

    def __init__(self, recipe: Recipe, devices: Iterable[torch.device], around: Around = nothing_around) -> None:
        self.recipe = recipe
        self.around = around
        self._saving = saving_now()
        # Called for every tensor that is saved: without a keeper, by no method in between.
        self._save: Callable[[torch.Tensor], Saved] = SavedAsItIs if type(self._saving) is AsItIs else self._saving.save
        self.autocast = autocast_now(devices)
        # Weak: when autograd has let go of all that it saved of a value, nobody will ask for it.
        self.dropped: WeakValueDictionary[int, _Dropped] = WeakValueDictionary()
        self._kept: dict[int, _Kept] = {}
        self._storages: dict[int, tuple[StorageWeakRef, int, torch.dtype]] = {}
        self._saved: dict[int, list[_Early]] = {}
        self._to_drop = len(recipe.needs)
        self._handing_over = handing_over_now()
        self._hooks: Any = None

    def __enter__(self) -> PartialSaving:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, tensor_of)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(*error)
        # Nothing is saved from here on. Each dropped value has what it is made from; the rest is not to be held.
        self._storages.clear()
        self._saved.clear()
        self._kept.clear()

    def keep(self, number: int, value: Any) -> None:
        """Value `number` is there, and is kept."""
        if isinstance(value, torch.Tensor):
            self._kept[number] = _Kept(self._saving.save(value, for_numbers=True).tensor)
        else:
            self._kept[number] = _Kept(lambda: value)

    def drop(self, number: int, value: torch.Tensor) -> None:
        """Value `number` is there, and is not to be saved."""
        # By address: autograd saves views and detached twins, which are other objects. The weak reference keeps the
        # address from being used again by another storage.
        storage = value.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage), number, value.dtype
        # Some operators save what they make, before they return it.
        for each in self._saved.pop(storage._cdata, ()):
            saved = each.saved()
            if saved is not None and each.dtype == value.dtype:
                saved.content = self._part(number, each.view)
        self._to_drop -= 1
        self._end_if_complete()

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        """What autograd is to save in the place of `tensor`."""
        storage, saved = tensor.untyped_storage(), _Saved()
        view = _View(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        found = self._storages.get(storage._cdata)
        # A view in another dtype is kept: the parts of a value that is made again are all of the value's own dtype.
        if found is not None and found[2] == tensor.dtype:
            saved.content = self._part(found[1], view)
        else:
            saved.content = self._save(tensor)
            if found is None:
                early = _Early(ref(saved), view, tensor.dtype, StorageWeakRef(storage))
                self._saved.setdefault(storage._cdata, []).append(early)
        if self._handing_over is not None:
            self._handing_over.hand_over(saved, tensor)
            self._end_if_complete()
        return saved

    def _end_if_complete(self) -> None:
        # Before the last value is dropped, something is held of it that was saved before.
        if self._handing_over is not None and not self._to_drop and not self._saving.undecided:
            self._handing_over.end_if_complete()

    def _part(self, number: int, view: _View) -> _Part:
        handle = self.dropped.get(number)
        if handle is None:
            kept = {each: self._kept[each] for each in self.recipe.needs[number]}
            handle = self.dropped[number] = _Dropped(self, number, kept)
        return _Part(handle, view)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A value that is kept, and how to get it as it was."""

    unchanged: Callable[[], Any]


class _Dropped:
    """A value that the backward needs and nobody holds.

    All that autograd saves of the value shares this object, so that it is made once; with the last of them it goes.
    """

    __slots__ = ("__weakref__", "kept", "made", "number", "run")

    def __init__(self, run: PartialSaving, number: int, kept: dict[int, _Kept]) -> None:
        self.run = run
        self.number = number
        self.kept = kept
        self.made: Any = None

    def value(self) -> torch.Tensor:
        """The value. Other dropped values that are made on the way to it are kept for when they are asked for."""
        if self.made is None:
            there, missing = self._plan()
            # No cache: a weight that is cast here has no history, and a later forward would find it without.
            autocast = restored_autocast(self.run.autocast, cache=False)
            with torch.no_grad(), autocast, self.run.around() as reading:
                self._make(there, missing, reading)
        return self.made  # type: ignore[no-any-return]  # a tensor

    def _plan(self) -> tuple[dict[int, Any], list[int]]:
        """The values that are there to begin with, and those to make from them, in order."""
        there: dict[int, Any] = {}
        missing: set[int] = set()
        pending = [self.number]
        while pending:
            number = pending.pop()
            if number in there or number in missing:
                continue
            shared = self.run.dropped.get(number)
            if number in self.kept:
                there[number] = self.kept[number].unchanged()
            elif shared is not None and shared.made is not None:
                there[number] = shared.made
            else:
                missing.add(number)
                pending.extend(self.run.recipe.calls[number].reads)
        return there, sorted(missing)  # numbers are positions in a graph: none reads a later one

    def _make(self, values: dict[int, Any], missing: list[int], reading: Reading) -> None:
        calls = self.run.recipe.calls
        last = {read: number for number in missing for read in calls[number].reads}
        for number in missing:
            reading(calls[number].reads)
            values[number] = calls[number](values)
            shared = self.run.dropped.get(number)
            if shared is not None:
                shared.made = values[number]
            # What nobody reads any more is not to be held while the rest is made.
            for read in {*calls[number].reads, number}:
                if last.get(read, number) == number:
                    del values[read]


class _Saved:
    """What autograd holds of a tensor that it has saved."""

    # Without an `__init__`: one of these is made for every tensor that is saved.
    __slots__ = ("__weakref__", "content")
    content: Saved | _Part

    def tensor(self) -> torch.Tensor:
        """The tensor, made again if it was dropped. RuntimeError where a gradient of gradients is asked for then."""
        part = self.content
        if not isinstance(part, _Part):
            return part.tensor()
        if torch.is_grad_enabled():
            raise InvalidStateError(
                "create_graph=True cannot go through a stage that makes tensors again in the backward; raise the "
                "memory limit until nothing is recomputed, or train this loss without Checkpointable",
                kind="create_graph",
            )
        return part.handle.value().as_strided(part.view.size, part.view.stride, part.view.offset)


@dataclass(frozen=True, slots=True)
class _View:
    """Which elements of a storage a tensor has."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A view of a dropped value."""

    handle: _Dropped
    view: _View


@dataclass(frozen=True, slots=True)
class _Early:
    """A tensor that was saved before anybody said whether its memory is dropped."""

    saved: ref[_Saved]
    view: _View
    dtype: torch.dtype
    memory: StorageWeakRef
    """It keeps the address from being used again: by a keeper, a tensor is saved without its memory."""
