"""Find the globals, closure variables and attributes of objects that the code of a module refers to by name."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from rotor_profiling.contents import (
    BOUND,
    MISSING,
    TABLES,
    Contents,
    StandIns,
    contents_of,
    fill,
    is_library,
    is_object,
    items_of,
    iterators_of,
    kind_of,
    on_host,
    tensors_held,
    unchanged,
    write_back,
)
from rotor_profiling.isolate import undoing
from rotor_profiling.stage.stage_signature import HasKind
from rotor_profiling.value_tree import PLAIN, fields_of, is_plain, tree_flatten

# Maximum number of objects to search. A guess: a large model has some ten thousand. Further objects are not restored.
_MOST = 100_000
# Maximum length of containers to search. A guess: hooks append fewer items in a step, and longer containers hold data.
_LONGEST = 10_000
_FLAGS = (bool, int, float, str, type(None))


class Location(NamedTuple):
    """Functions that read and write a global, closure variable or attribute, without keeping its object alive."""

    get: Callable[[], Any]
    set: Callable[[Any], object]

    @classmethod
    def in_namespace(cls, namespace: dict[str, Any], name: str) -> Location:
        return cls(lambda: namespace.get(name, MISSING), partial(namespace.__setitem__, name))

    @classmethod
    def of(cls, value: Any) -> Location:
        """Return a location whose value is always this object, of which only the contents may change."""
        known = ref(value)

        def read() -> Any:
            found = known()
            return MISSING if found is None else found

        return cls(read, lambda value: None)

    @classmethod
    def in_class(cls, owner: type, name: str) -> Location:
        return cls(lambda: vars(owner).get(name, MISSING), partial(setattr, owner, name))

    @classmethod
    def in_cell(cls, function: FunctionType, number: int) -> Location:
        known = ref(function)

        def read() -> Any:
            found = known()
            try:
                return MISSING if found is None or not found.__closure__ else found.__closure__[number].cell_contents
            except ValueError:  # not filled yet
                return MISSING

        def write(value: Any) -> None:
            if (found := known()) is not None and found.__closure__:
                found.__closure__[number].cell_contents = value

        return cls(read, write)


_FIELD = Location(lambda: MISSING, lambda value: None)  # a field of an object, which is restored with the object


def named_objects(function: Callable[..., Any]) -> list[Any]:
    """Return the objects that the code of `function`, of its modules and of their hooks refers to by name."""
    return [value for value, _ in _walk(function)]


def locations_of(function: Callable[..., Any]) -> list[Location]:
    """Return a `Location` for each global, closure variable and attribute that the code of `function` refers to."""
    locations = []
    for value, found in _walk(function):
        if isinstance(value, FunctionType) and (vars(value) or value.__defaults__ or value.__kwdefaults__):
            locations.append(Location.of(value))
        if found not in (None, _FIELD) and not isinstance(value, type | ModuleType):
            locations.append(found)
    return locations


def locations_in(value: Any) -> list[Location]:
    """Return a `Location` for each object in an input that runs share: what `with_own_containers` does not copy."""
    return [] if is_plain(value) else locations_at(tree_flatten(value)[0])


def locations_at(objects: Iterable[Any]) -> list[Location]:
    """Return a `Location`, which keeps it alive, for each object except tensors, modules and plain values."""
    others = [each for each in objects if type(each) not in PLAIN and not isinstance(each, torch.Tensor | nn.Module)]
    return [Location(partial([each].__getitem__, 0), lambda value: None) for each in others]


def locations_beside(function: Callable[..., Any], own: Container[nn.Module]) -> list[Location]:
    """Return a `Location` for each thing that a run of `function` may change, except what is in the modules `own`."""
    named = [function, *named_objects(function)]
    inside = [vars(each) for each in named if isinstance(each, nn.Module) and each not in own]
    return [*locations_of(function), *locations_at([*named, *inside])]


def named_values(function: Callable[..., Any]) -> tuple[str, ...]:
    """Describe the value of each `Location` of `function`, in texts that equal values have in every process."""
    return tuple(_described(value) for value, location in _walk(function) if location is not None)


def _held(value: Any) -> Location | None:
    """Return the location of a user's object to which a hook, a method or a partial function is bound."""
    with suppress(TypeError):  # of an object with slots, there may be no weak reference
        return Location.of(value) if is_object(type(value)) else None
    return None


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
        if is_object(type(value)):
            pending += ((*each, False) for each in _attributes(value) if opens)
        else:
            pending += ((*each, opens) for each in _named_by(value))


