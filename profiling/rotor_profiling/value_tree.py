"""Flatten and unflatten inputs and outputs of models: nested tensors, and objects that hold tensors.

PyTorch's pytrees flatten tuples, lists, dicts and objects of registered classes. Any other object is a leaf to them: a
dataclass, a batch of graphs, a subclass of dict. If such an object holds tensors, this module flattens its items and
attributes, too. Unflattening makes a new object of the same class without calling `__init__`. This module registers no
class with pytrees, which would change their results for the whole process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from rotor_profiling import torch_compat
from rotor_profiling.torch_compat import TreeSpec

PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Tensor, nn.Parameter, torch.dtype})
_CONTAINERS = (dict, list, tuple)
# Builtin classes whose subclasses are opened, since their instances consist of items and attributes only
_BASES = (*_CONTAINERS, OrderedDict, SimpleNamespace, object)
_ITEMS = ""  # Key of a container's items in the result of `parts_of`; the other keys are names of attributes
# Upper bounds of the number of objects opened in a value, and of levels of nesting. Guesses: enough for a batch of
# graphs, and few enough to end the search of an object that refers to the whole program.
_MOST, _DEEPEST = 10_000, 16
_HEAP = 1 << 9  # Flag `Py_TPFLAGS_HEAPTYPE` of Python's type objects: created by a class statement


def parts_of(value: Any) -> dict[str, Any] | None:
    """Return attributes and items of an object that may hold tensors, such as a dataclass; None for other values."""
    kind = type(value)
    if kind in PLAIN or isinstance(value, torch.Tensor | nn.Module | type) or _base(kind) not in _BASES:
        return None
    if kind.__module__.partition(".")[0] == "torch" and not isinstance(value, _CONTAINERS):
        return None  # torch's own objects, such as graph nodes, refer to much of torch
    found = fields_of(value)
    if isinstance(value, _CONTAINERS):
        found[_ITEMS] = dict(value) if isinstance(value, dict) else list(value)
    return found or None


def fields_of(value: Any) -> dict[str, Any]:
    """Return the attributes in the `__dict__` and the slots of an object."""
    found: dict[str, Any] = {}
    with suppress(AttributeError):  # not `vars` and `getattr`, which a class may override
        found.update(object.__getattribute__(value, "__dict__"))
    for name in _slots(type(value)):
        with suppress(AttributeError):
            found[name] = object.__getattribute__(value, name)
    return found


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor, or a tuple of tensors and of values that nothing can change, as most inputs are."""
    return isinstance(value, torch.Tensor) or (type(value) is tuple and PLAIN.issuperset(map(type, value)))


def tree_flatten(value: Any, of: Any = torch.Tensor, *, every: bool = False) -> tuple[list[Any], TreeSpec | Structure]:
    """Return the leaves and the structure of a value. Opens objects that have leaves of class `of`, or `every` one."""
    if type(value) is tuple and PLAIN.issuperset(map(type, value)):  # a captured stage's value
        return list(value), _of_tuple(len(value))
    given, tree = torch_compat.tree_flatten(value)
    if PLAIN.issuperset(map(type, given)):  # true for most other values
        return given, tree
    leaves, structure = _flatten(given, tree, _Search(of, every), 0)
    return (leaves, structure) if every or any(isinstance(leaf, of) for leaf in leaves) else (given, tree)


@cache
def _of_tuple(length: int) -> TreeSpec:
    return torch_compat.tree_flatten((None,) * length)[1]


def tree_leaves(value: Any) -> list[Any]:
    return tree_flatten(value)[0]


def tree_unflatten(leaves: list[Any], structure: TreeSpec | Structure) -> Any:
    return tuple(leaves) if structure is _of_tuple(len(leaves)) else _put_together(iter(leaves), structure, {})


def tree_map_only(of: Any, change: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `change(leaf)` in place of every leaf of the class `of`."""
    leaves, structure = tree_flatten(value, of)
    return tree_unflatten([change(leaf) if isinstance(leaf, of) else leaf for leaf in leaves], structure)


@dataclass(frozen=True, slots=True)
class _Object:
    """An opened object: the structure of its `parts`, or None if the object of this `number` occurs earlier, too."""

    kind: type
    number: int
    parts: TreeSpec | Structure | None = None


@dataclass(frozen=True, slots=True)
class Structure:
    """A value without its leaves: its pytree, and for each leaf of the pytree, the `_Object` if opened, else None."""

    tree: TreeSpec
    objects: tuple[_Object | None, ...]


@dataclass(frozen=True, slots=True)
class _Search:
    of: Any
    every: bool
    # Number of each object found so far, by `id`; -1 for objects that are not opened
    numbers: dict[int, int] = field(default_factory=dict)


def _flatten(given: list[Any], tree: TreeSpec, search: _Search, depth: int) -> tuple[list[Any], TreeSpec | Structure]:
    leaves: list[Any] = []
    objects: list[_Object | None] = []
    for each in given:
        inside, found = _open(each, search, depth)
        leaves += inside
        objects.append(found)
    return leaves, Structure(tree, tuple(objects)) if any(objects) else tree


def _open(value: Any, search: _Search, depth: int) -> tuple[list[Any], _Object | None]:
    """Return the leaves inside `value` and its structure, or `value` itself and None if it is not opened."""
    whole, numbers = ([value], None), search.numbers
    if isinstance(value, search.of) or depth == _DEEPEST or len(numbers) == _MOST:
        return whole
    if (number := numbers.get(id(value))) is not None:
        return whole if number < 0 else ([], _Object(type(value), number))
    if (parts := parts_of(value)) is None:
        return whole
    number = numbers[id(value)] = len(numbers)
    leaves, structure = _flatten(*torch_compat.tree_flatten(parts), search, depth + 1)
    if search.every or isinstance(structure, Structure) or any(isinstance(leaf, search.of) for leaf in leaves):
        return leaves, _Object(type(value), number, structure)
    numbers[id(value)] = -1
    return whole


def _put_together(leaves: Iterator[Any], structure: TreeSpec | Structure, made: dict[int, Any]) -> Any:
    if isinstance(structure, Structure):
        given = [next(leaves) if each is None else _object(leaves, each, made) for each in structure.objects]
        return torch_compat.tree_unflatten(given, structure.tree)
    return torch_compat.tree_unflatten(list(islice(leaves, structure.num_leaves)), structure)


def _object(leaves: Iterator[Any], which: _Object, made: dict[int, Any]) -> Any:
    if which.parts is None:
        return made[which.number]
    kind, base = which.kind, _base(which.kind)
    if base is not tuple:  # create the object before its parts, which may refer to it
        made[which.number] = base.__new__(kind)
    parts = _put_together(leaves, which.parts, made)
    items = parts.pop(_ITEMS, ())
    if base is tuple:
        made[which.number] = tuple.__new__(kind, items)
    found = made[which.number]
    # Call methods of `object` and of builtin classes: the object's class may override them, as frozen dataclasses do.
    for name in set(_slots(kind)).intersection(parts):
        object.__setattr__(found, name, parts.pop(name))
    if parts:
        object.__getattribute__(found, "__dict__").update(parts)
    if isinstance(found, dict):
        for key, item in items.items():
            base.__setitem__(found, key, item)
    elif isinstance(found, list):
        list.extend(found, items)
    return found


def _base(kind: type) -> Any:
    return next(each for each in kind.__mro__ if not each.__flags__ & _HEAP)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                yield f"_{base.__name__.lstrip('_')}{name}" if private else name
