"""Find stages that leave no trace behind, and effects that depend on a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rotor_profiling import isolated, leaves_of, tensors_in
from rotor_profiling.backends import memory_meter
from rotor_profiling.isolate import RandomState
from rotor_profiling.storage import equal, local, wait_for
from rotor_profiling.timing import several_processes
from rotor_profiling.torch_compat import tree_map_only
from rotor_py.stage.forward_state import Surroundings, autocast_now, own_buffers, recall_moving, remember_moving
from rotor_py.stage.replayed_routing import remember_undecided

# Stages of which one first run shows what all first runs do.
#
# Such a stage can be run again without having run before: what a first run would record is known. So what shows that it
# makes the same numbers without a graph (`graph_effects`) also saves its first run when it is measured.


class Steady(NamedTuple):
    """What every first run of a stage does that decides nothing and sets no attributes: whether it `draws` random
    numbers, the positions of buffers that are `moving`, and the most bytes that it holds beyond those before it.
    """

    draws: bool
    moving: frozenset[int]
    rise: int


_remembered_free: WeakKeyDictionary[nn.Module, Steady] = WeakKeyDictionary()


def shown_by(found: Surroundings, function: Callable[..., Any], rise: int) -> Steady | None:
    """What a first run of `function` shows, which took `rise` bytes at most; None if later runs take over more of it.

    `found` is what surrounded that run.
    """
    more = found.decisions or found.drawn or found.changes()
    return None if more else Steady(found.random is not None, recall_moving(function), rise)


def remember_steady(function: nn.Module, steady: Steady | None) -> None:
    """Have first runs of a stage do what one of a stage like it was seen to do; None if that tells nothing."""
    _remembered_free.pop(function, None)
    if steady is not None:
        _remembered_free[function] = steady
        remember_moving(function, steady.moving)
        remember_undecided(function)


def before_first(function: Callable[..., Any], devices: tuple[torch.device, ...]) -> tuple[Surroundings, int] | None:
    """What surrounds `function` now, as its first run would find it, and the most bytes that this would hold; None if
    only such a run tells.
    """
    known = _remembered_free.get(function) if isinstance(function, nn.Module) else None
    if known is None:
        return None
    slots = own_buffers(function)
    buffers = tuple((slots[i], slots[i][2].clone()) for i in sorted(known.moving))
    random = RandomState.now(devices) if known.draws else None
    return Surroundings(autocast_now(devices), random, buffers, slots=tuple(slots)), known.rise


# What a run of a stage without a graph cannot show about its run with one.
#
# Some operators take another kernel where no graph is needed, with other last digits: the recurrent layers on the CPU
# do.
# To get the numbers of plain training, such a stage has to run with a graph every time, even if nobody wants the graph.
# And without a graph, no output tells whether it would have a gradient.
#
# Both are found out once, when the stage is measured, and remembered as long as the stage lives. The run without a
# graph
# that this takes also shows whether another run needs more than its random numbers restored.


@dataclass(frozen=True, slots=True)
class GraphEffects:
    """`graph_dependent`: the outputs have other numbers with a graph than without one.

    `without_gradient`: the outputs that need no gradient in training, by position among the output's tensors.
    """

    graph_dependent: bool = False
    without_gradient: tuple[int, ...] = ()


_remembered: WeakKeyDictionary[nn.Module, GraphEffects] = WeakKeyDictionary()


def recall_effects(function: Callable[..., Any]) -> GraphEffects:
    """What is remembered of a stage. Of one that was never measured, what the types of its layers suggest."""
    if not isinstance(function, nn.Module):
        return GraphEffects()
    if function not in _remembered:
        # A plan made by hand, without measuring: those that are known to differ are taken to do so on every device.
        return GraphEffects(any(isinstance(module, nn.RNNBase) for module in function.modules()))
    return _remembered[function]


def remember_effects(function: nn.Module, effects: GraphEffects) -> None:
    """Have `recall_effects` say this of a stage: it was found out of a stage like it."""
    _remembered[function] = effects


def find_effects(
    function: nn.Module,
    value: Any,
    made: Any,
    device: torch.device,
    recorded: AbstractContextManager[Sequence[Surroundings]],
) -> tuple[GraphEffects, Steady | None]:
    """Run a stage on `value` without a graph, and compare with what it `made` with one. Nothing of it is changed.

    `made` is without its graph, with `requires_grad` where it had one. A stage that never does the same thing twice
    does not count as dependent on the graph: a graph would not help. A single process has the run `recorded`, and finds
    out what it shows of every first run.
    """
    attached = _detached(made)
    without_gradient = tuple(i for i, tensor in enumerate(attached) if not tensor.requires_grad)
    if not several_processes():
        with isolated(function, device), torch.no_grad(), memory_meter(device) as meter, recorded as surroundings:
            plain = _outputs(function, value)
        if _equal(plain, attached):
            return GraphEffects(False, without_gradient), shown_by(surroundings[0], function, meter.phases[""].rise)
        del plain  # what records it may have disturbed it
    with isolated(function, device), torch.no_grad():
        differs = not _equal(_outputs(function, value), attached)
    # Where a stage waits for other processes, all have to run it equally often, whatever each of them finds.
    if differs or several_processes():
        with isolated(function, device), torch.enable_grad():
            differs = _equal(attached, _outputs(function, value)) and differs
    return GraphEffects(differs, without_gradient), None


def run_with_graph(function: Callable[..., Any], value: Any) -> Any:
    """Run `function` with a graph although none is wanted, and return its output without it."""
    with torch.enable_grad():
        output = function(leaves_of(value))
    return tree_map_only(torch.Tensor, torch.Tensor.detach, output)


def _outputs(function: Callable[..., Any], value: Any) -> list[torch.Tensor]:
    """The tensors that a stage returns, with `requires_grad` where the run sets it."""
    output = function(leaves_of(value))
    wait_for(output)
    return _detached(output)


def _detached(output: Any) -> list[torch.Tensor]:
    return [local(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in tensors_in(output)]


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Bit for bit, but that one NaN is like another."""
    return len(found) == len(expected) and all(
        equal(a, b) or equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True)
    )