def _named_by(value: Any) -> Iterator[tuple[Any, Location | None]]:
    if isinstance(value, HasKind):  # generated from a graph, whose code refers to no globals
        yield from ((each, None) for each in vars(value).values() if isinstance(each, torch.Generator))
    elif isinstance(value, nn.Module):
        for name, each in vars(value).items():
            if name not in TABLES:
                yield each, None  # without a location: `rotor_profiling.attributes` restores it
            elif isinstance(each, dict):
                yield from ((inner, _held(inner)) for inner in each.values() if not isinstance(inner, torch.Tensor))
        yield from ((each, None) for each in _methods(type(value)))
        yield from _values_of_class(type(value))
    elif isinstance(value, FunctionType):
        if not is_library(value.__module__):
            yield from _of_code(value.__code__, value.__globals__)
            for number in range(len(value.__closure__ or ())):
                location = Location.in_cell(value, number)
                if (held := location.get()) is not MISSING:
                    yield held, location
            yield from ((each, None) for each in value.__defaults__ or ())
    elif isinstance(value, BOUND):
        yield from ((value.__self__, _held(value.__self__)), (getattr(value, "__func__", None), None))
    elif isinstance(value, partial):
        yield from ((each, _held(each)) for each in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, type):
        yield from _values_of_class(value)
    elif (type(value) is tuple or kind_of(type(value)) == "container") and len(value) <= _LONGEST:
        yield from ((each, None) for each in (value if type(value) is tuple else items_of(value)))


def _methods(kind: type) -> Iterator[FunctionType]:
    """Yield the `forward` of a class, and the methods of the user's that it names, also those that these name."""
    names = ["forward"]
    for name in names:
        for each in kind.__mro__:
            found = vars(each).get(name)
            found = getattr(found, "__func__", None) or getattr(found, "fget", None) or getattr(found, "func", found)
            if isinstance(found, FunctionType) and not is_library(found.__module__):
                yield found
                names += [other for other in _names_in(found.__code__) if other not in names]


def _attributes(value: Any) -> Iterator[tuple[Any, Location | None]]:
    yield from ((each, _FIELD) for each in fields_of(value).values())
    yield from _values_of_class(type(value))


def _values_of_class(kind: type) -> Iterator[tuple[Any, Location | None]]:
    for each in kind.__mro__:
        if not is_library(each.__module__):
            for name, value in vars(each).items():
                if not (name.startswith("__") or callable(value) or hasattr(value, "__get__")):
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


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


class NamedState:
    """The present values of `locations`, and what they contain; `copies`: with copies of the values of tensors.

    Leaves out the contents of objects `but`, and, without `tensors`, objects that have some, which copies would keep.
    """

    __slots__ = ("_before",)

    def __init__(self, locations: list[Location], *, copies: bool = False, tensors: bool = True, but: Any = ()) -> None:
        self._before: list[tuple[Location, Any, Contents]] = []
        seen = set(map(id, but))
        for location in locations:
            value = location.get()
            kind = kind_of(type(value))
            opens = kind is not None and not (kind == "container" and len(value) > _LONGEST)
            contents = contents_of(value, seen, copies=copies) if opens else []
            contents = on_host(contents) if copies else contents
            if tensors or not (contents and tensors_held(value, contents)):
                self._before.append((location, value, contents))

    def drop_written(self) -> bool:
        """Drop the locations whose values have changed and now have tensors; return whether there were any."""
        before = self._before
        self._before = [each for each in before if _stays(*each)]
        return len(self._before) < len(before)

    def now(self) -> NamedState:
        """Return the present state of the same locations."""
        return NamedState([location for location, _, _ in self._before])

    def lend(self) -> None:
        """Give the next runs copies of the iterators, until `put_back`, so that runs do not advance the user's."""
        stand_ins: StandIns = {}
        for _, _, contents in self._before:
            iterators_of(contents, stand_ins, moved=False)
        if stand_ins:
            self._set(stand_ins)

    def put_back(self) -> None:
        stand_ins: StandIns = {}
        for _, _, contents in self._before:
            write_back(contents)
            iterators_of(contents, stand_ins)
        self._set(stand_ins)

    def _set(self, stand_ins: StandIns) -> None:
        for location, value, contents in self._before:
            value = stand_ins.get(id(value), value)
            if value is not MISSING and location.get() is not value:
                location.set(value)
            fill(contents, stand_ins)


def _stays(location: Location, value: Any, contents: Contents) -> bool:
    now = location.get()
    return (now is value and unchanged(contents)) or not tensors_held(now)


@contextmanager
def named_state_kept(locations: list[Location], *, but: Iterable[Any] = ()) -> Iterator[None]:
    """When the context exits, restore the globals and the like at `locations`, except the contents of objects `but`."""
    before = NamedState(locations, copies=True, but=but)
    with undoing() as undo:
        undo.append(before.put_back)
        before.lend()
        yield
