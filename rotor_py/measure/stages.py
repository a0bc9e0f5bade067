"""Measuring a model that was cut into stages, one stage after the other.

At most one stage has a graph at a time, so measuring needs less memory than the least plan: people come here because
the whole step does not fit. Of stages of one kind, the first is measured and stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from rotor_profiling import (
    LossCost,
    StageCost,
    bytes_like,
    isolated,
    leaves_of,
    measure_loss,
    measure_options,
    stage_kind,
    storage_bytes,
    storages,
    tensors_in,
)
from rotor_profiling.isolate import trained_parameters
from rotor_py.distributed.whole_parameters import gathered
from rotor_py.measure.carried_tensors import CarriedTensors
from rotor_py.measure.cut import Cut, Layer
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.prefix import run_prefix
from rotor_py.stage.activity import During
from rotor_py.stage.decisions import decided_bytes
from rotor_py.stage.graph_effects import GraphEffects, find_effects, remember_effects
from rotor_py.stage.protocol import offers_of
from rotor_py.stage.runner import StageRunner
from rotor_py.stage.surroundings import moving_buffers
from rotor_solver.progress import Progress

_SCALARS = {"cpu": 16, "cuda": 1024}
"""Bytes of a loss that nobody has measured, and of the gradient that its backward starts with: two numbers of at most
eight bytes, each in a block of its own on CUDA (512 bytes)."""


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

    Without a `loss`, the loss counts as taking no time, and `loss_temp_bytes` of memory. `silent` are the positions,
    among the tensors of the chain's output, of those that get no gradient. `done` is called with that output.
    `progress` is called with the number of stages done, the number of all, and the name of the one that comes next.

    Raises UnusableLossError if the loss cannot be trained with, and ValueError for a kind of device whose memory cannot
    be measured. What a stage raises passes through, with a note that names the stage.
    """
    chain = _ChainMeasurer(cut, value, device, silent, preserve_rng_state, fresh_gradients)
    value, prefix = run_prefix(cut, leaves_of(value), device)
    input_bytes = 0 if cut.input_owned else storage_bytes(tensors_in(value))
    chain.activation_bytes = input_bytes
    for number, (name, _) in enumerate(cut.stages):
        if progress is not None:
            progress(number, len(cut.stages), name)
        value = chain.measure_stage(number, value)
    if progress is not None:
        progress(len(cut.stages), len(cut.stages), "loss")
    if done is not None:
        done(value)
    cost = LossCost(0.0, loss_temp_bytes, _SCALARS[device.type])
    if loss is not None:
        cost = measure_loss(loss, value, device=device, output_bytes=chain.activation_bytes)
    return Measurement(
        names=tuple(name for name, _ in cut.stages),
        stages=tuple(chain.costs),
        gradient_bytes=_gradient_bytes(cut),
        input_bytes=input_bytes,
        loss=cost,
        prefix=prefix,
        snapshot_bytes=_snapshot_bytes(cut) + chain.decided_bytes,
        carried=chain.carried.found,
        held_bytes=chain.held_bytes(value),
        in_part=tuple(chain.in_part) if any(chain.in_part) else (),
    )


