"""Record and restore plain attributes that a module's forward changes, such as a count of calls.

Parameters, buffers and submodules are not plain attributes: a module keeps them in separate dicts. Modules generated
from a graph (`HasKind`) set no attributes, so their attributes are not recorded.
"""

from __future__ import annotations

import operator
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from rotor_profiling.stage.stage_signature import HasKind
from rotor_profiling.storage import storage_bytes, storages, tensors_in
from rotor_solver.described_error import InvalidStateError

_TABLES = frozenset(vars(nn.Module()))
# Classes of containers whose contents are restored. A subclass may refuse `clear`, as model outputs of transformers do.
CONTAINERS = frozenset({list, dict, set, deque, Counter, OrderedDict, defaultdict})
_MISSING = object()

# For each module that has run, the names of attributes that a run changed and that were neither missing nor None.
_changing: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
# For each module that has run, the names of attributes with a tensor that a run wrote to in place.
_written: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
leaving: WeakSet[Any] = WeakSet()  # modules in whose attributes a run has put another floating-point tensor
# Modules in which a run has made an attribute or a buffer that a later run changes, such as a generator or a counter.
# Measuring keeps nothing that such modules make: the first forward in training makes all of it again.
making: WeakSet[nn.Module] = WeakSet()

Contents = list[tuple[Any, Any]]  # Pairs of a container and a shallow copy of it
Table = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """An attribute that a run changed, and its `value` before the run; `_MISSING` if it did not exist.

    Of a tensor, `version` is the version counter before the run, and `values` a copy made before the run, if any.
    `contents` has copies of a container, and of containers inside it, made before the run.
    """

    module: nn.Module
    name: str
    value: Any
    values: torch.Tensor | None
    contents: Contents
    version: int | None = None

    @property
    def overwritten(self) -> bool:
        """Whether the former values of a tensor are lost: a run wrote to it, and no copy had been made."""
        return self.values is None and self.version is not None and self.value._version != self.version

    def restore_for_recompute(self) -> None:
        """Restore the attribute for a recomputation, which may overwrite a tensor's values: so clone their copy."""
        self._set(self.value if self.values is None else self.values.clone())

    def put_back(self) -> None:
        """Restore the object that the attribute had before the run, with its contents and values of that time."""
        if self.values is not None:
            # A write to `data` does not raise the version counter, which autograd compares in its backward.
            self.value.data.copy_(self.values)
        self._set(self.value)

    def _set(self, value: Any) -> None:
        # Not `setattr`, which a class may override.
        if value is _MISSING:
            vars(self.module).pop(self.name, None)
        else:
            vars(self.module)[self.name] = value
        for container, content in self.contents:
            if not as_it_was(container, content):
                fill(container, content)


class Attributes:
    """Snapshot of the plain attributes of the modules of `function`.

    Has copies of the tensors that earlier runs wrote to; of a module that has not run before, copies of all tensors.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._before = [(module, *_before(module)) for module in modules_of(function, but=HasKind)]

    def values(self) -> Iterator[Any]:
        """Yield the values in the snapshot, and the items of containers."""
        for _, values, inside in self._before:
            yield from values.values()
            for change in inside:
                yield from (item for _, copy in change.contents for item in _items(copy))

    def changes(self) -> list[Change]:
        """Return the changes since the snapshot.

        Raises RuntimeError if a run wrote to a tensor that no earlier run wrote to: the snapshot has no copy of it.
        """
        return [each for before in self._before for each in _changes(*before)]

    def after_run(self, left: list[torch.Tensor]) -> Callable[[], list[Change]]:
        """Return a function that lists the changes since the snapshot, for a recomputation; add to `left` by `left_by`.

        Frees copies of tensors that no run since the snapshot wrote to. Raises RuntimeError like `changes`.
        """
        left += left_by(changes := self.changes())
        written = {(change.module, change.name) for change in changes if change.values is not None}
        before = [
            (module, values, [each if (module, each.name) in written else _uncopied(each) for each in inside])
            for module, values, inside in self._before
        ]
        return lambda: [change for each in before for change, _ in _differences(*each)]

    def put_back(self, *, caches: bool = True) -> None:
        """Restore all attributes to the snapshot.

        With `caches=False`, keeps caches: attributes that were missing or None, in modules that are not in `making`.
        """
        changes = self.changes()
        made = {id(change) for change in changes if change.value is None or change.value is _MISSING}
        for change in changes:
            moving = change.name in _changing[change.module] | _written[change.module]
            if id(change) in made and (moving or _may_advance(vars(change.module).get(change.name))):
                making.add(change.module)
        for change in changes:
            if caches or id(change) not in made or change.module in making:
                change.put_back()


def made_buffers(function: Callable[..., Any]) -> Callable[[], list[tuple[nn.Module, str]]]:
    """Return a function that lists the buffers that runs since now have made."""
    before = [(module, set(module._buffers)) for module in modules_of(function)]
    return lambda: [(module, name) for module, names in before for name in module._buffers.keys() - names]


def drop_made(made: Callable[[], list[tuple[nn.Module, str]]]) -> None:
    """Remove the buffers of `made_buffers` that are in modules that make what later runs change (`making`)."""
    for module, name in made():
        if module in making:
            del module._buffers[name]


@contextmanager
def attributes_kept(function: Callable[..., Any], *, caches: bool = True) -> Iterator[None]:
    """Restore the attributes of `function`'s modules when the context exits. `caches`: see `Attributes.put_back`."""
    before = Attributes(function)
    try:
        yield
    finally:
        before.put_back(caches=caches)


def sets_attributes(function: Callable[..., Any]) -> bool:
    """Return whether a run of `function` has changed an attribute that was neither missing nor None."""
    return any(_changing.get(module) for module in modules_of(function, but=HasKind))


