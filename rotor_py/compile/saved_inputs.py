"""Inputs that a compiled forward saves for its backward, saved as they were given.

In a graph with convolutions, Inductor lays images out with their channels last, and the weights of convolutions, too.
It lays out what a forward saves likewise, inputs included: beside every weight, a copy of it would be saved. No
partition of the graph shows that; of a U-Net, it was 8 MB of 27 MB. But what the caller sees keeps its layout. So saved
inputs are declared to be seen, and the backward lays each out when it reads it, which takes no longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from rotor_profiling.torch_compat import CustomGraphPass

_PASSES = "post_grad_custom_post_pass"
_SEEN = "user_visible_output_idxs"


def saving_inputs(options: Mapping[str, Any]) -> dict[str, Any]:
    """These options of Inductor, by which a forward saves inputs as they were given.

    Passes over graphs that the options have, or else Inductor's configuration, run before.
    """
    from rotor_profiling.torch_compat import inductor_config as config

    passes = options.get(_PASSES, getattr(config, _PASSES))
    if passes is None:
        return {**options, _PASSES: SavedInputs()}
    others = passes if isinstance(passes, list | tuple) else [passes]
    return {**options, _PASSES: [*(each for each in others if not isinstance(each, SavedInputs)), SavedInputs()]}


class SavedInputs(CustomGraphPass):
    """Declares that the layout of all inputs, and views of inputs, that a graph returns is seen."""

    def __call__(self, graph: fx.Graph) -> None:
        end = graph.output_node()
        (returned,) = end.args
        assert isinstance(returned, list | tuple)
        given = {storage for node in graph.find_nodes(op="placeholder") for storage in _storages(node)}
        seen = {position for position, each in enumerate(returned) if not given.isdisjoint(_storages(each))}
        end.meta[_SEEN] = sorted(seen.union(end.meta.get(_SEEN, ())))

    def uuid(self) -> str:
        """What tells Inductor's cache of compiled graphs apart."""
        return "rotor_py.compiled.saved_inputs 1"


def _storages(node: object) -> set[int]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return {value.untyped_storage()._cdata} if isinstance(value, torch.Tensor) else set()
