"""What one stage costs: its times and bytes, measured by running it the very ways in which it is run in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from rotor_profiling.isolate import isolated
from rotor_profiling.memory import Phase, memory_meter
from rotor_profiling.storage import storage_bytes, storages, tensors_in
from rotor_profiling.timing import lap_seconds


class Attached(Protocol):
    """A stage that was run again with a graph of its own."""

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]: ...


class Runner(Protocol):
    """The ways in which an executor runs a stage."""

    function: Callable[..., Any]

    @property
    def can_skip_output(self) -> bool:
        """Whether a run that skips its output differs from others."""

    def forward(self, value: Any, *, skip_output: bool = False) -> Any:
        """Run the stage in the graph that is being built around it; with `skip_output`, the output has no values."""

    def first(self, value: Any) -> tuple[Any, Any]:
        """Run it without a graph; return its output, and its surroundings for running it again."""

    def again(self, value: Any, surroundings: Any) -> Any:
        """Run it once more without a graph, exactly as the first time."""

    def attach(self, value: Any, surroundings: Any) -> tuple[Attached, Any]:
        """Run it once more with a graph of its own, exactly as the first time; return that, and the output."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Measured seconds and bytes of a stage; the words are those of `rotor_solver.Option` and `rotor_solver.Stage`."""

    forward_seconds: float
    nograd_seconds: float
    backward_seconds: float
    activation_bytes: int
    saved_bytes: int
    forward_temp_bytes: int
    nograd_temp_bytes: int
    backward_temp_bytes: int
    replay_temp_bytes: int
    input_released_bytes: int
    output_released_bytes: int
    gradient_storage_bytes: tuple[int, ...] = ()
    """of the gradient of every tensor of the input: more than the gradient itself where that is a part of another"""
    skipped_output_seconds: float = 0.0


def measure_options(
    runners: Sequence[Runner],
    value: Any,
    *,
    device: torch.device,
    input_bytes: int,
    owned: Sequence[int] = (),
    fresh_gradients: bool = False,
    output_held: bool = False,
    carried: Sequence[int] = (),
    silent: Sequence[int] = (),
) -> tuple[StageCost, ...]:
    """Measure the ways to run one stage on the input `value`, whose tensors that need a gradient have `requires_grad`.

    Ways after the first are timed by how much longer they take, run by run. `input_bytes` is |a_i| as the chain counts
    it; `owned` holds the addresses of storages that belong to the caller (parameters, the batch) and so are not the
    stage's. Unless `fresh_gradients`, parameters already have a gradient when the backward runs, as they do where
    gradients are kept between steps. `output_held` says that the caller keeps the output until the backward is done,
    as happens to the last stage's. `carried` are the positions, among the output's tensors, of those that are kept
    beside the chain: they count neither as |a_{i+1}| nor as saved, but as in memory while the stage runs. `silent` are
    the positions of those that get no gradient although they could. Nothing of the model is changed.
    """
    found = []
    with isolated(runners[0].function, device) as parameters, torch.enable_grad():
        for runner in runners:
            if not fresh_gradients:
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
            _step(runner, value)
            phases, activation, kept_beside, gradient, storage_sizes = _phases(
                runner,
                value,
                parameters,
                device,
                owned,
                fresh_gradients=fresh_gradients,
                output_held=output_held,
                carried=carried,
                silent=silent,
            )
            released = _released(runner, value, device, input_bytes, owned)
            saved = max(0, max(phases["forward"].kept, phases["attach"].kept) - kept_beside)
            both = activation + input_bytes
            found.append(
                StageCost(
                    forward_seconds=0.0,
                    nograd_seconds=0.0,
                    backward_seconds=0.0,
                    activation_bytes=activation,
                    saved_bytes=saved,
                    forward_temp_bytes=max(phases["forward"].rise, phases["attach"].rise) - saved,
                    nograd_temp_bytes=max(0, phases["first"].rise - activation, phases["again"].rise - activation),
                    # From the end of the forward on: an output that the stage's own backward does not need may be gone.
                    backward_temp_bytes=max(-input_bytes, phases["backward"].peak - phases["forward"].end - both),
                    replay_temp_bytes=max(-input_bytes, phases["replay"].rise + gradient - both),
                    input_released_bytes=released[0],
                    output_released_bytes=min(released[1], activation, saved),
                    gradient_storage_bytes=storage_sizes,
                )
            )
        seconds = _seconds(runners, value, device)
    return tuple(
        replace(
            cost,
            nograd_seconds=nograd,
            forward_seconds=forward,
            backward_seconds=backward,
            skipped_output_seconds=output,
        )
        for cost, (nograd, forward, backward, output) in zip(found, seconds, strict=True)
    )


