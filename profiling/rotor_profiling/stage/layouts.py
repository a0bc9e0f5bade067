"""The layouts of the gradients that a backward gives to what went in, found by running it once.

Which layout that is depends on the operators, and on the layout of the gradient that they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rotor_profiling.isolate import RandomState, isolated
from rotor_profiling.stage.gradients import Layouts, Strides, gradients_for, leaves_of
from rotor_profiling.stage.runner import Runner
from rotor_profiling.storage import layout_of, local, tensors_in, wait_for

BeforeBackward = Callable[[Any, Any, Sequence[torch.Tensor]], None]
"""Called with the input of a stage, its output in the graph, and the parameters that it trains."""


Watch = Callable[[Callable[[Any], Any]], Callable[[Any], Any]]
"""Makes of a run of a stage one that is watched, and does the same."""


def stage_layouts(
    runner: Runner,
    value: Any,
    device: torch.device,
    *,
    silent: Sequence[int] = (),
    arriving: Layouts = (),
    before_backward: BeforeBackward | None = None,
    watch: Watch | None = None,
) -> tuple[Layouts, Any]:
    """The layouts of the gradients that a stage's backward gives to the tensors of its input `value`, and its output.

    `arriving` are those of the gradients that it is given for its outputs; the ones at the positions `silent` get none.
    The output is without its graph, with `requires_grad` where it had one. The forward may be run in a `watch`. Nothing
    of the model is changed.
    """
    with isolated(runner.function, device) as parameters, torch.enable_grad():
        leaf = leaves_of(value)
        output = (runner.forward if watch is None else watch(runner.forward))(leaf)
        if before_backward is not None:
            before_backward(leaf, output, parameters)
        made, outputs = leaves_of(output), tensors_in(output)
        gradients = gradients_for(outputs, silent, arriving)
        given = [(y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None]
        del output, outputs, gradients
        return _layouts_at(leaf, [y for y, _ in given], [g for _, g in given]), made


def loss_layouts(loss: Callable[[Any], torch.Tensor], output: Any, device: torch.device) -> Layouts:
    """The layouts of the gradients that the backward of `loss` gives to the tensors of `output`."""
    state = RandomState.now((device,))
    try:
        with torch.enable_grad():
            leaf = leaves_of(output)
            return _layouts_at(leaf, [loss(leaf)], [None])
    finally:
        state.restore()


def _layouts_at(leaf: Any, outputs: list[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> Layouts:
    tensors = tensors_in(leaf)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not outputs or not wanted:  # torch.autograd.grad refuses both
        return (None,) * len(tensors)
    # Not `backward`: where a leaf keeps its gradient, that is copied into the leaf's own layout.
    found = iter(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True))
    made = [next(found) if tensor.requires_grad else None for tensor in tensors]
    wait_for([gradient for gradient in made if gradient is not None])  # nobody else does: see `gradients_at`
    return tuple(map(_strides, tensors, made))


def _strides(tensor: torch.Tensor, gradient: torch.Tensor | None) -> Strides | None:
    # If processes share it in another way than the tensor, its part has another shape, and strides of its own.
    if gradient is None or layout_of(gradient) != layout_of(tensor):
        return None
    return local(gradient).stride()
