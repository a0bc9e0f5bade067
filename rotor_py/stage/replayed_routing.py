"""Repeat in a recomputation what operators decided, and what streams of Python and NumPy drew."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from rotor_profiling import storage_bytes, tensors_in
from rotor_profiling.torch_compat import TorchDispatchMode, tree_leaves, tree_map_only
from rotor_py.errors import InvalidStateError

# Random streams that PyTorch does not keep: Python's, NumPy's, and those of generators that a model has.
#
# A stage may draw whether to skip a layer with `random.random()`. To look at these streams takes longer than to look at
# PyTorch's own, so only those are looked at in every step from which the first forward of a stage has drawn.


class Stream(NamedTuple):
    """A random stream: its state, which can be compared, and what sets it back to one."""

    state: Callable[[], Hashable]
    set: Callable[[Any], object]


Drawn = tuple[tuple[Stream, Hashable], ...]
"""Streams that something has drawn from, with their states before."""

_drawing: WeakKeyDictionary[nn.Module, tuple[Stream, ...]] = WeakKeyDictionary()
"""Per stage, the streams that its first forward has drawn from."""


def streams_of(function: Callable[..., Any]) -> list[Stream]:
    """Those that a run of `function` may draw from, as far as they can be found."""
    found = [Stream(random.getstate, random.setstate)]
    if "numpy" in sys.modules:
        found.append(Stream(_numpy_state, _set_numpy_state))
    modules = function.modules() if isinstance(function, nn.Module) else ()
    values = [value for module in modules for value in vars(module).values()]
    generators = {id(value): value for value in values if isinstance(value, torch.Generator)}
    return [*found, *map(_of_generator, generators.values())]


@contextmanager
def other_draws(function: Callable[..., Any]) -> Iterator[list[Drawn]]:
    """Yields a list that holds what a forward of `function`, run in here, has drawn from once the context is left."""
    known = _drawing.get(function) if isinstance(function, nn.Module) else None
    before = [(stream, stream.state()) for stream in (streams_of(function) if known is None else known)]
    result: list[Drawn] = []
    yield result
    drawn = tuple((stream, state) for stream, state in before if known is not None or stream.state() != state)
    if known is None and isinstance(function, nn.Module):
        _drawing[function] = tuple(stream for stream, _ in drawn)
    result.append(drawn)


def draws(function: Callable[..., Any]) -> bool:
    """Whether a forward of a stage has drawn from these streams, so that the next one may do something else."""
    return isinstance(function, nn.Module) and bool(_drawing.get(function))


@contextmanager
def streams_kept(function: Callable[..., Any]) -> Iterator[None]:
    """Put these streams back, whatever is run in here."""
    before = [(stream, stream.state()) for stream in streams_of(function)]
    try:
        yield
    finally:
        for stream, state in before:
            stream.set(state)


def _numpy_state() -> Hashable:
    import numpy as np

    state: Any = np.random.get_state()  # of the stream that all of NumPy's functions share
    name, keys, *rest = state
    return name, keys.tobytes(), *rest


def _set_numpy_state(state: Any) -> None:
    import numpy as np

    name, keys, *rest = state
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))


def _of_generator(generator: torch.Generator) -> Stream:
    def state() -> Hashable:
        return bytes(generator.get_state().numpy())

    def set_back(state: bytes) -> None:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return Stream(state, set_back)


# What a stage decides from its numbers: the experts of a token, the largest of many, a branch. Never decided anew.
#
# In plain training a router decides once. A stage that is run again could decide otherwise: where a sum over processes
# or
# an atomic addition on a GPU comes in another order, the last digits differ, and a token goes to another expert. Its
# loss
# would be of one expert, and its gradient of another; processes that decide differently would wait for each other. So
# what the first run of a stage has decided is kept, and later runs take it over.


Decisions = tuple[tuple[Any, Any], ...]
"""The operators that decided, in order, each with what it returned."""

_aten = torch.ops.aten
_SELECTIONS = {
    _aten.topk,
    _aten.sort,
    _aten.max,
    _aten.min,
    _aten.cummax,
    _aten.cummin,
    _aten.median,
    _aten.nanmedian,
    _aten.kthvalue,
    _aten.mode,
    _aten._local_scalar_dense,
}
"""Operators that return the numbers that they select, and where these were. Pooling is none of them: where it found the
largest number changes nothing but a gradient, and would take much memory."""
_NO_DECISIONS = {
    _aten.empty_like,
    _aten.zeros_like,
    _aten.ones_like,
    _aten.full_like,
    _aten.randint_like,
    torch.ops.prim.device,  # which fake tensors are asked for
}
"""Operators that read no number of the tensor that they are given."""

_not_the_stage: ContextVar[bool] = ContextVar("not_the_stage", default=False)
"""Whether operators run here and now that are none of the stage, although it runs."""
_undecided: WeakSet[nn.Module] = WeakSet()
"""The stages whose first run decided nothing."""
_bytes: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The most bytes of what the others have decided in a run."""


