"""Measure the bytes of one stage in every storage mode, by running it exactly as in training.

Each `meter.mark` begins a phase. Phases named "between" are ignored: they have allocations that training does not make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from rotor_profiling.attributes import leaves_tensors, left_tensors
from rotor_profiling.backends import memory_meter
from rotor_profiling.isolate import RandomState, isolated, undoing
from rotor_profiling.memory import MemoryMeter, Phase
from rotor_profiling.stage.gradients import (
    Layouts,
    Runner,
    StageContext,
    Stepped,
    Strides,
    added_up,
    enter_graph,
    gradients_for,
    hooked,
    leaves_of,
    scalar_after,
)
from rotor_profiling.stage.seconds import StageRun, StageSeconds
from rotor_profiling.storage import (
    allocated,
    bytes_like,
    layout_of,
    local,
    storage_bytes,
    storages,
    tensors_in,
    wait_for,
)
from rotor_profiling.timing import Stopwatch, several_processes
from rotor_profiling.torch_compat import storage_use_count

# Share of a faster mode's bytes by which a slower mode must keep fewer to be planned with, as times are uncertain
LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class StageBytes:
    activation_bytes: int = 0
    saved_bytes: int = 0
    forward_temp_bytes: int = 0
    nograd_temp_bytes: int = 0
    backward_temp_bytes: int = 0
    replay_temp_bytes: int = 0
    input_released_bytes: int = 0
    output_released_bytes: int = 0
    # For each input tensor, the bytes of its gradient's storage; if the gradient is a view, these exceed its own bytes
    gradient_storage_bytes: tuple[int, ...] = ()
    # Indices of parameters whose gradients are views, as in linear layers: autograd cannot add to these in place
    view_gradients: tuple[int, ...] = ()
    droppable_bytes: int = 0  # Bytes freed if the caller drops the silent outputs (`StageContext`) before the backward
    held_backward_bytes: int = 0  # Bytes by which the backward's peak grows if the caller holds the silent outputs
    # Bytes of tensors that a forward leaves in attributes, where they stay after the backward. `saved_bytes` includes
    # only those that share a storage with the output.
    left_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost(StageBytes):
    """Measured seconds and bytes of a stage, named as in `rotor_solver.Option` and `rotor_solver.Stage`."""

    forward_seconds: float
    nograd_seconds: float
    backward_seconds: float
    # Seconds by which a recomputation that does not compute the output is shorter than a forward in training's graph
    skipped_output_seconds: float = 0.0

    @classmethod
    def of(cls, nbytes: StageBytes, seconds: StageSeconds) -> StageCost:
        return cls(**asdict(nbytes), **asdict(seconds))


def clearly_less(saved: int, than: int) -> bool:
    """Return whether `saved` bytes of a mode are fewer than those of a faster one, `than`, by `LEAST_SHARE` or more."""
    return saved <= (1 - LEAST_SHARE) * than and saved < than


def measure_ways(
    runners: Sequence[Runner], value: Any, context: StageContext, watch: Stopwatch | None = None
) -> tuple[tuple[StageBytes, ...], StageRun | None, Any]:
    """Measure the bytes of one stage in the storage mode of each runner, without changing the model.

    Returns the bytes for each runner, the seconds of the same runs, which metering hardly slows, and the output of a
    run without a graph. Seconds are None without a `watch`. The first runner must store the whole stage. The stage must
    have run before: in its first run, libraries choose algorithms and allocate memory that stays. Raises ValueError for
    a device type that cannot be measured.
    """
    # With several processes, the CPU's profiler may miss frees (Rule 5 of `step.py`). So take the least of three runs.
    repeats = 3 if several_processes() and context.device.type == "cpu" else 1
    with isolated(runners[0].function, context.device) as parameters, torch.enable_grad():
        with added_up(parameters, fresh=context.fresh_gradients), _stand_in_steps(parameters, context.stepped):
            rounds = []
            for _ in range(repeats):
                output = None  # free that of the round before
                found, run, output = _measure_once(runners, value, parameters, context, watch)
                rounds.append(found)
        # Bytes in memory when the optimizer steps the first parameter of a recomputed stage, besides the gradient of
        # its input: those of the step, and the gradients of all parameters, which the stage's node returns together.
        steps = [nbytes for nbytes in context.stepped if nbytes is not None]
        after_replay = bytes_like(parameters) + max(steps) if steps else 0
    ways = tuple(map(_least, zip(*rounds, strict=True)))
    # Less activation and saved bytes, which the solver adds to the temporary bytes: both are freed before this step.
    needs = [max(each.replay_temp_bytes, after_replay - each.activation_bytes - each.saved_bytes) for each in ways]
    if after_replay:
        ways = tuple(replace(way, replay_temp_bytes=need) for way, need in zip(ways, needs, strict=True))
    return ways, run, output


def _measure_once(
    runners: Sequence[Runner],
    value: Any,
    parameters: list[torch.Tensor],
    context: StageContext,
    watch: Stopwatch | None,
) -> tuple[tuple[StageBytes, ...], StageRun | None, Any]:
    with memory_meter(context.device) as meter, torch.no_grad():
        output, surroundings = runners[0].first(value)
    rise = meter.phases[""].rise
    tensors = tensors_in(output)
    given, made = {*context.owned, *storages(tensors_in(value))}, storages(tensors)
    left = {at: size for at, size in storages(left_tensors(runners[0].function)).items() if at not in given}
    saved_left = sum(size for at, size in left.items() if at not in made)
    carried = storages(tensors[position] for position in context.carried)
    silent = storages(tensors[position] for position in context.silent)
    activation = storage_bytes(tensors, [*context.owned, *carried, *silent])
    carried_bytes = sum(size for address, size in carried.items() if address not in context.owned)
    counted = {*context.owned, *carried, *storages(tensors_in(value))}
    silent_bytes = sum(size for address, size in silent.items() if address not in counted)
    del output, tensors
    seconds, shown = [], []
    for runner in runners:
        runner.make_ready()
        _forget(parameters)
        with memory_meter(context.device) as meter:
            seconds.append(_run_in_graph(runner, value, parameters, context, meter, watch))
            found = _run_with_own_graph(runner, value, context, meter, surroundings)
        dropped = -meter.phases["dropping"].kept if "dropping" in meter.phases else 0
        held = dropped  # which a caller holds during the backward, if the graph keeps no silent output
        if "dropping" in meter.phases and (dropped < silent_bytes or "backward" not in meter.phases):
            with memory_meter(context.device) as other:
                _run_in_graph(runner, value, parameters, replace(context, silent_held=True), other, None)
            held = max(0, _backward_peak(other.phases) - _backward_peak(meter.phases))
        shown.append((meter.phases, replace(found, held_backward_bytes=held)))
    # Recompute last, so that the output of this run is not in memory while the modes are measured.
    with memory_meter(context.device) as meter:
        meter.mark("again")
        with torch.no_grad():
            output = runners[0].again(value, surroundings)
        meter.mark("between")
    # A node runs a stage that leaves tensors in attributes with a graph, to see which of them need a gradient.
    shown_rise = shown[0][0]["forward"].rise if leaves_tensors(runners[0].function) else 0
    nograd_temp = max(0, max(rise, shown_rise, meter.phases["again"].rise) - activation)
    apart = carried_bytes + saved_left
    ways = []
    for phases, found in shown:
        known = replace(
            found, activation_bytes=activation, nograd_temp_bytes=nograd_temp, left_bytes=sum(left.values())
        )
        ways.append(_bytes_of(phases, known, apart, silent_bytes, context))
    return tuple(ways), None if watch is None else StageRun(tuple(seconds)), output


def _backward_peak(phases: Mapping[str, Phase]) -> int:
    return max((phases[name].peak for name in ("gradients", "backward") if name in phases), default=0)


def _bytes_of(
    phases: Mapping[str, Phase], known: StageBytes, apart: int, silent_bytes: int, context: StageContext
) -> StageBytes:
    """Complete `known` by bytes that suffice for both runs of a mode: in the graph of a whole step, and in its own."""
    forward, attach, release = phases["forward"], phases["attach"], phases["release output"]
    # Peaks count from the bytes at the end of the forward, although the output may be freed before the backward.
    training = _backward_peak(phases) or forward.end
    own = max(release.peak, phases["replay"].peak) - release.start + phases["gradient"].kept
    # Silent outputs count as saved only if the graph keeps them.
    dropped = min(silent_bytes, max(0, -phases["dropping"].kept)) if "dropping" in phases else silent_bytes
    saved = max(0, max(forward.kept, attach.kept) - apart - dropped)
    # Bytes of the gradients of the output and of the input, which the solver adds to the temporary bytes below.
    both = known.activation_bytes + context.input_bytes
    freed = max(0, known.output_released_bytes - release.kept)
    return replace(
        known,
        saved_bytes=saved,
        forward_temp_bytes=max(forward.rise, attach.rise) - saved,
        backward_temp_bytes=max(-context.input_bytes, training - forward.end + dropped - both),
        replay_temp_bytes=max(-context.input_bytes, own + dropped - both),
        output_released_bytes=min(freed, known.activation_bytes, saved),
        droppable_bytes=dropped,
    )


def _least(found: Sequence[StageBytes]) -> StageBytes:
    saved = min(each.saved_bytes for each in found)
    return replace(
        found[0],
        saved_bytes=saved,
        forward_temp_bytes=min(each.saved_bytes + each.forward_temp_bytes for each in found) - saved,
        nograd_temp_bytes=min(each.nograd_temp_bytes for each in found),
        backward_temp_bytes=min(each.backward_temp_bytes for each in found),
        replay_temp_bytes=min(each.replay_temp_bytes for each in found),
        input_released_bytes=max(each.input_released_bytes for each in found),
        output_released_bytes=min(saved, max(each.output_released_bytes for each in found)),
        droppable_bytes=max(each.droppable_bytes for each in found),
        held_backward_bytes=min(each.held_backward_bytes for each in found),
    )


def _run_in_graph(
    runner: Runner,
    value: Any,
    parameters: list[torch.Tensor],
    context: StageContext,
    meter: MemoryMeter,
    watch: Stopwatch | None,
) -> tuple[float, float]:
    """Run the stage as in plain training; return the seconds of its forward and of its backward; 0.0 without a `watch`.

    Phases: "forward", "dropping" (of silent outputs, if any), "gradients" (of the output) and "backward"; the last two
    are missing if no output requires a gradient.
    """
    entered = enter_graph(torch.empty(0, requires_grad=True), value)
    torch.clear_autocast_cache()  # else weights that an earlier run has cast would not count
    before = left_tensors(runner.function)  # kept alive, so that the forward frees none when it replaces them

    lap: Callable[[], None] = (lambda: None) if watch is None else watch.lap

    def begin_backward(_: list[torch.Tensor]) -> None:
        meter.mark("backward")
        lap()

    meter.mark("forward")
    if watch is not None:
        watch.start()
    output = runner.forward(entered)
    lap()
    meter.mark("between")
    del before
    source = scalar_after(output, context.silent, context.arriving, made=begin_backward)
    del entered
    if not context.output_held:
        output = None  # in training, only autograd graphs refer to the output during the backward
    elif not (context.silent_held or {*context.carried}.issuperset(context.silent)):
        meter.mark("dropping")
        output = [tensor for position, tensor in enumerate(tensors_in(output)) if position not in context.silent]
        meter.mark("between")
    if source is not None:
        one = torch.ones_like(source)
        meter.mark("gradients")
        source.backward(one)
        lap()
        del one
    meter.mark("between")
    _forget(parameters)
    seconds = [0.0] if watch is None else watch.stop()
    return seconds[0], seconds[2] if len(seconds) > 1 else 0.0


def _run_with_own_graph(
    runner: Runner, value: Any, context: StageContext, meter: MemoryMeter, surroundings: Any
) -> StageBytes:
    """Run with a graph of its own, as in a recomputation. Phases: "attach", "gradient", "release output", "replay".

    Returns what is not seen in the phases: facts about gradients, and the bytes of input tensors to which neither graph
    nor output refers (`input_released_bytes`), or only the output (`output_released_bytes`).
    """
    # Addresses of storages in `value` that `context.input_bytes` excludes, such as those of carried tensors.
    owned = frozenset(() if storage_bytes(tensors_in(value)) == context.input_bytes else context.owned)
    tensors = [local(each) for each in tensors_in(value) if not owned.issuperset(storages([each]))]
    sizes = [allocated(each.numel() * each.element_size(), each.device.type) for each in tensors]
    before = _uses(tensors)
    given = leaves_of(value)
    torch.clear_autocast_cache()  # as in `_run_in_graph`
    meter.mark("attach")
    attached, output = runner.attach(given, surroundings)
    meter.mark("gradient")
    gradients = gradients_for(output, context.silent, context.arriving)
    del given
    with_output = _uses(tensors)
    meter.mark("release output")
    del output
    without_output = _uses(tensors)
    meter.mark("replay")
    kept = attached.backward(gradients)
    wait_for([gradient for gradient in kept if gradient is not None])
    meter.mark("between")
    number = len(tensors_in(value))
    gradient_bytes = tuple(0 if each is None else storage_bytes([each]) for each in kept[:number])
    views = tuple(i for i, each in enumerate(kept[number:]) if each is not None and each._is_view())
    input_freed = output_freed = 0
    for size, alone, first, second in zip(sizes, before, with_output, without_output, strict=True):
        if first == alone:
            input_freed += size
        elif second == alone:
            output_freed += size
    return StageBytes(
        # Report no bytes as freed if inputs are views of larger storages: their sizes then differ from `input_bytes`.
        input_released_bytes=input_freed if sum(sizes) == context.input_bytes else 0,
        output_released_bytes=output_freed,
        gradient_storage_bytes=gradient_bytes,
        view_gradients=views,
    )


def _uses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [storage_use_count(tensor.untyped_storage()._cdata) for tensor in tensors]


def _forget(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _stand_in_steps(parameters: Sequence[torch.Tensor], stepped: Stepped) -> AbstractContextManager[None]:
    """Imitate optimizer steps: once a gradient is complete, allocate and free a step's bytes; free the gradient."""
    pairs = zip(parameters, stepped or [None] * len(parameters), strict=True)
    return hooked([(each, partial(_stand_in, nbytes)) for each, nbytes in pairs if nbytes is not None])


