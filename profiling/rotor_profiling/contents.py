"""Copy and restore the contents of mutable objects: containers, the user's objects, arrays, tensors, iterators.

An iterator's state cannot be set, so whatever holds it gets a stand-in: another iterator in the former state. A tensor
gets one for a recomputation, since autograd may have saved the tensor itself.
"""

from __future__ import annotations

import operator
import sys
import sysconfig
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import copy
from functools import cache, lru_cache, partial
from itertools import starmap
from types import FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from rotor_profiling.stage.stage_signature import HasKind
from rotor_profiling.storage import equal, tensors_in
from rotor_profiling.value_tree import PLAIN, fields_of, is_plain, tree_flatten, tree_unflatten

TABLES = frozenset(vars(nn.Module())) - {"training"}  # attributes of a module that are restored elsewhere
MISSING = object()
# Classes of containers whose contents are restored. A subclass may refuse `clear`, as model outputs of transformers do.
_CONTAINERS = frozenset({list, dict, set, deque, bytearray, Counter, OrderedDict, defaultdict})
_LIBRARY_FOLDERS = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
# Maximum number of objects opened in one value, of items of a container inside an object, and of bytes of an array that
# is copied before every run. Guesses: what has more is data, or leads to the whole program.
_MOST, _LONGEST, LARGEST = 256, 10_000, 4096
# Classes of bound methods. The last two are written in C; an iterator's `__next__` has the last one.
BOUND: tuple[type[Any], ...] = (MethodType, type([].append), type([].__len__))

Contents = list[tuple[Any, Any]]  # pairs of a mutable object and what it contained
StandIns = dict[int, Any]  # maps ids of objects to those that replace them


class Values(NamedTuple):
    """The version of a tensor, or None of an array, and a copy of its values, if one was made."""

    version: int | None
    copy: Any


@cache
def is_library(name: str | None) -> bool:
    """Whether a module belongs to Python, an installed library, or this project."""
    if not isinstance(name, str):  # `__module__` of a class or function that is not written in Python
        return True
    first, file = name.partition(".")[0], getattr(sys.modules.get(name), "__file__", None)
    known = first in sys.stdlib_module_names and first != "__main__"
    return known or first.startswith("rotor_") or (isinstance(file, str) and file.startswith(_LIBRARY_FOLDERS))


def is_object(kind: type) -> bool:
    """Whether instances of a class have fields only, and the user's code defines it."""
    other = issubclass(kind, type | ModuleType | torch.Tensor | nn.Module) or is_library(kind.__module__)
    return kind in (SimpleNamespace, Namespace) or not other


def _kind_of(kind: type) -> str | None:
    """Return how instances of a class are copied and restored; None if they are not."""
    if kind in PLAIN:
        return "tensor" if kind is torch.Tensor else None
    if kind in _CONTAINERS:
        return "container"
    if issubclass(kind, torch.Tensor):
        return None if issubclass(kind, nn.Parameter) else "tensor"
    if issubclass(kind, nn.Module):
        return None if issubclass(kind, HasKind) else "module"
    if kind in (FunctionType, partial, *BOUND):
        return "function"
    if kind is GeneratorType or (issubclass(kind, Iterator) and kind.__module__ in ("builtins", "itertools")):
        return "iterator"
    if (kind.__module__, kind.__name__) == ("numpy", "ndarray"):
        return "array"
    return "object" if is_object(kind) else None


kind_of: Callable[[Any], str | None] = lru_cache(maxsize=4096)(_kind_of)


