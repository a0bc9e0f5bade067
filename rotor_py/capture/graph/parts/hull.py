"""Parts on the lower convex hull of what they keep and what they cost, and the few of them that are worth offering.

Of two parts, a line joins their bytes and prices; a part below it saves more for its price than a mixture of both. The
least cut by the line's own slope finds it if there is one, and so on between the new part and each of the two: all
parts on the lower convex hull, by Eisner and Severance (1976).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class Point(Protocol):
    """A part: the bytes that it keeps, and the price of what it makes again."""

    @property
    def nbytes(self) -> int: ...

    @property
    def price(self) -> int: ...


Part = TypeVar("Part", bound=Point)


def hull_between(before: Part, after: Part, least: Callable[[int, int], Part], depth: int) -> list[Part]:
    """The parts of the hull between two, which keep less from one to the next; a line is divided `depth` times at most.

    `least(for_bytes, for_prices)` is the part of least cost where a byte and a unit of price cost so much; of equal
    ones, that of the lowest price.
    """
    bytes_apart, price_apart = before.nbytes - after.nbytes, after.price - before.price
    if depth == 0 or bytes_apart <= 0 or price_apart <= 0:
        return []
    part = least(price_apart, bytes_apart)
    if not after.nbytes <= part.nbytes < before.nbytes or _below_line(part, before, after) < 0:
        return []
    first, second = (hull_between(*ends, least, depth - 1) for ends in ((before, part), (part, after)))
    return [*first, part, *second]


def thinned(parts: Sequence[Part], stays: Part, least_bytes: float, most: int) -> list[Part]:
    """At most so many of the parts between the first and the last, with at least so many bytes from one to the next.

    `parts` keep less from one to the next. Of those that are too close, or too many, what costs hardly less than a
    mixture of its neighbours goes first, and `stays` never.
    """
    whole, *inner, again = parts
    left = [whole, *(part for part in inner if whole.nbytes - part.nbytes >= least_bytes), again]

    def gain(at: int) -> int:
        return _below_line(left[at], left[at - 1], left[at + 1])

    while True:
        places = range(1, len(left) - 1)
        close = {at for at in places if at > 1 and left[at - 1].nbytes - left[at].nbytes < least_bytes}
        if not close and len(places) <= most:
            return left[1:-1]
        either = close | {at - 1 for at in close}
        del left[min((at for at in either or places if left[at] is not stays), key=gain)]


def _below_line(part: Point, before: Point, after: Point) -> int:
    """How much less a part costs than a mixture of two others that keeps the same bytes, in bytes times prices."""
    saved, apart = before.nbytes - part.nbytes, before.nbytes - after.nbytes
    return saved * (after.price - before.price) - apart * (part.price - before.price)
