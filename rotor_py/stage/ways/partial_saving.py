"""Stages stored in part: what is cheap to make is not saved, but made again when the backward asks for it.

Autograd is told to save the way to such a tensor instead of the tensor (`torch.autograd.graph.saved_tensors_hooks`).
Kept for it are the values that it is made from, and these are often kept anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.fx.node import map_aggregate
from torch.multiprocessing.reductions import StorageWeakRef

from rotor_py.stage.autocast import autocast_now, restored_autocast
from rotor_py.stage.keepers.keeper import Saved, saving_now


@dataclass(frozen=True, slots=True)
class Value:
    """A value in the arguments of a `Call`, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Call:
    """An operator that makes a value again, from others."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make values again: `calls` for them and for what is between, and the kept values that each `needs`."""

    calls: dict[int, Call]
    needs: dict[int, frozenset[int]]


class PartialSaving:
    """One run of a stage of which some values are dropped, to be made again by a recipe.

    The run happens inside it as a context, on tensors on the CPU and on `devices`. It calls `keep` and `drop` for its
    values as soon as it has made them; each of these has memory of its own. What is not dropped is saved
    as it would be without this: as it is, or by a keeper.
    """

    def __init__(self, recipe: Recipe, devices: Iterable[torch.device]) -> None:
        self.recipe = recipe
        self._save = saving_now()
        self.autocast = autocast_now(devices)
        # Weak: when autograd has let go of all that it saved of a value, nobody will ask for it.
        self.dropped: WeakValueDictionary[int, _Dropped] = WeakValueDictionary()
        self._kept: dict[int, _Kept] = {}
        self._storages: dict[int, tuple[StorageWeakRef, int, torch.dtype]] = {}
        self._hooks: Any = None

    def __enter__(self) -> PartialSaving:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        hooks, self._hooks = self._hooks, None
        hooks.__exit__(*error)
        # Nothing is saved from here on. Each dropped value has what it is made from; the rest is not to be held.
        self._storages.clear()
        self._kept.clear()

    def keep(self, number: int, value: Any) -> None:
        """Value `number` is there, and is kept."""
        self._kept[number] = _Kept(self._save(value).tensor if isinstance(value, torch.Tensor) else lambda: value)

    def drop(self, number: int, value: torch.Tensor) -> None:
        """Value `number` is there, and is not to be saved."""
        # By address: autograd saves views and detached twins, which are other objects. The weak reference keeps the
        # address from being used again by another storage.
        storage = value.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage), number, value.dtype

    def _pack(self, tensor: torch.Tensor) -> Any:
        """What autograd is to save in the place of `tensor`."""
        found = self._storages.get(tensor.untyped_storage()._cdata)
        # A view in another dtype is kept: the parts of a value that is made again are all of the value's own dtype.
        if found is None or found[2] != tensor.dtype:
            return self._save(tensor)
        _, number, _ = found
        handle = self.dropped.get(number)
        if handle is None:
            kept = {each: self._kept[each] for each in self.recipe.needs[number]}
            handle = self.dropped[number] = _Dropped(self, number, kept)
        return _Part(handle, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _unpack(saved: Saved | _Part) -> torch.Tensor:
    if not isinstance(saved, _Part):
        return saved.tensor()
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True cannot go through a stage that makes tensors again in the backward; raise the memory "
            "limit until nothing is recomputed, or train this loss without Checkpointable"
        )
    return saved.handle.value().as_strided(saved.size, saved.stride, saved.offset)


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
            # No cache: a weight that is cast here has no history, and a later forward would find it without.
            with torch.no_grad(), restored_autocast(self.run.autocast, cache=False):
                self._make(self.number, {})
        return self.made  # type: ignore[no-any-return]  # a tensor

    def _make(self, number: int, made: dict[int, Any]) -> Any:
        if number in self.kept:
            return self.kept[number].unchanged()
        shared = self.run.dropped.get(number)
        if shared is not None and shared.made is not None:
            return shared.made
        if number not in made:
            call = self.run.recipe.calls[number]
            args, kwargs = map_aggregate(
                (call.args, call.kwargs),
                lambda each: self._make(each.number, made) if isinstance(each, Value) else each,
            )
            made[number] = call.function(*args, **kwargs)
            if shared is not None:
                shared.made = made[number]
        return made[number]


@dataclass(frozen=True, slots=True)
class _Part:
    """A view of a dropped value."""

    handle: _Dropped
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
