"""The runs of a stage that show its bytes: one for each way in which an executor runs it, phase by phase.

A phase begins at each mark. What falls into "between" does not count: frees, and what measuring makes for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rotor_profiling.backends import memory_meter
from rotor_profiling.isolate import RandomState, isolated
from rotor_profiling.memory import MemoryMeter
from rotor_profiling.stage.bytes import Freed, Made, WatchedInput, can_be_watched, run_to_release
from rotor_profiling.stage.gradients import (
    Layouts,
    Strides,
    enter_graph,
    gradients_at,
    gradients_for,
    leaves_of,
    scalar_after,
)
from rotor_profiling.stage.stage_context import Runner, StageContext
from rotor_profiling.storage import layout_of, local, storage_bytes, storages, tensors_in, wait_for
from rotor_profiling.torch_classes import is_fake


def run_unmeasured(runner: Runner, value: Any) -> None:
    """Run the stage once before measuring."""
    leaf = leaves_of(value)
    source = scalar_after(runner.forward(leaf))
    if source is not None:
        source.backward()
        wait_for(gradients_at(leaf))


def run_first(runner: Runner, value: Any, context: StageContext) -> tuple[Any, int]:
    """A run without a graph; returns what surrounded it, and the most bytes that it held beyond those before it."""
    with memory_meter(context.device) as meter, torch.no_grad():
        output, surroundings = runner.first(value)
    del output
    return surroundings, meter.phases[""].rise


def run_again(runner: Runner, value: Any, surroundings: Any, meter: MemoryMeter) -> Any:
    """Phase "again", without a graph; returns the output."""
    meter.mark("again")
    with torch.no_grad():
        output = runner.again(value, surroundings)
    meter.mark("between")
    return output


def made_by(output: Any, context: StageContext) -> Made:
    """The bytes of what a run without a graph has returned."""
    carried = storages(tensors_in(output)[position] for position in context.carried)
    activation = storage_bytes(tensors_in(output), [*context.owned, *carried])
    return Made(activation, sum(size for address, size in carried.items() if address not in context.owned))


def run_in_graph(
    runner: Runner, value: Any, parameters: list[torch.Tensor], context: StageContext, meter: MemoryMeter
) -> Freed | None:
    """Phases "forward", "end of forward", in which the output is let go of, and if there is a backward, "gradients" for
    the output and "backward", as in plain training.

    The meter is told to hold what a graph of its own would hand on at the end of its backward, and training's frees
    once it is used. Returns what the graph did not hold of twins of the input; None if it has none, or if gradients are
    of a kind that no meter can hold.
    """
    watched = _watched(value, context)
    entered = enter_graph(torch.empty(0, requires_grad=True), value if watched is None else watched.value)
    torch.clear_autocast_cache()  # else weights that an earlier run has cast would not count
    meter.mark("forward")
    output = runner.forward(entered)
    meter.mark("between")
    holding = _Holding(meter)
    source = scalar_after(output, context.silent, context.arriving, made=holding.begin_backward)
    del entered
    with_input = 0 if watched is None else watched.let_go()
    meter.mark("end of forward")
    if not context.output_held:
        output = None  # in training, only graphs hold it by then
    with_output = 0 if watched is None else watched.freed()
    meter.mark("between")
    if source is not None:
        one = torch.ones_like(source)
        with holding.gradients_of(parameters):
            meter.mark("gradients")
            source.backward(one)
        del one
    meter.mark("between")
    forget_if_fresh(parameters, context)
    return None if holding.unknown else _freed(watched, with_input, with_output, context)


class _Holding:
    """Has `meter` hold gradients of the output, and of parameters: these are freed where they are added to others, or
    where a parameter keeps a copy in its own layout.
    """

    def __init__(self, meter: MemoryMeter) -> None:
        self.unknown = False
        """whether there was a gradient that cannot be held"""
        self._meter = meter

    def begin_backward(self, gradients: Sequence[torch.Tensor]) -> None:
        """These have been made for the output: begin the phase "backward"."""
        for gradient in gradients:
            self._hold(gradient)
        self._meter.mark("backward")

    @contextmanager
    def gradients_of(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Hold what a backward in here brings to `parameters`."""
        hooks = [parameter.register_hook(self._hold) for parameter in parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hold(self, gradient: torch.Tensor) -> None:
        if gradient.layout is torch.strided and (type(gradient) is torch.Tensor or is_fake(gradient)):
            self._meter.hold(gradient)
        else:  # sparse ones, those of a table of embeddings, have several parts
            self.unknown = True


def run_with_own_graph(
    runner: Runner, value: Any, context: StageContext, meter: MemoryMeter, surroundings: Any
) -> tuple[tuple[int, ...], Freed | None]:
    """Phases "attach", "letting go" of the output and "replay", as when a stage is run again, and "gradient" for those
    that the replay is given.

    Returns the bytes behind the gradient of every tensor of the input, and what the graph did not hold of twins. If the
    input has none, the phases of `run_to_release` follow.
    """
    watched = _watched(value, context)
    given = value if watched is None else watched.value
    torch.clear_autocast_cache()  # as above
    meter.mark("attach")
    attached, output = runner.attach(given, surroundings)
    meter.mark("gradient")
    gradients = gradients_for(output, context.silent, context.arriving)
    del given
    with_input = 0 if watched is None else watched.let_go()
    meter.mark("letting go")
    del output  # `saved` counts the output, so the scratch of the replay is counted from when it was still there
    with_output = 0 if watched is None else watched.freed()
    meter.mark("replay")
    kept = attached.backward(gradients)
    wait_for([gradient for gradient in kept if gradient is not None])
    meter.mark("between")
    inputs = kept[: len(tensors_in(value))]
    sizes = tuple(0 if each is None else storage_bytes([each]) for each in inputs)
    del kept, inputs
    if watched is None:
        run_to_release(runner, value, _not_input(value, context), meter)
    return sizes, _freed(watched, with_input, with_output, context)


def _watched(value: Any, context: StageContext) -> WatchedInput | None:
    return WatchedInput(value, _not_input(value, context)) if can_be_watched(value) else None


def _freed(watched: WatchedInput | None, with_input: int, with_output: int, context: StageContext) -> Freed | None:
    if watched is None:
        return None
    # If the twins are not as large as the input in the chain, they are not comparable, and nothing is promised.
    return Freed(with_input if watched.nbytes == context.input_bytes else 0, with_output)


def _not_input(value: Any, context: StageContext) -> frozenset[int]:
    """The storages among what goes in that are no part of the input, as the chain counts it."""
    whole_input = storage_bytes(tensors_in(value)) == context.input_bytes
    return frozenset() if whole_input else frozenset(context.owned)


def run_to_save(runner: Runner, value: Any, surroundings: Any, meter: MemoryMeter) -> None:
    """Phase "attach" alone: what the stage saves in one way."""
    torch.clear_autocast_cache()  # as above
    meter.mark("attach")
    attached, output = runner.attach(value, surroundings)
    meter.mark("between")
    del attached, output


def forget_if_fresh(parameters: list[torch.Tensor], context: StageContext) -> None:
    """Let go of gradients where training makes them anew in every step."""
    if context.fresh_gradients:
        for parameter in parameters:
            parameter.grad = None


# The layouts of the gradients that a backward gives to what went in, found by running it once.
#
# Which layout that is depends on the operators, and on the layout of the gradient that they are given.


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
