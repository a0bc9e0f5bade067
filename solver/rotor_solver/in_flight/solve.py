"""The fastest plans for several forwards of one chain that are in flight at once, within one limit.

In any order, all forwards follow one sequence: what all of them keep, and what one needs more while it runs, has to
fit. A plan of one forward within a limit, with room at its loss for the others, keeps the difference of the two; so
each amount of room is a problem for the persistent program. In reverse order, all forwards are one chain
(`nested_chain`), whose plan is also a bound for any order.
"""

from __future__ import annotations

from contextlib import suppress

from rotor_solver.chain import Chain
from rotor_solver.extremes import recompute_all, store_all
from rotor_solver.in_flight.candidates import candidates
from rotor_solver.in_flight.footprint import Footprint, peak_in_any_order, peak_in_reverse, with_room_at_loss
from rotor_solver.in_flight.joint_plan import Candidate, JointPlan, fastest_alike, joined
from rotor_solver.in_flight.least import least_in_flight, least_in_reverse
from rotor_solver.in_flight.nested_chain import apart, nested_chain
from rotor_solver.limits import InfeasibleError, bytes_of_limit, check_slots
from rotor_solver.persistent import Persistent

_LONGEST = 800
"""Stages of a nested chain, at most: for 800, the program takes some seconds."""


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
    """The fastest plans known for `forwards` forwards of `chain` that together stay within `mem_limit` bytes.

    Every a_0 is counted. `order` says in which order the backwards may come: "any", or "reverse", from the last forward
    to the first, which takes less time or memory. Plans for any order are safe in reverse; all forwards follow one
    sequence there, and with `alike` in reverse as well. That asks less of the step, and is preferred to different
    sequences in reverse as long as it takes no more than `worth` longer, a share of the time.

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
        return joined([(whole, stored)] * forwards, peak_in_any_order, forwards * whole.makespan)
    nested, bound = _nested(chain, limit, forwards, slots)
    in_reverse = None
    if order == "reverse" and nested is not None and not alike:
        in_reverse = joined(nested, peak_in_reverse, bound)
        if not worth:
            return in_reverse
    found = fastest_alike(candidates(chain, limit, forwards, slots), forwards, limit)
    plans = [*([joined(found, peak_in_any_order, bound)] if found else []), *([in_reverse] if in_reverse else [])]
    if not plans:  # the least limit for any order may be more than that in reverse
        return joined(least_in_reverse(chain, forwards), peak_in_reverse, bound)
    enough = (1 + worth) * min(plan.makespan for plan in plans)
    return next(plan for plan in plans if plan.makespan <= enough)


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
    bound, room, known = forwards * one, limit, list[list[Candidate]]()
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
            known.append(plans)
            break
        room -= over
    if room < limit:
        known.append(least_in_reverse(chain, forwards))
        with suppress(InfeasibleError):
            found = Persistent(slots).solve(nested_chain(chain, forwards, at_most=True), limit)
            known.append([(Footprint.of(chain, each), each) for each in apart(found, len(chain), forwards)])
    fitting = [plans for plans in known if peak_in_reverse([each for each, _ in plans]) <= limit]
    return min(fitting, key=lambda plans: sum(each.makespan for each, _ in plans), default=None), bound
