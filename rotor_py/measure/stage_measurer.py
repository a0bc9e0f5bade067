"""The stages of a chain, measured one after the other, as often as it takes.

At most one stage has a graph at a time, so measuring needs less memory than the least plan: people come here because
the whole step does not fit. Of stages of one kind, the first is measured and stands for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rotor_profiling import (
    Layouts,
    LossCost,
    StageCost,
    bytes_like,
    isolated,
    leaves_of,
    measure_options,
    stage_kind,
    stage_layouts,
    storage_bytes,
    storages,
    tensors_in,
)
from rotor_profiling.isolate import trained_parameters
from rotor_py.distributed.processes import anywhere
from rotor_py.distributed.whole_parameters import gathered
from rotor_py.measure.carried_tensors import CarriedTensors
from rotor_py.measure.cut import Cut, Layer
from rotor_py.measure.gradient_layouts import GradientLayouts
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.prefix import run_prefix
from rotor_py.stage.activity import During
from rotor_py.stage.decisions import decided_bytes
from rotor_py.stage.graph_effects import GraphEffects, find_effects, remember_effects
from rotor_py.stage.protocol import offers_of
from rotor_py.stage.runner import StageRunner
from rotor_py.stage.surroundings import moving_buffers, recall_moving, remember_moving
from rotor_solver.progress import Progress


class StageMeasurer:
    """Measures the stages of a chain on the input `value`, of equal ones the first.

    `silent` are the positions, among the tensors of the chain's output, of those that get no gradient. The processes of
    `group` measure the same stages together.
    """

    def __init__(
        self,
        cut: Cut,
        value: Any,
        device: torch.device,
        *,
        preserve_rng_state: bool = True,
        fresh_gradients: bool = False,
        silent: tuple[int, ...] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.activation_bytes = 0
        """Bytes of the next stage's input, as the chain counts them."""
        self._cut = cut
        self._stages = cut.stages
        self._device = device
        self._silent = silent
        self._group = group
        self._preserve_rng_state = preserve_rng_state
        self._fresh_gradients = fresh_gradients
        # Only what is alive throughout: any other address may come to be another tensor's.
        self._owned = list(storages(tensors_in(value)))
        self._known: dict[Hashable, _Found] = {}
        self._input, self._prefix = run_prefix(cut, leaves_of(value), device)
        self._input_bytes = 0 if cut.input_owned else storage_bytes(tensors_in(self._input))
        self._layouts = GradientLayouts(len(cut.stages))
        self._begin()

    def of(self, cut: Cut) -> StageMeasurer:
        """A measurer of the same chain on the same input, where `cut` runs its stages in another way."""
        other = copy(self)  # with what is known of kinds of stages
        other.take(cut)
        return other

    def take(self, cut: Cut) -> None:
        """Begin anew, with `cut` as the cut of the same chain."""
        self._cut, self._stages, self._layouts = cut, cut.stages, GradientLayouts(len(cut.stages))
        self._begin()

    def walk(self, progress: Progress | None = None) -> Any:
        """Measure all stages, in order; return the chain's output."""
        self._begin()
        value = self._input
        for number, (name, _) in enumerate(self._stages):
            if progress is not None:
                progress(number, len(self._stages), name)
            value = self._measure_stage(number, value)
        if progress is not None:
            progress(len(self._stages), len(self._stages), "loss")
        self._held_bytes = self._bytes_of_silent(value)
        return value

    def settle_layouts(self, of_output: Layouts) -> None:
        """Measure again the stages whose gradients arrive in another layout than the one they were measured with.

        `of_output` are the layouts of the gradients of the chain's output, as the loss makes them.
        """
        self._layouts.give_output(of_output)
        # This ends: the gradients of a stage depend on the stages after it alone, so every walk settles one more.
        while anywhere(self._layouts.differ(), self._group, self._device):
            self._layouts.take_over()
            self.walk()

    def measurement(self, loss: LossCost) -> Measurement:
        """What was measured, and what the loss costs."""
        return Measurement(
            names=tuple(name for name, _ in self._stages),
            stages=tuple(self._costs),
            gradient_bytes=_gradient_bytes(self._cut),
            input_bytes=self._input_bytes,
            loss=loss,
            prefix=self._prefix,
            snapshot_bytes=_snapshot_bytes(self._cut) + self._decided_bytes,
            carried=self._carried.found,
            held_bytes=self._held_bytes,
            in_part=tuple(self._in_part) if any(self._in_part) else (),
        )

    def _begin(self) -> None:
        self._costs: list[StageCost] = []
        self._in_part: list[StageCost | None] = []
        self._carried = CarriedTensors()
        self._held_bytes = 0
        self._decided_bytes = 0  # of what the stages decide, if all of them have to be run again
        self.activation_bytes = self._input_bytes

    def _measure_stage(self, number: int, value: Any) -> Any:
        """Measure a stage on its input; return its output, the input of the next one."""
        name, function = self._stages[number]
        offers = offers_of(function)
        with gathered(function, self._cut.sharding):
            beside = self._carried.addresses(value)
            found = self._find(number, value, beside, offers.carried)
            cost, *others = found.costs
            self._costs.append(cost)
            self._in_part.append(_worthwhile(cost, others))
            self._decided_bytes += found.decided_bytes
            self.activation_bytes = cost.activation_bytes
            # Run again for its output: a stage of a known kind was not measured, and its numbers are its own.
            value = self._run(self._runner((name, function)), value)
            self._layouts.note(number, found.layouts, tensors_in(value))
            self._carried.count_gradients(cost)
            self._carried.pass_on(offers.carried, value, number + 1, [*self._owned, *beside])
        return value

    def _bytes_of_silent(self, output: Any) -> int:
        """Bytes of what the caller gets of the chain's output without a gradient, beside what is carried."""
        tensors = tensors_in(output)
        positions = [i for i in self._silent if i not in self._carried.now.values()]
        return storage_bytes([tensors[i] for i in positions], self._owned)

    def _find(self, number: int, value: Any, beside: list[int], carried: Mapping[str, int]) -> _Found:
        """What measuring a stage finds, or what it found of an earlier stage of its kind."""
        name, function = self._stages[number]
        last = number == len(self._stages) - 1
        silent = self._silent if last else ()
        apart = tuple({*carried.values(), *silent})
        arriving = self._layouts.arriving[number]
        # The bytes of the input belong to the key: they do not follow from its shape, since what is carried or owned
        # does not count.
        kind = (stage_kind(function, value), self.activation_bytes, last, apart, arriving)
        # Where stages wait for other processes, all of them measure a stage that is new to any of them.
        if anywhere(kind not in self._known, self._group, self._device):
            with During("measuring", name):
                effects = find_effects(function, value, self._device)
            remember_effects(function, effects)  # before there is a runner: it asks for them when it is made
            runner = self._runner((name, function))
            # Parts may be of several sizes: what is worth storing in part in one process need not be in another.
            partial = not anywhere(not runner.can_be_partial, self._group, self._device)
            parameters = storages(trained_parameters(function))
            costs = measure_options(
                (runner, *([runner.by(1)] if partial else [])),
                value,
                device=self._device,
                input_bytes=self.activation_bytes,
                owned=[*self._owned, *parameters, *beside],
                fresh_gradients=self._fresh_gradients,
                output_held=last,
                carried=apart,
                silent=silent,
                arriving=arriving,
            )
            layouts = stage_layouts(runner, value, self._device, silent=silent, arriving=arriving)
            self._known[kind] = _Found(effects, costs, layouts, decided_bytes(function), recall_moving(function))
        found = self._known[kind]
        remember_effects(function, found.effects)
        remember_moving(function, found.moving)
        return found

    def _runner(self, stage: Layer) -> StageRunner:
        name, function = stage
        return StageRunner(function, name, self._preserve_rng_state)

    def _run(self, runner: StageRunner, value: Any) -> Any:
        """The input of the following stage, with `requires_grad` where training has it."""
        with isolated(runner.function, self._device), torch.enable_grad():
            return leaves_of(runner.forward(leaves_of(value)))


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of a kind of stage: the costs of its ways to run, the layouts of its input's gradients, the bytes
    of what it decides, and the positions of the buffers that it changes.
    """

    effects: GraphEffects
    costs: tuple[StageCost, ...]
    layouts: Layouts
    decided_bytes: int
    moving: frozenset[int]


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
