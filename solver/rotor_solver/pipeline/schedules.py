"""Schedules: the order of forwards and backwards on each rank of a pipeline, and how many microbatches are in flight.

The orders are those of torch.distributed.pipelining (`schedules.py` of torch 2.13): GPipe (Huang et al., 2019), 1F1B
(Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021), interleaved 1F1B (arXiv 2104.04473), and
ScheduleInterleavedZeroBubble with one part on each rank (ZB-H1 of Qi et al., arXiv 2401.10241), which has separate
backwards for inputs and weights. "zero-bubble-whole" has its order without separate backwards. Rank r of P has the
parts r, r + P, r + 2P, … of the chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from rotor_solver.chain import Chain
from rotor_solver.described_error import InvalidValueError, check_count, check_type

# torch's letters for forward, whole backward, backward for the inputs only, and backward for the weights only
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
    """A schedule by its name in `SCHEDULES`, for a number of ranks, of microbatches, and of parts on each rank.

    Raises ValueError for an unknown name, for numbers < 1, for several parts on a rank unless the schedule is
    interleaved, and for a number of microbatches that does not divide into the schedule's equal rounds.
    """

    name: str
    ranks: int
    microbatches: int
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        check_type(self.name, str, "schedule", f"use one of {', '.join(SCHEDULES)}")
        if self.name not in SCHEDULES:
            message = f"schedule must be one of {', '.join(SCHEDULES)}, got {self.name!r}"
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
        return self.ranks * self.virtual_stages

    @property
    def rounds(self) -> int:
        """Number of rounds into which an interleaved or zero-bubble schedule divides the microbatches."""
        return max(1, self.microbatches // self.ranks)

    def rank_of(self, part: int) -> int:
        return part % self.ranks

    def order(self, rank: int) -> list[Action]:
        """Return all actions of a rank in a step, in order."""
        return SCHEDULES[self.name](self, rank)


def _rounds(schedule: Schedule, rank: int, per_hop: int, put_off: int | None = None) -> list[Action]:
    """Return the actions of torch's `_get_1f1b_rank_ops`: some forwards, then a forward and a backward in turns.

    With `put_off`, these backwards are for the inputs only; that for the weights follows `put_off` backwards later.
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
# All schedules by name, as functions that return a rank's actions in order
SCHEDULES: dict[str, Callable[[Schedule, int], list[Action]]] = {
    "gpipe": lambda schedule, rank: [Action(kind, rank, n) for kind in _WHOLE for n in range(schedule.microbatches)],
    # Rank r of P first runs P - r forwards, then a backward before each further forward.
    "1f1b": lambda schedule, rank: _rounds(schedule, rank, per_hop=1),
    "interleaved": lambda schedule, rank: _rounds(schedule, rank, per_hop=2),
    # Rank r runs a backward for the weights r backwards late; rank 0, which has nothing to postpone, splits none.
    "zero-bubble": lambda schedule, rank: _rounds(schedule, rank, per_hop=1, put_off=rank or None),
    "zero-bubble-whole": lambda schedule, rank: _rounds(schedule, rank, per_hop=1),
}


@dataclass(frozen=True, slots=True)
class InFlight:
    """Upper bounds of how many microbatches of one part are in flight at once in a schedule."""

    forwards: int  # Number of microbatches from the start of their forward to the end of their backward
    weights: int = 0  # Number of microbatches that wait for the backward for the weights
    split: bool = False  # Whether the backwards for the inputs and for the weights are separate


def in_flight(schedule: Schedule) -> list[InFlight]:
    """Return, for each part of the chain, the most microbatches in flight at once, counted in its rank's actions."""
    found = [InFlight(1)] * schedule.parts
    for rank in range(schedule.ranks):
        for action, forwards, weights in waiting(schedule, rank):
            part = action.part
            most, split = found[part], found[part].split or action.kind == "I"
            # The action's own microbatch, which runs, is in flight, too.
            found[part] = InFlight(max(most.forwards, forwards[part] + 1), max(most.weights, weights[part]), split)
    return found


def waiting(schedule: Schedule, rank: int) -> Iterator[tuple[Action, Counter[int], Counter[int]]]:
    """Yield a rank's actions, each with the numbers of other microbatches, by part, that wait while it runs.

    The first number is of those that wait for a backward, the second of those that wait for one for the weights only.
    """
    forwards, weights = Counter[int](), Counter[int]()
    for action in schedule.order(rank):
        forwards[action.part] -= action.kind in ("B", "I")
        weights[action.part] -= action.kind == "W"
        yield action, forwards, weights
        forwards[action.part] += action.kind == "F"
        weights[action.part] += action.kind == "I"


def buffer_bytes(part: Chain, number: int, schedule: Schedule, flying: InFlight) -> int:
    """Return the bytes of torch's communication buffers for part `number`, beyond those of microbatches in flight.

    For every microbatch, torch's `PipelineStage` has a receive buffer for the input (`args_recv_info`; the first part
    has the inputs themselves), and one for the output's gradient (`grad_recv_info`). The last part keeps all outputs
    (`output_chunks`), and computes the loss right after each forward; what the loss saves is counted as its scratch
    memory. Sent outputs and gradients of inputs stay in memory until the schedule waits for their sends: in 1f1b one
    tensor at a time, in gpipe gradients to the end of all backwards, in others everything to the end of the step.
    """
    count = schedule.microbatches
    others = count - flying.forwards  # inputs and outputs of microbatches in flight are in the simulated memory already
    incoming, outgoing = part.input_bytes, part.activation[-1]
    # Bytes of sent gradients of inputs at the peak. In gpipe, each takes the memory of a finished microbatch, which had
    # at least an output.
    held = {"1f1b": incoming, "gpipe": incoming + (count - 1) * max(0, incoming - outgoing)}
    gradients = 0 if number == 0 else held.get(schedule.name, incoming * count)
    if number == schedule.parts - 1:
        return others * (incoming + outgoing) + gradients + (flying.forwards - 1) * part.loss_temp
    sent = {"gpipe": 0, "1f1b": outgoing}.get(schedule.name, others * outgoing)
    # The simulation counts the gradient of the output, which is in a receive buffer, but not the output, which the rank
    # keeps throughout the backward. Both have the same size, so neither is added here.
    return others * incoming + count * outgoing + gradients + sent
