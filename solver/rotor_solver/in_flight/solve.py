"""The fastest plans for several forwards of one chain that are in flight at once, within one limit.

In any order, the forwards share the limit evenly: what all of them keep, and what one needs more while it runs, has to
fit. A plan of one forward within a limit, with room at its loss for the others, keeps the difference of the two; so
each amount of room is a problem for the persistent program. In reverse order, all forwards are one chain
(`nested_chain`), whose plan is also a bound for any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rotor_solver.chain import Chain
from rotor_solver.extremes import min_bytes, recompute_all, store_all
from rotor_solver.in_flight.footprint import Footprint, peak_in_any_order, peak_in_reverse, with_room_at_loss
from rotor_solver.in_flight.joint_plan import Candidate, JointPlan, fastest_join
from rotor_solver.in_flight.nested_chain import apart, nested_chain
from rotor_solver.limits import InfeasibleError, bytes_of_limit, check_slots
from rotor_solver.persistent import Persistent
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate

ORDERS = ("any", "reverse")
_ROOMS = 10
"""Amounts of room for the forward that runs, at first; a guess."""
_CLOSER = 4
"""How often the two amounts beside the best are tried; a guess."""
_SHARES = (0.6, 0.8, 0.9, 1.0, 1.1, 1.25, 1.6)
"""Parts of an even share that one forward may keep, to be mixed; a guess."""
_LONGEST = 800
"""Stages of a nested chain, at most: for 800, the program takes some seconds."""


def solve_in_flight(
    chain: Chain, mem_limit: float, forwards: int, order: str = "any", *, alike: bool = False, slots: int = 500
) -> JointPlan:
    """The fastest plans known for `forwards` forwards of `chain` that together stay within `mem_limit` bytes.

    Every a_0 is counted. `order` says in which order the backwards may come: "any", or "reverse", from the last forward
    to the first, which takes less time or memory. Plans for any order are safe in reverse. With `alike`, all forwards
    follow one sequence, which is made for any order.

    Raises InfeasibleError if nothing fits; its `min_bytes` is `least_in_flight`. Raises ValueError if the limit is not
    a number of bytes, `forwards` or `slots` not one at least, or the order neither of the two.
    """
    limit = bytes_of_limit(mem_limit)
    check_slots(slots)
    least = least_in_flight(chain, forwards, order)
    if limit < least:
        raise InfeasibleError(
            f"{forwards} forwards in flight need at least {least} bytes; the limit is {limit}",
            min_bytes=least,
            mem_limit=limit,
        )
    stored = store_all(chain)
    whole = Footprint.of(chain, stored)
    if peak_in_any_order([whole] * forwards) <= limit:
        return _joined([(whole, stored)] * forwards, peak_in_any_order, forwards * whole.makespan)
    nested, bound = _nested(chain, limit, forwards, slots)
    if order == "reverse" and nested is not None and not alike:
        return _joined(nested, peak_in_reverse, bound)
    candidates = _candidates(chain, limit, forwards, slots)
    if alike:
        same = [each for each in candidates if peak_in_any_order([each[0]] * forwards) <= limit]
        found = [min(same, key=lambda each: each[0].makespan)] * forwards if same else None
    else:
        found = fastest_join(candidates, forwards, limit)
    if found is None:  # the least limit for any order may be more than that in reverse
        return _joined(_least_in_reverse(chain, forwards), peak_in_reverse, bound)
    # The fastest first: a step with fewer forwards then follows those.
    return _joined(sorted(found, key=lambda each: each[0].makespan), peak_in_any_order, bound)


def least_in_flight(chain: Chain, forwards: int, order: str = "any") -> int:
    """The least limit, in bytes, at which `solve_in_flight` has a plan.

    Raises ValueError if `forwards` is not one at least, or the order not one of `ORDERS`.
    """
    if isinstance(forwards, bool) or not isinstance(forwards, int) or forwards < 1:
        raise ValueError(f"forwards is {forwards!r}; it has to be a whole number, one at least")
    if order not in ORDERS:
        raise ValueError(f"the order is {order!r}; it has to be {' or '.join(ORDERS)}")
    least = _least_for_any_order(chain, forwards)[0]
    if order == "reverse":
        least = min(least, peak_in_reverse([each for each, _ in _least_in_reverse(chain, forwards)]))
    return least


def least_in_flight_sequence(chain: Chain, forwards: int, *, slots: int = 500) -> Sequence:
    """The sequence that `forwards` forwards follow at the least limit, for backwards in any order."""
    roomy = with_room_at_loss(chain, _least_for_any_order(chain, forwards)[1])
    return Persistent(slots).solve(roomy, min_bytes(roomy))


def _joined(found: list[Candidate], peak: Callable[[list[Footprint]], int], bound: float) -> JointPlan:
    footprints = [each for each, _ in found]
    makespan = sum(each.makespan for each in footprints)
    return JointPlan(tuple(each for _, each in found), makespan, peak(footprints), min(bound, makespan))


def _least_for_any_order(chain: Chain, forwards: int) -> tuple[int, int]:
    """The least limit for any order, and the room at the loss with which a plan of one forward keeps it.

    With room e, the least peak of one forward is P(e), and what it keeps is at most P(e) - e. So `forwards` of them
    need at most (forwards - 1) (P(e) - e) + P(e), and some e is the room of the best plan. As e grows, P(e) does not
    fall and P(e) - e does not rise, so most e can be left out.
    """
    left = Footprint.of(chain, store_all(chain)).left

    def least_peak(room: int) -> int:
        return min_bytes(with_room_at_loss(chain, room))

    def need(peak: int, kept: int) -> int:
        return (forwards - 1) * max(kept, left) + max(peak, left)

    low, high = 0, simulate(chain, store_all(chain)).peak
    peaks = least_peak(low), least_peak(high)
    best = min((need(peak, peak - room), room) for peak, room in zip(peaks, (low, high), strict=True))
    pending = [(low, peaks[0], high, peaks[1])]
    while pending:
        low, low_peak, high, high_peak = pending.pop()
        if high - low <= 1 or need(low_peak, high_peak - high) >= best[0]:
            continue
        middle = (low + high) // 2
        peak = least_peak(middle)
        best = min(best, (need(peak, peak - middle), middle))
        pending += [(low, low_peak, middle, peak), (middle, peak, high, high_peak)]
    return best


def _least_in_reverse(chain: Chain, forwards: int) -> list[Candidate]:
    sequences = apart(recompute_all(nested_chain(chain, forwards)), len(chain), forwards)
    return [(Footprint.of(chain, each), each) for each in sequences]


def _nested(chain: Chain, limit: int, forwards: int, slots: int) -> tuple[list[Candidate] | None, float]:
    """The best plan in reverse, and the bound that it proves; None where only a bound is known."""
    length = len(chain) + 1
    some = min(forwards, max(1, _LONGEST // length))
    one = store_all(chain).lower_bound
    assert one is not None
    if some < forwards:
        # The others keep something, too: what is left for `some` is the limit less the least of that.
        least = Footprint.of(chain, recompute_all(with_room_at_loss(chain, limit))).kept
        return None, forwards / some * _nested(chain, limit - (forwards - some) * least, some, slots)[1]
    bound, room = forwards * one, limit
    for _ in range(4):  # the nested chain counts a little less than there is
        try:
            found = Persistent(slots).solve(nested_chain(chain, forwards), room)
        except InfeasibleError:
            break
        if room == limit and found.lower_bound is not None:
            bound = max(bound, found.lower_bound)
        plans = [(Footprint.of(chain, each), each) for each in apart(found, len(chain), forwards)]
        over = peak_in_reverse([each for each, _ in plans]) - limit
        if over <= 0:
            return plans, bound
        room -= over
    plans = _least_in_reverse(chain, forwards)
    fits = peak_in_reverse([each for each, _ in plans]) <= limit
    return plans if fits else None, bound


def _candidates(chain: Chain, limit: int, forwards: int, slots: int) -> Iterator[Candidate]:
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