class _ChainMeasurer:
    """The stages of a chain, measured in order; `costs` and `in_part` are those of the stages so far."""

    def __init__(
        self,
        cut: Cut,
        value: Any,
        device: torch.device,
        silent: tuple[int, ...],
        preserve_rng_state: bool,
        fresh_gradients: bool,
    ) -> None:
        self.costs: list[StageCost] = []
        self.in_part: list[StageCost | None] = []
        self.carried = CarriedTensors()
        self.activation_bytes = 0
        """Bytes of the next stage's input, as the chain counts them."""
        self.decided_bytes = 0
        """Bytes of what the stages decide, if all of them have to be run again."""
        self._stages = cut.stages
        self._sharding = cut.sharding
        self._device = device
        self._silent = silent
        self._preserve_rng_state = preserve_rng_state
        self._fresh_gradients = fresh_gradients
        # Only what is alive throughout: any other address may come to be another tensor's.
        self._owned = list(storages(tensors_in(value)))
        self._known: dict[Hashable, tuple[GraphEffects, tuple[StageCost, ...], int]] = {}

    def measure_stage(self, number: int, value: Any) -> Any:
        """Measure a stage on its input; return its output, the input of the next one."""
        name, function = self._stages[number]
        offers = offers_of(function)
        with gathered(function, self._sharding):
            beside = self.carried.addresses(value)
            cost, *others = self._cost((name, function), value, beside, offers.carried, number == len(self._stages) - 1)
            self.costs.append(cost)
            self.in_part.append(_worthwhile(cost, others))
            self.activation_bytes = cost.activation_bytes
            # Run again for its output: a stage of a known kind was not measured, and its numbers are its own.
            value = self._run(self._runner((name, function)), value)
            self.carried.count_gradients(cost)
            self.carried.pass_on(offers.carried, value, number + 1, [*self._owned, *beside])
        return value

    def held_bytes(self, output: Any) -> int:
        """Bytes of what the caller gets of the chain's output without a gradient, beside what is carried."""
        tensors = tensors_in(output)
        positions = [i for i in self._silent if i not in self.carried.now.values()]
        return storage_bytes([tensors[i] for i in positions], self._owned)

    def _cost(
        self, stage: Layer, value: Any, beside: list[int], carried: Mapping[str, int], last: bool
    ) -> tuple[StageCost, ...]:
        """The cost of each way to run a stage: measured, or that of an earlier stage of its kind."""
        name, function = stage
        silent = self._silent if last else ()
        apart = tuple({*carried.values(), *silent})
        # The bytes of the input belong to the key: they do not follow from its shape, since what is carried or owned
        # does not count.
        kind = (stage_kind(function, value), self.activation_bytes, last, apart)
        if kind not in self._known:
            with During("measuring", name):
                effects = find_effects(function, value, self._device)
            remember_effects(function, effects)  # before there is a runner: it asks for them when it is made
            runner = self._runner(stage)
            parameters = storages(trained_parameters(function))
            costs = measure_options(
                (runner, *([runner.by(1)] if runner.can_be_partial else [])),
                value,
                device=self._device,
                input_bytes=self.activation_bytes,
                owned=[*self._owned, *parameters, *beside],
                fresh_gradients=self._fresh_gradients,
                output_held=last,
                carried=apart,
                silent=silent,
            )
            self._known[kind] = effects, costs, decided_bytes(function)
        effects, costs, decided = self._known[kind]
        self.decided_bytes += decided
        remember_effects(function, effects)
        return costs

    def _runner(self, stage: Layer) -> StageRunner:
        name, function = stage
        return StageRunner(function, name, self._preserve_rng_state)

    def _run(self, runner: StageRunner, value: Any) -> Any:
        """The input of the following stage, with `requires_grad` where training has it."""
        with isolated(runner.function, self._device), torch.enable_grad():
            return leaves_of(runner.forward(leaves_of(value)))


def _worthwhile(cost: StageCost, others: list[StageCost]) -> StageCost | None:
    """The first of the other ways that saves less than the usual one. The rest would only take longer."""
    return next((each for each in others if each.saved_bytes < cost.saved_bytes), None)


def _gradient_bytes(cut: Cut) -> tuple[int, ...]:
    """Bytes of the parameter gradients that the backward of each stage leaves; a shared parameter's, once.

    The gradient of a parameter that several stages share is there from the first backward that adds to it, that of
    the last of these stages.
    """
    seen: set[int] = set()  # by id: tensors compare element by element
    result = []  # from the last stage on, as the backward comes to them
    for _, function in reversed(cut.stages):
        new = [parameter for parameter in trained_parameters(function) if id(parameter) not in seen]
        seen.update(id(parameter) for parameter in new)
        result.append(bytes_like(new))
    return tuple(result[::-1])


def _snapshot_bytes(cut: Cut) -> int:
    """Upper bound of what a replay keeps of buffers whose values a forward depends on and changes."""
    tensors = [tensor for _, function in cut.stages for tensor in moving_buffers(function)]
    return 2 * bytes_like(tensors)  # the copy that is put back, and one more that the next run writes into
