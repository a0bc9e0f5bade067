"""Cut a chain into parts for the ranks: the best cuts with the best sequences, and equal cuts for comparison.

`best_cuts` minimizes the time of the slowest part, the bottleneck. With c(s, i, j) the time of stages i … j - 1 as part
s, the least bottleneck of parts 0 … s on stages 0 … j - 1 is f(s, j) = the least over i of max(f(s - 1, i), c(s, i,
j)). A part's time takes a solve, a lower bound of it is quick. So the recurrence begins with bounds; for the cuts that
it finds best, tighter bounds and at last times are computed, until cuts of known times are no slower than the bound of
the bottleneck (LazySP: Dellin and Srinivasa, 2016). `equal_cuts` applies one policy to all ranks, as training libraries
do: keep everything, recompute segments of n stages (Megatron-LM's "uniform"), or only the first n stages ("block").
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, pairwise
from numbers import Integral
from typing import NamedTuple

import numpy as np

from rotor_solver.chain import LARGEST_SIZE, Chain, check_chain, checked_size
from rotor_solver.described_error import (
    InfeasibleError,
    InvalidValueError,
    bytes_of_limit,
    check_count,
    check_type,
    is_number,
    listed,
)
from rotor_solver.least_memory import Floats
from rotor_solver.pipeline.plan import DividedLimits, Part, PipelinePlan, part_of
from rotor_solver.pipeline.schedules import Schedule
from rotor_solver.pipeline.sequences import (
    bound_in_flight,
    fastest_in_flight,
    fastest_with_room,
    has_room,
    least_in_flight,
)
from rotor_solver.segments import fastest_forwards, recompute_segments, segments_from, store_all
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate
from rotor_solver.watching import watcher

Cost = Callable[[int, int, int], float]  # Function of (s, i, j): cost, or a bound of it, of stages i … j - 1 as part s


def best_cuts(bounds: Floats, *costs: Cost) -> tuple[list[int], float]:
    """Return the cuts 0 = c_0 < … < c_S = N whose costliest part costs least, and its cost; [] if that is infinite."""
    # The last of `costs` is exact; the others are lower bounds, each slower to compute and tighter than the one before.
    lower, known = bounds.copy(), np.full(bounds.shape, np.inf)
    asked = np.zeros(bounds.shape, np.int64)
    while True:
        bottleneck = _bottleneck(lower)
        if bottleneck == np.inf:
            return [], np.inf
        if _bottleneck(known) <= bottleneck:
            return _cheapest(known, bottleneck), bottleneck
        for part, (i, j) in enumerate(pairwise(_cheapest(lower, bottleneck))):
            at = part, i, j
            if asked[at] < len(costs):
                lower[at] = max(lower[at], costs[asked[at]](part, i, j))
                asked[at] += 1
            if asked[at] == len(costs):
                known[at] = lower[at]


def _bottleneck(costs: Floats) -> float:
    best = np.full(costs.shape[1], np.inf)
    best[0] = -np.inf
    for part in costs:
        best = np.maximum(best[:, None], part).min(axis=0)
    return float(best[-1])


def _cheapest(costs: Floats, bottleneck: float) -> list[int]:
    """Return the cuts with the least sum of costs among those with no cost above `bottleneck`."""
    best = np.full(costs.shape[1], np.inf)
    best[0] = 0.0
    before = []
    for part in costs:
        sums = best[:, None] + np.where(part <= bottleneck, part, np.inf)
        before.append(sums.argmin(axis=0))
        best = sums.min(axis=0)
    cuts = [costs.shape[1] - 1]
    for earlier in reversed(before):
        cuts.append(int(earlier[cuts[-1]]))
    return cuts[::-1]


def cut_points(chain: Chain, boundaries: Iterable[int] | None) -> list[int]:
    """Return 0, the stages of `boundaries` (default: all) at which a part may begin, and the chain's length."""
    length = len(chain)
    given = list(range(length)) if boundaries is None else listed(boundaries, "boundaries")
    for point in given:
        if not is_number(point, Integral) or not 0 <= point <= length:
            message = f"boundaries must be 0 to {length - 1}, got {point}"
            raise InvalidValueError(message, kind="no_such_stage", name="boundaries")
    # A part may not begin at a stage if an earlier stage frees gradients that this stage or a later one adds.
    inner = sorted(set(given) - {0, length})
    return [0, *(each for each in inner if min(accumulate(reversed(chain.gradient[:each]))) >= 0), length]


