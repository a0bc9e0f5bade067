"""Convert measured seconds and bytes of a model into a `rotor_solver.Chain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from rotor_profiling import LossCost, StageCost
from rotor_py.stage.compression import word_of
from rotor_solver import Chain, Option, Stage

# Temporary bytes of an operation that no plan may contain: 256 TiB, more than any device has. The solver allows 1 PiB.
_NEVER = 2**48


@dataclass(frozen=True, slots=True)
class PrefixCost:
    """Cost of the layers before the chain: seconds, and peak bytes less those of their output, the chain's input."""

    seconds: float
    temp_bytes: int


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor of `nbytes` that stage first - 1 makes, and that stages return unchanged along with their own output up
    to stage `last`, the last to read it. If the model returns the tensor or a view of it, `last` is the number of
    stages.

    The tensor is in memory until the backward of stage `last`; from then on until the backward of the stage that made
    it, its gradient of `gradient_bytes`. A tensor without a gradient counts until the latter backward, since earlier
    stages may have saved it.
    """

    nbytes: int
    first: int
    last: int
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Way:
    """A storage mode that stores a stage in part: its name, which reports print after "stored", and the stage's cost.

    `moved_bytes` of the stage's saved tensors may be offloaded between its forward and its backward.
    """

    name: str
    cost: StageCost
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measured seconds and bytes of a training step: of its stages, its loss, and the layers before the chain.

    `snapshot_bytes`: bytes of copies of buffers and attributes that stages change, and of recorded decisions. They are
    in memory if a plan recomputes any stage.
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
    """Bytes of the last stage's outputs that get no gradient."""
    other_outputs: int = 0
    """Bytes of those outputs of the model that no stage makes or reads."""
    outputs_held: bool = True
    """Whether the caller keeps outputs that get no gradient through the backward. If the model returns a loss, this is
    False until a step shows that the caller keeps them."""
    waiting_gradients: tuple[int, ...] = ()
    """For each stage, the bytes of gradients of shared parameters that its backward begins, less those that it
    completes. Counts only parameters that are stepped in the backward, which `gradient_bytes` leaves out."""
    summed_gradients: tuple[int, ...] = ()
    """The same for other shared parameters, if they have a gradient before the step; empty if stages share none."""
    sum_bytes: tuple[int, ...] = ()
    """For each stage, the bytes that its backward allocates for the sum of the first two gradients of a shared
    parameter; empty if autograd adds all gradients in place."""
    output_held: bool = True
    """Whether the caller keeps the last stage's outputs that get a gradient; False if only later graphs read them."""
    ways: tuple[tuple[Way, ...], ...] = ()
    """For each stage, the modes that store it in part: the n-th mode, from 1, is option n of the stage in the chain."""
    unrepeatable: tuple[int, ...] = ()
    """Indices of stages that no plan may recompute, because a second run of them returns other values."""
    spread: float = field(default=0.0, compare=False)
    """Relative spread of the times of a stage: the larger it is, the less certain are the measured seconds."""

    @property
    def returned_bytes(self) -> int:
        """Bytes of the model's outputs that the caller keeps and that earlier stages, or none, have made.

        Carried tensors among them count even if the caller drops outputs, since stages mostly save them.
        """
        carried = sum(each.nbytes for each in self.carried if each.last == len(self.stages))
        return carried + (self.other_outputs if self.outputs_held else 0)

    @property
    def left_bytes(self) -> int:
        """Bytes of tensors that the stages' forwards leave in attributes until the next step."""
        return sum(cost.left_bytes for cost in self.stages)

    @property
    def output_bytes(self) -> int:
        """Bytes of the last stage's outputs that the caller keeps through the backward."""
        output = self.stages[-1].activation_bytes if self.output_held else 0
        return output + (self.held_bytes if self.outputs_held else 0)

    @property
    def dropped_bytes(self) -> int:
        """Bytes of the last stage's outputs that are freed between forward and backward."""
        return 0 if self.outputs_held else self._droppable_bytes

    @property
    def _droppable_bytes(self) -> int:
        return max(cost.droppable_bytes for cost in (self.stages[-1], *(way.cost for way in self.ways_by_stage[-1])))

    @property
    def ways_by_stage(self) -> tuple[tuple[Way, ...], ...]:
        return self.ways or ((),) * len(self.stages)

    @property
    def way_names(self) -> tuple[tuple[str, ...], ...]:
        """For each stage, the names of its storage modes, which are its options 1, 2, … in the chain."""
        return tuple(tuple(way.name for way in ways) for ways in self.ways_by_stage)

    @property
    def fewer_bits(self) -> str | None:
        """The value of `keep=` of the first storage mode that rounds saved values; None if no mode does."""
        return word_of(name for names in self.way_names for name in names)

    def chain(self, *, fresh_gradients: bool, forwards: int = 1) -> Chain:
        """Return the chain for the solver. With `fresh_gradients`, its backwards allocate the parameters' gradients.

        With several `forwards` in flight, they do not: gradients count as fixed, since the first backward makes all.
        """
        length = len(self.stages)
        gradient = [0] * length  # bytes of gradients that each stage's backward allocates, minus those that it frees
        if forwards == 1:
            gradient = list(self.gradient_bytes if fresh_gradients else self.summed_gradients or gradient)
        if self.waiting_gradients:
            gradient = [kept + waiting for kept, waiting in zip(gradient, self.waiting_gradients, strict=True)]
        # The solver counts only activations that one stage passes to the next. So add carried tensors to the temporary
        # bytes of every stage during which they exist.
        forward, backward, loss = [0] * length, list(self.sum_bytes or [0] * length), self.loss.temp_bytes
        for each in self.carried:
            for stage in range(each.first, length):
                forward[stage] += each.nbytes
                if stage >= each.last or not each.gradient_bytes:  # otherwise, only its gradient still exists
                    backward[stage] += each.nbytes
            loss += each.nbytes
            # The backward of stage `last` allocates the tensor's gradient, and that of the stage that made it frees it.
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
        # The caller keeps the model's output until the end of the step, at least in a local variable.
        return Chain(stages, self.input_bytes, self.loss.seconds, loss, output_held=self.output_held)