def _stand_in(nbytes: int, parameter: torch.Tensor) -> None:
    torch.empty(nbytes, dtype=torch.uint8, device=parameter.device)
    parameter.grad = None


def stage_layouts(
    runner: Runner,
    value: Any,
    device: torch.device,
    *,
    forward: Callable[[Any], Any] | None = None,
    silent: Sequence[int] = (),
    arriving: Layouts = (),
    before_backward: Callable[[Any, Any, Sequence[torch.Tensor]], None] = lambda *_: None,
) -> tuple[Layouts, Any]:
    """Return the strides of the gradients that a stage's backward returns for its input `value`, and its output.

    The returned output is detached, but keeps `requires_grad`. The model does not change. `forward` replaces that of
    the runner. Between forward and backward, calls `before_backward` with input, output (in the graph) and parameters.
    """
    with isolated(runner.function, device) as parameters, torch.enable_grad():
        leaf = leaves_of(value)
        output = (forward or runner.forward)(leaf)
        before_backward(leaf, output, parameters)
        made, outputs = leaves_of(output), tensors_in(output)
        gradients = gradients_for(outputs, silent, arriving)
        given = [(y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None]
        del output, outputs, gradients
        return _layouts_at(leaf, [y for y, _ in given], [g for _, g in given]), made


def loss_layouts(loss: Callable[[Any], torch.Tensor], output: Any, device: torch.device) -> Layouts:
    """Return the strides of the gradients that the backward of `loss` returns for the tensors of `output`."""
    with undoing() as undo, torch.enable_grad():
        undo.append(RandomState.now((device,)).restore)
        leaf = leaves_of(output)
        return _layouts_at(leaf, [loss(leaf)], [None])


def _layouts_at(leaf: Any, outputs: list[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> Layouts:
    tensors = tensors_in(leaf)
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    if not outputs or not trained:  # torch.autograd.grad raises for an empty list of either
        return (None,) * len(tensors)
    # Do not call `backward`, which copies a leaf's gradient into the layout of the leaf.
    found = iter(torch.autograd.grad(outputs, trained, gradients, allow_unused=True))
    made = [next(found) if tensor.requires_grad else None for tensor in tensors]
    # PyTorch holds the memory of a collective until code waits for its result, as no other code does here.
    wait_for([gradient for gradient in made if gradient is not None])
    return tuple(map(_strides, tensors, made))


def _strides(tensor: torch.Tensor, gradient: torch.Tensor | None) -> Strides | None:
    # The local part of a gradient that is distributed unlike its tensor has another shape and other strides.
    if gradient is None or layout_of(gradient) != layout_of(tensor):
        return None
    return local(gradient).stride()
