"""Find the largest and the best batch within a limit from few measured batches."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from rotor_py.batch_size.step_costs import StepCosts, interpolated
from rotor_py.report.batch_choice import BatchPoint

_GROWTH = 4
"""Most growth from one measured batch to the next. A guess: a batch that needs more than its line must show that while
memory remains.
"""
_PATIENCE = 8
"""Measurements by lines before bisection starts, for sizes that are not convex. A guess; costs measurements, not
accuracy.
"""
_POINTS = 24
"""Batches planned at equal ratios to find the best and to draw the curve. A guess; too few miss the best."""
_CLOSER = 8
"""The same between the neighbours of the best."""
_FINE = 0.01
"""Relative distance between neighbours at which the search for the best batch ends."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest batch that fits, measured; `needs` is its bytes.

    `beyond` is the next tried batch, which does not fit, with `beyond_bytes`, measured or predicted by the line through
    smaller ones. None if there is no larger candidate.
    """

    batch: int
    needs: int
    beyond: int | None = None
    beyond_bytes: int = 0
    beyond_measured: bool = False


def largest(
    candidates: Sequence[int], needs: Callable[[int], int], known: dict[int, int], mem_limit: int, slack: int = 0
) -> Largest | None:
    """Find the largest of the increasing `candidates` that needs at most `mem_limit` bytes; None if the least does not
    fit.

    `needs` measures a batch; `known` holds the bytes of at least two measured batches and is extended. The bytes of a
    step are convex in the batch, since a peak is a maximum of affine sums. So the line through two batches is a lower
    bound outside them and an upper bound between them. Predictions within `slack` bytes of the limit are measured.
    """
    for rounds in count():
        fitting = [batch for batch in known if batch in candidates and known[batch] <= mem_limit]
        if not fitting:
            first = candidates[0]
            if first in known or _bound(known, first) > mem_limit + slack:
                return None
            known[first] = needs(first)
            continue
        fits = max(fitting)
        place = bisect_left(candidates, fits)
        if place + 1 == len(candidates):
            return Largest(fits, known[fits])
        following = candidates[place + 1]
        if following in known:
            return Largest(fits, known[fits], following, known[following], beyond_measured=True)
        # Use smaller batches only: bytes may jump where a library changes kernels, and the line through larger batches
        # then overestimates those before the jump.
        bound = _bound({batch: known[batch] for batch in known if batch < following}, following)
        if bound > mem_limit + slack:
            return Largest(fits, known[fits], following, bound)
        above = min((batch for batch in known if batch > fits and known[batch] > mem_limit), default=None)
        # A measured batch need not be a candidate, so always keep the next one.
        end = len(candidates) if above is None else max(bisect_left(candidates, above), place + 2)
        if rounds >= _PATIENCE:
            at = (place + end) // 2 if above is not None else 2 * place + 1
        else:
            at = bisect_right(candidates, _reached(known, fits, above, mem_limit)) - 1
        guess = candidates[min(max(at, place + 1), end - 1)]
        known[guess] = needs(guess)
    raise AssertionError


def _reached(known: dict[int, int], fits: int, above: int | None, mem_limit: int) -> int:
    """The batch at which lines through measured batches reach the limit, above `fits`, which is below it."""
    below = sorted(batch for batch in known if above is None or batch < above)
    ahead = _meets(known, below[-2], below[-1], mem_limit) if len(below) > 1 else None
    if above is None:
        most = _GROWTH * max(known)
        return most if ahead is None else min(ahead, most)
    between = _meets(known, below[-1], above, mem_limit)
    # Between two batches the line overestimates: its batch fits, or leads to the next try.
    return max(fits, between) if between is not None and between > fits else ahead or fits


def _meets(known: dict[int, int], low: int, high: int, mem_limit: int) -> int | None:
    """The last batch at which the line through two is within the limit; None if it does not rise."""
    rise = known[high] - known[low]
    return low + (mem_limit - known[low]) * (high - low) // rise if rise > 0 else None


def _bound(known: dict[int, int], batch: int) -> int:
    """Lower bound of the bytes of an unmeasured batch, if bytes are convex and do not fall."""
    below = sorted(each for each in known if each < batch)
    above = sorted(each for each in known if each > batch)
    bounds = [known[each] for each in below[-1:]]
    for pair in (below[-2:], above[:2]):
        if len(pair) == 2:
            low, high = pair
            bounds.append(known[low] + (known[high] - known[low]) * (batch - low) // (high - low))
    return max(bounds, default=0)


@dataclass(frozen=True, slots=True)
class Rate:
    optimizer_seconds: float = 0.0
    effective_batch: int | None = None

    def per_sample(self, seconds: float, batch: int) -> float:
        return seconds / batch + self.optimizer_seconds / (self.effective_batch or batch)


@dataclass(slots=True)
class Curve:
    """Plans within `mem_limit` by batch, each solved once, with costs interpolated between `measured` batches."""

    measured: dict[int, StepCosts]
    mem_limit: int
    rate: Rate
    slots: int = 500
    planned: dict[int, float] = field(default_factory=dict)
    """Seconds of forward, loss and backward by the fastest plan, by batch; infinite if none fits."""

    def seconds(self, batch: int) -> float:
        if batch not in self.planned:
            costs = interpolated(self.measured, batch)
            sequence = None if costs is None else costs.plan(self.mem_limit, self.slots)
            found = costs.seconds_of(sequence) if costs is not None and sequence is not None else float("inf")
            self.planned[batch] = found
        return self.planned[batch]

    def per_sample(self, batch: int) -> float:
        return self.rate.per_sample(self.seconds(batch), batch)

    def best(self, candidates: Sequence[int]) -> int:
        """The candidate with the least seconds per sample, from a grid at equal ratios and a finer one around its best.

        Seconds per sample have no simple shape: a larger batch amortizes fixed costs but recomputes more. The best may
        be missed between grid points.
        """
        looked = sorted({*_spread(candidates, _POINTS), *(batch for batch in self.measured if batch in candidates)})
        while True:
            best = min(looked, key=self.per_sample)
            at = looked.index(best)
            low, high = looked[max(0, at - 1)], looked[min(len(looked) - 1, at + 1)]
            around = candidates[bisect_left(candidates, low) : bisect_right(candidates, high)]
            more = {*_spread(around, _CLOSER), low, best, high}
            if more <= {*looked} or high - low <= _FINE * best:
                return best
            looked = sorted({*looked, *more})

    def points(self, candidates: Sequence[int], most: int, included: Iterable[int]) -> tuple[BatchPoint, ...]:
        """Points up to the batch `most`: those `included`, measured ones, and some at equal ratios."""
        inside = [batch for batch in candidates if batch <= most]
        batches = {*_spread(inside, _POINTS), *included, *(batch for batch in self.measured if batch in inside)}
        found = (self._point(batch) for batch in sorted(batches))
        return tuple(point for point in found if point is not None)

    def _point(self, batch: int) -> BatchPoint | None:
        costs = interpolated(self.measured, batch)
        if costs is None or self.per_sample(batch) in (0.0, float("inf")):
            return None
        stored = None
        if costs.stored_bytes <= self.mem_limit and costs.stored_seconds > 0:
            stored = 1 / self.rate.per_sample(costs.stored_seconds, batch)
        return BatchPoint(batch, 1 / self.per_sample(batch), stored, batch in self.measured)


def _spread(candidates: Sequence[int], points: int) -> set[int]:
    """Candidates at equal ratios from the first to the last."""
    ratio = candidates[-1] / candidates[0]
    found = set()
    for at in range(points + 1):
        target = candidates[0] * ratio ** (at / points)
        place = min(bisect_left(candidates, target), len(candidates) - 1)
        found.add(min(candidates[max(0, place - 1) : place + 1], key=lambda batch: abs(batch - target)))
    return found
