"""What a run of a stage without a graph cannot show about its run with one.

Some operators take another kernel where no graph is needed, with other last digits: the recurrent layers on the CPU do.
To get the numbers of plain training, such a stage has to run with a graph every time, even if nobody wants the graph.
And without a graph, no output tells whether it would have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from rotor_profiling import isolated, leaves_of, tensors_in


@dataclass(frozen=True, slots=True)
class StageTraits:
    """`graph_dependent`: the outputs have other numbers with a graph than without one.

    `without_gradient`: the outputs that need no gradient in training, by position among the output's tensors.
    """

    graph_dependent: bool = False
    without_gradient: tuple[int, ...] = ()


_known: WeakKeyDictionary[nn.Module, StageTraits] = WeakKeyDictionary()


def traits_of(function: Callable[..., Any]) -> StageTraits:
    """The traits of a stage: as was found out, and else by its kind."""
    if not isinstance(function, nn.Module):
        return StageTraits()
    if function not in _known:
        return StageTraits(any(isinstance(module, nn.RNNBase) for module in function.modules()))
    return _known[function]


def remember(function: nn.Module, traits: StageTraits) -> None:
    """What `traits_of` is to say of a stage: what was found out of one like it."""
    _known[function] = traits


def find_out(function: nn.Module, value: Any, device: torch.device) -> StageTraits:
    """Run a stage on `value` with a graph and without one, and compare.

    A stage that never does the same thing twice does not count as dependent on the graph.
    """
    plain = _outputs(function, value, device, graph=False)
    recorded = _outputs(function, value, device, graph=True)
    differs = not _equal(plain, recorded) and _equal(recorded, _outputs(function, value, device, graph=True))
    return StageTraits(differs, tuple(i for i, tensor in enumerate(recorded) if not tensor.requires_grad))


def without_history(function: Callable[..., Any], value: Any) -> Any:
    """Run `function` with a graph, and return its output without it."""
    with torch.enable_grad():
        output = function(leaves_of(value))
    return tree_map_only(torch.Tensor, torch.Tensor.detach, output)


def _outputs(function: nn.Module, value: Any, device: torch.device, *, graph: bool) -> list[torch.Tensor]:
    """The tensors that a stage returns, with `requires_grad` where a run with a `graph` sets it."""
    with isolated(function, device), torch.set_grad_enabled(graph):
        output = function(leaves_of(value))
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors_in(output)]


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True)
    )
