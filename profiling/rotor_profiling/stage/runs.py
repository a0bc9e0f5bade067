"""Run a stage as an executor does, in phases that show its bytes.

A phase begins at each mark. The phase "between" does not count: frees, and allocations of measuring itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from rotor_profiling.backends import memory_meter
from rotor_profiling.isolate import RandomState, isolated
from rotor_profiling.memory import MemoryMeter
from rotor_profiling.stage.gradients import (
    Layouts,
    Strides,
    enter_graph,
    gradients_for,
    leaves_of,
    scalar_after,
)
from rotor_profiling.stage.stage_context import Runner, StageContext
from rotor_profiling.storage import allocated, layout_of, local, storage_bytes, storages, tensors_in, wait_for
from rotor_profiling.timing import Stopwatch
from rotor_profiling.torch_compat import tree_map_only

# Input and output bytes that a run with a graph frees.
#
# Most inputs can be observed directly (`WatchedInput`). Tensor subclasses and fake tensors cannot: the run releases a
# copy of them instead.


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SHARED = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
})  # fmt: skip
"""Dtypes that every torch release exchanges with itself by DLPack."""


class WatchedInput:
    """`value` with aliases of its tensors over the same memory, each with a storage of its own.

    The tensors themselves have other holders while their stage is measured, which hide whether a graph holds them. A
    copy would take as much memory again. Tensors with `owned` storages are no part of the input, and are not aliased.
    """

    def __init__(self, value: Any, owned: frozenset[int]) -> None:
        self.nbytes = 0
        """bytes of all aliases, as if each was allocated"""
        self._watched: list[tuple[StorageWeakRef, int]] = []
        self.value: Any = tree_map_only(torch.Tensor, lambda each: self._twin(each, owned), value)

    def let_go(self) -> int:
        """Release the aliases; return the bytes that nothing else holds."""
        self.value = None
        return self.freed()

    def freed(self) -> int:
        """Return the bytes of aliases freed since the last call."""
        gone = [(storage, size) for storage, size in self._watched if storage.expired()]
        self._watched = [each for each in self._watched if each not in gone]
        return sum(size for _, size in gone)

    def _twin(self, tensor: torch.Tensor, owned: frozenset[int]) -> torch.Tensor:
        if owned.issuperset(storages([tensor])):
            return tensor
        twin = from_dlpack(tensor.detach())
        if twin.stride() != tensor.stride():  # some releases write stride 1 for sides of length one
            twin = twin.as_strided(tensor.shape, tensor.stride())
        size = allocated(tensor.numel() * tensor.element_size(), tensor.device.type)
        self.nbytes += size
        self._watched.append((StorageWeakRef(twin.untyped_storage()), size))
        return twin.requires_grad_(tensor.requires_grad)


def can_be_watched(value: Any) -> bool:
    """Whether all tensors of `value` are plain memory, which can be aliased."""
    return all(
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and tensor.dtype in _SHARED
        and not (tensor.is_conj() or tensor.is_neg())
        for tensor in tensors_in(value)
    )


def run_first(runner: Runner, value: Any, context: StageContext) -> tuple[Any, int]:
    """Run without a graph; return the recorded state, and the most bytes above the start."""
    with memory_meter(context.device) as meter, torch.no_grad():
        output, surroundings = runner.first(value)
    del output
    return surroundings, meter.phases[""].rise


def run_in_graph(
    runner: Runner,
    value: Any,
    parameters: list[torch.Tensor],
    context: StageContext,
    meter: MemoryMeter,
    watch: Stopwatch | None,
) -> tuple[float, float]:
    """Run as in plain training; return the seconds of forward and backward, zero without a watch.

    Phases: "forward"; and if there is a backward, "gradients" of the output and "backward".
    """
    entered = enter_graph(torch.empty(0, requires_grad=True), value)
    torch.clear_autocast_cache()  # else weights cast by an earlier run would not count

    def begin_backward(_: list[torch.Tensor]) -> None:
        meter.mark("backward")
        if watch is not None:
            watch.lap()

    meter.mark("forward")
    if watch is not None:
        watch.start()
    output = runner.forward(entered)
    if watch is not None:
        watch.lap()
    meter.mark("between")
    source = scalar_after(output, context.silent, context.arriving, made=begin_backward)
    del entered
    if not context.output_held:
        output = None  # in training, only graphs hold it by then
    if source is not None:
        one = torch.ones_like(source)
        meter.mark("gradients")
        source.backward(one)
        if watch is not None:
            watch.lap()
        del one
    meter.mark("between")
    forget_if_fresh(parameters, context)
    # The second lap makes the gradients of the output.
    seconds = [0.0] if watch is None else watch.stop()
    return seconds[0], seconds[2] if len(seconds) > 1 else 0.0


def run_with_own_graph(
    runner: Runner, value: Any, context: StageContext, meter: MemoryMeter, surroundings: Any
) -> tuple[tuple[int, ...], tuple[int, int] | None]:
    """Run with a graph of its own, as in a recomputation; return bytes of the input's gradients, and those freed.

    Phases: "attach"; "gradient", which makes the output's; "letting go" of the output; and "replay". The gradients'
    bytes are those of their storages. Freed: bytes of aliases of the input, and of the input with the output, once only
    the graph holds them. If the input cannot be aliased: None, and the phases of `_run_to_release` follow.
    """
    # Storages in `value` that the chain does not count as input.
    owned = frozenset(() if storage_bytes(tensors_in(value)) == context.input_bytes else context.owned)
    watched = WatchedInput(value, owned) if can_be_watched(value) else None
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
        _run_to_release(runner, value, owned, meter)
        return sizes, None
    # Aliases of another size than the chain's input are not comparable, so nothing is promised.
    return sizes, (with_input if watched.nbytes == context.input_bytes else 0, with_output)


def _run_to_release(runner: Runner, value: Any, owned: frozenset[int], meter: MemoryMeter) -> None:
    """Run phases "copy" of the input, "run", and "input" and "output", in which these are released.

    Tensors with `owned` storages are not copied.
    """
    leaf = leaves_of(value)
    meter.mark("copy")
    # A copy, as if another layer had made it: the input itself has other holders and would never be freed.
    copy = tree_map_only(torch.Tensor, lambda each: each if owned.issuperset(storages([each])) else each.clone(), leaf)
    meter.mark("run")
    output = runner.forward(copy)
    source = scalar_after(output)
    meter.mark("input")
    del copy
    meter.mark("output")
    del output
    meter.mark("between")
    del source


def forget_if_fresh(parameters: list[torch.Tensor], context: StageContext) -> None:
    """Drop gradients if training makes them anew in every step."""
    if context.fresh_gradients:
        for parameter in parameters:
            parameter.grad = None


# Layouts of the gradients that a backward gives to its inputs, found by running it once. They depend on the operators
# and on the layouts of the arriving gradients.


def stage_layouts(
    runner: Runner,
    value: Any,
    device: torch.device,
    *,
    silent: Sequence[int] = (),
    arriving: Layouts = (),
    before_backward: Callable[[Any, Any, Sequence[torch.Tensor]], None] | None = None,
    watch: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] | None = None,
) -> tuple[Layouts, Any]:
    """Return the gradient layouts that a stage's backward gives to its input `value`, and the output.

    The output is detached, with its `requires_grad`. Nothing of the model changes.

    Args:
        runner: Runs the stage.
        value: Its input.
        device: Its device.
        silent: Indices of outputs without gradient.
        arriving: Layouts of the gradients of the outputs.
        before_backward: Called before the backward with the input, the output in the graph, and the parameters.
        watch: Wraps the forward to observe it, with the same result.
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
