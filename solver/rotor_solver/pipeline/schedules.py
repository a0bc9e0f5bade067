"""The order in which every rank of a pipeline runs the microbatches, by schedule.

The orders are those of torch.distributed.pipelining (`schedules.py` of torch 2.13), and of the papers:

    gpipe         ScheduleGPipe: Huang et al., "GPipe", 2019
    1f1b          Schedule1F1B: Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021
    interleaved   ScheduleInterleaved1F1B: Narayanan et al., "Efficient large-scale language model training on GPU
                  clusters using Megatron-LM", arXiv 2104.04473
    zero-bubble   ScheduleInterleavedZeroBubble with one part on each rank: the ZB-H1 of Qi et al., "Zero bubble
                  pipeline parallelism", arXiv 2401.10241
    zero-bubble-whole
                  the same, and the backward for the inputs is the whole one: nothing is kept for the second

The chain is cut into P · V parts. Rank r has the parts r, r + P, r + 2P, …: V of them if the schedule is interleaved,
else one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W"]
"""Forward, the whole backward, the backward for the inputs alone, and the one for the weights: torch's letters."""


@dataclass(frozen=True, slots=True)
class Action:
    """What a rank does next: the forward or a backward of one microbatch through one part of the chain."""

    kind: Kind
    part: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.part}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule by its name in `SCHEDULES`, for `ranks` with `virtual_stages` parts each, and so many `microbatches`.

    ValueError for a name that is not there, for numbers that are not one or more, for several parts on a rank in a
    schedule that has one, and for microbatches that cannot be divided into equal rounds, where a schedule does that.
    """

    name: str
    ranks: int
    microbatches: int
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ValueError(f"there is no schedule {self.name!r}; there are {', '.join(SCHEDULES)}")
        for field in ("ranks", "microbatches", "virtual_stages"):
            number = getattr(self, field)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{field} is {number!r}; it has to be a whole number, one or more")
        if self.name not in _SEVERAL_PARTS and self.virtual_stages > 1:
            raise ValueError(
                f"{self.name} has one part of the chain on each rank; virtual_stages is {self.virtual_stages}. "
                'The schedule that has several is "interleaved"'
            )
        if self.name not in _ONE_AFTER_THE_OTHER and self.microbatches % self.rounds:
            raise ValueError(
                f"{self.name} on {self.ranks} ranks cannot divide {self.microbatches} microbatches into {self.rounds} "
                f"equal rounds; take a multiple of {self.ranks}"
            )

    @property
    def parts(self) -> int:
        """Into how many parts the chain is cut."""
        return self.ranks * self.virtual_stages

    @property
    def rounds(self) -> int:
        """Of an interleaved schedule, how often a rank turns to each of its parts."""
        return max(1, self.microbatches // self.ranks)

    def rank_of(self, part: int) -> int:
        """The rank that has a part."""
        return part % self.ranks

    def order(self, rank: int) -> list[Action]:
        """All that a rank does in a step, in order."""
        return SCHEDULES[self.name](self, rank)


def _gpipe(schedule: Schedule, rank: int) -> list[Action]:
    microbatches = range(schedule.microbatches)
    return [Action("F", rank, each) for each in microbatches] + [Action("B", rank, each) for each in microbatches]


def _one_forward_one_backward(schedule: Schedule, rank: int) -> list[Action]:
    """Rank r runs P - r forwards ahead, and from then on a backward before each forward."""
    ahead = min(schedule.microbatches, schedule.ranks - rank)
    actions = [Action("F", rank, each) for each in range(ahead)]
    for each in range(schedule.microbatches):
        actions.append(Action("B", rank, each))
        if ahead + each < schedule.microbatches:
            actions.append(Action("F", rank, ahead + each))
    return actions


def _interleaved(schedule: Schedule, rank: int) -> list[Action]:
    return _rounds(schedule, rank, per_hop=2)


def _zero_bubble(schedule: Schedule, rank: int) -> list[Action]:
    """Rank r puts off the backwards for the weights of r microbatches, to fill what would be a bubble."""
    return _rounds(schedule, rank, per_hop=1, put_off=rank or None)  # rank 0 puts off none: its backward stays whole


def _zero_bubble_whole(schedule: Schedule, rank: int) -> list[Action]:
    return _rounds(schedule, rank, per_hop=1)


def _rounds(schedule: Schedule, rank: int, per_hop: int, put_off: int | None = None) -> list[Action]:
    """torch's `_get_1f1b_rank_ops`: forwards ahead (`_get_warmup_ops`), then a forward and a backward in turns.

    In each round, a rank runs some microbatches through its first part, the same ones through its second, and so on;
    backwards go through the parts the other way. With `put_off`, backwards are for the inputs alone, and those for the
    weights follow that many microbatches later.
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


SCHEDULES: dict[str, Callable[[Schedule, int], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
    "zero-bubble-whole": _zero_bubble_whole,
}
"""All schedules by name: the order of a rank."""
_ONE_AFTER_THE_OTHER = ("gpipe", "1f1b")
"""Schedules that turn to every microbatch once; the others do so in rounds."""
_SEVERAL_PARTS = ("interleaved",)