def kept_bytes(function: Callable[..., Any]) -> int:
    """Return the bytes of the former tensors in changing attributes, which a recomputation of `function` needs."""
    modules = modules_of(function, but=HasKind)
    owned = _owned(modules)
    return sum(
        (1 + (name in _written[module]))  # if a run writes to the tensor, the recomputation writes to a second copy
        * storage_bytes(tensors_in(vars(module).get(name)), owned)
        for module in modules
        for name in _changing.get(module, ())
    )


def left_tensors(function: Callable[..., Any]) -> list[torch.Tensor]:
    """Return tensors that runs leave in attributes, as weight norm does: in memory until the next run replaces them."""
    modules = modules_of(function, but=HasKind)
    changing = [(module, name) for module in modules for name in _changing.get(module, ())]
    names = [(module, name) for module, name in changing if name not in _written[module]]
    owned = _owned(modules).keys() if names else set()
    tensors = [each for module, name in names for each in tensors_in(vars(module).get(name))]
    return [each for each in tensors if owned.isdisjoint(storages([each]))]


def _owned(modules: Iterable[nn.Module]) -> dict[int, int]:
    # Storages of parameters and buffers, which do not count as attributes, although recurrent layers list them in one.
    tables = [table for module in modules for table in (module._parameters, module._buffers)]
    return storages(each for table in tables for each in table.values() if each is not None)


def leaves_tensors(function: Callable[..., Any]) -> bool:
    """Return whether a run has put another floating-point tensor into an attribute of a module of `function`."""
    return any(module in leaving for module in modules_of(function, but=HasKind))


def left_by(changes: Iterable[Change]) -> list[torch.Tensor]:
    """Return the floating-point tensors that a run put into attributes, each once, in the same order after any run."""
    changes = sorted(changes, key=lambda change: change.name)
    before = {id(tensor) for change in changes for tensor in _floating(change.value, change.contents)}
    now = [tensor for change in changes for tensor in _floating_now(change)]
    return list({id(tensor): tensor for tensor in now if id(tensor) not in before}.values())


def _floating_now(change: Change) -> list[torch.Tensor]:
    value = vars(change.module).get(change.name)
    return _floating(value, list(contents_of(value, set())) if type(value) in CONTAINERS else [])


def _floating(value: Any, contents: Contents) -> list[torch.Tensor]:
    items = (
        [item for _, copy in contents for item in _items(copy) if type(item) not in CONTAINERS] if contents else value
    )
    return [tensor for tensor in tensors_in(items) if tensor.is_floating_point() or tensor.is_complex()]


def _may_advance(value: Any) -> bool:
    """Whether a value is, or has, a generator, an iterator, or an object without tensors, which runs may change."""
    if type(value) in CONTAINERS:
        return any(map(_may_advance, _items(value)))
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


def _before(module: nn.Module) -> tuple[Table, list[Change]]:
    """Return a module's attributes, and a `Change` for each container or tensor, which a run may change in place."""
    values = dict(vars(module))
    inside, written = [], _written.get(module)
    for name, value in values.items():
        if name in _TABLES:
            continue
        if type(value) in CONTAINERS:
            inside.append(Change(module, name, value, None, list(contents_of(value, set()))))
        elif isinstance(value, torch.Tensor) and not value.requires_grad:
            kept = value.clone() if written is None or name in written else None
            inside.append(Change(module, name, value, kept, [], value._version))
    return values, inside


def _changes(module: nn.Module, values: Table, inside: list[Change]) -> Iterator[Change]:
    """Yield the changes that a run made, and record their names in `_changing` and `_written`."""
    changing, written = _changing.setdefault(module, set()), _written.setdefault(module, set())
    for change, wrote in _differences(module, values, inside):
        if change.value is not None and change.value is not _MISSING:
            changing.add(change.name)
        if wrote:
            written.add(change.name)
            if change.values is None:
                what = f"the attribute {change.name!r} of {type(module).__name__}"
                message = f"run the step once more: a forward wrote to {what}, which no earlier forward had changed"
                raise InvalidStateError(message, kind="attribute_changed", name=change.name)
        elif _floating_now(change):
            leaving.add(module)
        yield change


def _differences(module: nn.Module, values: Table, inside: list[Change]) -> Iterator[tuple[Change, bool]]:
    """Yield each changed attribute, and whether the run wrote to its tensor in place."""
    now = vars(module)
    if now.keys() == values.keys() and all(map(operator.is_, now.values(), values.values())):  # true for most modules
        changed = set()
    else:
        names = (now.keys() | values.keys()) - _TABLES
        changed = {name for name in names if now.get(name, _MISSING) is not values.get(name, _MISSING)}
    for before in inside:
        wrote = before.version is not None and before.value._version != before.version
        if before.name in changed or wrote or not all(starmap(as_it_was, before.contents)):
            changed.discard(before.name)
            yield (before if wrote else _uncopied(before)), wrote
    for name in changed:
        yield Change(module, name, values.get(name, _MISSING), None, []), False


def _uncopied(change: Change) -> Change:
    return change if change.values is None else replace(change, values=None)


def contents_of(container: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    seen.add(id(container))
    yield container, copy(container)
    for each in _items(container):
        if type(each) in CONTAINERS and id(each) not in seen:
            yield from contents_of(each, seen)


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def as_it_was(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if isinstance(container, set):
        return bool(container == content)
    if isinstance(container, dict):
        return all(key in content and each is content[key] for key, each in container.items())
    return all(map(operator.is_, container, content))


def fill(container: Any, content: Any) -> None:
    container.clear()
    container.update(content) if isinstance(container, dict | set) else container.extend(content)
