"""Run a stage as an executor does, in phases that show its bytes.

A phase begins at each mark. The phase "between" does not count: frees, and allocations of measuring itself.
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
    """Warm up the stage before measuring."""
    leaf = leaves_of(value)
    source = scalar_after(runner.forward(leaf))
    if source is not None:
        source.backward()
        wait_for(gradients_at(leaf))


def run_first(runner: Runner, value: Any, context: StageContext) -> tuple[Any, int]:
    """Run without a graph; return the recorded state, and the most bytes above the start."""
    with memory_meter(context.device) as meter, torch.no_grad():
        output, surroundings = runner.first(value)
    del output
    return surroundings, meter.phases[""].rise


def run_again(runner: Runner, value: Any, surroundings: Any, meter: MemoryMeter) -> Any:
    """Run phase "again", without a graph; return the output."""
    meter.mark("again")
    with torch.no_grad():
        output = runner.again(value, surroundings)
    meter.mark("between")
    return output


def made_by(output: Any, context: StageContext) -> Made:
    """Return the bytes of the output of a run without a graph."""
    carried = storages(tensors_in(output)[position] for position in context.carried)
    activation = storage_bytes(tensors_in(output), [*context.owned, *carried])
    return Made(activation, sum(size for address, size in carried.items() if address not in context.owned))


def run_in_graph(
    runner: Runner, value: Any, parameters: list[torch.Tensor], context: StageContext, meter: MemoryMeter
) -> Freed | None:
    """Run as in plain training, in up to four phases; return the bytes of the input and output that the graph freed.

    Phases: "forward"; "end of forward", which releases the output; and if there is a backward, "gradients" of the
    output and "backward". The meter is told to hold the gradients that a graph of its own would keep to the end of its
    backward, and training's frees after use. Returns None if the input cannot be aliased, or a gradient cannot be held.
    """
    watched = _watched(value, context)
    entered = enter_graph(torch.empty(0, requires_grad=True), value if watched is None else watched.value)
    torch.clear_autocast_cache()  # else weights cast by an earlier run would not count
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
    """Make `meter` hold gradients of the output and of parameters.

    They are freed when added to others, or when a parameter keeps a copy in its own layout.
    """

    def __init__(self, meter: MemoryMeter) -> None:
        self.unknown = False
        """whether a gradient could not be held"""
        self._meter = meter

    def begin_backward(self, gradients: Sequence[torch.Tensor]) -> None:
        """Hold the output's gradients, and begin the phase "backward"."""
        for gradient in gradients:
            self._hold(gradient)
        self._meter.mark("backward")

    @contextmanager
    def gradients_of(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Hold the gradients that a backward inside brings to `parameters`."""
        hooks = [parameter.register_hook(self._hold) for parameter in parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hold(self, gradient: torch.Tensor) -> None:
        if gradient.layout is torch.strided and (type(gradient) is torch.Tensor or is_fake(gradient)):
            self._meter.hold(gradient)
        else:  # sparse gradients, those of embedding tables, have several parts
            self.unknown = True


def run_with_own_graph(
    runner: Runner, value: Any, context: StageContext, meter: MemoryMeter, surroundings: Any
) -> tuple[tuple[int, ...], Freed | None]:
    """Run with a graph of its own, as in a recomputation; return bytes of the input's gradients, and the freed bytes.

    Phases: "attach"; "gradient", which makes the output's; "letting go" of the output; and "replay". The gradients'
    bytes are those of their storages. If the input cannot be aliased, the phases of `run_to_release` follow.
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
    del output  # `saved` counts the output, so the replay's temporary bytes count from when it was still held
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
    # Aliases of another size than the chain's input are not comparable, so nothing is promised.
    return Freed(with_input if watched.nbytes == context.input_bytes else 0, with_output)


def _not_input(value: Any, context: StageContext) -> frozenset[int]:
    """Return the storages in `value` that the chain does not count as input."""
    whole_input = storage_bytes(tensors_in(value)) == context.input_bytes
    return frozenset() if whole_input else frozenset(context.owned)


def run_to_save(runner: Runner, value: Any, surroundings: Any, meter: MemoryMeter) -> None:
    """Run phase "attach" alone, to show the saved bytes of one mode."""
    torch.clear_autocast_cache()  # as above
    meter.mark("attach")
    attached, output = runner.attach(value, surroundings)
    meter.mark("between")
    del attached, output


def forget_if_fresh(parameters: list[torch.Tensor], context: StageContext) -> None:
    """Drop gradients if training makes them anew in every step."""
    if context.fresh_gradients:
        for parameter in parameters:
            parameter.grad = None


# Layouts of the gradients that a backward gives to its inputs, found by running it once. They depend on the operators
# and on the layouts of the arriving gradients.


BeforeBackward = Callable[[Any, Any, Sequence[torch.Tensor]], None]
"""Called with the input of a stage, its output in the graph, and the parameters that it trains."""


Watch = Callable[[Callable[[Any], Any]], Callable[[Any], Any]]
"""Wraps a run of a stage to observe it, with the same result."""


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
    """Return the gradient layouts that a stage's backward gives to its input `value`, and the output.

    The output is detached, with its `requires_grad`. Nothing of the model changes.

    Args:
        runner: Runs the stage.
        value: Its input.
        device: Its device.
        silent: Indices of outputs without gradient.
        arriving: Layouts of the gradients of the outputs.
        before_backward: Called before the backward.
        watch: Wraps the forward.
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
    """Return the gradient layouts that the backward of `loss` gives to the tensors of `output`."""
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
    # Not `backward`: a leaf that keeps its gradient copies it into its own layout.
    found = iter(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True))
    made = [next(found) if tensor.requires_grad else None for tensor in tensors]
    wait_for([gradient for gradient in made if gradient is not None])  # no one else waits: see `gradients_at`
    return tuple(map(_strides, tensors, made))


def _strides(tensor: torch.Tensor, gradient: torch.Tensor | None) -> Strides | None:
    # If distributed unlike the tensor, its local part has another shape and strides.
    if gradient is None or layout_of(gradient) != layout_of(tensor):
        return None
    return local(gradient).stride()
