"""The runs of a stage that show its bytes: one for each way in which an executor runs it, phase by phase.

A phase begins at each mark. What falls into "between" does not count: frees, and what measuring makes for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rotor_profiling.memory import MemoryMeter
from rotor_profiling.stage.gradients import gradients_at, gradients_for, leaves_of, scalar_after
from rotor_profiling.stage.place import Place
from rotor_profiling.stage.released import WatchedInput, can_be_watched, run_to_release
from rotor_profiling.stage.runner import Runner
from rotor_profiling.storage import storage_bytes, storages, tensors_in, wait_for


@dataclass(frozen=True, slots=True)
class WithoutGraph:
    """What runs of a stage without a graph have shown: it is the same in every way to run it."""

    surroundings: Any
    activation_bytes: int
    carried_bytes: int
    """of what is carried, and was made in the stage"""


class Freed(NamedTuple):
    """Bytes of a watched input that nothing holds once it has been let go of, and once the output has."""

    input: int
    output: int


def run_unmeasured(runner: Runner, value: Any) -> None:
    """Run the stage once before measuring."""
    leaf = leaves_of(value)
    source = scalar_after(runner.forward(leaf))
    if source is not None:
        source.backward()
        wait_for(gradients_at(leaf))


def run_first(runner: Runner, value: Any, place: Place, meter: MemoryMeter) -> WithoutGraph:
    """Phase "first", without a graph; what it took at most is known when the meter has ended."""
    meter.mark("first")
    with torch.no_grad():
        output, surroundings = runner.first(value)
    meter.mark("between")
    carried = storages(tensors_in(output)[position] for position in place.carried)
    activation = storage_bytes(tensors_in(output), [*place.owned, *carried])
    made_here = sum(size for address, size in carried.items() if address not in place.owned)
    return WithoutGraph(surroundings, activation, made_here)


def run_again(runner: Runner, value: Any, surroundings: Any, meter: MemoryMeter) -> Any:
    """Phase "again", without a graph; returns the output."""
    meter.mark("again")
    with torch.no_grad():
        output = runner.again(value, surroundings)
    meter.mark("between")
    return output


def run_in_graph(runner: Runner, value: Any, parameters: list[torch.Tensor], place: Place, meter: MemoryMeter) -> None:
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
    forget_if_fresh(parameters, place)


def _run_with_own_graph(
    runner: Runner, value: Any, watched: WatchedInput | None, surroundings: Any, place: Place, meter: MemoryMeter
) -> tuple[tuple[int, ...], Freed]:
    """Phases "attach", "letting go" of the output and "replay", as when a stage is run again, and "gradient" for those
    that the replay is given.

    Returns the bytes behind the gradient of every tensor of the input, and what the graph did not hold of `watched`.
    """
    given = value if watched is None else watched.value
    torch.clear_autocast_cache()  # as above
    meter.mark("attach")
    attached, output = runner.attach(given, surroundings)
    meter.mark("gradient")
    gradients = gradients_for(output, place.silent, place.arriving)
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
    return sizes, Freed(with_input, with_output)


def _watched(value: Any, place: Place) -> WatchedInput | None:
    return WatchedInput(value, _not_input(value, place)) if can_be_watched(value) else None


def _not_input(value: Any, place: Place) -> frozenset[int]:
    """The storages among what goes in that are no part of the input, as the chain counts it."""
    whole_input = storage_bytes(tensors_in(value)) == place.input_bytes
    return frozenset() if whole_input else frozenset(place.owned)


def run_with_own_graph(
    runner: Runner, value: Any, place: Place, meter: MemoryMeter, known: WithoutGraph
) -> tuple[WatchedInput | None, tuple[int, ...], Freed]:
    """Run a stage in one way with a graph of its own, after what is `known` without one."""
    watched = _watched(value, place)
    gradient_sizes, freed = _run_with_own_graph(runner, value, watched, known.surroundings, place, meter)
    if watched is None:
        run_to_release(runner, value, _not_input(value, place), meter)
    return watched, gradient_sizes, freed


def run_to_save(runner: Runner, value: Any, known: WithoutGraph, meter: MemoryMeter) -> None:
    """Phase "attach" alone: what the stage saves in one way."""
    torch.clear_autocast_cache()  # as above
    meter.mark("attach")
    attached, output = runner.attach(value, known.surroundings)
    meter.mark("between")
    del attached, output


def forget_if_fresh(parameters: list[torch.Tensor], place: Place) -> None:
    """Let go of gradients where training makes them anew in every step."""
    if place.fresh_gradients:
        for parameter in parameters:
            parameter.grad = None
