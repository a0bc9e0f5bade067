"""Find the globals, closure variables and attributes of objects that the code of a module refers to by name."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from rotor_profiling.attributes import CONTAINERS, Contents, as_it_was, contents_of, fill
from rotor_profiling.isolate import undoing
from rotor_profiling.stage.stage_signature import HasKind

_LIBRARY_FOLDERS = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
# Maximum number of objects to search. A guess: a large model has some ten thousand. Further objects are not restored.
_MOST = 100_000
# Maximum length of containers to search. A guess: hooks append fewer items in a step, and longer containers hold data.
_LONGEST = 10_000
_FLAGS = (bool, int, float, str, type(None))
_MISSING = object()
_TABLES = frozenset(vars(nn.Module()))


class Location(NamedTuple):
    """Functions that read and write a global, closure variable or attribute, without keeping its object alive."""

    get: Callable[[], Any]
    set: Callable[[Any], object]

    @classmethod
    def in_namespace(cls, namespace: dict[str, Any], name: str) -> Location:
        return cls(lambda: namespace.get(name, _MISSING), partial(namespace.__setitem__, name))

    @classmethod
    def in_attribute(cls, owner: Any, name: str) -> Location:
        known = ref(owner)

        def write(value: Any) -> None:
            if (found := known()) is not None:
                vars(found)[name] = value

        return cls(lambda: _MISSING if (found := known()) is None else vars(found).get(name, _MISSING), write)

    @classmethod
    def in_class(cls, owner: type, name: str) -> Location:
        return cls(lambda: vars(owner).get(name, _MISSING), partial(setattr, owner, name))

    @classmethod
    def in_cell(cls, function: FunctionType, number: int) -> Location:
        known = ref(function)

        def read() -> Any:
            found = known()
            try:
                return _MISSING if found is None or not found.__closure__ else found.__closure__[number].cell_contents
            except ValueError:  # not filled yet
                return _MISSING

        def write(value: Any) -> None:
            if (found := known()) is not None and found.__closure__:
                found.__closure__[number].cell_contents = value

        return cls(read, write)


def named_objects(function: Callable[..., Any]) -> list[Any]:
    """Return the objects that the code of `function`, of its modules and of their hooks refers to by name."""
    return [value for value, _ in _walk(function)]


def locations_of(function: Callable[..., Any]) -> list[Location]:
    """Return a `Location` for each global, closure variable and attribute that the code of `function` refers to."""
    fixed = type | ModuleType | nn.Module
    return [found for value, found in _walk(function) if found is not None and not isinstance(value, fixed)]


def named_values(function: Callable[..., Any]) -> tuple[str, ...]:
    """Describe the value of each `Location` of `function`, in texts that equal values have in every process."""
    return tuple(_described(value) for value, location in _walk(function) if location is not None)


def _described(value: Any) -> str:
    if isinstance(value, _FLAGS):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__} {value.__code__.co_code.hex()}"
    return f"{type(value).__name__} {getattr(value, '__name__', '')}"


def _walk(function: Callable[..., Any]) -> Iterator[tuple[Any, Location | None]]:
    seen: set[int] = set()
    # Search the attributes of the user's objects, but not attributes of objects found there, which may lead anywhere.
    pending: list[tuple[Any, Location | None, bool]] = [(function, None, True)]
    while pending and len(seen) < _MOST:
        value, location, opens = pending.pop()
        plain = isinstance(value, _FLAGS)
        if not plain and id(value) in seen:
            continue
        yield value, location
        if plain:
            continue
        seen.add(id(value))
        if _is_object(value):
            pending += ((*each, False) for each in _attributes(value) if opens)
        else:
            pending += ((*each, opens) for each in _named_by(value))


def _named_by(value: Any) -> Iterator[tuple[Any, Location | None]]:
    if isinstance(value, HasKind):  # generated from a graph, whose code refers to no globals
        yield from ((each, None) for each in vars(value).values() if isinstance(each, torch.Generator))
    elif isinstance(value, nn.Module):
        for name, each in vars(value).items():
            if name not in _TABLES:
                yield each, None  # without a location: `rotor_profiling.attributes` restores it
            elif isinstance(each, dict):
                yield from ((inner, None) for inner in each.values() if not isinstance(inner, torch.Tensor))
        yield getattr(type(value), "forward", None), None
        yield from _flags_of_class(type(value))
    elif isinstance(value, FunctionType):
        if not is_library(value.__module__):
            yield from _of_code(value.__code__, value.__globals__)
            for number in range(len(value.__closure__ or ())):
                location = Location.in_cell(value, number)
                if (held := location.get()) is not _MISSING:
                    yield held, location
            yield from ((each, None) for each in value.__defaults__ or ())
    elif isinstance(value, MethodType):
        yield from ((value.__self__, None), (value.__func__, None))
    elif isinstance(value, partial):
        yield from ((each, None) for each in (value.func, *value.args, *value.keywords.values()))
    elif type(value) in CONTAINERS and len(value) <= _LONGEST:
        yield from ((each, None) for each in (value.values() if isinstance(value, dict) else value))


def _is_object(value: Any) -> bool:
    """Whether a value is an instance of a class that the user's code defines."""
    other = isinstance(value, type | ModuleType | torch.Tensor | nn.Module) or is_library(type(value).__module__)
    return type(value) is SimpleNamespace or not other


