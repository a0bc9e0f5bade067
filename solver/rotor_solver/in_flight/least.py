"""The least limit for several forwards in flight, and plans that keep it."""

from __future__ import annotations

from rotor_solver.chain import Chain
from rotor_solver.extremes import min_bytes, recompute_all, store_all
from rotor_solver.in_flight.footprint import Footprint, peak_in_reverse, with_room_at_loss
from rotor_solver.in_flight.joint_plan import Candidate, joined
from rotor_solver.in_flight.nested_chain import apart, nested_chain
from rotor_solver.persistent import Persistent
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate

ORDERS = ("any", "reverse")


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
        least = min(least, peak_in_reverse([each for each, _ in least_in_reverse(chain, forwards)]))
    return least


def least_in_flight_sequence(chain: Chain, forwards: int, order: str = "any", *, slots: int = 500) -> Sequence:
    """The sequence of the first of `forwards` forwards at the least limit, with those beside it if they are others."""
    least, room = _least_for_any_order(chain, forwards)
    if order == "reverse":
        found = least_in_reverse(chain, forwards)
        if peak_in_reverse([each for each, _ in found]) < least:
            return joined(found, peak_in_reverse, 0.0).sequence
    roomy = with_room_at_loss(chain, room)
    return Persistent(slots).solve(roomy, min_bytes(roomy))


def least_in_reverse(chain: Chain, forwards: int) -> list[Candidate]:
    """Plans that need little if the backwards come in reverse."""
    sequences = apart(recompute_all(nested_chain(chain, forwards)), len(chain), forwards)
    return [(Footprint.of(chain, each), each) for each in sequences]


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
