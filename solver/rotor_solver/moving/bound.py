"""A lower bound for all steps that move, from lower bounds for priced chains.

Of any sequence within the limit, let C₁ be the seconds that it computes up to the loss, C₂ those after it, and M the
bytes that it moves. Copies out are over when the first operation after the loss begins, and copies back begin after the
loss. So with β bytes a second, a step takes at least

    T ≥ max(C₁, M / β_out) + max(C₂, M / β_in)
      = the most of  C₁ + C₂,  M / β_out + C₂,  C₁ + M / β_in,  M / β_out + M / β_in.

Every stage runs once before the loss, by one of its forwards: C₁ lies between `least` and `most`, whatever the
sequence. The program's certificate for the chain with a price λ says that C₁ + C₂ + λ M ≥ D(λ). Together, for all λ
that were solved, T is at least the height over M of each of the lines

    D(λ) - λ M        D(λ) - λ M - most + M / β_out        least + M / β_in        M / β_out + M / β_in

and of the seconds of storing everything. So it is at least the lowest point of all lines together. Memory that copies
take on their way is left out, which only lowers the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

from rotor_solver.chain import Chain
from rotor_solver.moving.link import Link


class Line(NamedTuple):
    """`seconds` for no byte moved, and `slope` seconds more for every byte."""

    seconds: float
    slope: float

    def at(self, moved: float) -> float:
        """Seconds if so many bytes are moved."""
        return self.seconds + self.slope * moved


class Priced(NamedTuple):
    """`bound`: no sequence takes fewer seconds on the chain with this `price` for every byte."""

    price: float
    bound: float


def lower_bound(chain: Chain, link: Link, found: Iterable[Priced]) -> tuple[float, float]:
    """(bytes, seconds): every step within the limit takes so many seconds at least, and that only if it moves so many
    bytes. The bounds in `found` have to be for that limit, or a higher one.
    """
    return lowest_point(list(_lines(chain, link, found)))


def lowest_point(lines: list[Line]) -> tuple[float, float]:
    """(bytes, seconds): where the highest of all lines is lowest, over zero bytes or more."""
    crossings = [0.0]
    for one, other in combinations(lines, 2):
        if one.slope != other.slope:
            crossings.append(max(0.0, (other.seconds - one.seconds) / (one.slope - other.slope)))
    return min(((moved, max(line.at(moved) for line in lines)) for moved in crossings), key=lambda point: point[1])


def _lines(chain: Chain, link: Link, found: Iterable[Priced]) -> Iterator[Line]:
    out, back = 1 / link.out_bytes_per_second, 1 / link.in_bytes_per_second
    forwards = [(stage.seconds_without_graph, *(o.forward_time for o in stage.options)) for stage in chain.stages]
    least, most = (sum(map(pick, forwards)) + chain.loss_time for pick in (min, max))
    yield Line(
        sum(min(o.forward_time + o.backward_time for o in stage.options) for stage in chain) + chain.loss_time, 0
    )
    yield Line(least, back)
    yield Line(0.0, out + back)
    for price, bound in found:
        yield Line(bound, -price)
        yield Line(bound - most, out - price)