def _attributes(value: Any) -> Iterator[tuple[Any, Location | None]]:
    try:
        attributes = object.__getattribute__(value, "__dict__")  # a class may have a `__getattr__` of its own
    except AttributeError:
        attributes = None
    for name, each in list(attributes.items()) if isinstance(attributes, dict) else ():
        try:
            yield each, Location.in_attribute(value, name)
        except TypeError:  # objects of this class have no weak references
            yield each, None
    yield from _flags_of_class(type(value))


def _flags_of_class(kind: type) -> Iterator[tuple[Any, Location | None]]:
    for each in kind.__mro__:
        if not is_library(each.__module__):
            for name, value in vars(each).items():
                if isinstance(value, _FLAGS) and not name.startswith("__"):
                    yield value, Location.in_class(each, name)


def _of_code(code: CodeType, namespace: dict[str, Any]) -> Iterator[tuple[Any, Location | None]]:
    """Yield the values in `namespace`, and in its modules, that `code` and the functions inside it refer to."""
    for name in code.co_names:
        if name not in namespace:
            continue
        named = namespace[name]
        yield named, Location.in_namespace(namespace, name)
        if isinstance(named, ModuleType) and not is_library(named.__name__):
            inside = vars(named)
            yield from ((inside[each], Location.in_namespace(inside, each)) for each in code.co_names if each in inside)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _of_code(inner, namespace)


@cache
def is_library(name: str | None) -> bool:
    """Whether a module belongs to Python, an installed library, or this project."""
    if not isinstance(name, str):  # `__module__` of a class or function that is not written in Python
        return True
    first, file = name.partition(".")[0], getattr(sys.modules.get(name), "__file__", None)
    known = first in sys.stdlib_module_names and first != "__main__"
    return known or first.startswith("rotor_") or (isinstance(file, str) and file.startswith(_LIBRARY_FOLDERS))


class NamedState:
    """The present values of `locations`, and copies of the contents of those that are lists, dicts or sets."""

    __slots__ = ("_before",)

    def __init__(self, locations: Sequence[Location]) -> None:
        self._before: list[tuple[Location, Any, Contents]] = []
        for location in locations:
            value = location.get()
            short = type(value) in CONTAINERS and len(value) <= _LONGEST
            self._before.append((location, value, list(contents_of(value, set())) if short else []))

    def without_tensors(self) -> NamedState:
        """Drop the entries of containers with tensors, since copies would keep these alive; return this object."""
        self._before = [each for each in self._before if not any(_has_tensors(copy) for _, copy in each[2])]
        return self

    def only_unchanged(self) -> bool:
        """Drop the locations whose values have changed since construction; return whether there were any."""
        before = self._before
        self._before = [each for each in before if not _changed(*each)]
        return len(self._before) < len(before)

    def now(self) -> NamedState:
        """Return the present state of the same locations."""
        return NamedState([location for location, _, _ in self._before])

    def put_back(self) -> None:
        for location, value, contents in self._before:
            if value is not _MISSING and location.get() is not value:
                location.set(value)
            for container, content in contents:
                if not as_it_was(container, content):
                    fill(container, content)


def _has_tensors(container: Any) -> bool:
    values = container.values() if isinstance(container, dict) else container
    return any(isinstance(each, torch.Tensor) for each in values)


def _changed(location: Location, value: Any, contents: Contents) -> bool:
    return location.get() is not value or not all(as_it_was(*each) for each in contents)


@contextmanager
def named_state_kept(function: Callable[..., Any]) -> Iterator[None]:
    """When the context exits, restore the globals and the like (`Location`) of `function` to their former values."""
    with undoing() as undo:
        undo.append(NamedState(locations_of(function)).put_back)
        yield
