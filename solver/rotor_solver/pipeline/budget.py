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

    Where a rank has several parts, its limit is divided. A share `working` of what average fixed bytes leave is for
    the microbatch in progress, whichever part it runs through. Each part gets the fixed bytes of an average part, and
    of the rest in proportion to its microbatches in flight.
    """

    schedule: Schedule
    limits: tuple[int, ...]
    fixed: tuple[int, ...]
    buffers: bool = False
    working: float = 0.0

    @cached_property
    def flying(self) -> list[InFlight]:
        """By part, the microbatches in flight."""
        return in_flight(self.schedule)

    def room(self, number: int, more: int = 0) -> int:
        """What the microbatch in progress may take beside all that is kept; if the limit was `more` bytes larger."""
        return int(self.working * self._free(number, more))

    def share(self, number: int, more: int = 0) -> int:
        """What a part may take beside that room: the limit of its rank, or its part of it."""
        average = sum(self.fixed) // self.schedule.parts
        free = self._free(number, more)
        ours = (free - self.room(number, more)) * self.flying[number].forwards // self._together(number)
        return average + ours if self.schedule.virtual_stages > 1 else self.limits[number] + more

    def _free(self, number: int, more: int) -> int:
        average = sum(self.fixed) // self.schedule.parts
        return self.limits[self.schedule.rank_of(number)] + more - average * self.schedule.virtual_stages

    def _together(self, number: int) -> int:
        """Microbatches in flight of all parts on the rank that has this one."""
        others = range(self.schedule.rank_of(number), self.schedule.parts, self.schedule.ranks)
        return sum(self.flying[each].forwards for each in others)

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
