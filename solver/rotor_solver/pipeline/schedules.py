"""The order of microbatches on every rank of a pipeline, by schedule, and the resulting microbatches in flight.

The orders are those of torch.distributed.pipelining (`schedules.py` of torch 2.13): GPipe (Huang et al., 2019), 1F1B
(Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021), interleaved 1F1B (arXiv 2104.04473), and
ScheduleInterleavedZeroBubble with one part on each rank, the ZB-H1 of Qi et al. (arXiv 2401.10241); in
"zero-bubble-whole", nothing is kept for a second backward. Rank r of P has the parts r, r + P, r + 2P, … of the chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rotor_solver.chain import Chain
from rotor_solver.described_error import InvalidValueError, check_count, check_type

# Forward, the whole backward, the backward for the inputs only, and the one for the weights: torch's letters.
Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a rank: the forward or a backward of one microbatch through one part of the chain."""

    kind: Kind
    part: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.part}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule by its name in `SCHEDULES`, for `ranks` with `virtual_stages` parts each, and `microbatches`.

    Raises ValueError for an unknown name, for numbers < 1, for several parts on a rank in a schedule that has one, and
    for microbatches that cannot be divided into the equal rounds of a schedule.
    """

    name: str
    ranks: int
    microbatches: int
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        check_type(self.name, str, "schedule", f"use one of {', '.join(SCHEDULES)}")
        if self.name not in SCHEDULES:
            message = f"there is no schedule {self.name!r}; there are {', '.join(SCHEDULES)}"
            raise InvalidValueError(message, kind="unknown_value", name="schedule")
        for field in ("ranks", "microbatches", "virtual_stages"):
            check_count(getattr(self, field), field)
        if self.name != "interleaved" and self.virtual_stages > 1:
            message = (
                f'take "interleaved" for {self.virtual_stages} virtual_stages: {self.name} has one part on each rank'
            )
            raise InvalidValueError(message, kind="one_part_per_rank", name="virtual_stages")
        if self.name not in ("gpipe", "1f1b") and self.microbatches % self.rounds:
            message = (
                f"{self.name} needs a multiple of {self.ranks} microbatches for equal rounds, got {self.microbatches}"
            )
            raise InvalidValueError(message, kind="not_divisible", name="microbatches", got=self.microbatches)

    @property
    def parts(self) -> int:
        """The number of parts of the chain."""
        return self.ranks * self.virtual_stages

    @property
    def rounds(self) -> int:
        """How often a rank turns to each of its parts in an interleaved schedule."""
        return max(1, self.microbatches // self.ranks)

    def rank_of(self, part: int) -> int:
        """Return the rank of a part."""
        return part % self.ranks

    def order(self, rank: int) -> list[Action]:
        """Return all actions of a rank in a step, in order."""
        return SCHEDULES[self.name](self, rank)


def _one_forward_one_backward(schedule: Schedule, rank: int) -> list[Action]:
    """Rank r runs P - r forwards ahead, and from then on a backward before each forward."""
    ahead = min(schedule.microbatches, schedule.ranks - rank)
    actions = [Action("F", rank, each) for each in range(ahead)]
    for each in range(schedule.microbatches):
        actions.append(Action("B", rank, each))
        if ahead + each < schedule.microbatches:
            actions.append(Action("F", rank, ahead + each))
    return actions


def _rounds(schedule: Schedule, rank: int, per_hop: int, put_off: int | None = None) -> list[Action]:
    """torch's `_get_1f1b_rank_ops`: forwards ahead (`_get_warmup_ops`), then a forward and a backward in turns.

    With `put_off`, backwards are for the inputs only, and those for the weights follow that many microbatches later.
    """
    parts, ranks = schedule.virtual_stages, schedule.ranks
    each_round = schedule.microbatches // schedule.rounds
    total = schedule.microbatches * parts
    ahead = min((parts - 1) * each_round + per_hop * (ranks - 1 - rank), total)
    seen: Counter[tuple[Kind, int]] = Counter()

    def action(kind: Kind, step: int) -> Action:
        local = step // each_round % parts
        part = (local if kind == "F" else parts - 1 - local) * ranks + rank
        seen[kind, part] += 1
        return Action(kind, part, seen[kind, part] - 1)

    actions, weights = [], 0
    for step in range(total + ahead):
        if step < total:
            actions.append(action("F", step))
        if step >= ahead:
            actions.append(action("B" if put_off is None else "I", step - ahead))
            if put_off is not None and step - ahead >= put_off:
                actions.append(action("W", weights))
                weights += 1
    if put_off is not None:
        actions += [action("W", each) for each in range(weights, total)]
    return actions


_WHOLE: tuple[Kind, ...] = ("F", "B")
# All schedules by name: the order of a rank
SCHEDULES: dict[str, Callable[[Schedule, int], list[Action]]] = {
    "gpipe": lambda schedule, rank: [Action(kind, rank, n) for kind in _WHOLE for n in range(schedule.microbatches)],
    "1f1b": _one_forward_one_backward,
    "interleaved": lambda schedule, rank: _rounds(schedule, rank, per_hop=2),
    # Rank r postpones the weights' backwards of r microbatches; rank 0 postpones none: its backward stays whole.
    "zero-bubble": lambda schedule, rank: _rounds(schedule, rank, per_hop=1, put_off=rank or None),
    "zero-bubble-whole": lambda schedule, rank: _rounds(schedule, rank, per_hop=1),
}


@dataclass(frozen=True, slots=True)
class InFlight:
    """The most microbatches at once of one part of the chain, in a schedule."""

    forwards: int  # Had their forward and not their backward, or are in progress
    weights: int = 0  # Wait for the backward for the weights
    split: bool = False  # Whether backwards for the inputs and for the weights are apart


def in_flight(schedule: Schedule) -> list[InFlight]:
    """Return the microbatches in flight for every part of the chain, counted in the order of actions itself."""
    found = [InFlight(1)] * schedule.parts
    for rank in range(schedule.ranks):
        forwards: Counter[int] = Counter()
        weights: Counter[int] = Counter()
        for action in schedule.order(rank):
            part, kind = action.part, action.kind
            # The action's own microbatch is in progress; all others wait.
            forwards[part] -= kind in ("B", "I")
            weights[part] -= kind == "W"
            most = found[part]
            found[part] = InFlight(
                max(most.forwards, forwards[part] + 1), max(most.weights, weights[part]), most.split or kind == "I"
            )
            forwards[part] += kind == "F"
            weights[part] += kind == "I"
    return found


def buffer_bytes(part: Chain, number: int, schedule: Schedule, flying: InFlight) -> int:
    """Bytes for part `number` beyond those of `flying` microbatches, from the beginning of a step to its end.

    For every microbatch, torch's `PipelineStage` has a receive buffer for the input (`args_recv_info`; the first part
    has the inputs themselves), and one for the output's gradient (`grad_recv_info`). The last part keeps all outputs
    (`output_chunks`), and computes the loss right after each forward, which keeps at most the loss's scratch memory.
    Sent outputs and gradients of inputs are held until the schedule waits for them: one tensor at a time in 1f1b,
    gradients to the end of all backwards in gpipe, everything to the end of the step in the others.
    """
    count = schedule.microbatches
    others = count - flying.forwards  # the chain's simulation has the inputs and outputs of those in flight
    incoming, outgoing = part.input_bytes, part.activation[-1]
    # Sent gradients of inputs that are in memory at the peak. In gpipe, each replaces a finished microbatch, which held
    # an output at least.
    held = {"1f1b": incoming, "gpipe": incoming + (count - 1) * max(0, incoming - outgoing)}
    gradients = 0 if number == 0 else held.get(schedule.name, incoming * count)
    if number == schedule.parts - 1:
        return others * (incoming + outgoing) + gradients + (flying.forwards - 1) * part.loss_temp
    sent = {"gpipe": 0, "1f1b": outgoing}.get(schedule.name, others * outgoing)
    # The simulation also makes a gradient of the output, which is in its buffer here. It stands for the output, which
    # is held throughout the backward: stages are measured with no holder of their output.
    return others * incoming + count * outgoing + gradients + sent
