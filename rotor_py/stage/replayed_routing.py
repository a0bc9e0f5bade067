"""Have a recomputation repeat the decisions (top-k, branches) and the draws from Python's and NumPy's RNGs of a run."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from rotor_profiling import storage_bytes, tensors_in
from rotor_profiling.contents import BOUND, is_library
from rotor_profiling.isolate import undoing
from rotor_profiling.torch_compat import TorchDispatchMode, tree_leaves, tree_map_only
from rotor_py.errors import InvalidStateError
from rotor_py.stage.named_state import named_objects
from rotor_solver.watching import holding

# Random streams besides PyTorch's RNG: Python's, NumPy's, and generators to which a model refers. Reading the states of
# the first two takes long, so a forward reads them only if its code refers to a library that may draw from them.


class Stream(NamedTuple):
    state: Callable[[], Hashable]
    set: Callable[[Any], object]


Drawn = tuple[tuple[Stream, Hashable], ...]  # streams from which a forward has drawn, each with its state before

# For each stage, streams that its code may draw from in any forward, as known before its first.
_streams: WeakKeyDictionary[Callable[..., Any], list[Stream]] = WeakKeyDictionary()
_drawing: WeakSet[nn.Module] = WeakSet()  # stages of which a forward has drawn from one
_DRAW_NOTHING = {"builtins", "collections", "einops", "functools", "itertools", "math", "operator", "torch", "typing"}


def streams_of(function: Callable[..., Any], *, by_code: bool = False) -> list[Stream]:
    """Return Python's and NumPy's streams (if `by_code`, only where code may draw from them), and named generators."""
    named, found = named_objects(function), list[Stream]()
    if not by_code or any(map(_may_draw, named)):
        found.append(Stream(random.getstate, random.setstate))
        if "numpy" in sys.modules:
            found.append(_of_numpy(sys.modules["numpy"].random))
    return found + streams_among(named)


def _may_draw(value: Any) -> bool:
    """Whether a value is code of a library that may draw from Python's or NumPy's RNG."""
    if not (isinstance(value, ModuleType) or callable(value)):
        return False
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    name = name or type(getattr(value, "__self__", value)).__module__
    return is_library(name) and name.partition(".")[0] not in _DRAW_NOTHING and not name.startswith("rotor_")


def streams_among(objects: Iterable[Any]) -> list[Stream]:
    kinds: list[tuple[type, Callable[[Any], Stream]]] = [
        (torch.Generator, _of_generator),
        (random.Random, lambda each: Stream(each.getstate, each.setstate)),
    ]
    if "numpy" in sys.modules:
        np = sys.modules["numpy"].random
        kinds += [(np.RandomState, _of_numpy), (np.Generator, _of_bits)]
    owners = [each.__self__ if isinstance(each, BOUND) else each for each in objects]
    others = [each for each in owners if type(each).__module__ != "builtins"]  # almost none, so ask only these
    return [make(each) for each in others for kind, make in kinds if isinstance(each, kind)]


@contextmanager
def other_draws(function: Any, present: Iterable[Any], *, hooked: bool) -> Iterator[list[Drawn]]:
    """Yield a list that gets, when the context exits, the random streams from which `function` drew inside it, among
    those that its code names and those in `present`: what its attributes and globals hold in this forward.
    """
    known = None if hooked else _streams.get(function)
    if known is None:
        known = streams_of(function, by_code=True)
        if not hooked:  # hooks may change
            _streams[function] = known
    before = [(stream, stream.state()) for stream in (*known, *streams_among(present))]
    result: list[Drawn] = []
    yield result
    drawn = tuple((stream, state) for stream, state in before if stream.state() != state)
    if drawn and isinstance(function, nn.Module):
        _drawing.add(function)
    result.append(drawn)


def draws(function: Callable[..., Any]) -> bool:
    """Whether a forward of a stage has drawn from random streams other than PyTorch's RNG."""
    return function in _drawing


@contextmanager
def streams_kept(function: Callable[..., Any], value: Any = None) -> Iterator[None]:
    """Context that keeps the streams that `function` names, and generators that are leaves of its arguments `value`."""
    with undoing() as undo:
        streams = (*streams_of(function), *streams_among(tree_leaves(value)))
        undo += [partial(stream.set, stream.state()) for stream in streams]
        yield


def _of_numpy(source: Any) -> Stream:
    """Return the stream of `numpy.random`, or of a `RandomState`."""
    return Stream(lambda: pickle.dumps(source.get_state()), lambda state: source.set_state(pickle.loads(state)))