def contents_of(value: Any, seen: set[int], *, copies: bool) -> Contents:
    """Return the mutable objects in `value`, itself included, with their contents; none of those `seen` earlier.

    With `copies`, copies the values of all tensors that need no gradient, and of large arrays.
    """
    found: Contents = []
    pending = [(value, False)]
    while pending:
        each, inside = pending.pop()
        kind = kind_of(type(each))
        if inside and len(found) >= _MOST:
            continue
        if kind == "tensor":
            if not each.requires_grad:
                found.append((each, Values(each._version, each.clone() if copies else None)))
        elif kind == "array":
            if each.flags.writeable:
                found.append((each, Values(None, each.copy() if copies or each.nbytes <= LARGEST else None)))
        elif kind == "iterator":
            found.append((each, state := _state(each)))
            if state is None and type(each) is not GeneratorType:  # a generator inside may be why it cannot be copied
                with suppress(TypeError):  # newer Python does not say what is in an iterator of itertools
                    pending += [(item, inside) for item in tree_flatten(each.__reduce__())[0]]
        elif (
            kind is not None and id(each) not in seen and not (inside and kind == "container" and len(each) > _LONGEST)
        ):
            seen.add(id(each))
            content = copy(each) if kind == "container" else _fields(each, kind)
            if content or kind != "function" or type(each) is BOUND[-1]:
                found.append((each, content))
            items = (*items_of(content), *(_given(each) if kind == "function" else ()))
            if not PLAIN.issuperset(map(type, items)) or torch.Tensor in map(type, items):
                pending += [(item, inside or kind != "container") for item in reversed(items)]
    return found


def _fields(value: Any, kind: str) -> dict[str, Any]:
    fields = fields_of(value)
    return {name: each for name, each in fields.items() if name not in TABLES} if kind == "module" else fields


def _given(value: Any) -> tuple[Any, ...]:
    """Return the objects that a function, a bound method or a partial passes on when called."""
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, BOUND):
        return value.__self__, getattr(value, "__func__", None)
    return () if is_library(value.__module__) else (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())


def items_of(content: Any) -> Iterable[Any]:
    """Return the objects in a content that `contents_of` recorded."""
    if isinstance(content, dict):
        return content.values()
    return content if type(content) in _CONTAINERS else ()


def tensors_held(value: Any, contents: Contents | None = None) -> list[torch.Tensor]:
    """Return the tensors in a value, also those in objects that pytrees do not open."""
    contents = contents_of(value, set(), copies=False) if contents is None else contents
    leaves = [item for _, content in contents for item in items_of(content) if kind_of(type(item)) in (None, "tensor")]
    return tensors_in(leaves if any(kind_of(type(each)) != "tensor" for each, _ in contents) else value)


def as_it_was(value: Any, content: Any) -> bool:
    """Whether an object has the contents that `contents_of` recorded."""
    kind = kind_of(type(value))
    if kind == "tensor":
        return bool(value._version == content.version)
    if kind == "array":
        return content.copy is None or bool(value.tobytes() == content.copy.tobytes())
    if kind == "iterator":
        return _alike(_state(value), content)
    now = value if kind == "container" else _fields(value, str(kind))
    if len(now) != len(content):
        return False
    if isinstance(now, set | bytearray):
        return bool(now == content)
    if isinstance(now, dict):
        return all(key in content and each is content[key] for key, each in now.items())
    return all(map(operator.is_, now, content))


def unchanged(contents: Contents) -> bool:
    return all(starmap(as_it_was, contents))


def written(contents: Contents) -> list[Values]:
    """Return the recorded values of the tensors and arrays that were written to since."""
    return [each[1] for each in contents if isinstance(each[1], Values) and not as_it_was(*each)]


def advanced(contents: Contents) -> bool:
    """Whether there is a generator that has advanced since."""
    return any(type(each) is GeneratorType and not as_it_was(each, content) for each, content in contents)


def without_copies(contents: Contents) -> Contents:
    """Return the same contents without the copies of tensors and of large arrays that were not written to since."""
    return [(each, content if _stays(each, content) else Values(content.version, None)) for each, content in contents]


def _stays(value: Any, content: Any) -> bool:
    small = isinstance(content, Values) and content.version is None and value.nbytes <= LARGEST
    return small or not isinstance(content, Values) or not as_it_was(value, content)


def on_host(contents: Contents) -> Contents:
    """Return the same contents with copies of CUDA tensors on the CPU, where they count in no measured peak."""
    moved = {id(each): Values(each._version, before.cpu()) for each, before in _copied(contents) if before.is_cuda}
    return [(each, moved.get(id(each), content)) for each, content in contents]


