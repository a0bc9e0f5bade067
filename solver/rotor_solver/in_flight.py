"""Plan several forwards of one chain that all run before their backwards ("in flight"), within one limit.

If backwards may run in any order, all forwards use one sequence. `Persistent` finds it for a chain whose loss needs
`room` bytes: so at most the limit less `room` is kept at the loss, and several values of `room` are tried. In reverse
order, all forwards form one long chain (`nested_chain`), which gives the best plan, and a bound for any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import dataclass, replace

from rotor_solver.chain import LARGEST_SIZE, Chain, Option, Stage, check_chain
from rotor_solver.described_error import (
    InfeasibleError,
    InvalidValueError,
    bytes_of_limit,
    check_count,
    check_fits,
    check_type,
    listed,
    within_memory,
)
from rotor_solver.grouping import coarse_chain, joined
from rotor_solver.least_memory import costs_of, least_kept, least_memory
from rotor_solver.persistent import Persistent
from rotor_solver.segments import min_bytes, recompute_all, store_all
from rotor_solver.sequence import Loss, Operation, Sequence, check_sequence
from rotor_solver.simulate import Machine, simulate


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes and seconds of one forward and its backward that decide what several of them need together.

    `kept` is in memory from the end of the forward to the start of its backward, the gradient of the output included.
    `left` stays after the backward: the input, the output if the caller keeps it, and gradients. `peak` is the most
    bytes that this forward and its backward have in memory by themselves.
    """

    kept: int
    left: int
    peak: int
    makespan: float

    @property
    def waiting(self) -> int:
        """Most bytes that the forward has in memory while another forward or backward runs."""
        return max(self.kept, self.left)

    @property
    def working(self) -> int:
        """Bytes that the forward or its backward needs beyond `waiting` while it runs."""
        return max(0, self.peak - self.waiting)

    @classmethod
    def of(cls, chain: Chain, sequence: Sequence) -> Footprint:
        found = simulate(chain, sequence)
        loss = sequence.index(Loss())
        # The output's gradient counts: a sum of losses makes those of all outputs before any stage's backward.
        kept = (found.after[loss - 1] if loss else chain.input_bytes) + chain.activation[-1]
        return cls(kept, found.after[-1] + chain.input_bytes, found.peak, found.makespan)


def _held_by_others(footprints: Many[Footprint], order: str) -> list[int]:
    """Return, for each forward, the bytes that the others have in memory while it or its backward runs."""
    if order == "any":
        return [sum(each.waiting for each in footprints) - own.waiting for own in footprints]
    found, before, after = [], 0, sum(each.left for each in footprints)
    for each in footprints:
        after -= each.left
        found.append(before + after)
        before += each.kept
    return found


def peaks_of(footprints: Many[Footprint], order: str) -> list[int]:
    """Return, for each forward, the peak bytes of all forwards together while it or its backward runs."""
    own = [max(each.peak, each.waiting if order == "any" else 0) for each in footprints]
    return [others + each for others, each in zip(_held_by_others(footprints, order), own, strict=True)]


def busiest_of(footprints: Many[Footprint], order: str) -> tuple[int, int]:
    """Return the index of the forward that runs at the peak, and the bytes that the others then have in memory."""
    peaks = peaks_of(footprints, order)
    number = peaks.index(max(peaks))
    return number, _held_by_others(footprints, order)[number]


def most_while_one_begins(footprints: Many[Footprint], order: str) -> int:
    """Return the most bytes that others have in memory when a forward begins: in reverse order, when the last does."""
    return sum(each.kept for each in footprints[:-1]) if order == "reverse" else max(_held_by_others(footprints, order))


def with_room_at_loss(chain: Chain, room: int) -> Chain:
    """Let the loss need `room` bytes: a plan within a limit then keeps at most limit - `room` bytes up to the loss."""
    return replace(chain, loss_temp=max(chain.loss_temp, room))


@dataclass(frozen=True, slots=True)
class ForwardsSimulation:
    """Seconds (`makespan`) and peak bytes of all forwards and backwards together; all forwards' inputs count."""

    makespan: float
    peak: int


