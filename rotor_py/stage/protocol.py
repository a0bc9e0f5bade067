"""Storage modes, and offers of a stage: other ways to run it, and facts that planning and running it need.

A user's layer offers nothing; a captured stage derives from `StageOffers`. All code reads offers through `offers_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from types import MappingProxyType
from typing import Any, ClassVar

from torch import nn

from rotor_profiling.torch_compat import has_any_global_hook
from rotor_py.errors import InvalidValueError

Run = Callable[[Any], Any]  # runs a stage: maps its input to its output

# Runs several stages as one. Arguments: the first stage's input in a list, which it empties, and a function that
# returns a stage's name by index, for errors. Returns the last stage's output, without the values that stages share.
RunThrough = Callable[[list[Any], Callable[[int], str]], tuple[Any, ...]]

Wrap = Callable[[nn.Module], nn.Module]  # returns the module to run instead of a piece of a stage


class StageOffers:
    """What a stage offers besides being called. By default, nothing; subclasses override attributes and methods."""

    # Output tensors that later stages read, though those in between do not pass them on: index in the output, by name.
    carried: Mapping[str, int] = MappingProxyType({})
    # Input tensors that the stage passes on, and does not use otherwise: index in the input, by index in the output.
    handed_on: Mapping[int, int] = MappingProxyType({})
    # Positions, in the stage's input, of the values that it reads and passes on. Stages with equal signatures
    # (`stage_signature`) that differ in these cost the same, but cannot share compiled code.
    wiring: Hashable = None
    # For every input tensor, whether it needs a gradient in training; None if only a run shows this.
    needs_gradient: Sequence[bool] | None = None
    saves_through_hooks = True  # whether saved-tensor hooks active during a run see the tensors that autograd saves
    shared: int = 0  # number of values, at the end of its input, that all stages of the chain share
    last: bool = True  # whether its output is that of the chain, without the shared values

    @property
    def parts(self) -> Sequence[StageOffers]:
        return (self,)

    def run_through(self, following: Sequence[StageOffers]) -> RunThrough | None:
        """Return a function that runs this stage and `following` as one; None if they must run one by one."""
        return None

    def gather_begun(self) -> None:
        """Gather the sharded parameters of modules whose forward began in an earlier stage."""

    def in_pieces(self, wrap: Wrap) -> Run | None:
        """Return a function that runs the stage with `wrap(piece)` for each piece; None if it is compiled whole."""
        return None

    def forward_skipping_output(self) -> Run | None:
        """Return a function that runs the stage but only allocates its output, which a recompute right before the
        backward does not need; None if this saves no time.
        """
        return None

    # Whether its storage modes (`ways`) run different code, which may round differently: a plan then uses only one.
    ways_are_code = False

    def ways(self) -> tuple[str, ...]:
        """Return the names of the modes that store the stage in part. Each keeps fewer bytes than those before it."""
        return ()

    def ways_for(self, value: Any) -> tuple[str, ...]:
        """Return those of `ways` that apply to the input `value`; may run the stage to find out."""
        return self.ways()

    def forward_by(self, way: str, *, skip_output: bool = False) -> Run:
        """Return a function that runs the stage in a mode of `ways`; with `skip_output`, it computes no output."""
        raise InvalidValueError(f"the stage has no storage mode {way!r}", kind="unknown_way", name=way)


class _Joined(StageOffers):
    """Offers of consecutive stages run as one. No partial storage modes: each would apply to one part only."""

    def __init__(self, parts: Iterable[StageOffers]) -> None:
        self._parts = list(parts)
        if self._parts:
            self.carried = self._parts[-1].carried  # of the last part, whose output this is
            self.needs_gradient = self._parts[0].needs_gradient
            self.shared, self.last = self._parts[0].shared, self._parts[-1].last
        self.wiring = tuple(part.wiring for part in self._parts)
        self.saves_through_hooks = all(part.saves_through_hooks for part in self._parts)

    @property
    def parts(self) -> Sequence[StageOffers]:
        return [inner for part in self._parts for inner in part.parts]

    def gather_begun(self) -> None:
        for part in self._parts:
            part.gather_begun()

    def in_pieces(self, wrap: Wrap) -> Run | None:
        runs = [part.in_pieces(wrap) for part in self._parts]
        # Either all stages of a model run in pieces (sharded), or none does.
        found = [run for run in runs if run is not None]
        return (lambda value: reduce(lambda made, run: run(made), found, value)) if found else None


_NOTHING = StageOffers()


def offers_of(function: Callable[..., Any]) -> StageOffers:
    """Return the offers of a stage, or of an `nn.Sequential` of joined stages; any other function offers nothing."""
    if isinstance(function, StageOffers):
        return function
    if isinstance(function, nn.Sequential):
        return _Joined(offers_of(part) for part in function)
    return _NOTHING


_AND = ", "  # joins the names of storage modes that are used together


def both(own: str, keeper: str) -> str:
    return f"{own}{_AND}{keeper}"


def parted(way: str, keepers: Container[str]) -> tuple[str | None, str | None]:
    """Split the name of a storage mode into that of its last keeper and what comes before; None for a missing part."""
    if way in keepers:
        return None, way
    own, _, keeper = way.rpartition(_AND)
    return (own, keeper) if keeper in keepers and own else (way, None)


def own_of(way: str, keepers: Container[str]) -> str | None:
    before, keeper = parted(way, keepers)
    return before if keeper is None or before is None else own_of(before, keepers)


def base_of(way: str, ways: Collection[str]) -> str | None:
    """Return the mode in `ways` to which the mode `way` adds a keeper; None if it adds none, or `ways` lacks that mode.

    What follows the last comma of `way` is a keeper only if `ways` also has it as a mode of its own.
    """
    base, _, keeper = way.rpartition(_AND)
    return base if base in ways and keeper in ways else None


class Trial:
    """Finds out, from a run of a stage, whether a storage mode is worth measuring. This base class says no."""

    pays: bool = False  # whether a run has shown that the mode is worth measuring
    # Bytes that autograd saved in the run, without parameters, input, output and storages below a page; None before it.
    saved_bytes: int | None = None

    def watch(self, run: Run) -> Run:
        """Return `run` wrapped to be observed, saving the same tensors. RuntimeError where hooks are refused."""
        return run


class Keeper:
    """Keeps saved tensors of any stage packed, rounded or offloaded. Processes that train together need the same."""

    # Name of the storage mode, which reports print after "stored". Never change it, since plan files contain it.
    name: str
    keeps_the_rest: ClassVar[bool] = False  # whether it may keep tensors that another keeper of the same run declines

    def suits(self, function: Callable[..., Any]) -> bool:
        return True

    def keeping(self, run: Run, function: Callable[..., Any]) -> Run:
        """Return `run`, a run of the stage `function`, wrapped so that its saved tensors are kept in this form."""
        return run

    def trial(self, function: Callable[..., Any]) -> Trial:
        """Return a trial of whether the mode is worth measuring for the stage `function`."""
        return Trial()


class _Elsewhere(Keeper):
    """Storage mode of a stage whose saved tensors a plan may offload. The stage runs as if it stored them all; the tape
    copies them (`Moving`). So it costs as much as without this mode, and needs no trial.
    """

    name = "elsewhere"
    keeps_the_rest = True

    def __reduce__(self) -> str:
        return "ELSEWHERE"  # copies of a model share this object


ELSEWHERE: Keeper = _Elsewhere()  # for runners of plans that may offload; `measure.stage_ways` counts its bytes


def calls_forward_alone(module: nn.Module, *, but_for_its_hooks: bool = False) -> bool:
    """Whether `module` and its parts have no hook (`but_for_its_hooks`: the parts), compiler or replaced forward."""
    unhooked = [each for each in module.modules() if not (but_for_its_hooks and each is module)]
    return not has_any_global_hook() and not any(map(_replaced, module.modules())) and not any(map(_hooked, unhooked))


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call of `module` runs its class's forward and nothing else but hooks on all modules."""
    return not _replaced(module) and not _hooked(module)


@contextmanager
def calling_instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside the context, the first call of `module` runs its hooks, but `forward` instead of its own forward."""

    def once(*args: Any, **kwargs: Any) -> Any:
        vars(module).pop("forward", None)  # before the call, so that `forward` finds the module unchanged
        return forward(*args, **kwargs)

    vars(module)["forward"] = once
    try:
        yield
    finally:
        vars(module).pop("forward", None)


def _hooked(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _replaced(module: nn.Module) -> bool:
    called = "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__
    return called or module._compiled_call_impl is not None
