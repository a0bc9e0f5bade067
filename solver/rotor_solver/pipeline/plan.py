"""The plan of a pipeline of parts (consecutive stages), the division of each rank's limit, and the simulated step.

The simulation reads the order of actions and the costs of one microbatch, and uses no code that finds plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from functools import cached_property

from rotor_solver.chain import Chain, Stage
from rotor_solver.described_error import InvalidValueError
from rotor_solver.pipeline.schedules import Action, InFlight, Kind, Schedule, buffer_bytes, in_flight, waiting
from rotor_solver.pipeline.sequences import Microbatch, bytes_in_flight
from rotor_solver.segments import store_all
from rotor_solver.sequence import Sequence

_FOR_WEIGHTS = 0.5  # Share of a backward's time, without recomputation, for the gradients of weights (Qi et al.)


@dataclass(frozen=True, slots=True)
class Event:
    """An action of a rank, from `begin` to `end` in seconds, with the rank's peak meanwhile."""

    action: Action
    rank: int
    begin: float
    end: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step: events in the order in which they begin; by rank, `peaks` in bytes and `busy` in seconds."""

    events: tuple[Event, ...]
    peaks: tuple[int, ...]
    busy: tuple[float, ...]

    @property
    def makespan(self) -> float:
        return max(event.end for event in self.events)

    @property
    def bubble(self) -> float:
        """Share of the step that ranks spend waiting, on average over all ranks: from 0 to below 1."""
        whole = len(self.busy) * self.makespan
        return 1 - sum(self.busy) / whole if whole else 0.0


def _peaks(schedule: Schedule, parts: Several[Part], rank: int) -> Iterator[int]:
    """Yield the rank's peak in bytes during each of its actions."""
    own = [(number, part) for number, part in enumerate(parts) if schedule.rank_of(number) == rank]
    trained: set[int] = set()
    for action, forwards, weights in waiting(schedule, rank):
        one = parts[action.part].microbatch
        peak = {"F": one.forward_peak, "W": parts[action.part].waiting_bytes}.get(action.kind, one.backward_peak)
        for number, part in own:
            peak += part.fixed_bytes + (part.left_bytes if number in trained else 0)
            peak += forwards[number] * part.microbatch.kept_bytes + weights[number] * part.waiting_bytes
        if action.kind in ("B", "W"):
            trained.add(action.part)
        yield peak


def run(schedule: Schedule, parts: Several[Part]) -> Timeline:
    """Return the simulated step of a pipeline. Sending takes no time. Raises ValueError if the schedule deadlocks."""
    orders = [schedule.order(rank) for rank in range(schedule.ranks)]
    peaks = [_peaks(schedule, parts, rank) for rank in range(schedule.ranks)]
    ends: dict[tuple[Kind, int, int], float] = {}
    free, position = [0.0] * schedule.ranks, [0] * schedule.ranks
    events: list[Event] = []
    while any(at < len(order) for at, order in zip(position, orders, strict=True)):
        before = len(events)
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                action = order[position[rank]]
                needed = _needed(action, schedule)
                if any(each not in ends for each in needed):
                    break
                begin = max([free[rank], *(ends[each] for each in needed)])
                end = begin + _seconds(action, parts[action.part])
                done: Kind = "I" if action.kind == "B" else action.kind
                ends[done, action.part, action.microbatch] = free[rank] = end
                events.append(Event(action, rank, begin, end, next(peaks[rank])))
                position[rank] += 1
        if len(events) == before:
            message = f"schedule {schedule.name} deadlocks: the next action of every rank waits for another rank"
            raise InvalidValueError(message, kind="schedule_deadlock", name=schedule.name)
    events.sort(key=lambda event: (event.begin, event.rank))
    by_rank = [[event for event in events if event.rank == rank] for rank in range(schedule.ranks)]
    return Timeline(
        tuple(events),
        tuple(max(event.peak_bytes for event in each) for each in by_rank),
        tuple(sum(event.end - event.begin for event in each) for each in by_rank),
    )


def _needed(action: Action, schedule: Schedule) -> list[tuple[Kind, int, int]]:
    """Return (kind, part, microbatch) of the actions that an action waits for; "I" stands for "B", too."""
    part, microbatch = action.part, action.microbatch
    if action.kind == "F":
        return [("F", part - 1, microbatch)] if part else []
    if action.kind == "W":
        return [("I", part, microbatch)]
    own: tuple[Kind, int, int] = ("F", part, microbatch)
    return [own] if part == schedule.parts - 1 else [own, ("I", part + 1, microbatch)]


def _seconds(action: Action, part: Part) -> float:
    one = part.microbatch
    weights = _FOR_WEIGHTS * one.stored_backward_seconds
    by_kind = {"F": one.forward_seconds, "B": one.backward_seconds, "I": one.backward_seconds - weights, "W": weights}
    return by_kind[action.kind]


