"""Record and restore plain attributes that a module's forward changes, such as a count of calls.

Parameters, buffers and submodules are not plain attributes: a module keeps them in separate dicts. Modules generated
from a graph (`HasKind`) set no attributes, so their attributes are not recorded.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from rotor_profiling.contents import (
    MISSING,
    TABLES,
    Contents,
    StandIns,
    advanced,
    contents_of,
    copies_of,
    fill,
    items_of,
    iterators_of,
    kind_of,
    tensors_held,
    unchanged,
    without_copies,
    write_back,
    written,
)
from rotor_profiling.stage.stage_signature import HasKind
from rotor_profiling.storage import storage_bytes, storages, tensors_in
from rotor_solver.described_error import InvalidStateError

# For each module that has run, the names of attributes that a run changed and that were neither missing nor None.
_changing: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
# For each module that has run, the names of attributes with a tensor or array that a run wrote to in place.
_written: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
# For each module that has run, the names of attributes with a generator that a run advanced.
_advancing: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
leaving: WeakSet[Any] = WeakSet()  # modules in whose attributes a run has put another floating-point tensor
# Modules in which a run has made an attribute, a buffer or the like that a later run changes, such as a generator or a
# counter, or for which it drew random numbers.
# Measuring keeps nothing that such modules make: the first forward in training makes all of it again.
making: WeakSet[nn.Module] = WeakSet()

Table = dict[str, Any]
_NUMBERS = frozenset({bool, int, float, str, type(None)})  # asked first, which saves time in every run


@dataclass(frozen=True, slots=True)
class Change:
    """An attribute that a run changed: its `value` before the run, `MISSING` if it did not exist, and the contents."""

    module: nn.Module
    name: str
    value: Any
    contents: Contents

    @property
    def overwritten(self) -> Iterator[tuple[int, int]]:
        """Yield the versions, then and now, of each tensor whose former values are lost, since there is no copy."""
        for each, content in self.contents:
            if isinstance(each, torch.Tensor) and content.copy is None and each._version != content.version:
                yield content.version, each._version

    def restore_for_recompute(self, stand_ins: StandIns) -> None:
        """Restore the attribute for a recomputation, with `stand_ins` for what it may write to or advance."""
        self._set(copies_of(self.contents, stand_ins))

    def put_back(self) -> None:
        """Restore the object that the attribute had before the run, with its contents and values of that time."""
        write_back(self.contents)
        self._set(iterators_of(self.contents, {}))

    def lend(self, stand_ins: StandIns) -> None:
        """Give the next run other iterators in the same state, until `put_back`."""
        if iterators_of(self.contents, stand_ins, moved=False):
            self._set(stand_ins)

    def _set(self, stand_ins: StandIns) -> None:
        # Not `setattr`, which a class may override.
        if self.value is MISSING:
            vars(self.module).pop(self.name, None)
        else:
            vars(self.module)[self.name] = stand_ins.get(id(self.value), self.value)
        fill(self.contents, stand_ins)


class Attributes:
    """Snapshot of the plain attributes of the modules of `function`.

    Has copies of the tensors that earlier runs wrote to; of a module that has not run before, copies of all tensors.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        modules = modules_of(function, but=HasKind)
        seen = set(map(id, modules))
        self._before = [(module, *_before(module, seen)) for module in modules]

    def values(self) -> Iterator[Any]:
        """Yield the values in the snapshot, and the objects in their contents."""
        for _, values, inside in self._before:
            yield from values.values()
            for change in inside:
                yield from (item for _, content in change.contents for item in items_of(content))

    def lend(self) -> Attributes:
        """Give the next runs copies of the iterators, until `put_back`, so that runs do not advance the user's."""
        stand_ins: StandIns = {}
        for _, _, inside in self._before:
            for change in inside:
                change.lend(stand_ins)
        return self

    def changes(self) -> list[Change]:
        """Return the changes since the snapshot.

        Raises RuntimeError if a run wrote to a tensor that no earlier run wrote to: the snapshot has no copy of it.
        """
        return [each for before in self._before for each in _changes(*before)]

    def after_run(self, left: list[torch.Tensor]) -> Callable[[], list[Change]]:
        """Return a function that lists the changes since the snapshot, for a recomputation; add to `left` by `left_by`.

        Frees copies of tensors that no run since the snapshot wrote to. Raises RuntimeError like `changes`.
        """
        left += left_by(self.changes())
        before = [(module, values, list(map(_uncopied, inside))) for module, values, inside in self._before]
        return lambda: [change for each in before for change in _differences(*each)]

    def put_back(self, *, caches: bool = True) -> None:
        """Restore all attributes to the snapshot.

        With `caches=False`, keeps caches: attributes that were missing or None, in modules that are not in `making`.
        """
        changes = self.changes()
        made = {id(change) for change in changes if change.value is None or change.value is MISSING}
        for change in changes:
            moving = change.name in _changing[change.module] | _written[change.module]
            if id(change) in made and (moving or _may_advance(vars(change.module).get(change.name))):
                making.add(change.module)
        for change in changes:
            if caches or id(change) not in made or change.module in making:
                change.put_back()