# Number of slots of a microbatch's kept bytes in quick lower bounds. Not measured; with fewer, more parts are solved.
_FEW = 24
# A part's chain, bytes for its microbatches (negative if other memory exceeds the part's share), number of microbatches
# in flight, and bytes for the running one alone (0 if a rank has one part).
_Key = tuple[Chain, int, int, int]


class PartCosts:
    """Seconds of parts, by number, first stage and end; equal parts with equal limits are solved once."""

    def __init__(self, chain: Chain, divided: DividedLimits, slots: int) -> None:
        self.chain = chain
        self.divided = divided
        self._slots = slots
        self._shared = divided.schedule.virtual_stages > 1
        self._solved: dict[_Key, Sequence | None] = {}
        self._guessed: dict[_Key, float] = {}
        self._stored = cache(partial(divided.part, chain))

    def seconds(self, number: int, begin: int, end: int) -> float:
        sequence = self._solve(self._key(number, begin, end))
        return math.inf if sequence is None else simulate(self._stored(number, begin, end).chain, sequence).makespan

    def lower_bound(self, number: int, begin: int, end: int) -> float:
        """Return a proven lower bound of a part's seconds with any `Persistent` sequence; infinite if none fits."""
        sequence = self._solve(self._key(number, begin, end))
        return math.inf if sequence is None else sequence.lower_bound or 0.0

    def guess(self, number: int, begin: int, end: int) -> float:
        """Return a lower bound of the part's seconds that takes little time; infinite if no sequence fits."""
        key = self._key(number, begin, end)
        if key in self._solved:
            return self.lower_bound(number, begin, end)
        if key not in self._guessed:
            chain, free, count, room = key
            if free < 0:
                guess = math.inf
            elif not self._shared:
                guess = bound_in_flight(chain, free, count, _FEW)
            else:
                guess = simulate(chain, store_all(chain)).makespan if has_room(chain, free // count, room) else math.inf
            self._guessed[key] = guess
        return self._guessed[key]

    def lacking(self, number: int, begin: int, end: int) -> int:
        """Return by how many bytes the limit of the part's rank is too low for it; zero or less if the part fits."""
        part = self._stored(number, begin, end)
        if not self._shared:
            least = least_in_flight(part.chain, part.flying.forwards)[0]
            return part.beside_bytes + least - self.divided.share(number)
        return bisect_left(range(LARGEST_SIZE), True, key=partial(self._fits, number, part))

    def part(self, number: int, begin: int, end: int) -> Part:
        sequence = self._solve(self._key(number, begin, end))
        assert sequence is not None
        part = replace(self._stored(number, begin, end), sequence=sequence)
        assert part.peak_bytes <= self.divided.share(number) + self.divided.room(number)
        return part

    def _key(self, number: int, begin: int, end: int) -> _Key:
        part = self._stored(number, begin, end)
        free = self.divided.share(number) - part.beside_bytes
        return part.chain, free, part.flying.forwards, self.divided.room(number)

    def _fits(self, number: int, part: Part, more: int) -> bool:
        free = self.divided.share(number, more) - part.beside_bytes
        return has_room(part.chain, free // part.flying.forwards, self.divided.room(number, more))

    def _solve(self, key: _Key) -> Sequence | None:
        if key not in self._solved:
            if (progress := watcher()) is not None:
                progress(len(self._solved), 0, "parts")
            chain, free, count, room = key
            self._solved[key] = None
            with suppress(InfeasibleError):
                if free >= 0 and self._shared:
                    self._solved[key] = fastest_with_room(chain, free // count, room)
                elif free >= 0:
                    self._solved[key] = fastest_in_flight(chain, free, count, self._slots)
        return self._solved[key]


def plan_pipeline(
    chain: Chain,
    ranks: int,
    limits: float | Several[float],
    microbatches: int,
    schedule: str = "1f1b",
    *,
    fixed: Several[int] | None = None,
    boundaries: Iterable[int] | None = None,
    virtual_stages: int | None = None,
    buffers: bool = False,
    slots: int = 200,
) -> PipelinePlan:
    """Cut `chain` into parts for `ranks`, with a sequence for each, so that the slowest part is as fast as possible.

    `chain` is for one microbatch. `limits` are bytes, the same for all ranks or one number for each. `fixed` are each
    stage's bytes in memory throughout the step: parameters, optimizer state, and gradients that `chain` does not count.
    `boundaries` are the stages at which a part may begin (default: all), `virtual_stages` the number of parts on each
    rank (default: two if interleaved). With `buffers`, communication buffers of torch.distributed.pipelining count.

    If each rank has one part, the cuts are optimal: no others make the slowest part faster, given each part's fastest
    memory-persistent sequence with kept bytes rounded up to `slots`. The plan's `lower_bound` holds for all cuts and
    memory-persistent sequences, without rounding. If a rank has several parts, each gets a share of the rank's limit;
    of a few divisions of the limits, the plan with the shortest simulated step is returned, without a bound.

    Raises InfeasibleError if no cuts fit; its `min_bytes` is the least limit that has a plan (if a rank has several
    parts, another division of its limit might need less). Raises ValueError for an unknown schedule, fewer stages than
    parts, and invalid numbers.
    """
    check_chain(chain)
    check_type(buffers, bool, "buffers", "pass True or False")
    if virtual_stages is None:
        virtual_stages = 2 if str(schedule) == "interleaved" else 1
    order = Schedule(schedule, ranks, microbatches, virtual_stages)
    check_count(slots, "slots")
    points = cut_points(chain, boundaries)
    if len(points) <= order.parts:
        places = "" if len(points) > len(chain) else f", which can be cut at {len(points) - 2} places,"
        message = f"take fewer ranks: {len(chain)} stages{places} cannot be cut into {order.parts} parts"
        raise InvalidValueError(message, kind="too_few_stages", stages=len(chain), parts=order.parts)
    limits = limits if isinstance(limits, Several) else [limits] * ranks
    _check_length("limits", limits, ranks)
    divided = DividedLimits(order, tuple(map(bytes_of_limit, limits)), _fixed_sizes(chain, fixed), buffers)
    if order.virtual_stages == 1:
        return _best_plan(PartCosts(chain, divided, slots), points)
    plans, refusals = [], []
    for working in _WORKING:
        try:
            plans.append(_best_plan(PartCosts(chain, replace(divided, working=working), slots), points))
        except InfeasibleError as error:
            refusals.append(error)
    if not plans:
        raise min(refusals, key=lambda error: error.min_bytes)
    return min(plans, key=lambda plan: plan.timeline.makespan)


# Shares of a rank's limit that several parts reserve for the microbatch that runs: all are tried, and the fastest plan
# is kept. Not measured; each costs a search.
_WORKING = (0.1, 0.2, 0.3, 0.45, 0.6)


def _best_plan(search: PartCosts, points: list[int]) -> PipelinePlan:
    divided = search.divided
    bounds = _seconds_stored(search.chain, points, divided.schedule.parts)

    def along(cost: Cost) -> Cost:
        return lambda part, i, j: cost(part, points[i], points[j])

    cuts, _ = best_cuts(bounds, along(search.guess), along(search.seconds))
    if not cuts:
        raise _refusal(search, bounds, points)
    pairs = enumerate(pairwise(points[cut] for cut in cuts))
    parts = tuple(search.part(number, begin, end) for number, (begin, end) in pairs)
    plan = PipelinePlan(divided.schedule, parts, divided.limits)
    if divided.schedule.virtual_stages > 1:
        return plan
    _, lower = best_cuts(bounds, along(search.guess), along(search.lower_bound))
    return replace(plan, lower_bound=min(lower, plan.slowest_seconds))


def _fixed_sizes(chain: Chain, fixed: Several[int] | None) -> tuple[int, ...]:
    sizes = [0] * len(chain) if fixed is None else listed(fixed, "fixed")
    _check_length("fixed", sizes, len(chain))
    return tuple(checked_size(size, f"fixed of stage {stage}") for stage, size in enumerate(sizes))


def _check_length(name: str, values: Several[float], needs: int) -> None:
    if len(values) != needs:
        each = "rank" if name == "limits" else "stage"
        message = f"{name} must have {needs} entries, one for each {each}, got {len(values)}"
        raise InvalidValueError(message, kind="wrong_length", name=name, got=len(values), needs=needs)


def _seconds_stored(chain: Chain, points: list[int], parts: int) -> Floats:
    """Return lower bounds, [S, N+1, N+1] by (part, i, j): seconds of storing stages points[i] … points[j] - 1."""
    fastest = [min(way.forward_time + way.backward_time for way in stage.options) for stage in chain]
    until = np.array([0.0, *accumulate(fastest)])[points]
    until[-1] += chain.loss_time
    # A margin, as sums in another order differ in their last digits.
    seconds = (until[None, :] - until[:, None]) * (1 - 1e-12 * len(points))
    bounds = np.repeat(np.where(np.tri(len(points), dtype=bool), np.inf, seconds)[None], parts, axis=0)
    bounds[:-1, :, -1] = np.inf  # only the last part ends at the end of the chain
    bounds[-1, :, :-1] = np.inf
    return bounds


def _refusal(search: PartCosts, bounds: Floats, points: list[int]) -> InfeasibleError:
    """Return the error that names the least limit with a plan: that of the cuts whose limits lack the fewest bytes."""
    unknown = np.where(np.isfinite(bounds), -float(max(search.divided.limits)), np.inf)

    def lacking(part: int, i: int, j: int) -> float:
        return float(search.lacking(part, points[i], points[j]))

    cuts, missing = best_cuts(unknown, lacking)
    schedule, pairs = search.divided.schedule, [*pairwise(cuts)]
    number = max(range(schedule.parts), key=lambda each: lacking(each, *pairs[each]))
    rank, flying = schedule.rank_of(number), search.divided.flying[number].forwards
    limit = search.divided.limits[rank]
    least = limit + int(missing)
    # Another division of a rank's limit among its parts might need less.
    why = " at least" if schedule.virtual_stages == 1 else ", since each of its parts has a share of its own"
    message = (
        f"take a limit of {least} bytes, smaller microbatches or more than {schedule.ranks} ranks: rank {rank}, with "
        f"{flying} of {schedule.microbatches} microbatches in flight, needs {least} bytes{why}; its limit is {limit}"
    )
    return InfeasibleError(message, min_bytes=least, mem_limit=limit)


class EqualCuts(NamedTuple):
    policy: str  # Description for reports, such as "recompute segments of 2 stages"
    plan: PipelinePlan


def equal_cuts(
    chain: Chain,
    plan: PipelinePlan,
    *,
    fixed: Several[int] | None = None,
    boundaries: Iterable[int] | None = None,
    buffers: bool = False,
) -> tuple[EqualCuts, ...]:
    """Return, for equal cuts of `chain`, a plan by every policy, fastest first, with the schedule and limits of `plan`.

    The other arguments must be those with which `plan_pipeline` made `plan`.
    """
    check_chain(chain)
    check_type(plan, PipelinePlan, "plan", "take that of plan_pipeline")
    points, count = cut_points(chain, boundaries), plan.schedule.parts
    cuts = [points[(len(points) - 1) * each // count] for each in range(count + 1)]
    divided = DividedLimits(plan.schedule, plan.limits, _fixed_sizes(chain, fixed), buffers)
    chains = [part_of(chain, begin, end) for begin, end in pairwise(cuts)]

    found = []
    for words, segments in _policies([len(each) for each in chains]):
        pairs = zip(chains, segments, strict=True)
        sequences = [recompute_segments(fastest_forwards(each), again) for each, again in pairs]
        numbered = enumerate(zip(pairwise(cuts), sequences, strict=True))
        parts = [divided.part(chain, number, begin, end, each) for number, ((begin, end), each) in numbered]
        found.append(EqualCuts(words, PipelinePlan(plan.schedule, tuple(parts), plan.limits)))
    return tuple(sorted(found, key=lambda each: each.plan.slowest_seconds))


def _policies(lengths: list[int]) -> Iterator[tuple[str, list[list[range]]]]:
    """Yield each policy's description and, for each part of `lengths` stages, the segments that it recomputes."""
    longest = max(lengths)
    yield "keep everything", [[] for _ in lengths]
    for size in range(1, longest + 1):
        words = f"recompute segments of {size} stages" if size < longest else "recompute everything"
        yield words, [segments_from(range(0, length, size), length) for length in lengths]
    for count in range(1, longest):
        again = [[range(stage, stage + 1) for stage in range(min(count, length))] for length in lengths]
        yield f"recompute the first {count} stages", again
