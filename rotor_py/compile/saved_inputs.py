"""Save a compiled forward's inputs for the backward in their given layout.

In a graph with convolutions, Inductor uses channels-last layouts for images and for weights. It does so for saved
values as well, inputs included, and would save a copy of every weight. No partition of the graph shows that; of a
U-Net, it was 8 MB of 27 MB. But outputs visible to the user keep their layout. So saved inputs are declared visible,
and the backward converts each when it reads it, which takes no longer.
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
    """Return these options of Inductor with a pass that saves inputs as given.

    Passes from the options, or else from Inductor's configuration, run before it.
    """
    from rotor_profiling.torch_compat import inductor_config as config

    passes = options.get(_PASSES, getattr(config, _PASSES))
    if passes is None:
        return {**options, _PASSES: SavedInputs()}
    others = passes if isinstance(passes, list | tuple) else [passes]
    return {**options, _PASSES: [*(each for each in others if not isinstance(each, SavedInputs)), SavedInputs()]}


class SavedInputs(CustomGraphPass):
    """Declares the layout of all returned inputs, and views of inputs, as visible to the user."""

    def __call__(self, graph: fx.Graph) -> None:
        end = graph.output_node()
        (returned,) = end.args
        assert isinstance(returned, list | tuple)
        given = {storage for node in graph.find_nodes(op="placeholder") for storage in _storages(node)}
        seen = {position for position, each in enumerate(returned) if not given.isdisjoint(_storages(each))}
        end.meta[_SEEN] = sorted(seen.union(end.meta.get(_SEEN, ())))

    def uuid(self) -> str:
        return "rotor_py.compiled.saved_inputs 1"


def _storages(node: object) -> set[int]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return {value.untyped_storage()._cdata} if isinstance(value, torch.Tensor) else set()
