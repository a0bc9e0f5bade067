"""Offers of a stage: other functions that run it, its storage modes, and facts about its inputs and outputs.

A captured stage derives from `StageOffers`; a user's layer offers nothing. Code reads offers through `offers_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from torch import nn

from rotor_profiling.torch_compat import has_any_global_hook
from rotor_py.errors import InvalidValueError

Run = Callable[[Any], Any]  # runs a stage: maps its input to its output

# Runs several stages as one. Arguments: a list with the first stage's input, which it empties to free the input, and a
# function that maps a stage's index to its name, for errors. Returns the last output, without values that stages share.
RunThrough = Callable[[list[Any], Callable[[int], str]], tuple[Any, ...]]

JOINT = "+"  # separates the stages' names in the name of several stages that run as one

Wrap = Callable[[nn.Module], nn.Module]  # maps a piece of a stage to the module to run in its place


class StageOffers:
    """Base class for what a stage offers besides being called: nothing, unless a subclass overrides it."""

    # Maps names of carried tensors to indices in the output: stages return them unchanged up to their last reader
    carried: Mapping[str, int] = MappingProxyType({})
    # For tensors that the stage returns unchanged without reading them: maps their indices in the output to the input's
    handed_on: Mapping[int, int] = MappingProxyType({})
    # Indices in the stage's input of the values that it reads and passes on. Stages of an equal signature
    # (`stage_signature`) with different indices cost the same, but cannot share compiled code.
    wiring: Hashable = None
    # For every input tensor, whether it requires a gradient in training; None if unknown before a run.
    needs_gradient: Sequence[bool] | None = None
    may_draw = True  # whether a run may draw random values although an earlier run has drawn none
    saves_through_hooks = True  # whether autograd calls saved-tensor hooks for the tensors that a run saves
    shared: int = 0  # number of values at the end of its input that all stages of the chain get
    last: bool = True  # whether it is the last stage, whose output lacks the shared values

    @property
    def parts(self) -> Sequence[StageOffers]:
        return (self,)

    def run_through(self, following: Sequence[StageOffers]) -> RunThrough | None:
        """Return a function that runs this stage and `following` as one; None if they must run one by one."""
        return None

    def gather_begun(self) -> None:
        """Gather the sharded parameters of modules whose forward began in an earlier stage."""

    def in_pieces(self, wrap: Wrap) -> Run | None:
        """Return a function that runs the stage with `wrap(piece)` for each piece to compile; None if it has none."""
        return None

    def forward_skipping_output(self) -> Run | None:
        """Return a function that runs the stage, but only allocates its output, since no code reads the output of a
        recomputation right before the backward; None if this saves no time.
        """
        return None

    # Whether its storage modes (`ways`) run different code, which may round differently. If so, a plan uses only one.
    ways_are_code = False

    def ways(self) -> tuple[str, ...]:
        """Return the names of the modes that store only a part of its saved tensors, by decreasing bytes."""
        return ()

    def ways_for(self, value: Any) -> tuple[str, ...]:
        """Return those of `ways` that apply to the input `value`; may run the stage to find out."""
        return self.ways()

    def forward_by(self, way: str, *, skip_output: bool = False) -> Run:
        """Return a function that runs the stage in a mode of `ways`; with `skip_output`, its output is not computed."""
        raise InvalidValueError(f"the stage has no storage mode {way!r}", kind="unknown_way", name=way)


class _Joined(StageOffers):
    """Offers of consecutive stages that run as one. It has no `ways`, since each would apply to one part only."""

    def __init__(self, parts: Iterable[StageOffers]) -> None:
        self._parts = list(parts)
        if self._parts:
            self.carried = self._parts[-1].carried  # of the last part, whose output this is
            self.needs_gradient = self._parts[0].needs_gradient
            self.shared, self.last = self._parts[0].shared, self._parts[-1].last
        self.wiring = tuple(part.wiring for part in self._parts)
        self.may_draw = any(part.may_draw for part in self._parts)
        self.saves_through_hooks = all(part.saves_through_hooks for part in self._parts)

    @property
    def parts(self) -> Sequence[StageOffers]:
        return [inner for part in self._parts for inner in part.parts]

    def gather_begun(self) -> None:
        for part in self._parts:
            part.gather_begun()

    def in_pieces(self, wrap: Wrap) -> Run | None:
        runs = [part.in_pieces(wrap) for part in self._parts]
        # All stages of a sharded model return a function here; all stages of other models return None.
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
    """Split a storage mode's name into (the part before its last keeper's name, this name); None for a missing part."""
    if way in keepers:
        return None, way
    own, _, keeper = way.rpartition(_AND)
    return (own, keeper) if keeper in keepers and own else (way, None)


def own_of(way: str, keepers: Container[str]) -> str | None:
    before, keeper = parted(way, keepers)
    return before if keeper is None or before is None else own_of(before, keepers)


def base_of(way: str, ways: Collection[str]) -> str | None:
    """Return the name of the mode in `ways` to which the mode `way` adds a keeper; None if there is no such mode.

    The text after the last comma of `way` is a keeper's name only if `ways` contains it, too.
    """
    base, _, keeper = way.rpartition(_AND)
    return base if base in ways and keeper in ways else None


class Trial(NamedTuple):
    """What a trial run of a stage finds; by default, that the storage mode is not worth measuring."""

    pays: bool = False  # whether the mode is worth measuring
    saved_bytes: int = 0  # that autograd saved in the run, except parameters, inputs, outputs and storages below a page
    clearly_less: bool | None = None  # whether it saves clearly fewer bytes than `run` does; None if it may round


class Keeper:
    """Storage mode for any stage: packs, rounds or offloads its saved tensors. All processes need the same keepers."""

    # Name of the mode, which reports print after "stored". Plan files contain it, so a new name would break them.
    name: str
    keeps_the_rest: ClassVar[bool] = False  # whether it may be added to other modes, for tensors that they leave as is

    def suits(self, function: Callable[..., Any]) -> bool:
        return True

    def keeping(self, run: Run, function: Callable[..., Any]) -> Run:
        """Return a function that calls `run`, a run of the stage `function`, and keeps saved tensors in this mode."""
        return run

    def trial(self, run: Run, function: Callable[..., Any], value: Any) -> Trial:
        """Find whether this mode is worth measuring for the stage `function`, from `run` of it on `value`.

        RuntimeError if saved-tensor hooks fail.
        """
        return Trial()


class _Elsewhere(Keeper):
    """Storage mode of a stage whose saved tensors may be offloaded. The stage runs as without this mode, since the tape
    copies the tensors (`Moving`). So it costs as much as without this mode, and needs no trial.
    """

    name = "elsewhere"
    keeps_the_rest = True

    def __reduce__(self) -> str:
        return "ELSEWHERE"  # copies of a model share this object


ELSEWHERE: Keeper = _Elsewhere()  # for runners of plans that may offload; `measure.stage_ways` counts its bytes


def calls_forward_alone(module: nn.Module, *, but_for_its_hooks: bool = False) -> bool:
    """Whether calling `module` runs no hook (`but_for_its_hooks`: but its own), compiled code or replaced forward."""
    unhooked = [each for each in module.modules() if not (but_for_its_hooks and each is module)]
    return not has_any_global_hook() and not any(map(_replaced, module.modules())) and not any(map(_hooked, unhooked))


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call of `module` runs only its class's forward, and hooks that are registered for all modules."""
    return not _replaced(module) and not _hooked(module)


@contextmanager
def calling_instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside this context, have the first call of `module` run its hooks, but `forward` in place of its own forward."""

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
