"""Ways to store a stage, as the runner and the solver see them."""

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
    """The way in which a stage is stored in its `own` way, or in one with a keeper, and what that saves by a keeper."""
    return f"{own}{_AND}{keeper}"


def parted(way: str, keepers: Container[str]) -> tuple[str | None, str | None]:
    """A way without its last keeper, and the name of that keeper; None for what has no part in it."""
    if way in keepers:
        return None, way
    own, _, keeper = way.rpartition(_AND)
    return (own, keeper) if keeper in keepers and own else (way, None)


def own_of(way: str, keepers: Container[str]) -> str | None:
    """What the stage does by itself in a way; None if that is nothing."""
    before, keeper = parted(way, keepers)
    return before if keeper is None or before is None else own_of(before, keepers)


def base_of(way: str, ways: Collection[str]) -> str | None:
    """The one of `ways` that `way` adds a keeper to; None if it adds one to the whole stage, or none.

    Ways that add a keeper come with the keeper alone, as one of `ways`. Else, what follows is a part of the name.
    """
    base, _, keeper = way.rpartition(_AND)
    return base if base in ways and keeper in ways else None


class Trial(Protocol):
    """Tells by a run of a stage whether a way to store it pays."""

    @property
    def pays(self) -> bool:
        """Whether the way is worth measuring, as far as a run has shown."""

    @property
    def saved_bytes(self) -> int | None:
        """Bytes that the run has saved beside parameters, input and output, but for storages smaller than a page; None
        if no run has shown it.
        """

    def watch(self, run: Run) -> Run:
        """`run`, which is watched, and saves what it saves by itself. RuntimeError where hooks are refused."""


@dataclass(frozen=True, slots=True)
class Known:
    """A trial that needs no run."""

    pays: bool
    saved_bytes: int | None = None

    def watch(self, run: Run) -> Run:
        """`run` itself."""
        return run


class Keeper(Protocol):
    """Keeps what autograd saves in the forward of any stage.

    Processes that train together have to have the same keepers.
    """

    @property
    def name(self) -> str:
        """The name of the way: what follows "stored" in a report. It is written into plans, so it must not change."""

    @property
    def keeps_the_rest(self) -> bool:
        """Whether it may be asked to keep what another keeper of the same run has left as it is."""

    def suits(self, function: Callable[..., Any]) -> bool:
        """Whether a stage can be stored in this way."""

    def keeping(self, run: Run, function: Callable[..., Any]) -> Run:
        """`run`, a run of the stage `function`, as one whose graph has saved its tensors in this way.

        It makes the same values.
        """

    def trial(self, function: Callable[..., Any]) -> Trial:
        """What tells whether the way is worth measuring for the stage `function`."""


# The way to store a stage with some of what it saves in another tier of memory.
#
# The stage runs as it does where all of that stays: stored whole, in part, or packed. What leaves, and when, concerns
# the
# whole step (`execute.moving`).


class _Elsewhere:
    name = "elsewhere"
    keeps_the_rest = True

    def suits(self, function: Callable[..., Any]) -> bool:
        return True

    def keeping(self, run: Run, function: Callable[..., Any]) -> Run:
        return run

    def trial(self, function: Callable[..., Any]) -> Trial:
        return Known(pays=False)  # it costs what the same way costs without it, beside the bytes that leave


ELSEWHERE: Keeper = _Elsewhere()
"""Offered to runners where a plan may move; `measure.stage_ways` has its bytes."""


def calls_forward_alone(module: nn.Module, *, but_for_its_hooks: bool = False) -> bool:
    """Whether no hook, no compiler and no other forward comes between a call of `module` and what its class defines.

    The same of all modules in it. `but_for_its_hooks`, hooks of `module` itself do not count.
    """
    unhooked = [each for each in module.modules() if not (but_for_its_hooks and each is module)]
    return not has_any_global_hook() and not any(map(_replaced, module.modules())) and not any(map(_hooked, unhooked))


@contextmanager
def calling_instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Have a call of `module` call its hooks, and `forward` once in the place of its own."""

    def once(*args: Any, **kwargs: Any) -> Any:
        vars(module).pop("forward", None)  # whoever looks into the module from there finds it as it is
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
