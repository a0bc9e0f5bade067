"""What a model costs as a chain: measured facts, and the `rotor_solver.Chain` that they make."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from rotor_profiling import (
    LossCost,
    StageCost,
    bytes_like,
    isolated,
    leaves_of,
    measure_loss,
    measure_stage,
    memory_meter,
    stage_kind,
    storage_bytes,
    storages,
    tensors_in,
)
from rotor_profiling.isolate import trained_parameters
from rotor_profiling.timing import median_seconds
from rotor_py.chain import Cut
from rotor_py.runner import StageRunner
from rotor_py.surroundings import moving_buffers
from rotor_py.traits import StageTraits, find_out, remember
from rotor_solver import Chain

Progress = Callable[[int, int, str], None]
"""Called with the number of stages done, the number of all, and the name of the one that is measured now."""


_SCALARS = {"cpu": 16, "cuda": 1024}
"""Bytes of a loss that nobody has measured, and of the gradient that a backward starts with: two scalars."""


@dataclass(frozen=True, slots=True)
class PrefixCost:
    """What runs before the chain: its time, and the most memory it holds beyond the chain's own input."""

    seconds: float
    temp_bytes: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds and bytes of every part of a step. `snapshot_bytes` is what a replay keeps of buffers that move."""

    names: tuple[str, ...]
    stages: tuple[StageCost, ...]
    gradient_bytes: tuple[int, ...]
    input_bytes: int
    loss: LossCost
    prefix: PrefixCost | None = None
    snapshot_bytes: int = 0

    def chain(self, *, fresh_gradients: bool) -> Chain:
        """The chain for the solver; parameter gradients appear in it if they are freed between steps."""
        stages = self.stages
        return Chain.from_arrays(
            forward_time=[stage.forward_seconds for stage in stages],
            backward_time=[*(stage.backward_seconds for stage in stages), self.loss.seconds],
            activation=[self.input_bytes, *(stage.activation_bytes for stage in stages)],
            saved=[stage.saved_bytes for stage in stages],
            forward_temp=[stage.forward_temp_bytes for stage in stages],
            backward_temp=[*(stage.backward_temp_bytes for stage in stages), self.loss.temp_bytes],
            nograd_time=[stage.nograd_seconds for stage in stages],
            nograd_temp=[stage.nograd_temp_bytes for stage in stages],
            replay_temp=[stage.replay_temp_bytes for stage in stages],
            input_released=[stage.input_released_bytes for stage in stages],
            output_released=[stage.output_released_bytes for stage in stages],
            gradient=self.gradient_bytes if fresh_gradients else None,
            output_held=True,
            names=self.names,
        )


def measure(
    cut: Cut,
    value: Any,
    device: torch.device,
    *,
    preserve_rng_state: bool = True,
    fresh_gradients: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
    loss_temp_bytes: int = 0,
    progress: Progress | None = None,
) -> Measurement:
    """Measure every stage of `cut` on the input `value`, stage by stage; of equal stages, one.

    Without a `loss`, it is taken to need no time, and `loss_temp_bytes` of memory.
    """
    owned = list(storages(tensors_in(value)))  # of what is alive throughout; any other address may come to be reused
    value, prefix = _through_prefix(cut, leaves_of(value), device)
    input_bytes = held = storage_bytes(tensors_in(value))
    known: dict[Hashable, StageCost] = {}
    traits: dict[Hashable, StageTraits] = {}
    costs: list[StageCost] = []
    for position, (name, function) in enumerate(cut.stages):
        if progress is not None:
            progress(position, len(cut.stages), name)
        parameters = storages(trained_parameters(function)).keys()
        last = position == len(cut.stages) - 1
        kind = (stage_kind(function, value), held, last)
        runner = StageRunner(function, name, preserve_rng_state)
        if kind not in known:
            traits[kind] = find_out(function, value, device)
            remember(function, traits[kind])
            known[kind] = measure_stage(
                runner,
                value,
                device=device,
                input_bytes=held,
                owned=[*owned, *parameters],
                fresh_gradients=fresh_gradients,
                output_held=last,
            )
        remember(function, traits[kind])
        costs.append(known[kind])
        held = known[kind].activation_bytes
        value = _next(runner, value, device)
    if progress is not None:
        progress(len(cut.stages), len(cut.stages), "loss")
    cost = LossCost(0.0, loss_temp_bytes, _SCALARS[device.type])
    if loss is not None:
        cost = measure_loss(loss, value, device=device, output_bytes=held)
    return Measurement(
        names=tuple(name for name, _ in cut.stages),
        stages=tuple(costs),
        gradient_bytes=_gradient_bytes(cut),
        input_bytes=input_bytes,
        loss=cost,
        prefix=prefix,
        snapshot_bytes=_snapshot_bytes(cut),
    )


def _next(runner: StageRunner, value: Any, device: torch.device) -> Any:
    """The input of the following stage, with `requires_grad` where training has it."""
    with isolated(runner.function, device), torch.enable_grad():
        return leaves_of(runner.forward(leaves_of(value)))


def _through_prefix(cut: Cut, value: Any, device: torch.device) -> tuple[Any, PrefixCost | None]:
    if not cut.prefix:
        return value, None
    modules = torch.nn.Sequential(*(module for _, module in cut.prefix))
    value = tree_map_only(torch.Tensor, torch.clone, value)  # a layer may write into it
    with isolated(modules, device), torch.no_grad():
        modules(value)
        with memory_meter(device) as meter:
            output = modules(value)

        def run(lap: Callable[[], None]) -> None:
            modules(value)
            lap()

        (seconds,) = median_seconds(run, device, laps=1)
    (phase,) = meter.phases.values()
    return output, PrefixCost(seconds, max(0, phase.rise - storage_bytes(tensors_in(output))))


def _gradient_bytes(cut: Cut) -> tuple[int, ...]:
    """Bytes of the parameter gradients that the backward of each stage leaves; a shared parameter's, once.

    The gradient of a parameter that several stages share is there from the first backward that adds to it, that of
    the last of these stages.
    """
    seen: set[int] = set()
    result = []
    for _, function in reversed(cut.stages):
        new = [parameter for parameter in trained_parameters(function) if id(parameter) not in seen]
        seen.update(id(parameter) for parameter in new)
        result.append(bytes_like(new))
    return tuple(result[::-1])


def _snapshot_bytes(cut: Cut) -> int:
    """Upper bound of what a replay keeps of buffers whose values a forward depends on and changes."""
    tensors = [tensor for _, function in cut.stages for tensor in moving_buffers(function)]
    return 2 * bytes_like(tensors)
