"""The largest batch that needs no more than a limit, exact to one sample, from few measurements.

The bytes that a step needs are convex in the batch: a peak is the largest of sums that are affine. So two measured
batches say something certain about all others. Outside of them, the line through both is a lower bound; between them,
it is an upper bound. If that line says that the next batch does not fit, no measurement is needed to know it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_GROWTH = 4
"""By how much a batch that is measured may be larger than any before it. A guess: where the law breaks, and more memory
is needed than the line says, that is to show while there is room."""
_PATIENCE = 8
"""Measurements led by lines, before the range is halved each time: for sizes that are not convex. A guess."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest batch that fits, measured; `needs` are its bytes.

    `beyond` is the next one that was asked about and does not fit, with `beyond_bytes`: measured, or predicted by the
    affine law. None if there is no larger one to ask about.
    """

    batch: int
    needs: int
    beyond: int | None = None
    beyond_bytes: int = 0
    beyond_measured: bool = False


def largest(
    candidates: Sequence[int], needs: Callable[[int], int], known: dict[int, int], mem_limit: int, slack: int = 0
) -> Largest | None:
    """The largest of `candidates`, which increase, that needs at most `mem_limit` bytes; None if the least does not.

    `needs` measures a batch; `known` has the bytes of those that were measured, two at least, and is added to. A
    prediction that is within `slack` bytes of the limit is not relied on.
    """
    rounds = 0
    while True:
        fitting = [batch for batch in candidates_in(candidates, known) if known[batch] <= mem_limit]
        if not fitting:
            if candidates[0] in known or at_least(known, candidates[0]) > mem_limit + slack:
                return None
            known[candidates[0]] = needs(candidates[0])
            continue
        fits = max(fitting)
        place = bisect_left(candidates, fits)
        if place + 1 == len(candidates):
            return Largest(fits, known[fits])
        following = candidates[place + 1]
        if following in known:
            return Largest(fits, known[fits], following, known[following], beyond_measured=True)
        # Only by smaller batches: bytes may jump where a library takes another kernel, and the line through larger ones
        # then says too much of those before the jump.
        bound = at_least({batch: known[batch] for batch in known if batch < following}, following)
        if bound > mem_limit + slack:
            return Largest(fits, known[fits], following, bound)
        rounds += 1
        guess = _next(candidates, known, mem_limit, place, halving=rounds > _PATIENCE)
        known[guess] = needs(guess)


def candidates_in(candidates: Sequence[int], known: dict[int, int]) -> list[int]:
    """The measured batches that are among the candidates."""
    return [batch for batch in known if batch in candidates]


def _next(candidates: Sequence[int], known: dict[int, int], mem_limit: int, place: int, *, halving: bool) -> int:
    """The batch to be measured: above the one at `place`, which fits, and below the least that is known not to."""
    fits = candidates[place]
    above = [batch for batch in known if batch > fits]
    end = len(candidates) if not above else bisect_left(candidates, min(above))
    if halving:
        return candidates[(place + end) // 2 if above else min(2 * place + 1, end - 1)]

    def last(fitting: Callable[[int], bool]) -> int:
        """The index of the last candidate for which it holds, from `place` on."""
        low, high = place, end
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fitting(candidates[middle]) else (low, middle)
        return low

    if not above:
        reach = last(lambda batch: at_least(known, batch) <= mem_limit and batch <= _GROWTH * max(known))
        return candidates[max(reach, place + 1)]
    safe = last(lambda batch: _line(known, fits, min(above), batch) <= mem_limit)
    if safe > place:
        return candidates[safe]
    return candidates[max(place + 1, last(lambda batch: at_least(known, batch) <= mem_limit))]


def at_least(known: dict[int, int], batch: int) -> int:
    """A lower bound for the bytes of a batch that was not measured, if they are convex and do not fall."""
    below = sorted(each for each in known if each < batch)
    above = sorted(each for each in known if each > batch)
    bounds = [known[each] for each in below[-1:]]
    if len(below) > 1:
        bounds.append(_line(known, below[-2], below[-1], batch))
    if len(above) > 1:
        bounds.append(_line(known, above[0], above[1], batch))
    return max(bounds, default=0)


def _line(known: dict[int, int], low: int, high: int, batch: int) -> int:
    """Where the line through two measured batches is at another one, rounded down."""
    return known[low] + (known[high] - known[low]) * (batch - low) // (high - low)