def _phases(
    runner: Runner,
    value: Any,
    parameters: list[torch.Tensor],
    device: torch.device,
    owned: Sequence[int],
    *,
    fresh_gradients: bool,
    output_held: bool,
    carried: Sequence[int],
    silent: Sequence[int],
) -> tuple[dict[str, Phase], int, int, int, tuple[int, ...]]:
    """Memory of every way to run the stage, |a_{i+1}|, the bytes of what is carried and was made here, those of the
    gradient handed to the replay, and those behind every gradient that came out.
    """
    if fresh_gradients:
        _forget(parameters)
    with memory_meter(device) as meter:
        meter.mark("first")
        with torch.no_grad():
            output, surroundings = runner.first(value)
        beside = storages(tensors_in(output)[position] for position in carried)
        activation = storage_bytes(tensors_in(output), [*owned, *beside])
        kept_beside = sum(size for address, size in beside.items() if address not in owned)
        meter.mark("between")
        del output
        meter.mark("again")
        with torch.no_grad():
            output = runner.again(value, surroundings)
        del output
        meter.mark("between")
        leaf = leaves_of(value)
        torch.clear_autocast_cache()
        meter.mark("forward")
        output = runner.forward(leaf)
        meter.mark("between")
        source = _source(output, silent)
        if not output_held:
            output = None
        if source is not None:
            one = torch.ones_like(source)
            meter.mark("backward")
            source.backward(one)
            del one
        meter.mark("between")
        del source, leaf, output
        if fresh_gradients:
            _forget(parameters)
        torch.clear_autocast_cache()
        meter.mark("attach")
        attached, output = runner.attach(value, surroundings)
        meter.mark("gradient")
        gradients = [
            torch.ones_like(tensor) if tensor.requires_grad and position not in silent else None
            for position, tensor in enumerate(tensors_in(output))
        ]
        meter.mark("replay")
        del output
        kept = attached.backward(gradients)
        meter.mark("between")
        inputs = kept[: len(tensors_in(value))]
        storage_sizes = tuple(0 if each is None else each.untyped_storage().nbytes() for each in inputs)
        del kept, inputs, attached, gradients
    end = meter.phases["forward"].end
    phases = {"backward": Phase(end, end, end), **meter.phases}
    return phases, activation, kept_beside, phases["gradient"].kept, storage_sizes


def _released(
    runner: Runner, value: Any, device: torch.device, input_bytes: int, owned: Sequence[int]
) -> tuple[int, int]:
    """Bytes of the input, and of the output, that a run with a graph does not hold on to."""
    leaf = leaves_of(value)
    if storage_bytes(tensors_in(value)) == input_bytes:
        owned = ()
    with memory_meter(device) as meter:
        meter.mark("copy")
        # As from another layer: nothing but the graph holds it.
        copy = tree_map_only(torch.Tensor, partial(_copied, frozenset(owned)), leaf)
        meter.mark("run")
        output = runner.forward(copy)
        source = _source(output)
        meter.mark("input")
        del copy
        meter.mark("output")
        del output
        meter.mark("end")
        del source
    phases = meter.phases
    whole = phases["copy"].kept == input_bytes
    return max(0, -phases["input"].kept) if whole else 0, max(0, -phases["output"].kept)


def _seconds(runners: Sequence[Runner], value: Any, device: torch.device) -> list[tuple[float, float, float, float]]:
    """Median seconds of the forward without a graph, of the forward with one, and of the backward; and what of the
    forward is left out where nobody reads the output.
    """
    runner = runners[0]
    with torch.no_grad():
        _, surroundings = runner.first(value)
    gradients = [torch.ones_like(tensor) for tensor in _with_graph(runner.forward(leaves_of(value)))]

    def run(lap: Callable[[], None]) -> None:
        with torch.no_grad():
            runner.again(value, surroundings)
        lap()
        for each in runners:
            outputs = _with_graph(each.forward(leaves_of(value)))
            lap()
            if outputs:
                torch.autograd.backward(outputs, gradients)
            lap()
            del outputs
        for skip_output in (True, False) if runner.can_skip_output else ():  # one like the other: memory is warm by now
            runner.forward(leaves_of(value), skip_output=skip_output)
            lap()

    laps = 1 + 2 * len(runners)
    measured = lap_seconds(run, device, laps=laps + (2 if runner.can_skip_output else 0))
    nograd, forward, backward = (median(each[lap] for each in measured) for lap in range(3))
    skipped = median(each[laps + 1] - each[laps] for each in measured) if runner.can_skip_output else 0.0
    output = max(0.0, min(skipped, nograd, forward))
    found = []
    for number in range(len(runners)):
        longer = [median(each[2 * number + lap] - each[lap] for each in measured) for lap in (1, 2)]
        found.append((nograd, forward + max(0.0, longer[0]), backward + max(0.0, longer[1]), output))
    return found


def _step(runner: Runner, value: Any) -> None:
    """One untimed run: libraries choose their algorithms and allocate what they keep for good."""
    source = _source(runner.forward(leaves_of(value)))
    if source is not None:
        source.backward()


def _forget(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def leaves_of(value: Any) -> Any:
    """`value` with every tensor replaced by a leaf over the same memory, `requires_grad` as it was."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def _with_graph(output: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]


def _copied(owned: frozenset[int], tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.untyped_storage().data_ptr() in owned else tensor.clone()


def _source(output: Any, silent: Sequence[int] = ()) -> torch.Tensor | None:
    """A scalar whose backward hands every tensor in `output` a gradient that is made at that moment.

    The engine gives such a gradient away as it would give away one that another layer made, so memory is released as
    early as in training. None where nothing in `output` has a graph.
    """
    tensors = _with_graph([tensor for i, tensor in enumerate(tensors_in(output)) if i not in silent])
    return _NewGradient.apply(*tensors) if tensors else None  # type: ignore[no-untyped-call]  # torch leaves it so


class _NewGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.like = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors]
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(
            torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(1)
            for shape, stride, dtype, device in ctx.like
        )
