"""Find stages without lasting side effects, and effects that depend on a graph."""

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

# Stages whose first runs are all alike.
#
# Such a stage can be recomputed without a first run, since the state to record is known. So `find_effects`, which
# checks that it makes the same numbers without a graph, also saves measuring its first run.


class Steady(NamedTuple):
    """Effects shared by all first runs: whether it draws, buffers that move, and the most bytes above the start."""

    draws: bool
    moving: frozenset[int]
    rise: int


_remembered_free: WeakKeyDictionary[nn.Module, Steady] = WeakKeyDictionary()


def shown_by(found: Surroundings, function: Callable[..., Any], rise: int) -> Steady | None:
    """Return the effects of all first runs, from the recorded state of one; None if they may vary."""
    more = found.decisions or found.drawn or found.changes()
    return None if more else Steady(found.random is not None, recall_moving(function), rise)


def remember_steady(function: nn.Module, steady: Steady | None) -> None:
    """Assume for a stage the effects measured on an identical one; None forgets them."""
    _remembered_free.pop(function, None)
    if steady is not None:
        _remembered_free[function] = steady
        remember_moving(function, steady.moving)
        remember_undecided(function)


def before_first(function: Callable[..., Any], devices: tuple[torch.device, ...]) -> tuple[Surroundings, int] | None:
    """Return the state that a first run would find now, and its most bytes; None if only a run shows this."""
    known = _remembered_free.get(function) if isinstance(function, nn.Module) else None
    if known is None:
        return None
    slots = own_buffers(function)
    buffers = tuple((slots[i], slots[i][2].clone()) for i in sorted(known.moving))
    random = RandomState.now(devices) if known.draws else None
    return Surroundings(autocast_now(devices), random, buffers, slots=tuple(slots)), known.rise


# Differences between runs with and without a graph.
#
# Some operators use another kernel without a graph, which rounds differently: the recurrent layers on the CPU do. For
# the numbers of plain training, such a stage always runs with a graph. And without a graph, an output does not show
# whether it would require a gradient.
#
# Both are found once, when the stage is measured, and remembered for its lifetime. The run without a graph also shows
# whether a recomputation must restore more than random numbers.


@dataclass(frozen=True, slots=True)
class GraphEffects:
    """Whether outputs have other numbers with a graph than without, and which output tensors have no gradient."""

    graph_dependent: bool = False
    without_gradient: tuple[int, ...] = ()


_remembered: WeakKeyDictionary[nn.Module, GraphEffects] = WeakKeyDictionary()


def recall_effects(function: Callable[..., Any]) -> GraphEffects:
    """Return the measured effects of a stage; if never measured, those that its layer types suggest."""
    if not isinstance(function, nn.Module):
        return GraphEffects()
    if function not in _remembered:
        # A plan made by hand: layers known to differ on one device count as different on all.
        return GraphEffects(any(isinstance(module, nn.RNNBase) for module in function.modules()))
    return _remembered[function]


def remember_effects(function: nn.Module, effects: GraphEffects) -> None:
    """Assume for a stage the effects measured on an identical one."""
    _remembered[function] = effects


def find_effects(
    function: nn.Module,
    value: Any,
    made: Any,
    device: torch.device,
    recorded: AbstractContextManager[Sequence[Surroundings]],
) -> tuple[GraphEffects, Steady | None]:
    """Run a stage on `value` without a graph, and compare with its output `made` with one. Restores the stage.

    `made` is detached, with its `requires_grad`. A stage that is not deterministic does not count as dependent on the
    graph, which would not help. A single process has the run `recorded`, to learn the effects of every first run.
    """
    attached = _detached(made)
    without_gradient = tuple(i for i, tensor in enumerate(attached) if not tensor.requires_grad)
    if not several_processes():
        with isolated(function, device), torch.no_grad(), memory_meter(device) as meter, recorded as surroundings:
            plain = _outputs(function, value)
        if _equal(plain, attached):
            return GraphEffects(False, without_gradient), shown_by(surroundings[0], function, meter.phases[""].rise)
        del plain  # the recording may have disturbed it
    with isolated(function, device), torch.no_grad():
        differs = not _equal(_outputs(function, value), attached)
    # With collectives, all processes must run the stage equally often, whatever each finds.
    if differs or several_processes():
        with isolated(function, device), torch.enable_grad():
            differs = _equal(attached, _outputs(function, value)) and differs
    return GraphEffects(differs, without_gradient), None


def run_with_graph(function: Callable[..., Any], value: Any) -> Any:
    with torch.enable_grad():
        output = function(leaves_of(value))
    return tree_map_only(torch.Tensor, torch.Tensor.detach, output)


def _outputs(function: Callable[..., Any], value: Any) -> list[torch.Tensor]:
    """Return the output tensors, detached, with the `requires_grad` of the run."""
    output = function(leaves_of(value))
    wait_for(output)
    return _detached(output)


def _detached(output: Any) -> list[torch.Tensor]:
    return [local(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in tensors_in(output)]


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether tensors are equal bit for bit, except that all NaNs are alike."""
    return len(found) == len(expected) and all(
        equal(a, b) or equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True)
    )
