"""When to wait and when to fetch: as late and as early as memory allows.

For stages that are to move, both are greedy, and the best that there is. Copies out end in the order in which they
begin. So what has to be over before an operation is the shortest beginning of the queue that makes enough room, and to
wait for it earlier gains nothing. Copies back begin in the order of the backwards. Once one has begun, its bytes stay
to the backward. So while the bytes of a later one are there, those of an earlier one are there too or used up, whenever
it began: to begin it as early as possible takes no room from the later one.
"""

from __future__ import annotations

from collections import deque

from rotor_solver.chain import Chain
from rotor_solver.limits import InfeasibleError
from rotor_solver.moving.link import Link
from rotor_solver.moving.moves import Moves
from rotor_solver.moving.simulate_moves import simulate_moves
from rotor_solver.moving.trips import Trip, loss_position, trips_of
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import Machine, last_reads, skipped_outputs


def plan_moves(chain: Chain, sequence: Sequence, link: Link, limit: int) -> Moves:
    """What of `sequence` moves, and when, such that no step by it takes more than `limit` bytes, however slow the link.

    A stage stays where it is if that fits and takes no longer over `link`. Raises InfeasibleError if even moving all
    that can move, one at a time, needs more.
    """
    trips = trips_of(chain, sequence)
    stay = _timetable(chain, sequence, (), limit)
    if stay is not None:
        return stay
    best = _timetable(chain, sequence, trips, limit)
    if best is None:
        least = max(bytes_while_away(chain, sequence, trips))
        raise InfeasibleError(
            f"the sequence needs {least} bytes, whatever it moves; the limit is {limit}",
            min_bytes=least,
            mem_limit=limit,
        )
    seconds = simulate_moves(chain, sequence, best, link).makespan
    moving = list(trips)
    for trip in reversed(trips):  # those nearest to the loss come back soonest, and are the hardest to hide
        others = [each for each in moving if each is not trip]
        without = _timetable(chain, sequence, others, limit)
        if without is not None:
            time = simulate_moves(chain, sequence, without, link).makespan
            if time <= seconds:
                best, seconds, moving = without, time, others
    return best


def _timetable(chain: Chain, sequence: Sequence, trips: list[Trip] | tuple[Trip, ...], limit: int) -> Moves | None:
    """When these trips begin and end, if all others are not made; None if that does not fit."""
    room = [limit - most for most in bytes_while_away(chain, sequence, trips)]
    if min(room, default=limit) < 0:
        return None
    after_loss = loss_position(sequence) + 1
    wait_out: list[list[int]] = [[] for _ in room]
    fetch: list[list[int]] = [[] for _ in room]
    leaves = {trip.forward: trip for trip in trips}
    pending: deque[Trip] = deque()
    for position, free in enumerate(room):
        while pending and (sum(trip.moved for trip in pending) > free or position == after_loss):
            wait_out[position].append(pending.popleft().stage)
        if position in leaves:
            pending.append(leaves[position])
    earliest = after_loss
    for trip in sorted(trips, key=lambda each: each.backward):
        begin = trip.backward
        while begin > earliest and room[begin - 1] >= trip.moved:
            begin -= 1
            room[begin] -= trip.moved
        fetch[begin].append(trip.stage)
        earliest = begin
    return Moves(tuple(map(tuple, wait_out)), tuple(map(tuple, fetch)))


def bytes_while_away(chain: Chain, sequence: Sequence, trips: list[Trip] | tuple[Trip, ...]) -> list[int]:
    """By operation, the most bytes in memory if what is moved is there in its own forward and backward alone."""
    machine, reads, skipped = Machine(chain), last_reads(sequence), skipped_outputs(sequence)
    leaves = {trip.forward: trip.stage for trip in trips}
    returns = {trip.backward: trip.stage for trip in trips}
    found = []
    for position, operation in enumerate(sequence):
        if position in returns:
            machine.move_in(returns[position])
        found.append(machine.run(operation, skip_output=position in skipped))
        if position in reads:
            machine.release_input(reads[position])
        if position in leaves:
            machine.move_out(leaves[position])
    return found