def _of_bits(generator: Any) -> Stream:
    """Return the stream of a `numpy.random.Generator`."""
    bits = generator.bit_generator
    return Stream(lambda: pickle.dumps(bits.state), lambda state: setattr(bits, "state", pickle.loads(state)))


def _of_generator(generator: torch.Generator) -> Stream:
    return Stream(
        lambda: bytes(generator.get_state().numpy()),
        lambda state: generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    )


# In a recomputation, the experts of a token, a top-k or a branch may differ from the first run's, since sums over
# processes and atomic additions on a GPU vary in the last digits. Then a token's loss would come from one expert and
# its gradient from another, and processes could deadlock. So a recomputation uses the recorded decisions.

Decisions = tuple[tuple[Any, Any], ...]  # operators with a discrete result, in the order of calls, each with its result

_aten = torch.ops.aten
# Operators that select values. Pooling is missing: its indices affect only gradients, and would take much memory.
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
# Operators whose result depends only on shape, dtype or device of their arguments, so that it is no decision.
_NO_DECISIONS = {
    _aten.empty_like,
    _aten.zeros_like,
    _aten.ones_like,
    _aten.full_like,
    _aten.randint_like,
    torch.ops.prim.device,  # called on fake tensors
}

# Whether operators are called by this project's code, not by the stage.
_not_the_stage: ContextVar[bool] = ContextVar("rotor_py.not_the_stage", default=False)
_undecided: WeakSet[nn.Module] = WeakSet()  # stages whose first run made no decision
_bytes: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # for each stage, most bytes of decisions in a run


@contextmanager
def decisions_recorded(function: Callable[..., Any]) -> Iterator[list[Decisions]]:
    """Yield a list that gets, when the context exits, the decisions of a run of `function` inside the context.

    Does not record a module whose first run made no decision: recording slows every operator.
    """
    result: list[Decisions] = []
    if decides_nothing(function):
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
    """Return a context in which deciding operators return `decisions`, in order; RuntimeError if others decide."""
    return _Repeating(decisions) if decisions else nullcontext()


def not_deciding() -> AbstractContextManager[None]:
    """Inside this context, do not treat results of operators as decisions of the stage that runs."""
    return holding(_not_the_stage, True)


def decided_bytes(function: nn.Module) -> int:
    return _bytes.get(function, 0)


def decides_nothing(function: Callable[..., Any]) -> bool:
    return isinstance(function, nn.Module) and function in _undecided


def remember_undecided(function: nn.Module) -> None:
    """Let runs of this stage record no decisions, since a stage of equal signature made none."""
    _undecided.add(function)


class _Recording(TorchDispatchMode):
    """Records the results of operators that decide; `_Repeating` replaces them, and autograd then uses these."""

    def __init__(self, decisions: Decisions = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self.decisions = list(decisions)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))  # also if its result is replaced, since it may draw random values
        return self._decided(func, made) if _decides(func, (args, kwargs), made) else made

    def _decided(self, func: Any, made: Any) -> Any:
        """Return the result of an operator that decides, which has `made` its own."""
        self.decisions.append((func, _copied(made)))
        return made


class _Repeating(_Recording):
    def _decided(self, func: Any, made: Any) -> Any:
        nothing: tuple[Any, Any] = (None, None)
        decided, before = self.decisions.pop(0) if self.decisions else nothing
        if decided is not func:
            raise InvalidStateError(
                f"a stage must call the same operators in every run: {func} was not called here in the forward",
                kind="rerun_differs",
                name=str(func),
            )
        if func._schema.is_mutable:  # its result is in one of its arguments, which other operators read
            for tensor, decision in zip(tensors_in(made), tensors_in(before), strict=True):
                tensor.copy_(decision)
            return made
        return _copied(before)


def _decides(func: Any, given: Any, made: Any) -> bool:
    """Whether an operator maps floating-point values, which another run may round differently, to a discrete result."""
    if _not_the_stage.get() or func.overloadpacket in _NO_DECISIONS or made is None:
        return False
    if func.overloadpacket not in _SELECTIONS:
        # Fast path: most operators return one floating-point tensor.
        if _is_number(made) or any(map(_is_number, tree_leaves(made))):
            return False
        if any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns):
            return False  # a view of an argument
    return any(map(_is_number, tree_leaves(given)))


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _copied(made: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.clone, made)
