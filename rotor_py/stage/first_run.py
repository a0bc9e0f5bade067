"""Record the state of a stage and of the process in the stage's first run; restore or compare it when it is recomputed.

# Note [What a recomputation sees]
#
# A recomputation must see the state that the first run saw, even if the user has changed it since, and change no state.
#
#  1. Restored state of the process (`World`): context variables, function modes, dispatch modes except torch's, which
#     only count operators (so a `FlopCounterMode` around the backward counts recomputations), settings that choose
#     kernels and precision, default dtype and device, hooks that are registered for all modules, autocast.
#  2. Restored state of the stage: random streams, buffers that forwards change, training modes, attributes and what is
#     inside of them (`contents.py`), tables of submodules, parameters, buffers and hooks (`Seen`), and which parameters
#     required gradients. The tables include parameters that `functional_call` had substituted. The same holds for what
#     the stage's code, its methods and the functions that they name refer to, and for objects in the stage's input,
#     except what has got tensors in the run: this is written again, with a warning.
#  3. Compared state, of which there is no copy: versions of parameters, other buffers and the stage's input; addresses
#     of parameters; the class of a module, and its `forward`. A difference raises `StageChangedError` before the stage
#     is recomputed, as autograd raises for changed saved tensors. Later plans store this stage.
#  4. `parametrize.cached` reuses no tensor of an earlier run of a stage, which belongs to that run's graph.
#  5. These writes are not detected: to a file, through `.data` to a part of a parameter, to large arrays that no run
#     has changed, and to what only a tuple, a subclass of a container, a weak reference, a cache of functools, a method
#     of another object, or a library's object leads to. Generators advance again; measuring warns of those in
#     attributes, and refuses those in inputs. If an optimizer steps through `.data` on the CPU, a parameter's first or
#     last bytes show it.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from rotor_profiling.attributes import modules_of
from rotor_profiling.isolate import Undoing, undoing
from rotor_profiling.torch_compat import (
    SETTINGS,
    dispatch_mode_stack,
    function_mode_stack,
    module_hooks,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
    settings_now,
)
from rotor_py.errors import StageChangedError

T = TypeVar("T")
Table = dict[str, Any]

_GLOBAL_HOOKS: list[dict[int, Any]] = [
    table for name, table in vars(module_hooks).items() if name.startswith("_global_") and isinstance(table, dict)
]
_TABLES = [name for name, table in vars(nn.Module()).items() if isinstance(table, dict) and "state_dict" not in name]
_PARAMETERS = "_parameters"
_COUNTERS = ("torch.utils.flop_counter", "torch.utils.module_tracker")


def hooks_on_all_modules() -> tuple[int, ...]:
    """Return the keys of hooks that PyTorch calls for every module, except hooks of its own counters (`_COUNTERS`)."""
    return tuple(number for table in _GLOBAL_HOOKS if table for number in _without_counters(table))


@contextmanager
def counters_aside() -> Iterator[None]:
    """Inside this context, hide operators and modules from torch's counters, such as `FlopCounterMode`."""
    with undoing() as undo, modes_aside(*_COUNTERS):
        for table in _GLOBAL_HOOKS:
            _swap(undo, table, _without_counters(table))
        yield


@contextmanager
def modes_aside(*modules: str) -> Iterator[None]:
    """Inside this context, hide operators from the dispatch modes of these Python modules."""
    with undoing() as undo:
        modes = [mode for mode in dispatch_mode_stack() if type(mode).__module__ not in modules]
        _swap_modes(undo, dispatch_mode_stack, modes, pop_dispatch_mode, push_dispatch_mode, ())
        yield


def _without_counters(hooks: dict[int, Any]) -> dict[int, Any]:
    return {number: hook for number, hook in hooks.items() if getattr(hook, "__module__", None) not in _COUNTERS}