def simulate_forwards(
    chain: Chain, sequences: Many[Sequence], order: Iterable[int] | None = None
) -> ForwardsSimulation:
    """Return the time and memory of forwards of `chain`, one by each of `sequences`, and of their backwards.

    `order` has the index of each sequence three times: for its forward, its loss and its backward. By default, it is
    the order of a sum of losses: all forwards, all losses, and the backwards from last to first. Memory that a forward
    still has after its backward, such as its input, counts to the end. Raises ValueError if a sequence is not valid, or
    if `order` does not have every index three times.
    """
    sequences = listed(sequences, "sequences")
    for each in sequences:
        check_sequence(each)
        simulate(chain, each)  # raises ValueError, naming the operation, if the sequence is not valid
    forwards = list(range(len(sequences)))
    order = [*forwards, *forwards, *reversed(forwards)] if order is None else listed(order, "order")
    if sorted(map(str, order)) != sorted(map(str, 3 * forwards)):
        message = f"order must name each of {len(sequences)} forwards three times, got {order}"
        raise InvalidValueError(message, kind="wrong_order", name="order")
    running: dict[int, tuple[Machine, Iterator[range]]] = {}
    peak = 0
    for number in order:
        if number not in running:
            loss, end = sequences[number].index(Loss()), len(sequences[number])
            parts = iter((range(loss), range(loss, loss + 1), range(loss + 1, end)))
            running[number] = Machine(chain, sequences[number]), parts
        machine, parts = running[number]
        others = sum(_held(each) for each, _ in running.values() if each is not machine)
        peak = max(peak, others + max([_held(machine), *map(machine.run, next(parts))]))
    return ForwardsSimulation(sum(machine.seconds for machine, _ in running.values()), peak)


def _held(machine: Machine) -> int:
    """Return the bytes in memory now, with the input to the end, as the caller keeps it; `machine` drops it at B_0."""
    return machine.held + (machine.chain.input_bytes if 0 in machine.deltas and len(machine.chain) else 0)