def _copied(contents: Contents) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor of which there is a copy, with the copy."""
    for value, content in contents:
        if isinstance(value, torch.Tensor) and content.copy is not None:
            yield value, content.copy


def write_back(contents: Contents) -> None:
    """Give the tensors their recorded values, if there is a copy."""
    for tensor, before in _copied(contents):
        if not equal(tensor, before := before.to(tensor.device)):  # `copy_` raises an error for an expanded tensor
            tensor.data.copy_(before)  # writing to `data` does not raise the version counter, which autograd compares


def iterators_of(contents: Contents, stand_ins: StandIns, *, moved: bool = True) -> StandIns:
    """Add stand-ins for iterators to `stand_ins`; if `moved`, only for those that have advanced since."""
    for value, content in contents:
        copied = kind_of(type(content)) == "iterator"
        if copied and id(value) not in stand_ins and not (moved and as_it_was(value, content)):
            stand_ins[id(value)] = _another(content)
    for value, _ in contents:
        if type(value) is BOUND[-1] and id(value.__self__) in stand_ins:
            stand_ins[id(value)] = getattr(stand_ins[id(value.__self__)], value.__name__)
    return stand_ins


def copies_of(contents: Contents, stand_ins: StandIns) -> StandIns:
    """Add stand-ins for iterators that have advanced, and for tensors of which there are copies, to `stand_ins`."""
    for tensor, before in _copied(contents):
        stand_ins.setdefault(id(tensor), before.clone())
    return iterators_of(contents, stand_ins)


def fill(contents: Contents, stand_ins: StandIns) -> None:
    """Give all objects except tensors and iterators their recorded contents, with `stand_ins` in place of some."""
    for value, content in contents:
        kind = kind_of(type(value))
        if kind in ("tensor", "iterator") or (as_it_was(value, content) and not stand_ins):
            continue
        if kind == "array":
            if content.copy is not None and value.shape == content.copy.shape:
                value[...] = content.copy
        else:
            _fill(value, _with(content, stand_ins), str(kind))


def _with(content: Any, stand_ins: StandIns) -> Any:
    if not stand_ins or isinstance(content, set | bytearray):
        return content
    if isinstance(content, dict):
        return {key: stand_ins.get(id(each), each) for key, each in content.items()}
    return [stand_ins.get(id(each), each) for each in content]


def _fill(value: Any, content: Any, kind: str) -> None:
    if kind == "container":
        value.clear()
        value.update(content) if isinstance(value, dict | set) else value.extend(content)
        return
    # Not `setattr`, which a class may override.
    table = getattr(value, "__dict__", {})
    for name in _fields(value, kind).keys() - content.keys():
        table.pop(name) if name in table else object.__delattr__(value, name)
    for name, each in content.items():
        if name in table or not hasattr(type(value), name):
            table[name] = each
        else:
            object.__setattr__(value, name, each)


def with_own_containers(value: Any) -> Any:
    """Return `value` with the same tensors in new containers, objects and iterators, which a run may change."""
    if is_plain(value):
        return value
    leaves, structure = tree_flatten(value)
    return tree_unflatten([_own(leaf) if kind_of(type(leaf)) == "iterator" else leaf for leaf in leaves], structure)


def _own(iterator: Any) -> Any:
    state = _state(iterator)
    return state if kind_of(type(state)) == "iterator" else iterator


def _state(value: Any) -> Any:
    """Return another iterator in the same state; None if there is none. Return where a generator is in its code."""
    if type(value) is GeneratorType:
        frame = value.gi_frame
        return None if frame is None else (frame.f_lasti, *map(id, frame.f_locals.values()))
    try:
        return _another(value)
    except TypeError:  # it is, or has inside, an iterator that cannot be copied
        return None


def _another(value: Any, *, own: bool = False) -> Any:
    """Return another iterator in the same state, or the parts of a state with other iterators in place of those inside.

    `own`: also copy lists, to which the iterator may append.
    """
    if kind_of(type(value)) == "iterator":
        make, given, *rest = value.__reduce__()
        made = make(*map(_another, given))
        for each in rest:
            made.__setstate__(_another(each, own=True))
        return made
    if type(value) is tuple:
        return tuple([_another(each, own=own) for each in value])
    return list(value) if own and type(value) is list else value


def _alike(now: Any, then: Any) -> bool:
    if kind_of(type(now)) == kind_of(type(then)) == "iterator":
        now, then = now.__reduce__(), then.__reduce__()
    if isinstance(now, tuple) and isinstance(then, tuple):
        return len(now) == len(then) and all(map(_alike, now, then))
    if type(now) is list:
        return len(now) == len(then)
    return now is then or (type(now) in (int, float) and bool(now == then))
