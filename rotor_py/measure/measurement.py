"""Measured seconds and bytes of a model, and their conversion into a `rotor_solver.Chain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from rotor_profiling import LossCost, StageCost
from rotor_py.stage.compression import word_of
from rotor_solver import Chain, Option, Stage

# Scratch bytes of an operation that no plan may contain: more than any device has (256 TiB). The solver takes 1 PiB.
_NEVER = 2**48


@dataclass(frozen=True, slots=True)
class PrefixCost:
    """Cost of the layers before the chain: seconds, and peak bytes beyond their output, which is the chain's input."""

    seconds: float
    temp_bytes: int


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor of `nbytes` that stages pass on beside their outputs: made by stage first - 1, last used by stage
    `last`.

    The tensor is in memory until the backward of stage `last`, and then, until the backward of the stage that made it,
    its gradient of `gradient_bytes`. A tensor without a gradient counts until that backward, too, since earlier stages
    may have saved it. If the model returns the tensor, `last` is the number of stages.
    """

    nbytes: int
    first: int
    last: int
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Way:
    """A partial storage mode of a stage: its name, which follows "stored" in a report, and the stage's cost.

    `moved_bytes` of the stage's saved tensors are offloaded between its forward and its backward.
    """

    name: str
    cost: StageCost
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measured seconds and bytes of a training step: of its stages, its loss, and the layers before the chain.

    `snapshot_bytes`: bytes of the copies of buffers and attributes that stages change, and of recorded routing
    decisions, which a plan holds if it recomputes anything.
    """

    names: tuple[str, ...]
    stages: tuple[StageCost, ...]
    gradient_bytes: tuple[int, ...]
    input_bytes: int
    loss: LossCost
    prefix: PrefixCost | None = None
    snapshot_bytes: int = 0
    carried: tuple[Carried, ...] = ()
    held_bytes: int = 0
    """Bytes of the last stage's outputs without gradient."""
    other_outputs: int = 0
    """Bytes of the model's outputs that no stage has made or read."""
    outputs_held: bool = True
    """Whether the caller holds outputs without gradient through the backward. If the model returns a loss, this is
    False until a step shows otherwise."""
    waiting_gradients: tuple[int, ...] = ()
    """Bytes of gradients of shared parameters that each stage's backward begins, less those of gradients that it
    completes. Only of parameters that are stepped in the backward, which are not in `gradient_bytes`."""
    summed_gradients: tuple[int, ...] = ()
    """The same for all other parameters, if their gradients exist before the step; empty if stages share none."""
    sum_bytes: tuple[int, ...] = ()
    """Bytes of the tensor that autograd allocates to sum the first two gradients of a shared parameter, by the stage
    that makes the second; empty if it adds in place."""
    output_held: bool = True
    """Whether the caller holds the last stage's outputs with gradient; False if only later graphs read them."""
    ways: tuple[tuple[Way, ...], ...] = ()
    """The partial storage modes of each stage: its n-th mode, from 1, is option n of the stage in the chain."""
    unrepeatable: tuple[int, ...] = ()
    """Indices of stages that no plan may recompute, because another run of them has other outputs."""
    spread: float = field(default=0.0, compare=False)
    """Relative spread of the measured times of equal stages: the larger, the less certain are the seconds."""

    @property
    def returned_bytes(self) -> int:
        """Bytes that the caller holds of outputs of the model that the last stage has not made.

        Carried tensors among them count even if the caller drops outputs, since stages mostly save them.
        """
        carried = sum(each.nbytes for each in self.carried if each.last == len(self.stages))
        return carried + (self.other_outputs if self.outputs_held else 0)

    @property
    def left_bytes(self) -> int:
        """Bytes that the stages' forwards leave in attributes until the next step."""
        return sum(cost.left_bytes for cost in self.stages)

    @property
    def output_bytes(self) -> int:
        """Bytes of the last stage's outputs that the caller holds."""
        output = self.stages[-1].activation_bytes if self.output_held else 0
        return output + (self.held_bytes if self.outputs_held else 0)

    @property
    def dropped_bytes(self) -> int:
        """Bytes of the last stage's outputs that are freed between forward and backward."""
        return 0 if self.outputs_held else self._droppable_bytes

    @property
    def _droppable_bytes(self) -> int:
        ways = self.ways_by_stage[-1]
        return max(cost.droppable_bytes for cost in (self.stages[-1], *(way.cost for way in ways)))

    @property
    def ways_by_stage(self) -> tuple[tuple[Way, ...], ...]:
        return self.ways or ((),) * len(self.stages)

    @property
    def way_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the partial storage modes of each stage, which are its options 1, 2, … in the chain."""
        return tuple(tuple(way.name for way in ways) for ways in self.ways_by_stage)

    @property
    def fewer_bits(self) -> str | None:
        """The value of `keep=` for the first storage mode that keeps fewer bits of values; None if none does."""
        return word_of(name for names in self.way_names for name in names)

    def chain(self, *, fresh_gradients: bool, forwards: int = 1) -> Chain:
        """Return the chain for the solver. Its backwards allocate parameter gradients if these are freed between steps.

        With several `forwards` in flight, they do not: gradients count as fixed, since the first backward makes all.
        """
        length = len(self.stages)
        gradient = [0] * length  # bytes of gradients that each stage's backward allocates, minus those that it frees
        if forwards == 1:
            gradient = list(self.gradient_bytes if fresh_gradients else self.summed_gradients or gradient)
        if self.waiting_gradients:
            gradient = [kept + waiting for kept, waiting in zip(gradient, self.waiting_gradients, strict=True)]
        # The solver knows only activations that one stage passes to the next. So carried tensors count in the scratch
        # memory of every stage during which they exist.
        forward, backward, loss = [0] * length, list(self.sum_bytes or [0] * length), self.loss.temp_bytes
        for each in self.carried:
            for stage in range(each.first, length):
                forward[stage] += each.nbytes
                if stage >= each.last or not each.gradient_bytes:  # otherwise, only its gradient still exists
                    backward[stage] += each.nbytes
            loss += each.nbytes
            # The backward of the last stage that reads it leaves its gradient, which the maker's backward frees.
            gradient[min(each.last, length - 1)] += each.gradient_bytes
            if each.first:
                gradient[each.first - 1] -= each.gradient_bytes
        nograd = list(forward)
        held = self.outputs_held and self.held_bytes > 0
        if self.held_bytes:
            nograd[-1] = _NEVER  # recomputed, the last stage would allocate its outputs without gradient twice
        if held:  # the caller holds outputs without gradient from the last forward to the end of the step
            loss += self._droppable_bytes
            gradient[-1] += self.held_bytes
        for stage in self.unrepeatable:
            nograd[stage] = _NEVER
        stages = tuple(
            Stage(
                cost.activation_bytes,
                tuple(
                    _option(way, cost, forward[number], backward[number], held and number == length - 1)
                    for way in (Way("", cost), *ways)
                ),
                nograd_time=cost.nograd_seconds,
                nograd_temp=cost.nograd_temp_bytes + nograd[number],
                gradient=gradient[number],
                name=self.names[number],
                input_released=cost.input_released_bytes,
                output_released=cost.output_released_bytes,
                skipped_output_time=cost.skipped_output_seconds,
            )
            for number, (cost, ways) in enumerate(zip(self.stages, self.ways_by_stage, strict=True))
        )
        # The caller holds the model's output until the end of the step, at least in a local variable.
        return Chain(stages, self.input_bytes, self.loss.seconds, loss, output_held=self.output_held)


def _option(way: Way, first: StageCost, forward: int, backward: int, outputs_held: bool) -> Option:
    # The solver takes one number of freed bytes for all options of a stage. If one frees fewer, count more as saved.
    cost = way.cost
    held = max(0, first.input_released_bytes - cost.input_released_bytes)
    held += max(0, first.output_released_bytes - cost.output_released_bytes)
    if outputs_held:
        backward += cost.held_backward_bytes
    return Option(
        forward_time=cost.forward_seconds,
        backward_time=cost.backward_seconds,
        saved=cost.saved_bytes + held - way.moved_bytes,
        forward_temp=max(0, cost.forward_temp_bytes + forward - held),
        backward_temp=cost.backward_temp_bytes + backward,
        replay_temp=cost.replay_temp_bytes + backward,
        name=way.name,
        moved=way.moved_bytes,
    )


_LEAST = ("input_released", "output_released", "skipped_output_time")


def costliest(chains: Sequence[Chain]) -> Chain:
    """Return a chain with the maximum of each cost over `chains`, which several processes measured.

    The slowest process determines the time, since processes wait for each other in collectives. Of each stage's
    options, takes those before the first whose name differs between chains.
    """
    if all(chain == chains[0] for chain in chains):
        return chains[0]
    stages = []
    for same in zip(*(chain.stages for chain in chains), strict=True):
        columns = zip(*(stage.options for stage in same), strict=False)
        agreed = takewhile(lambda options: len({option.name for option in options}) == 1, columns)
        most = _most(
            same, "activation", "gradient", nograd_time="seconds_without_graph", nograd_temp="temp_without_graph"
        )
        # Take the minimum of freed bytes and of saved seconds: a plan must be able to rely on them in all processes.
        least = {name: min(getattr(each, name) for each in same) for name in _LEAST}
        stages.append(Stage(options=tuple(map(_costliest_option, agreed)), name=same[0].name, **most, **least))
    return Chain(
        tuple(stages),
        output_held=any(chain.output_held for chain in chains),
        **_most(chains, "input_bytes", "loss_time", "loss_temp"),
    )


def _costliest_option(same: Sequence[Option]) -> Option:
    names = "forward_time", "backward_time", "saved", "forward_temp", "backward_temp", "moved"
    return Option(name=same[0].name, **_most(same, *names, replay_temp="backward_temp_of_replay"))


def _most(same: Sequence[Any], *names: str, **sources: str) -> dict[str, Any]:
    """Return the largest value of each field: `names` are fields, and `sources` maps a field to another attribute."""
    sources |= {name: name for name in names}
    return {field: max(getattr(each, source) for each in same) for field, source in sources.items()}
