"""What the parts of a pipeline may take: the limits of ranks, and what is in memory beside the microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rotor_solver.chain import Chain
from rotor_solver.extremes import store_all
from rotor_solver.pipeline.buffers import buffer_bytes
from rotor_solver.pipeline.in_flight import InFlight, in_flight
from rotor_solver.pipeline.parts import left_bytes, part_of, with_weights_put_off
from rotor_solver.pipeline.plan import Part
from rotor_solver.pipeline.schedules import Schedule
from rotor_solver.sequence import Sequence


@dataclass(frozen=True)
class Budget:
    """`limits` in bytes by rank, `fixed` in bytes by stage; `buffers` says whether torch's are counted.

    Where a rank has several parts, its limit is divided: each part gets the fixed bytes of an average part, and of the
    rest in proportion to its microbatches in flight and `progress`, which stands for the one in progress: it takes more
    than those that wait.
    """

    schedule: Schedule
    limits: tuple[int, ...]
    fixed: tuple[int, ...]
    buffers: bool = False
    progress: int = 0

    @cached_property
    def flying(self) -> list[InFlight]:
        """By part, the microbatches in flight."""
        return in_flight(self.schedule)

    @cached_property
    def shares(self) -> list[int]:
        """By part, what it may take of the limit of its rank."""
        average = sum(self.fixed) // self.schedule.parts
        shares = []
        for number in range(self.schedule.parts):
            rest = self.limits[self.schedule.rank_of(number)] - average * self.schedule.virtual_stages
            shares.append(average + rest * self._weight(number) // self._together(number))
        return shares

    def rank_bytes_for(self, number: int, missing: int) -> int:
        """By how many bytes the limit of a rank has to grow for the share of a part to grow by `missing` bytes."""
        return -(-missing * self._together(number) // self._weight(number))

    def _weight(self, number: int) -> int:
        return self.flying[number].forwards + self.progress

    def _together(self, number: int) -> int:
        """The weights of all parts on the rank that has this one."""
        return sum(map(self._weight, range(self.schedule.rank_of(number), self.schedule.parts, self.schedule.ranks)))

    def part(self, chain: Chain, number: int, begin: int, end: int, sequence: Sequence | None = None) -> Part:
        """Part `number` of `chain`, with all that is in memory beside its microbatches; stored whole unless given."""
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
            left_bytes=left_bytes(part) if self.schedule.microbatches > 1 else 0,
            waiting_bytes=left_bytes(planned) if flying.split else 0,
        )