@dataclass(frozen=True)
class Part:
    """Stages `begin` … `end` - 1 on a rank: their chain and sequence for one microbatch, and how many are in flight.

    `fixed_bytes` (`fixed` of `plan_pipeline`, communication buffers) are always in memory. `left_bytes` (gradients that
    `chain` counts) are in memory after the first backward, and `waiting_bytes` of a microbatch from its backward for
    the inputs to that for the weights.
    """

    rank: int
    begin: int
    end: int
    chain: Chain
    flying: InFlight
    sequence: Sequence
    fixed_bytes: int = 0
    left_bytes: int = 0
    waiting_bytes: int = 0

    @cached_property
    def microbatch(self) -> Microbatch:
        return Microbatch.of(self.chain, self.sequence)

    @property
    def beside_bytes(self) -> int:
        """Most bytes besides the microbatches in flight: fixed bytes, gradients, and data of postponed backwards."""
        return self.fixed_bytes + self.left_bytes + self.flying.weights * self.waiting_bytes

    @property
    def peak_bytes(self) -> int:
        one = self.microbatch
        return self.beside_bytes + bytes_in_flight(one.kept_bytes, one.peak_bytes, self.flying.forwards)


@dataclass(frozen=True)
class PipelinePlan:
    """The parts of a chain in order, `limits` in bytes by rank, and a lower bound in seconds, None if unknown.

    With any cuts and any memory-persistent sequences within the limits, the slowest part takes at least `lower_bound`
    seconds a microbatch.
    """

    schedule: Schedule
    parts: tuple[Part, ...]
    limits: tuple[int, ...]
    lower_bound: float | None = None

    @property
    def cuts(self) -> tuple[int, ...]:
        """Index of the first stage of every part except the first part."""
        return tuple(part.begin for part in self.parts[1:])

    @property
    def slowest_seconds(self) -> float:
        """Seconds that a microbatch takes on the slowest rank, recomputation included."""
        ranks = range(self.schedule.ranks)
        return max(sum(part.microbatch.seconds for part in self.parts_of(rank)) for rank in ranks)

    def parts_of(self, rank: int) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.rank == rank)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step of this plan."""
        return run(self.schedule, self.parts)

    @property
    def fits(self) -> bool:
        """Whether every rank of the simulated step stays within its limit."""
        return all(peak <= limit for peak, limit in zip(self.timeline.peaks, self.limits, strict=True))


def part_of(chain: Chain, begin: int, end: int) -> Chain:
    """Return stages begin … end - 1 as a chain. Unless it is the last part, it has no loss, and its output is kept."""
    last = end == len(chain)
    return Chain(
        chain.stages[begin:end],
        chain.activation[begin],
        chain.loss_time if last else 0.0,
        chain.loss_temp if last else 0,
        output_held=chain.output_held or not last,
    )


def with_weights_put_off(part: Chain) -> Chain:
    """Return `part` with backwards for the inputs only, which keep what the postponed backwards for the weights read.

    Each backward's `gradient` grows by these bytes: everything that the stage saves, its input, and the gradient of its
    output. If a runtime keeps less of this, the step needs less memory than planned.
    """
    stages: list[Stage] = []
    for incoming, stage in zip(part.activation, part.stages, strict=False):
        most = max(option.kept for option in stage.options)
        stays = stage.gradient + most + stage.activation + (incoming if not stages else 0)
        stages.append(replace(stage, gradient=stays))
    return replace(part, stages=tuple(stages))


@dataclass(frozen=True)
class DividedLimits:
    """Each part's share of its rank's limit. `limits`: bytes by rank; `fixed`: by stage; `buffers`: whether they count.

    If a rank has several parts, its limit is divided. Each part gets the fixed bytes of an average part. Of the rest, a
    share `working` is for the running microbatch, whichever part it runs through; the parts divide the remaining bytes
    in proportion to their microbatches in flight.
    """

    schedule: Schedule
    limits: tuple[int, ...]
    fixed: tuple[int, ...]
    buffers: bool = False
    working: float = 0.0

    @cached_property
    def flying(self) -> list[InFlight]:
        return in_flight(self.schedule)

    def room(self, number: int, more: int = 0) -> int:
        """Return the bytes that part `number` may use for the running microbatch; `more` is added to the limit."""
        return int(self.working * self._free(number, more))

    def share(self, number: int, more: int = 0) -> int:
        """Return the bytes that part `number` may use besides `room`: its rank's limit if it is the only part there."""
        schedule = self.schedule
        if schedule.virtual_stages == 1:
            return self.limits[number] + more
        same_rank = range(schedule.rank_of(number), schedule.parts, schedule.ranks)
        together = sum(self.flying[each].forwards for each in same_rank)
        free = self._free(number, more) - self.room(number, more)
        return sum(self.fixed) // schedule.parts + free * self.flying[number].forwards // together

    def _free(self, number: int, more: int) -> int:
        average = sum(self.fixed) // self.schedule.parts
        return self.limits[self.schedule.rank_of(number)] + more - average * self.schedule.virtual_stages

    def part(self, chain: Chain, number: int, begin: int, end: int, sequence: Sequence | None = None) -> Part:
        """Build part `number` of the pipeline from stages begin … end - 1; by default, it stores everything."""
        part, flying = part_of(chain, begin, end), self.flying[number]
        planned = with_weights_put_off(part) if flying.split else part
        return Part(
            rank=self.schedule.rank_of(number),
            begin=begin,
            end=end,
            chain=planned,
            flying=flying,
            sequence=store_all(part) if sequence is None else sequence,
            fixed_bytes=sum(self.fixed[begin:end])
            + (buffer_bytes(part, number, self.schedule, flying) if self.buffers else 0),
            left_bytes=sum(part.gradient) if self.schedule.microbatches > 1 else 0,
            waiting_bytes=sum(planned.gradient) if flying.split else 0,
        )