@dataclass(frozen=True, slots=True)
class World:
    """State of the process in a forward that the user may change before the backward (Rule 1 of the Note)."""

    variables: dict[ContextVar[Any], Any]
    settings: tuple[Any, ...]
    function_modes: list[Any]
    dispatch_modes: list[Any]
    hooks: list[dict[int, Any]]

    @classmethod
    def now(cls) -> World:
        return cls(
            _users_variables(),
            settings_now(),
            function_mode_stack(),
            dispatch_mode_stack(),
            [dict(table) for table in _GLOBAL_HOOKS] if any(_GLOBAL_HOOKS) else [],
        )

    def enter(self, undo: Undoing) -> None:
        """Restore the recorded state, except context variables (see `run`), until `undo` runs."""
        if settings_now() != self.settings:
            for each, before in zip(SETTINGS, self.settings, strict=True):
                if (now := each.get()) != before:  # setting an older option may have set this one, too
                    undo.append(partial(each.set, now))
                    each.set(before)
        swap = partial(_swap_modes, undo)
        swap(function_mode_stack, self.function_modes, pop_function_mode, push_function_mode, _OWN)
        # Leave torch's own dispatch modes as they are: they count operators, or make all tensors fake.
        swap(dispatch_mode_stack, self.dispatch_modes, pop_dispatch_mode, push_dispatch_mode, _OWN_AND_TORCH)
        if self.hooks or any(_GLOBAL_HOOKS):
            for table, hooks in zip(_GLOBAL_HOOKS, self.hooks or [{} for _ in _GLOBAL_HOOKS], strict=True):
                _swap(undo, table, hooks)

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function` with the user's context variables as recorded, and this project's as they are now."""
        if self.variables == {} == _users_variables():
            return function(*args)
        context = Context()
        for variable, value in copy_context().items():
            if variable.name.startswith(_OWN):
                context.run(variable.set, value)
        for variable, value in self.variables.items():
            context.run(variable.set, value)
        return context.run(function, *args)


_OWN = "rotor_"  # beginning of the names of this project's context variables, and of its modules
_OWN_AND_TORCH = (_OWN, "torch.")


def _users_variables() -> dict[ContextVar[Any], Any]:
    return {variable: value for variable, value in copy_context().items() if not variable.name.startswith(_OWN)}


def _swap_modes(
    undo: Undoing,
    present: Callable[[], list[Any]],
    before: list[Any],
    pop: Callable[[], Any],
    push: Callable[[Any], object],
    own: str | tuple[str, ...],
) -> None:
    """Enter the first run's modes, `before`, until `undo` runs; but keep the present modes of Python modules `own`…."""
    now = present()
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return
    restored = [mode for mode in before if not type(mode).__module__.startswith(own)]
    restored += [mode for mode in now if type(mode).__module__.startswith(own)]

    def turn_to(modes: list[Any]) -> None:
        for _ in present():
            pop()
        for mode in modes:
            push(mode)

    undo.append(partial(turn_to, now))
    turn_to(restored)


def _swap(undo: Undoing, table: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Give `table` the entries `before` until `undo` runs."""
    if len(table) == len(before) and all(map(operator.is_, table.values(), before.values())):
        return
    undo.append(partial(_fill, table, dict(table)))
    _fill(table, before)


def _fill(table: dict[Any, Any], entries: dict[Any, Any]) -> None:
    table.clear()
    table.update(entries)


class Seen:
    """The state of a stage's modules right before its first run (Rules 2 and 3 of the Note)."""

    __slots__ = ("_code", "_marks", "_modes", "_modules", "_name", "_tables", "hooked", "trained")

    def __init__(self, module: nn.Module, name: str) -> None:
        self._name = name
        self._modules = modules_of(module)
        self._modes = [each.training for each in self._modules]
        # for each module: its `__dict__`, and copies of the dicts of submodules, parameters, buffers and hooks in it
        self._tables: list[tuple[Table, dict[str, Table]]] = [
            (own, {key: dict(table) for key in _TABLES if (table := own.get(key))}) for own in map(vars, self._modules)
        ]
        # whether any module has a hook
        self.hooked = any("hooks" in key for _, before in self._tables for key in before)
        self.trained = frozenset(id(each) for each in self._tensors(_PARAMETERS) if each.requires_grad)
        self._code: list[tuple[type, object]] = []
        self._marks: list[tuple[torch.Tensor, Any]] = []

    def note(self, copied: Iterable[torch.Tensor] = ()) -> None:
        """After a run, record the versions of parameters and of buffers, except `copied` ones, which are restored."""
        left_out = {id(each) for each in copied}
        tensors = [*self._tensors(_PARAMETERS), *self._tensors("_buffers")]
        # Leave out the copies that measuring gives to a stage that writes to its parameters.
        kept = [each for each in tensors if id(each) not in left_out and not vars(each).get("copied")]
        self._marks = [(each, mark_of(each)) for each in kept]
        kinds: list[type[Any]] = [type(each) for each in self._modules]
        self._code = [(kind, kind.forward) for kind in kinds]

    def noted_again(self) -> None:
        """After a recomputation, record the versions of these tensors again, since a recomputation may raise them."""
        for number, (tensor, mark) in enumerate(self._marks):
            if mark[0] is not None and mark[0] != tensor._version:
                self._marks[number] = tensor, mark_of(tensor)

    def refuse_changes(self) -> None:
        """Raise StageChangedError if a tensor was written to since `note`, or a module has another class or forward."""
        for module, (kind, forward) in zip(self._modules, self._code, strict=True):
            code = type(module).forward
            if type(module) is not kind or not _is_same(code, forward):
                label = next(name for name, each in self._modules[0].named_modules() if each is module)
                raise StageChangedError(self._name, f"method forward of {label or 'the module'}", forward, code)
        for tensor, then in self._marks:
            if (now := mark_of(tensor)) != then:
                raise StageChangedError(self._name, self._label(tensor), *described(then, now))

    def put_back(self, undo: Undoing, *, parameters: bool = True) -> None:
        """Restore the modules' dicts and training modes until `undo` runs; dicts of parameters only if `parameters`."""
        for own, before in self._tables:
            for key in _TABLES:
                if (own.get(key) or key in before) and (parameters or key != _PARAMETERS):
                    _swap(undo, own[key], before.get(key, {}))
        for module, mode in zip(self._modules, self._modes, strict=True):
            if module.training != mode:
                undo.append(partial(setattr, module, "training", not mode))
                module.training = mode

    def _tensors(self, table: str) -> list[torch.Tensor]:
        return [each for _, before in self._tables for each in before.get(table, {}).values() if each is not None]

    def _label(self, tensor: torch.Tensor) -> str:
        named = (*self._modules[0].named_parameters(), *self._modules[0].named_buffers())
        name = next((name for name, each in named if each is tensor), "owned")
        if "owned" not in name:
            return name
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"  # a captured stage has no names
        return f"a {kind} of shape {tuple(tensor.shape)}"


def _is_same(now: Any, then: Any) -> bool:
    """Whether both `forward`s are one, or torch's or this project's: a capture, maybe in another thread, replaces some.

    For a `GraphModule`, torch.fx generates the function anew, also if the module's graph has not changed.
    """
    theirs = [(getattr(each, "__module__", None) or "").startswith(_OWN_AND_TORCH) for each in (now, then)]
    codes = [getattr(each, "__code__", None) for each in (now, then)]
    generated = [each is not None and each.co_filename.startswith("<eval_with_key>") for each in codes]
    return now == then or all(theirs) or (all(generated) and codes[0] == codes[1])


_PLAIN = (torch.Tensor, nn.Parameter)
_Sample = ctypes.c_char * 16  # the bytes that are compared at the beginning, and again at the end, of a parameter


def mark_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return values that a write to a tensor changes: its version, and if it is plain, its address and some bytes."""
    version = None if tensor.is_inference() else tensor._version
    if version is None or type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return (version,)
    address, size = tensor.data_ptr(), tensor.nbytes
    if not tensor.is_cpu or address == 0 or not tensor.is_contiguous():
        return version, address
    if size < ctypes.sizeof(_Sample):
        return version, address, ctypes.string_at(address, size)
    first, last = _Sample.from_address(address), _Sample.from_address(address + size - ctypes.sizeof(_Sample))
    return version, address, first.raw, last.raw


def described(then: tuple[Any, ...], now: tuple[Any, ...]) -> tuple[str, str]:
    """Describe the first difference between two results of `_mark`, for an error message."""
    if then[0] != now[0]:
        return f"at version {then[0]}", f"at version {now[0]}"
    if then[1] != now[1]:
        return f"at address {then[1]:#x}", f"at address {now[1]:#x}"
    return "of other values", "of new ones, written through .data"