@contextmanager
def decisions_recorded(function: Callable[..., Any]) -> Iterator[list[Decisions]]:
    """Record what `function` decides when it is run inside this context.

    Yields a list that holds the decisions once the context has been left. A module that has decided nothing in its
    first run is not watched in later ones: that takes time for every operator.
    """
    result: list[Decisions] = []
    if isinstance(function, nn.Module) and function in _undecided:
        yield result
        result.append(())
        return
    with _Recording() as recording:
        yield result
    result.append(tuple(recording.decisions))
    if not isinstance(function, nn.Module):
        return
    if recording.decisions:
        size = storage_bytes(tensors_in([made for _, made in recording.decisions]))
        _bytes[function] = max(_bytes.get(function, 0), size)
    elif function not in _bytes:
        _undecided.add(function)


def decisions_repeated(decisions: Decisions) -> Any:
    """A context in which a stage decides as it did before.

    RuntimeError, from within, if it comes to other decisions: it did something else the first time.
    """
    return _Repeating(decisions) if decisions else nullcontext()


@contextmanager
def not_deciding() -> Iterator[None]:
    """What runs in this context is no decision of the stage inside of which it runs."""
    outside = _not_the_stage.set(True)
    try:
        yield
    finally:
        _not_the_stage.reset(outside)


def decided_bytes(function: Callable[..., Any]) -> int:
    """Bytes that are kept of what a stage decides, as far as its runs have shown."""
    return _bytes.get(function, 0) if isinstance(function, nn.Module) else 0


def decides_nothing(function: Callable[..., Any]) -> bool:
    """Whether a stage has been run, and decided nothing."""
    return isinstance(function, nn.Module) and function in _undecided


def remember_undecided(function: Callable[..., Any]) -> None:
    """Have a stage not watched, not even in its first run: a stage like it decides nothing."""
    if isinstance(function, nn.Module):
        _undecided.add(function)


class _Watching(TorchDispatchMode):
    """Below autograd, which therefore goes on from what an operator is said to have returned."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled layers be run compiled: what they decide, nobody sees."""
        return True


class _Recording(_Watching):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self.decisions: list[tuple[Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if _decides(func, (args, kwargs), made):
            self.decisions.append((func, _copied(made)))
        return made


class _Repeating(_Watching):
    def __init__(self, decisions: Decisions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._remaining = iter(decisions)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))  # in any case: it may draw random numbers
        if not _decides(func, (args, kwargs), made):
            return made
        nothing: tuple[Any, Any] = (None, None)
        decided, before = next(self._remaining, nothing)
        if decided is not func:
            raise InvalidStateError(
                f"{func} decides something that the stage did not decide in the forward, so it cannot be run again "
                "exactly; a stage has to do the same thing every time",
                kind="rerun_differs",
                name=str(func),
            )
        if func._schema.is_mutable:  # it has written what it made into memory that others look at
            for tensor, decision in zip(tensors_in(made), tensors_in(before), strict=True):
                tensor.copy_(decision)
            return made
        return _copied(before)


def _decides(func: Any, given: Any, made: Any) -> bool:
    """Whether an operator went from numbers, which may differ in their last digits, to what is either this or that."""
    if _not_the_stage.get() or func.overloadpacket in _NO_DECISIONS or made is None:
        return False
    if func.overloadpacket not in _SELECTIONS:
        # Most operators make one tensor of numbers, which is seen at once.
        if _is_number(made) or any(map(_is_number, tree_leaves(made))):
            return False
        if any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns):
            return False  # a view
    return any(map(_is_number, tree_leaves(given)))


def _is_number(value: Any) -> bool:
    """Whether a value may differ in its last digits."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _copied(made: Any) -> Any:
    """A copy, since the stage may write into what it has decided."""
    return tree_map_only(torch.Tensor, torch.Tensor.clone, made)