def nested_chain(chain: Chain, forwards: int, *, at_most: bool = False) -> Chain:
    """Chain `forwards` copies of `chain` one after another; between each two is a joint, a stage that runs once.

    A joint's forward makes the input of the next forward and the gradient of the previous forward's output; its
    backward is the loss of the previous forward. Plans for this chain never need more bytes than the forwards do; with
    `at_most`, never fewer. The only difference is an output that the caller keeps, during the backward of the last
    stage: if the stage was stored, its saved bytes contain the output; if it was recomputed, the output is extra.
    """
    output, held = chain.activation[-1], chain.activation[-1] if chain.output_held else 0
    loss = Option(
        forward_time=0.0,
        backward_time=chain.loss_time,
        saved=chain.input_bytes + output,
        backward_temp=chain.loss_temp - output,  # `saved` already counts the gradient that the joint makes
    )
    # When the joint runs backward, the next forward's backward is over, but its input and the input's gradient stay.
    left = 2 * chain.input_bytes + (held if at_most else 0)
    joint = Stage(chain.input_bytes, (loss,), nograd_temp=LARGEST_SIZE // 4, gradient=left, name="joint")
    copy = chain.stages
    if copy and not at_most:
        copy = (*copy[:-1], replace(copy[-1], gradient=copy[-1].gradient + held))
    return replace(chain, stages=(*(forwards - 1) * (*copy, joint), *chain.stages))


def apart(sequence: Sequence, stages: int, forwards: int) -> tuple[Sequence, ...]:
    """Split a sequence for a `nested_chain` of `forwards` copies of `stages` stages into a sequence for each copy."""
    parts: list[list[Operation]] = [[] for _ in range(forwards)]
    for operation in sequence:
        if isinstance(operation, Loss):
            parts[-1].append(operation)
            continue
        number, stage = divmod(operation.stage, stages + 1)
        if stage < stages:
            parts[number].append(replace(operation, stage=stage))
        elif Loss() not in parts[number]:  # a joint's first operation runs when the forward of its copy is over
            parts[number].append(Loss())
    return tuple(Sequence(part, sequence.algorithm) for part in parts)


Candidate = tuple[Footprint, Sequence]


@dataclass(frozen=True, slots=True)
class JointPlan:
    """One sequence for each forward, in the order in which the forwards run.

    `makespan` (seconds) and `peak` (bytes) are of all forwards and backwards together. No memory-persistent sequences
    take less than `lower_bound` seconds together within the limit.
    """

    sequences: tuple[Sequence, ...]
    makespan: float
    peak: int
    lower_bound: float

    @property
    def gap(self) -> float:
        """Upper bound of how much slower the plan is than the best: makespan / lower_bound - 1."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def sequence(self) -> Sequence:
        """The sequence of the first forward, with the others in `beside` unless all are the same."""
        first, bound = self.sequences[0], self.lower_bound / len(self.sequences)
        others = self.sequences[1:] if any(each != first for each in self.sequences) else ()
        return Sequence(first, "persistent", bound, (Sequence(each, "persistent", bound) for each in others))


def _joined(found: list[Candidate], order: str, bound: float) -> JointPlan:
    makespan = sum(each.makespan for each, _ in found)
    return JointPlan(tuple(each for _, each in found), makespan, _peak(found, order), min(bound, makespan))


def _peak(found: list[Candidate], order: str) -> int:
    return max(peaks_of([each for each, _ in found], order))


def _apart(chain: Chain, sequence: Sequence, forwards: int) -> list[Candidate]:
    return [(Footprint.of(chain, each), each) for each in apart(sequence, len(chain), forwards)]


ORDERS = ("any", "reverse")


@within_memory
def least_in_flight(chain: Chain, forwards: int, order: str = "any") -> int:
    """Return the least limit, in bytes, at which `solve_in_flight` has a plan.

    Raises ValueError if `forwards` < 1, or if the order is not one of `ORDERS`.
    """
    check_chain(chain)
    check_count(forwards, "forwards")
    check_type(order, str, "order", f"use {' or '.join(ORDERS)}")
    if order not in ORDERS:
        message = f"order must be {' or '.join(ORDERS)}, got {order!r}"
        raise InvalidValueError(message, kind="unknown_value", name="order")
    least = _least_for_any_order(chain, forwards)[0]
    return least if order == "any" else min(least, _peak(_least_in_reverse(chain, forwards), order))


def least_in_flight_sequence(chain: Chain, forwards: int, order: str = "any", *, slots: int = 500) -> Sequence:
    """Return the first forward's sequence of a plan at the least limit; `beside` has the others if they differ."""
    least, room = _least_for_any_order(chain, forwards)
    if order == "reverse":
        found = _least_in_reverse(chain, forwards)
        if _peak(found, order) < least:
            return _joined(found, order, 0.0).sequence
    roomy = with_room_at_loss(chain, room)
    return Persistent(slots).solve(roomy, min_bytes(roomy))


def _least_in_reverse(chain: Chain, forwards: int) -> list[Candidate]:
    return _apart(chain, recompute_all(nested_chain(chain, forwards)), forwards)


def _least_for_any_order(chain: Chain, forwards: int) -> tuple[int, int]:
    """Return the least limit for any order, and the `room` of `with_room_at_loss` with which a plan attains it."""
    if (groups := joined(chain)) is not None:
        return _least_for_any_order(coarse_chain(chain, groups), forwards)
    costs, left = costs_of(chain), Footprint.of(chain, store_all(chain)).left
    found = []
    for kept, most, *_ in least_kept(costs, least_memory(costs)):
        room = most - kept - chain.activation[-1]
        kept, peak = chain.input_bytes + most - room, chain.input_bytes + most
        found.append(((forwards - 1) * max(kept, left) + max(peak, left), room))
    return min(found)


# Number of intervals from 0 to the limit, whose inner ends are tried first as `room`. Not measured; each costs a solve.
_ROOMS = 10
_CLOSER = 4  # Number of refinements around the best room so far. Not measured; each costs two solves.
# Limits of a forward's kept bytes to try, as multiples of an equal share of the limit less `room`. Multiples above 1
# may fit, too, since a plan may keep less than its limit. Not measured.
_SHARES = (0.6, 0.8, 0.9, 1.1, 1.25, 1.6)


def candidates(chain: Chain, limit: int, forwards: int, slots: int) -> Iterator[Candidate]:
    """Yield sequences that all `forwards` may use, found with different values of `room`. Not all fit in `limit`."""
    solver = Persistent(slots, work=0)  # little work for each solve, as only the best result is used
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


_LONGEST = 800  # Upper bound of the number of stages of a nested chain; for 800, `Persistent` takes some seconds


@within_memory
def solve_in_flight(
    chain: Chain,
    mem_limit: float,
    forwards: int,
    order: str = "any",
    *,
    alike: bool = False,
    worth: float = 0.0,
    slots: int = 500,
) -> JointPlan:
    """Return the fastest plan found with which `forwards` forwards of `chain` together stay within `mem_limit` bytes.

    The inputs of all forwards count. `order` is the order of the backwards: "any", or "reverse", from the last forward
    to the first, which may take less time or memory. A plan for any order has one sequence for all forwards, and works
    in reverse, too. Plans for reverse order may have different sequences, unless `alike`. A plan for any order is
    preferred to them if it takes at most the share `worth` longer.

    Raises InfeasibleError if nothing fits; its `min_bytes` is `least_in_flight`. Raises ValueError if the limit is not
    a number of bytes, if `forwards` or `slots` < 1, or if the order is unknown.
    """
    limit = bytes_of_limit(mem_limit)
    check_count(slots, "slots")
    check_fits(f"{forwards} forwards in flight need", least_in_flight(chain, forwards, order), limit)
    stored = store_all(chain)
    whole = Footprint.of(chain, stored)
    if max(peaks_of([whole] * forwards, "any")) <= limit:
        return _joined([(whole, stored)] * forwards, "any", forwards * whole.makespan)
    nested, bound = _nested(chain, limit, forwards, slots)
    in_reverse = None
    if order == "reverse" and nested is not None and not alike:
        in_reverse = _joined(nested, order, bound)
        if not worth:
            return in_reverse
    every = candidates(chain, limit, forwards, slots)
    fitting = [each for each in every if max(peaks_of([each[0]] * forwards, "any")) <= limit]
    plans = [in_reverse] if in_reverse else []
    if fitting:
        plans.insert(0, _joined([min(fitting, key=lambda each: each[0].makespan)] * forwards, "any", bound))
    if not plans:  # the limit suffices for backwards in reverse order, but not for any order
        return _joined(_least_in_reverse(chain, forwards), "reverse", bound)
    enough = (1 + worth) * min(plan.makespan for plan in plans)
    return next(plan for plan in plans if plan.makespan <= enough)


def _nested(chain: Chain, limit: int, forwards: int, slots: int) -> tuple[list[Candidate] | None, float]:
    """Return the fastest plan found for reverse order, or None, and a proven lower bound in seconds for any order."""
    some = min(forwards, max(1, _LONGEST // (len(chain) + 1)))
    one = store_all(chain).lower_bound or 0.0
    if some < forwards:
        # The other forwards keep memory, too: `some` get the limit less the least bytes that the others can keep.
        least = Footprint.of(chain, recompute_all(with_room_at_loss(chain, limit))).kept
        return None, forwards / some * _nested(chain, limit - (forwards - some) * least, some, slots)[1]
    bound, room, known = forwards * one, limit, list[list[Candidate]]()
    for _ in range(4):  # the nested chain counts slightly too few bytes: retry with less room
        try:
            found = Persistent(slots).solve(nested_chain(chain, forwards), room)
        except InfeasibleError:
            break
        if room == limit:
            bound = max(bound, found.lower_bound or 0.0)
        plans = _apart(chain, found, forwards)
        over = _peak(plans, "reverse") - limit
        if over <= 0:
            known.append(plans)
            break
        room -= over
    if room < limit:
        known.append(_least_in_reverse(chain, forwards))
        with suppress(InfeasibleError):
            found = Persistent(slots).solve(nested_chain(chain, forwards, at_most=True), limit)
            known.append(_apart(chain, found, forwards))
    fitting = [plans for plans in known if _peak(plans, "reverse") <= limit]
    return min(fitting, key=lambda plans: sum(each.makespan for each, _ in plans), default=None), bound
