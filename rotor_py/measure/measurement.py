"""Measured costs of a model, and the `rotor_solver.Chain` that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from rotor_profiling import LossCost, StageCost
from rotor_py.stage.low_precision import word_of
from rotor_solver import Chain, Option, Stage

_NEVER = 2**48
"""Scratch bytes that no device has (256 TiB), to exclude an operation from plans. The solver takes sizes up to 1 PiB.
"""


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

    `snapshot_bytes` are what recomputations keep: copies of changing buffers, and decisions.
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
    """Bytes of outputs without gradient."""
    waiting_gradients: tuple[int, ...] = ()
    """With parameters stepped in the backward: bytes of shared parameters' gradients that each backward leaves for
    earlier stages, less those that it finishes. Not in `gradient_bytes`, which stay."""
    summed_gradients: tuple[int, ...] = ()
    """The same for parameters not stepped, where gradients exist before the step; empty if stages share none."""
    ways: tuple[tuple[Way, ...], ...] = ()
    """The partial storage modes of each stage, as in the chain: option n of a stage is its n-th."""
    spread: float = field(default=0.0, compare=False)
    """Relative spread of the times of one signature: quality of the measurement."""

    @property
    def returned_bytes(self) -> int:
        """Bytes of carried tensors that are returned. The caller keeps the first ones, even if recomputed."""
        return sum(each.nbytes for each in self.carried if each.last == len(self.stages))

    @property
    def ways_by_stage(self) -> tuple[tuple[Way, ...], ...]:
        """`ways` for every stage."""
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
        beside = _Beside.of_chain(self, fresh_gradients, forwards)
        stages = tuple(self._stage(number, beside) for number in range(len(self.stages)))
        # The caller holds the model's output, at least as a local variable, until the step is over.
        return Chain(stages, self.input_bytes, self.loss.seconds, beside.loss, output_held=True)

    def _stage(self, number: int, beside: _Beside) -> Stage:
        cost = self.stages[number]
        ways = [Way("", cost), *self.ways_by_stage[number]]
        return Stage(
            cost.activation_bytes,
            tuple(_option(way, cost, beside.forward[number], beside.backward[number]) for way in ways),
            nograd_time=cost.nograd_seconds,
            nograd_temp=cost.nograd_temp_bytes + beside.nograd[number],
            gradient=beside.gradient[number],
            name=self.names[number],
            input_released=cost.input_released_bytes,
            output_released=cost.output_released_bytes,
            skipped_output_time=cost.skipped_output_seconds,
        )


@dataclass(slots=True)
class _Beside:
    """Bytes outside the chain, per stage and pass.

    `forward`, `nograd`, `backward`: held while the stage runs forward, without a graph, or backward. `loss`: held
    during the loss. `gradient`: gradients that a backward leaves, less those that it finishes.

    The solver models only activations passed from one stage to the next. Tensors that go further are added to the
    scratch memory of every stage during which they exist.
    """

    forward: list[int]
    nograd: list[int]
    backward: list[int]
    gradient: list[int]
    loss: int

    @classmethod
    def of_chain(cls, measurement: Measurement, fresh_gradients: bool, forwards: int) -> _Beside:
        length = len(measurement.stages)
        gradient = [0] * length
        if forwards == 1:
            gradient = list(measurement.gradient_bytes if fresh_gradients else measurement.summed_gradients or gradient)
        if measurement.waiting_gradients:
            gradient = [kept + waiting for kept, waiting in zip(gradient, measurement.waiting_gradients, strict=True)]
        found = cls([0] * length, [0] * length, [0] * length, gradient, measurement.loss.temp_bytes)
        for each in measurement.carried:
            found._add_carried(each)
        if measurement.held_bytes:
            found._add_held(measurement.held_bytes)
        return found

    def _add_carried(self, carried: Carried) -> None:
        length = len(self.forward)
        for stage in range(carried.first, length):
            self.forward[stage] += carried.nbytes
            self.nograd[stage] += carried.nbytes
            if stage >= carried.last or not carried.gradient_bytes:  # else its gradient is there instead
                self.backward[stage] += carried.nbytes
        self.loss += carried.nbytes
        # For the solver, a backward leaves its gradient, and its maker's backward finishes it.
        self.gradient[min(carried.last, length - 1)] += carried.gradient_bytes
        if carried.first:
            self.gradient[carried.first - 1] -= carried.gradient_bytes

    def _add_held(self, nbytes: int) -> None:
        """Add outputs without gradient: the caller's, from the last forward to the end of the step."""
        self.nograd[-1] = _NEVER  # a recomputation of the last stage would make them twice
        self.backward[-1] += nbytes
        self.loss += nbytes
        self.gradient[-1] += nbytes


def _option(way: Way, first: StageCost, forward: int, backward: int) -> Option:
    """Return the solver's option, with the bytes outside the chain. `first` is the cost of the first option.

    A chain has one number per stage for the bytes that a run frees: the first option's. If another option frees less,
    the difference counts as saved.
    """
    cost = way.cost
    held = max(0, first.input_released_bytes - cost.input_released_bytes)
    held += max(0, first.output_released_bytes - cost.output_released_bytes)
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


# The joint costs of a chain measured by several processes: the largest of each number.
#
# Processes wait for each other in every collective, so the slowest sets the time. A sequence that fits these costs fits
# every process.


def costliest(chains: Sequence[Chain]) -> Chain:
    """Return a chain whose stages cost the most of any of `chains`, which have the same stages.

    Keeps the leading options whose names agree in all of them.
    """
    if all(chain == chains[0] for chain in chains):
        return chains[0]
    return Chain(
        tuple(_costliest_stage(same) for same in zip(*(chain.stages for chain in chains), strict=True)),
        input_bytes=max(chain.input_bytes for chain in chains),
        loss_time=max(chain.loss_time for chain in chains),
        loss_temp=max(chain.loss_temp for chain in chains),
        output_held=any(chain.output_held for chain in chains),
    )


def _costliest_stage(same: Sequence[Stage]) -> Stage:
    return Stage(
        activation=max(stage.activation for stage in same),
        options=tuple(map(_costliest_option, takewhile(_alike, zip(*(stage.options for stage in same), strict=False)))),
        nograd_time=max(stage.seconds_without_graph for stage in same),
        nograd_temp=max(stage.temp_without_graph for stage in same),
        gradient=max(stage.gradient for stage in same),
        name=same[0].name,
        # For freed bytes and saved time, all can count only on the least.
        input_released=min(stage.input_released for stage in same),
        output_released=min(stage.output_released for stage in same),
        skipped_output_time=min(stage.skipped_output_time for stage in same),
    )


def _alike(same: Sequence[Option]) -> bool:
    return len({option.name for option in same}) == 1


def _costliest_option(same: Sequence[Option]) -> Option:
    return Option(
        forward_time=max(option.forward_time for option in same),
        backward_time=max(option.backward_time for option in same),
        saved=max(option.saved for option in same),
        forward_temp=max(option.forward_temp for option in same),
        backward_temp=max(option.backward_temp for option in same),
        replay_temp=max(option.backward_temp_of_replay for option in same),
        name=same[0].name,
        moved=max(option.moved for option in same),
    )
