"""Sequences that all forwards in flight may follow, to choose one from."""

from __future__ import annotations

from collections.abc import Iterator

from rotor_solver.chain import Chain
from rotor_solver.in_flight.footprint import Footprint, with_room_at_loss
from rotor_solver.in_flight.joint_plan import Candidate
from rotor_solver.in_flight.least import least_in_flight_sequence
from rotor_solver.limits import InfeasibleError
from rotor_solver.persistent import Persistent

_ROOMS = 10
"""Amounts of room for the forward that runs, at first; a guess."""
_CLOSER = 4
"""How often the two amounts beside the best are tried; a guess."""
_SHARES = (0.6, 0.8, 0.9, 1.1, 1.25, 1.6)
"""Parts of an even share that one forward may keep at most; a guess. What it keeps in the end may be less, and fit."""


def candidates(chain: Chain, limit: int, forwards: int, slots: int) -> Iterator[Candidate]:
    """Plans for one forward among so many, with more and less room for the one that runs."""
    solver = Persistent(slots)
    least = least_in_flight_sequence(chain, forwards, slots=slots)
    yield Footprint.of(chain, least), least
    seconds: dict[int, float] = {}

    def even(room: int, share: float = 1.0) -> Candidate | None:
        kept = int(share * (limit - room) / forwards)
        try:
            sequence = solver.solve(with_room_at_loss(chain, room), kept + room)
        except InfeasibleError:
            return None
        found = Footprint.of(chain, sequence), sequence
        if share == 1.0:
            seconds[room] = found[0].makespan
        return found

    rooms = sorted({int(limit * (number / _ROOMS) ** 2) for number in range(1, _ROOMS)})
    for _ in range(1 + _CLOSER):
        yield from (found for room in rooms if room not in seconds and (found := even(room)) is not None)
        if not seconds:
            return
        known = sorted(seconds)
        at = known.index(min(known, key=lambda room: seconds[room]))
        ends = known[max(0, at - 1)], known[at], known[min(len(known) - 1, at + 1)]
        rooms = [(ends[0] + ends[1]) // 2, (ends[1] + ends[2]) // 2]
    best = min(seconds, key=lambda room: seconds[room])
    yield from (found for share in _SHARES if (found := even(best, share)) is not None)
