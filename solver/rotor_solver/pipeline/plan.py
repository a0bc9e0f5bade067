"""A plan for a pipeline: where the chain is cut, and by which sequence every part is trained."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rotor_solver.chain import Chain
from rotor_solver.pipeline.in_flight import InFlight
from rotor_solver.pipeline.schedules import Schedule
from rotor_solver.pipeline.sequences.microbatch import Microbatch, bytes_in_flight
from rotor_solver.pipeline.timeline import Timeline, run
from rotor_solver.sequence import Sequence


@dataclass(frozen=True)
class Part:
    """Stages `begin` … `end` - 1, on a rank: a chain for one microbatch, and the sequence by which it is trained.

    `fixed_bytes` are parameters and the like, and buffers. `left_bytes` are gradients that the first microbatch leaves
    for good. `waiting_bytes` are kept from the backward for the inputs to the one for the weights, if they are two.
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
        """What one microbatch takes."""
        return Microbatch.of(self.chain, self.sequence)

    @property
    def beside_bytes(self) -> int:
        """All that may be there beside microbatches that wait for their backward, or are in progress."""
        return self.fixed_bytes + self.left_bytes + self.flying.weights * self.waiting_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes of the part."""
        one = self.microbatch
        return self.beside_bytes + bytes_in_flight(one.kept_bytes, one.peak_bytes, self.flying.forwards)


@dataclass(frozen=True)
class PipelinePlan:
    """The parts of a chain in order, `limits` in bytes by rank, and a bound: no cuts, with memory-persistent sequences
    inside the limits, make the slowest part faster than `lower_bound` seconds a microbatch. None if there is no bound.
    """

    schedule: Schedule
    parts: tuple[Part, ...]
    limits: tuple[int, ...]
    lower_bound: float | None = None

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first stages of all parts but the first."""
        return tuple(part.begin for part in self.parts[1:])

    @property
    def slowest_seconds(self) -> float:
        """Seconds of a microbatch on the slowest rank, recomputation included."""
        return max(map(self.rank_seconds, range(self.schedule.ranks)))

    def parts_of(self, rank: int) -> tuple[Part, ...]:
        """The parts of a rank."""
        return tuple(part for part in self.parts if part.rank == rank)

    def rank_seconds(self, rank: int) -> float:
        """Seconds of a microbatch on a rank, through all of its parts."""
        return sum(part.microbatch.seconds for part in self.parts_of(rank))

    @cached_property
    def timeline(self) -> Timeline:
        """A step of the pipeline, simulated."""
        return run(self.schedule, self.parts)

    @property
    def fits(self) -> bool:
        """Whether every rank of the simulated step stays inside its limit."""
        return all(peak <= limit for peak, limit in zip(self.timeline.peaks, self.limits, strict=True))