Made = list[tuple[nn.Module, Table, str, bool]]  # a module, its dict that got a value, the name, and whether it is new


def made_by(function: Callable[..., Any], *, attributes: bool = False) -> Callable[[], Made]:
    """Return a function that lists the buffers, parameters, submodules, maybe other attributes that runs have made."""
    before = [
        (module, table, set(table), _names(table))
        for module in modules_of(function)
        for table in (module._buffers, module._parameters, module._modules, *([vars(module)] if attributes else ()))
    ]
    return lambda: [
        (module, table, name, name not in known)
        for module, table, known, had in before
        for name in sorted(_names(table) - had)
    ]


def _names(table: Table) -> set[str]:
    return {name for name, value in table.items() if value is not None}


def drop_made(made: Callable[[], Made]) -> None:
    """Remove what `made_by` lists in modules that make what later runs change, or that draw to make it (`making`)."""
    for module, table, name, new in made():
        if module in making:
            table[name] = None  # registered without a value, if it was
            if new:
                del table[name]


@contextmanager
def attributes_kept(function: Callable[..., Any], *, caches: bool = True) -> Iterator[None]:
    """Restore the attributes of `function`'s modules when the context exits. `caches`: see `Attributes.put_back`."""
    before = Attributes(function)
    try:
        before.lend()
        yield
    finally:
        before.put_back(caches=caches)


def sets_attributes(function: Callable[..., Any]) -> bool:
    """Return whether a run of `function` has changed an attribute that was neither missing nor None."""
    return bool(_changing_in(function))


def _changing_in(function: Callable[..., Any]) -> list[tuple[nn.Module, str]]:
    return [(module, name) for module in modules_of(function, but=HasKind) for name in _changing.get(module, ())]


def advanced_generators(model: nn.Module) -> list[str]:
    """Return the names of attributes with a generator that runs have advanced, which cannot be undone."""
    found = [(name, each) for name, module in model.named_modules() for each in sorted(_advancing.get(module, ()))]
    return [f"{name}.{each}" if name else each for name, each in found]


def kept_bytes(function: Callable[..., Any]) -> int:
    """Return the bytes of the former tensors in changing attributes, which a recomputation of `function` needs."""
    owned = _owned(function)
    return sum(
        (1 + (name in _written[module]))  # if a run writes to the tensor, the recomputation writes to a second copy
        * storage_bytes(tensors_held(vars(module).get(name)), owned)
        for module, name in _changing_in(function)
    )


def left_tensors(function: Callable[..., Any]) -> list[torch.Tensor]:
    """Return tensors that runs leave in attributes, as weight norm does: in memory until the next run replaces them."""
    names = [(module, name) for module, name in _changing_in(function) if name not in _written[module]]
    owned = _owned(function).keys() if names else set()
    tensors = [each for module, name in names for each in tensors_held(vars(module).get(name))]
    return [each for each in tensors if owned.isdisjoint(storages([each]))]


def _owned(function: Callable[..., Any]) -> dict[int, int]:
    # Storages of parameters and buffers, which do not count as attributes, although recurrent layers list them in one.
    modules = modules_of(function, but=HasKind)
    tables = [table for module in modules for table in (module._parameters, module._buffers)]
    return storages(each for table in tables for each in table.values() if each is not None)


