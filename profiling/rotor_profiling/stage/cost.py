"""What one stage costs: its times and bytes, measured by running it the very ways in which it is run in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rotor_profiling.isolate import isolated
from rotor_profiling.stage.bytes import Place, StageBytes, measure_bytes
from rotor_profiling.stage.gradients import Layouts
from rotor_profiling.stage.runner import Runner
from rotor_profiling.stage.seconds import measure_seconds


@dataclass(frozen=True, slots=True)
class StageCost:
    """Measured seconds and bytes of a stage, in the words of `rotor_solver.Option` and `rotor_solver.Stage`."""

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
    """Bytes of the storage behind the gradient of every tensor of the input: more than its own where it is a view."""
    skipped_output_seconds: float = 0.0
    """What a forward saves by skipping its output."""


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
    arriving: Layouts = (),
) -> tuple[StageCost, ...]:
    """Measure the ways to run one stage on the input `value`, whose tensors that need a gradient have `requires_grad`.

    `runners` has one runner for each way, all of the same function. Ways after the first are timed by how much longer
    they take, run by run. Nothing of the model is changed.

    `input_bytes` is |a_i| as the chain counts it. `owned` are the addresses of storages that belong to the caller
    (parameters, the batch) and not to the stage. Unless `fresh_gradients`, parameters already have a gradient when the
    backward runs, as they do if gradients are kept between steps. `output_held` says that the caller keeps the output
    until the backward is done, which is so for the last stage. `carried` are the positions, among the output's tensors,
    of those that are kept beside the chain: they count neither as |a_{i+1}| nor as saved, only as in memory while the
    stage runs. `silent` are the positions of those that get no gradient although they could. `arriving` are the layouts
    of the gradients that the backward is given for the output's tensors.

    ValueError for a kind of device whose memory cannot be measured.
    """
    place = Place(device, input_bytes, owned, fresh_gradients, output_held, carried, silent, arriving)
    found: list[StageBytes] = []
    with isolated(runners[0].function, device) as parameters, torch.enable_grad():
        for runner in runners:
            if not fresh_gradients:
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
            found.append(measure_bytes(runner, value, parameters, place))
        seconds = measure_seconds(runners, value, device, arriving)
    return tuple(StageCost(**asdict(nbytes), **asdict(timed)) for nbytes, timed in zip(found, seconds, strict=True))
