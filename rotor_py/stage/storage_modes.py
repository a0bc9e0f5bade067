"""Storage modes of a stage, as the runner and the solver see them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from rotor_profiling.torch_compat import has_any_global_hook
from rotor_py.stage.protocol import Run

_AND = ", "


def both(own: str, keeper: str) -> str:
    """Return the name of storage mode `own` combined with a keeper."""
    return f"{own}{_AND}{keeper}"


def parted(way: str, keepers: Container[str]) -> tuple[str | None, str | None]:
    """Return a storage mode without its last keeper, and the name of that keeper; None for a missing part."""
    if way in keepers:
        return None, way
    own, _, keeper = way.rpartition(_AND)
    return (own, keeper) if keeper in keepers and own else (way, None)


def own_of(way: str, keepers: Container[str]) -> str | None:
    """Return the stage's own part of a storage mode; None if it has none."""
    before, keeper = parted(way, keepers)
    return before if keeper is None or before is None else own_of(before, keepers)


def base_of(way: str, ways: Collection[str]) -> str | None:
    """Return the one of `ways` to which `way` adds a keeper; None if there is none, or it adds it to the whole stage.

    A mode with a keeper implies the keeper alone among `ways`. Otherwise the suffix belongs to the name.
    """
    base, _, keeper = way.rpartition(_AND)
    return base if base in ways and keeper in ways else None


class Trial(Protocol):
    """Tells from a run of a stage whether a storage mode pays."""

    @property
    def pays(self) -> bool:
        """Whether the mode is worth measuring, as far as a run has shown."""

    @property
    def saved_bytes(self) -> int | None:
        """Bytes saved by the run, without parameters, input, output and storages below a page; None before a run."""

    def watch(self, run: Run) -> Run:
        """Wrap `run`, which then saves unchanged. Raises RuntimeError where hooks are refused."""


@dataclass(frozen=True, slots=True)
class Known:
    """A trial that needs no run."""

    pays: bool
    saved_bytes: int | None = None

    def watch(self, run: Run) -> Run:
        return run


class Keeper(Protocol):
    """Keeps the saved tensors of any stage in another form. All processes of a training need the same keepers."""

    @property
    def name(self) -> str:
        """Name of the storage mode: the text after "stored" in a report. Plan files contain it: never change it."""

    @property
    def keeps_the_rest(self) -> bool:
        """Whether it may keep tensors that another keeper of the same run declined."""

    def suits(self, function: Callable[..., Any]) -> bool:
        """Whether it applies to a stage."""

    def keeping(self, run: Run, function: Callable[..., Any]) -> Run:
        """Wrap `run`, a run of `function`, so that its graph saves in this form. The values are the same."""

    def trial(self, function: Callable[..., Any]) -> Trial:
        """Return a trial that tells whether the mode is worth measuring for the stage `function`."""


# Storage mode with some saved tensors offloaded.
#
# The stage runs as without offloading: stored whole, in part, or packed. What to offload, and when, concerns the whole
# step (`offload`).


class _Elsewhere:
    name = "elsewhere"
    keeps_the_rest = True

    def suits(self, function: Callable[..., Any]) -> bool:
        return True

    def keeping(self, run: Run, function: Callable[..., Any]) -> Run:
        return run

    def trial(self, function: Callable[..., Any]) -> Trial:
        return Known(pays=False)  # costs the same as without it, except for the offloaded bytes

    def __reduce__(self) -> str:
        return "ELSEWHERE"  # a copy of a model has this very keeper


ELSEWHERE: Keeper = _Elsewhere()
"""Offered to runners where a plan may offload; `measure.stage_ways` has its bytes."""


def calls_forward_alone(module: nn.Module, *, but_for_its_hooks: bool = False) -> bool:
    """Whether no hook (but of `module` itself, `but_for_its_hooks`), compiler or other forward is in or on `module`."""
    unhooked = [each for each in module.modules() if not (but_for_its_hooks and each is module)]
    return not has_any_global_hook() and not any(map(_replaced, module.modules())) and not any(map(_hooked, unhooked))


@contextmanager
def calling_instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Make a call of `module` run its hooks, and `forward` once in place of its own."""

    def once(*args: Any, **kwargs: Any) -> Any:
        vars(module).pop("forward", None)  # first, so `forward` finds the module unchanged
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
