"""Stages whose numbers depend on whether autograd records them.

Some operators take another kernel where no graph is needed, with other last digits: the recurrent layers on the CPU do.
To get the numbers of plain training, such a stage has to run with a graph every time, even if nobody wants the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from rotor_profiling import isolated, leaves_of, tensors_in

_known: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def depends_on_graph(function: Callable[..., Any]) -> bool:
    """Whether `function`, a stage, has to run with a graph: as was found out, and else by its kind."""
    if not isinstance(function, nn.Module):
        return False
    if function not in _known:
        return any(isinstance(module, nn.RNNBase) for module in function.modules())
    return _known[function]


def find_out(function: nn.Module, value: Any, device: torch.device) -> bool:
    """Run a stage on `value` with a graph and without; remember and return whether the numbers differ.

    A stage that never does the same thing twice does not count.
    """
    plain = _outputs(function, value, device, graph=False)
    recorded = _outputs(function, value, device, graph=True)
    differs = not _equal(plain, recorded)
    _known[function] = differs and _equal(recorded, _outputs(function, value, device, graph=True))
    return _known[function]


def remember(function: nn.Module, depends: bool) -> None:
    """What `depends_on_graph` is to say of a stage: what was found out of one like it."""
    _known[function] = depends


def graph_dependent(functions: Sequence[nn.Module]) -> list[int]:
    """The indices of those among `functions` that are known to depend on a graph."""
    return [index for index, function in enumerate(functions) if _known.get(function)]


def without_history(function: Callable[..., Any], value: Any) -> Any:
    """Run `function` with a graph, and return its output without it."""
    with torch.enable_grad():
        output = function(leaves_of(value))
    return tree_map_only(torch.Tensor, torch.Tensor.detach, output)


def _outputs(function: nn.Module, value: Any, device: torch.device, *, graph: bool) -> list[torch.Tensor]:
    with isolated(function, device), torch.no_grad():
        return tensors_in(without_history(function, value) if graph else function(value))


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True)
    )
