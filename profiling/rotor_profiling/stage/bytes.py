"""The bytes of one stage: what it holds, and what it needs while it runs, in each way in which an executor runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from rotor_profiling.instruments import memory_meter
from rotor_profiling.memory import MemoryMeter, Phase
from rotor_profiling.stage.gradients import Layouts, gradients_at, gradients_for, leaves_of, scalar_after
from rotor_profiling.stage.runner import Runner
from rotor_profiling.stage.stepping import Stepped
from rotor_profiling.storage import storage_bytes, storages, tensors_in, wait_for
from rotor_profiling.timing import several_processes


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a chain a stage is.

    `input_bytes` is |a_i| as the chain counts it. `owned` are the addresses of storages that belong to the caller
    (parameters, the batch) and not to the stage. Unless `fresh_gradients`, parameters already have a gradient when the
    backward runs, as they do if gradients are kept between steps. `output_held` says that the caller keeps the output
    until the backward is done, which is so for the last stage. `carried` are the positions, among the output's tensors,
    of those that are kept beside the chain: they count neither as |a_{i+1}| nor as saved, only as in memory while the
    stage runs. `silent` are the positions of those that get no gradient although they could. `arriving` are the layouts
    of the gradients that the backward is given for the output's tensors. `stepped` says which parameters the backward
    steps.
    """

    device: torch.device
    input_bytes: int
    owned: Sequence[int] = ()
    fresh_gradients: bool = False
    output_held: bool = False
    carried: Sequence[int] = ()
    silent: Sequence[int] = ()
    arriving: Layouts = ()
    stepped: Stepped = ()


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Measured bytes of a stage, as in `StageCost`."""

    activation_bytes: int
    saved_bytes: int
    forward_temp_bytes: int
    nograd_temp_bytes: int
    backward_temp_bytes: int
    replay_temp_bytes: int
    input_released_bytes: int
    output_released_bytes: int
    gradient_storage_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _WithoutGraph:
    """What runs of a stage without a graph have shown: it is the same in every way to run it."""

    surroundings: Any
    activation_bytes: int
    carried_bytes: int
    """of what is carried, and was made in the stage"""
    temp_bytes: int


def measure_bytes(
    runners: Sequence[Runner], value: Any, parameters: list[torch.Tensor], place: Place
) -> tuple[StageBytes, ...]:
    """Measure what a stage holds and needs in each way, by running it; `parameters` are those it trains.

    The stage has to have run before: libraries choose their algorithms and allocate what they keep for good.
    """
    # On the CPU, the profiler misses a free if a thread of the backend is the last to let go of what was sent. So what
    # is found is never less than what it is, and the least of several is closest.
    times = 3 if place.device.type == "cpu" and several_processes() else 1
    rounds = [_measure_once(runners, value, parameters, place) for _ in range(times)]
    return tuple(_least(found) for found in zip(*rounds, strict=True))


def _least(found: Sequence[StageBytes]) -> StageBytes:
    """The least that a stage held and needed in several runs, and the most that it freed."""
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
    )


def _measure_once(
    runners: Sequence[Runner], value: Any, parameters: list[torch.Tensor], place: Place
) -> list[StageBytes]:
    found: list[StageBytes] = []
    without_graph = None
    for runner in runners:
        if not place.fresh_gradients:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        without_graph, way = _measure_way(runner, value, parameters, place, without_graph)
        found.append(way)
    return found


def _measure_way(
    runner: Runner, value: Any, parameters: list[torch.Tensor], place: Place, known: _WithoutGraph | None
) -> tuple[_WithoutGraph, StageBytes]:
    """The bytes of a stage in one way; `known` is what another one has shown without a graph."""
    _forget_if_fresh(parameters, place)
    with memory_meter(place.device) as meter:
        known = _run_without_graph(runner, value, place, meter) if known is None else known
        _run_in_graph(runner, value, place, meter)
        _forget_if_fresh(parameters, place)
        gradient_sizes = _run_with_own_graph(runner, value, known.surroundings, place, meter)
        _run_to_release(runner, value, place, meter)
    end = meter.phases["forward"].end
    phases = {"backward": Phase(end, end, end), **meter.phases}  # where nothing has a graph, there was none
    if "first" in phases:
        temp = max(phases["first"].rise, phases["again"].rise) - known.activation_bytes
        known = replace(known, temp_bytes=max(0, temp))
    gradient, activation = phases["gradient"].kept, known.activation_bytes
    input_released, output_released = _released_bytes(phases, place)
    # One number serves both ways to run a stage with a graph, in training's graph and in its own: the larger.
    saved = max(0, max(phases["forward"].kept, phases["attach"].kept) - known.carried_bytes)
    both = activation + place.input_bytes
    return known, StageBytes(
        activation_bytes=activation,
        saved_bytes=saved,
        forward_temp_bytes=max(phases["forward"].rise, phases["attach"].rise) - saved,
        nograd_temp_bytes=known.temp_bytes,
        # From the end of the forward on: an output that the stage's own backward does not need may be gone. What the
        # solver adds by itself is taken off: the gradients of output and input, as large as these are.
        backward_temp_bytes=max(-place.input_bytes, phases["backward"].peak - phases["forward"].end - both),
        replay_temp_bytes=max(-place.input_bytes, phases["replay"].rise + gradient - both),
        input_released_bytes=input_released,
        output_released_bytes=min(output_released, activation, saved),
        gradient_storage_bytes=gradient_sizes,
    )


def run_unmeasured(runner: Runner, value: Any) -> None:
    """Run the stage once before measuring."""
    leaf = leaves_of(value)
    source = scalar_after(runner.forward(leaf))
    if source is not None:
        source.backward()
        wait_for(gradients_at(leaf))


# In the runs below, a phase begins at each mark. What falls into "between" does not count: frees, and what measuring
# makes for itself.


def _run_without_graph(runner: Runner, value: Any, place: Place, meter: MemoryMeter) -> _WithoutGraph:
    """Phases "first" and "again"; what they took at most is known when the meter has ended."""
    meter.mark("first")
    with torch.no_grad():
        output, surroundings = runner.first(value)
    carried = storages(tensors_in(output)[position] for position in place.carried)
    activation = storage_bytes(tensors_in(output), [*place.owned, *carried])
    made_here = sum(size for address, size in carried.items() if address not in place.owned)
    meter.mark("between")
    del output
    meter.mark("again")
    with torch.no_grad():
        output = runner.again(value, surroundings)
    del output
    meter.mark("between")
    return _WithoutGraph(surroundings, activation, made_here, 0)


def _run_in_graph(runner: Runner, value: Any, place: Place, meter: MemoryMeter) -> None:
    """Phases "forward" and, if there is one, "backward", as in plain training."""
    leaf = leaves_of(value)
    torch.clear_autocast_cache()  # else weights that an earlier run has cast would not count
    meter.mark("forward")
    output = runner.forward(leaf)
    meter.mark("between")
    source = scalar_after(output, place.silent, place.arriving)
    if not place.output_held:
        output = None  # in training, only graphs hold it by then
    if source is not None:
        one = torch.ones_like(source)
        meter.mark("backward")
        source.backward(one)
        wait_for(gradients_at(leaf))
        del one
    meter.mark("between")


def _run_with_own_graph(
    runner: Runner, value: Any, surroundings: Any, place: Place, meter: MemoryMeter
) -> tuple[int, ...]:
    """Phases "attach" and "replay", as when a stage is run again, and "gradient" for those that the replay is given.

    Returns the bytes behind the gradient of every tensor of the input.
    """
    torch.clear_autocast_cache()  # as above
    meter.mark("attach")
    attached, output = runner.attach(value, surroundings)
    meter.mark("gradient")
    gradients = gradients_for(output, place.silent, place.arriving)
    meter.mark("replay")
    del output  # inside the phase: `saved` counts the output, so scratch is counted from when it was still there
    kept = attached.backward(gradients)
    wait_for([gradient for gradient in kept if gradient is not None])
    meter.mark("between")
    inputs = kept[: len(tensors_in(value))]
    return tuple(0 if each is None else storage_bytes([each]) for each in inputs)


def _run_to_release(runner: Runner, value: Any, place: Place, meter: MemoryMeter) -> None:
    """Phases "copy" of the input, "run", and "input" and "output", in which these are let go of."""
    leaf = leaves_of(value)
    whole_input = storage_bytes(tensors_in(value)) == place.input_bytes
    owned = frozenset() if whole_input else frozenset(place.owned)
    meter.mark("copy")
    # A copy, as if another layer had made it: the input itself has other holders, so nothing would ever be freed.
    copy = tree_map_only(torch.Tensor, partial(_copied, owned), leaf)
    meter.mark("run")
    output = runner.forward(copy)
    source = scalar_after(output)
    meter.mark("input")
    del copy
    meter.mark("output")
    del output
    meter.mark("between")
    del source


def _released_bytes(phases: Mapping[str, Phase], place: Place) -> tuple[int, int]:
    """Bytes of the input, and of the output, that a run with a graph does not hold on to."""
    # If the copy is not as large as the input in the chain, they are not comparable, and nothing is promised.
    whole = phases["copy"].kept == place.input_bytes
    return max(0, -phases["input"].kept) if whole else 0, max(0, -phases["output"].kept)


def _copied(owned: frozenset[int], tensor: torch.Tensor) -> torch.Tensor:
    return tensor if owned.issuperset(storages([tensor])) else tensor.clone()


def _forget_if_fresh(parameters: list[torch.Tensor], place: Place) -> None:
    """Let go of gradients where training makes them anew in every step."""
    if place.fresh_gradients:
        for parameter in parameters:
            parameter.grad = None