def _option(way: Way, first: StageCost, forward: int, backward: int, outputs_held: bool) -> Option:
    # In the solver, all options of a stage free equally many bytes. If a mode frees fewer, count more bytes as saved.
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
    """Return a chain with the maximum of each cost over `chains`, each measured by another process.

    The slowest process determines the time, since processes wait for each other in collectives. Leaves out the first
    option of a stage whose name differs between chains, and the options after it.
    """
    if all(chain == chains[0] for chain in chains):
        return chains[0]
    stages, names = [], ("forward_time", "backward_time", "saved", "forward_temp", "backward_temp", "moved")
    for same in zip(*(chain.stages for chain in chains), strict=True):
        columns = zip(*(stage.options for stage in same), strict=False)
        options = tuple(
            Option(name=each[0].name, **_most(each, *names, replay_temp="backward_temp_of_replay"))
            for each in takewhile(lambda options: len({option.name for option in options}) == 1, columns)
        )
        most = _most(
            same, "activation", "gradient", nograd_time="seconds_without_graph", nograd_temp="temp_without_graph"
        )
        # Take the minimum of freed bytes and of skipped seconds, which the plan must reach in every process.
        least = {name: min(getattr(each, name) for each in same) for name in _LEAST}
        stages.append(Stage(options=options, name=same[0].name, **most, **least))
    return Chain(
        tuple(stages),
        output_held=any(chain.output_held for chain in chains),
        **_most(chains, "input_bytes", "loss_time", "loss_temp"),
    )


def _most(same: Sequence[Any], *names: str, **sources: str) -> dict[str, Any]:
    """Map each field to the largest value in `same`; `sources` maps fields to attributes of another name to read."""
    sources |= {name: name for name in names}
    return {field: max(getattr(each, source) for each in same) for field, source in sources.items()}
