"""What a model costs as a chain: measured facts, and the `rotor_solver.Chain` that they make."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
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
    measure_options,
    memory_meter,
    stage_kind,
    storage_bytes,
    storages,
    tensors_in,
)
from rotor_profiling.isolate import trained_parameters
from rotor_profiling.timing import median_seconds
from rotor_py.distributed.whole_parameters import gathered
from rotor_py.measure.cut import Cut
from rotor_py.stage.activity import During
from rotor_py.stage.graph_effects import GraphEffects, find_effects, remember_effects
from rotor_py.stage.protocol import offers_of
from rotor_py.stage.runner import StageRunner
from rotor_py.stage.surroundings import moving_buffers
from rotor_solver import Chain, Option, Stage

Progress = Callable[[int, int, str], None]
"""Called with the number of stages done, the number of all, and the name of the one that is measured now."""


_NEVER = 2**48
"""Scratch memory that no device has."""
_SCALARS = {"cpu": 16, "cuda": 1024}
"""Bytes of a loss that nobody has measured, and of the gradient that a backward starts with: two scalars."""


@dataclass(frozen=True, slots=True)
class PrefixCost:
    """What runs before the chain: its time, and the most memory it holds beyond the chain's own input."""

    seconds: float
    temp_bytes: int


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor that is kept beside the chain, of `nbytes`: made by stage first - 1, last used by stage `last`.

    It is in memory from then on until the backward of the stage that made it, and so is its gradient, of
    `gradient_bytes`, from the backward of `last` on. `last` is the number of stages for what is returned.
    """

    nbytes: int
    first: int
    last: int
    gradient_bytes: int = 0


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
    carried: tuple[Carried, ...] = ()
    held_bytes: int = 0
    """of outputs that get no gradient"""
    in_part: tuple[StageCost | None, ...] = ()
    """what stages cost that are stored in part (`stage.partial_saving`); None where they cannot be"""

    @property
    def returned_bytes(self) -> int:
        """Of carried tensors that are returned: the caller keeps the first ones, whatever is made again."""
        return sum(each.nbytes for each in self.carried if each.last == len(self.stages))

    @property
    def in_part_by_stage(self) -> tuple[StageCost | None, ...]:
        """`in_part` for every stage."""
        return self.in_part or (None,) * len(self.stages)

    def chain(self, *, fresh_gradients: bool) -> Chain:
        """The chain for the solver; parameter gradients appear in it if they are freed between steps."""
        length = len(self.stages)
        forward, backward, nograd, loss = [0] * length, [0] * length, [0] * length, self.loss.temp_bytes
        gradient = list(self.gradient_bytes) if fresh_gradients else [0] * length
        for each in self.carried:
            for stage in range(each.first, length):
                forward[stage] += each.nbytes
                nograd[stage] += each.nbytes
                if stage >= each.last:
                    backward[stage] += each.nbytes
            loss += each.nbytes
            gradient[min(each.last, length - 1)] += each.gradient_bytes
            if each.first:
                gradient[each.first - 1] -= each.gradient_bytes
        if self.held_bytes:  # a last stage that is run again would make them again
            nograd[length - 1] = _NEVER
            backward[length - 1] += self.held_bytes
            loss += self.held_bytes
            gradient[length - 1] += self.held_bytes
        stages = []
        for stage, (name, cost, in_part) in enumerate(zip(self.names, self.stages, self.in_part_by_stage, strict=True)):
            ways = [cost] if in_part is None else [cost, in_part]
            options = [_option(way, cost, forward[stage], backward[stage]) for way in ways]
            stages.append(
                Stage(
                    cost.activation_bytes,
                    tuple(options),
                    nograd_time=cost.nograd_seconds,
                    nograd_temp=cost.nograd_temp_bytes + nograd[stage],
                    gradient=gradient[stage],
                    name=name,
                    input_released=cost.input_released_bytes,
                    output_released=cost.output_released_bytes,
                    skipped_output_time=cost.skipped_output_seconds,
                )
            )
        return Chain(tuple(stages), self.input_bytes, self.loss.seconds, loss, output_held=True)


def _option(cost: StageCost, first: StageCost, forward: int, backward: int) -> Option:
    """An option, with what is in memory beside it. What it holds of input and output and the first one lets go of, is
    counted as saved: the chain lets go of it for every option.
    """
    held = max(0, first.input_released_bytes - cost.input_released_bytes)
    held += max(0, first.output_released_bytes - cost.output_released_bytes)
    return Option(
        forward_time=cost.forward_seconds,
        backward_time=cost.backward_seconds,
        saved=cost.saved_bytes + held,
        forward_temp=max(0, cost.forward_temp_bytes + forward - held),
        backward_temp=cost.backward_temp_bytes + backward,
        replay_temp=cost.replay_temp_bytes + backward,
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
    silent: tuple[int, ...] = (),
    done: Callable[[Any], None] | None = None,
) -> Measurement:
    """Measure every stage of `cut` on the input `value`, stage by stage; of equal stages, one.

    Without a `loss`, it is taken to need no time, and `loss_temp_bytes` of memory. `silent` are the positions, among
    the tensors of the chain's output, of those that get no gradient. `done` is called with that output.
    """
    owned = list(storages(tensors_in(value)))  # of what is alive throughout; any other address may come to be reused
    value, prefix = _through_prefix(cut, leaves_of(value), device)
    input_bytes = held = 0 if cut.input_owned else storage_bytes(tensors_in(value))
    spans: dict[str, Carried] = {}
    carried: dict[str, int] = {}
    known: dict[Hashable, tuple[StageCost, ...]] = {}
    effects: dict[Hashable, GraphEffects] = {}
    costs: list[StageCost] = []
    in_part: list[StageCost | None] = []
    for position, (name, function) in enumerate(cut.stages):
        if progress is not None:
            progress(position, len(cut.stages), name)
        with gathered(function, offers_of(function).groups):
            parameters = storages(trained_parameters(function)).keys()
            last = position == len(cut.stages) - 1
            beside = list(storages(tensors_in(value)[i] for i in carried.values()))
            entering, carried = carried, dict(offers_of(function).carried)
            apart = tuple({*carried.values(), *(silent if last else ())})
            kind = (stage_kind(function, value), held, last, apart)
            if kind not in effects:
                with During("measuring", name):
                    effects[kind] = find_effects(function, value, device)
            remember_effects(function, effects[kind])
            runner = StageRunner(function, name, preserve_rng_state)
            if kind not in known:
                known[kind] = measure_options(
                    (runner, *([runner.by(1)] if runner.can_be_partial else [])),
                    value,
                    device=device,
                    input_bytes=held,
                    owned=[*owned, *parameters, *beside],
                    fresh_gradients=fresh_gradients,
                    output_held=last,
                    carried=apart,
                    silent=silent if last else (),
                )
            cost, *others = known[kind]
            costs.append(cost)
            in_part.append(_worthwhile(cost, others))
            held = cost.activation_bytes
            value = _next(runner, value, device)
            for node, i in entering.items():
                size = cost.gradient_storage_bytes[i]
                spans[node] = replace(spans[node], gradient_bytes=max(size, spans[node].gradient_bytes))
            for node, i in carried.items():
                new = Carried(storage_bytes([tensors_in(value)[i]], [*owned, *beside]), position + 1, position + 1)
                spans[node] = replace(spans.get(node, new), last=position + 1)
    if progress is not None:
        progress(len(cut.stages), len(cut.stages), "loss")
    if done is not None:
        done(value)
    after = LossCost(0.0, loss_temp_bytes, _SCALARS[device.type])
    if loss is not None:
        after = measure_loss(loss, value, device=device, output_bytes=held)
    return Measurement(
        names=tuple(name for name, _ in cut.stages),
        stages=tuple(costs),
        gradient_bytes=_gradient_bytes(cut),
        input_bytes=input_bytes,
        loss=after,
        prefix=prefix,
        snapshot_bytes=_snapshot_bytes(cut),
        carried=tuple(spans.values()),
        held_bytes=storage_bytes([tensors_in(value)[i] for i in silent if i not in carried.values()], owned),
        in_part=tuple(in_part) if any(in_part) else (),
    )


def _worthwhile(cost: StageCost, others: list[StageCost]) -> StageCost | None:
    return next((each for each in others if each.saved_bytes < cost.saved_bytes), None)


def _next(runner: StageRunner, value: Any, device: torch.device) -> Any:
    """The input of the following stage, with `requires_grad` where training has it."""
    with isolated(runner.function, device), torch.enable_grad():
        return leaves_of(runner.forward(leaves_of(value)))


def _through_prefix(cut: Cut, value: Any, device: torch.device) -> tuple[Any, PrefixCost | None]:
    if not cut.prefix:
        return value, None
    modules = torch.nn.Sequential(*(module for _, module in cut.prefix))
    value = tree_map_only(torch.Tensor, torch.clone, value)  # a layer may write into it
    with gathered(modules, offers_of(modules).groups), isolated(modules, device), torch.no_grad():
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