def leaves_tensors(function: Callable[..., Any]) -> bool:
    """Return whether a run has put another floating-point tensor into an attribute of a module of `function`."""
    return any(module in leaving for module in modules_of(function, but=HasKind))


def left_by(changes: Iterable[Change]) -> list[torch.Tensor]:
    """Return the floating-point tensors that a run put into attributes, each once, in the same order after any run."""
    changes = sorted(changes, key=lambda change: change.name)
    before = {id(tensor) for change in changes for tensor in _floating(change.value, change.contents)}
    now = [tensor for change in changes for tensor in _floating(vars(change.module).get(change.name))]
    return list({id(tensor): tensor for tensor in now if id(tensor) not in before}.values())


def _floating(value: Any, contents: Contents | None = None) -> list[torch.Tensor]:
    held = tensors_held(value, contents)
    return [tensor for tensor in held if tensor.is_floating_point() or tensor.is_complex()]


def _may_advance(value: Any) -> bool:
    """Whether a value is, or has, a generator, an iterator, or an object without tensors, which runs may change."""
    if kind_of(type(value)) == "container":
        return any(map(_may_advance, items_of(value)))
    if isinstance(value, torch.Generator | random.Random | Iterator) or "numpy.random" in type(value).__module__:
        return True
    return hasattr(value, "__dict__") and not callable(value) and not tensors_in(value)


def modules_of(function: Callable[..., Any], but: type | tuple[()] = ()) -> list[nn.Module]:
    """Return the modules in `function`, itself included, except modules of class `but` and the modules in them."""
    found: dict[nn.Module, None] = {}
    pending: list[Any] = [function] if isinstance(function, nn.Module) else []
    while pending:
        module = pending.pop()
        if module is not None and module not in found and not isinstance(module, but):
            found[module] = None
            if module._modules:
                pending += reversed(module._modules.values())
    return list(found)


def _before(module: nn.Module, seen: set[int]) -> tuple[Table, list[Change]]:
    """Return a module's attributes, and a `Change` for each whose contents a run may change in place."""
    values, wrote = dict(vars(module)), _written.get(module)
    inside = [
        Change(module, name, value, contents)
        for name, value in values.items()
        if name not in TABLES
        and type(value) not in _NUMBERS
        and kind_of(type(value)) is not None
        and (contents := contents_of(value, seen, copies=wrote is None or name in wrote))
    ]
    return values, inside


def _changes(module: nn.Module, values: Table, inside: list[Change]) -> Iterator[Change]:
    """Yield the changes that a run made, and record their names in `_changing` and `_written`."""
    changing, wrote = _changing.setdefault(module, set()), _written.setdefault(module, set())
    for change in _differences(module, values, inside):
        if change.value is not None and change.value is not MISSING:
            changing.add(change.name)
        if written(change.contents):
            wrote.add(change.name)
            if any(change.overwritten):
                what = f"the attribute {change.name!r} of {type(module).__name__}"
                message = f"run the step once more: a forward wrote to {what}, which no earlier forward had changed"
                raise InvalidStateError(message, kind="attribute_changed", name=change.name)
        if left_by([change]):
            leaving.add(module)
        if advanced(change.contents):
            _advancing.setdefault(module, set()).add(change.name)
        yield change


def _differences(module: nn.Module, values: Table, inside: list[Change]) -> Iterator[Change]:
    """Yield each changed attribute."""
    now = vars(module)
    if now.keys() == values.keys() and all(map(operator.is_, now.values(), values.values())):  # true for most modules
        changed = set()
    else:
        names = (now.keys() | values.keys()) - TABLES
        changed = {name for name in names if now.get(name, MISSING) is not values.get(name, MISSING)}
    for before in inside:
        if before.name in changed or not unchanged(before.contents):
            changed.discard(before.name)
            yield _uncopied(before)
    for name in changed:
        yield Change(module, name, values.get(name, MISSING), [])


def _uncopied(change: Change) -> Change:
    return replace(change, contents=without_copies(change.contents))
