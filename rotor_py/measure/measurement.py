"""Measured costs of a model, and the `rotor_solver.Chain` that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from rotor_profiling import LossCost, StageCost
from rotor_py.stage.compression import word_of
from rotor_solver import Chain, Option, Stage

# Scratch bytes that no device has (256 TiB), to exclude an operation from plans. The solver takes sizes up to 1 PiB.
_NEVER = 2**48


@dataclass(frozen=True, slots=True)
class PrefixCost:
    """Cost of the layers before the chain: time, and peak memory beyond the chain's input."""

    seconds: float
    temp_bytes: int


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor of `nbytes` kept outside the chain: made by stage first - 1, last used by stage `last`.

    It is in memory until the backward of stage `last`. From then to the backward of its maker, its gradient of
    `gradient_bytes` is. Without a gradient, the tensor itself counts until then, since earlier stages may have saved
    it. If it is returned, `last` is the number of stages.
    """

    nbytes: int
    first: int
    last: int
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Way:
    """A partial storage mode of a stage: its name, which follows "stored" in a report, and the stage's cost.

    `moved_bytes` of its saved tensors can be offloaded from its forward to its backward.
    """

    name: str
    cost: StageCost
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds and bytes of every part of a step.

    `snapshot_bytes` are what recomputations keep: copies of changing buffers and attributes, and decisions.
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
    """Bytes of outputs that no stage has made or read."""
    outputs_held: bool = True
    """Whether the caller holds such outputs through the backward. Beside a loss, they count as dropped until a step
    shows them held."""
    waiting_gradients: tuple[int, ...] = ()
    """With parameters stepped in the backward: bytes of shared parameters' gradients that each backward leaves for
    earlier stages, less those that it finishes. Not in `gradient_bytes`, which stay."""
    summed_gradients: tuple[int, ...] = ()
    """The same for parameters not stepped, where gradients exist before the step; empty if stages share none."""
    sum_bytes: tuple[int, ...] = ()
    """Bytes of the new tensor in which the engine sums the first two gradients of a shared parameter, by the stage of
    the second; empty if it adds in place."""
    output_held: bool = True
    """Whether the caller holds the last stage's other outputs; not where later graphs read them, unless returned."""
    ways: tuple[tuple[Way, ...], ...] = ()
    """The partial storage modes of each stage, as in the chain: option n of a stage is its n-th."""
    unrepeatable: tuple[int, ...] = ()
    """Stages that no plan may recompute: another run of theirs has other outputs."""
    spread: float = field(default=0.0, compare=False)
    """Relative spread of the times of one signature: quality of the measurement."""

    @property
    def returned_bytes(self) -> int:
        """Bytes of outputs that the last stage has not made. The caller keeps the first ones, even if recomputed.

        Carried tensors count even where outputs are dropped: stages of a block's width mostly save them.
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
        """Names of the partial storage modes of each stage: its options 1, 2, …"""
        return tuple(tuple(way.name for way in ways) for ways in self.ways_by_stage)

    @property
    def fewer_bits(self) -> str | None:
        """The `keep=` word of the low precision that a plan may use; None if all modes are exact."""
        return word_of(name for names in self.way_names for name in names)

    def chain(self, *, fresh_gradients: bool, forwards: int = 1) -> Chain:
        """Return the chain for the solver. It includes parameter gradients if they are freed between steps.

        With several `forwards` in flight, all gradients exist from the first backward on, and none is in the chain.
        """
        length = len(self.stages)
        gradient = [0] * length  # left by each backward, less those that it finishes
        if forwards == 1:
            gradient = list(self.gradient_bytes if fresh_gradients else self.summed_gradients or gradient)
        if self.waiting_gradients:
            gradient = [kept + waiting for kept, waiting in zip(gradient, self.waiting_gradients, strict=True)]
        # The solver models only activations passed from one stage to the next. Tensors that go further are added to
        # the scratch memory of every stage during which they exist.
        forward, backward, loss = [0] * length, list(self.sum_bytes or [0] * length), self.loss.temp_bytes
        for each in self.carried:
            for stage in range(each.first, length):
                forward[stage] += each.nbytes
                if stage >= each.last or not each.gradient_bytes:  # else its gradient is there instead
                    backward[stage] += each.nbytes
            loss += each.nbytes
            # For the solver, a backward leaves its gradient, and its maker's backward finishes it.
            gradient[min(each.last, length - 1)] += each.gradient_bytes
            if each.first:
                gradient[each.first - 1] -= each.gradient_bytes
        nograd = list(forward)
        held = self.outputs_held and self.held_bytes > 0
        if self.held_bytes:
            nograd[-1] = _NEVER  # a recomputation of the last stage would make outputs without gradient twice
        if held:  # they are the caller's, from the last forward to the end of the step
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
        # The caller holds the model's output, at least as a local variable, until the step is over.
        return Chain(stages, self.input_bytes, self.loss.seconds, loss, output_held=self.output_held)


def _option(way: Way, first: StageCost, forward: int, backward: int, outputs_held: bool) -> Option:
    # A chain has one number per stage for the bytes that a run frees: that of the first option. If another option frees
    # less, the difference counts as saved.
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
    """Return a chain whose stages cost the most of any of `chains`, which several processes measured.

    They wait for each other in every collective, so the slowest sets the time. Keeps the leading options whose names
    agree in all of them.
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
        # For freed bytes and saved time, all can count only on the least.
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
    """Return the largest value of each field, read from the attribute of its name or given as its source."""
    sources |= {name: name for name in names}
    return {field: max(getattr(each, source) for each in same) for field, source in sources.items()}
