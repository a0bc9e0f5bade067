"""Cut a chain into parts for the ranks: the best cuts, the memory of each part, and equal cuts for comparison.

`best_cuts` minimizes the time of the slowest part, exactly and lazily. With c(s, i, j) the cost of stages i … j - 1 as
part s, the least bottleneck of parts 0 … s on stages 0 … j - 1 is

    f(s, j) = the least over i of max(f(s - 1, i), c(s, i, j))

Costs are expensive, lower bounds are cheap. So the recurrence is solved with lower bounds for all unknown costs; those
of the best cuts are tightened, then computed, and it is solved again, until cuts with known costs reach the bound
(LazySP: Dellin and Srinivasa, 2016). Costs are arbitrary: a part of a part may cost more, where its input is larger.

`equal_cuts` has parts of equally many stages and one policy on all ranks, like training libraries: keep everything;
recompute segments of n stages (Megatron-LM's "uniform"), up to whole parts; recompute only the first n stages of every
part (its "block").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from rotor_solver.chain import Chain, Stage
from rotor_solver.errors import InvalidValueError
from rotor_solver.least_memory import Floats
from rotor_solver.pipeline.plan import Part, PipelinePlan
from rotor_solver.pipeline.schedules import InFlight, Schedule, buffer_bytes, in_flight
from rotor_solver.segments import fastest_forwards, recompute_segments, segments_from, store_all
from rotor_solver.sequence import Sequence

Cost = Callable[[int, int, int], float]
"""Cost of stages i … j - 1 as part s, for (s, i, j)."""


def best_cuts(bounds: Floats, *costs: Cost) -> tuple[list[int], float]:
    """Return the cuts 0 = c_0 < … < c_S = N with the least bottleneck, and that bottleneck.

    `bounds` is [S, N+1, N+1], lower bounds by (s, i, j), infinite for forbidden parts. The last of `costs` is the cost,
    infinite if there is none; those before it are lower bounds, each more expensive and tighter than the one before.
    Each is called at most once for each part. Equal cuts are ordered by their sum, as far as costs are known. The list
    is empty if there are no finite cuts.
    """
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
    """The cuts with the least sum of costs, none of which is more than `bottleneck`."""
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


def part_of(chain: Chain, begin: int, end: int) -> Chain:
    """Return stages begin … end - 1 as a chain. Only the last part has the loss; for others it takes no time.

    The runtime keeps the output of a part until the backward, when it gets the output's gradient.
    """
    last = end == len(chain)
    return Chain(
        chain.stages[begin:end],
        chain.activation[begin],
        chain.loss_time if last else 0.0,
        chain.loss_temp if last else 0,
        output_held=chain.output_held or not last,
    )


def left_bytes(part: Chain) -> int:
    """Bytes that the backwards of a part leave for good; in memory from the beginning of the second microbatch on."""
    return sum(part.gradient)


def with_weights_put_off(part: Chain) -> Chain:
    """Return the part with backwards for the inputs only; the data for the weights' backwards stays in memory.

    This is all that the stages save, their inputs, and the gradients of their outputs: as if each backward left that
    many bytes of gradients. A runtime that keeps less stays below.
    """
    stages: list[Stage] = []
    for incoming, stage in zip(part.activation, part.stages, strict=False):
        most = max(option.kept for option in stage.options)
        stays = stage.gradient + most + stage.activation + (incoming if not stages else 0)
        stages.append(replace(stage, gradient=stays))
    return replace(part, stages=tuple(stages))


def cut_points(chain: Chain, wanted: Iterable[int] | None) -> list[int]:
    """Return the stages at which a part may begin, 0 and the end included: of those in `wanted`, or of all.

    The chain cannot be cut between stages that a gradient passes. Raises ValueError for a stage that does not exist.
    """
    length = len(chain)
    inner = range(1, length) if wanted is None else sorted(set(wanted) - {0, length})
    for point in inner:
        if not 0 < point < length:
            raise InvalidValueError(
                f"boundaries has {point}; the chain's stages are 0 to {length - 1}",
                kind="no_such_stage",
                name="boundaries",
            )
    return [0, *(point for point in inner if _nothing_crosses(chain.gradient[:point])), length]


def _nothing_crosses(gradients: tuple[int, ...]) -> bool:
    """Whether these stages free no gradients that later ones left."""
    left = 0
    for gradient in reversed(gradients):
        left += gradient
        if left < 0:
            return False
    return True


@dataclass(frozen=True)
class Budget:
    """`limits` in bytes by rank, `fixed` in bytes by stage; `buffers` says whether torch's are counted.

    If a rank has several parts, its limit is divided. After average fixed bytes, a share `working` of the rest is for
    the microbatch in progress, whichever part it runs through. Each part gets the fixed bytes of an average part, and
    of the rest in proportion to its microbatches in flight.
    """

    schedule: Schedule
    limits: tuple[int, ...]
    fixed: tuple[int, ...]
    buffers: bool = False
    working: float = 0.0

    @cached_property
    def flying(self) -> list[InFlight]:
        """By part, the microbatches in flight."""
        return in_flight(self.schedule)

    def room(self, number: int, more: int = 0) -> int:
        """Bytes for the microbatch in progress in addition to all kept bytes; `more` is added to the limit."""
        return int(self.working * self._free(number, more))

    def share(self, number: int, more: int = 0) -> int:
        """Bytes for a part in addition to that room: the limit of its rank, or its share of it."""
        average = sum(self.fixed) // self.schedule.parts
        free = self._free(number, more)
        ours = (free - self.room(number, more)) * self.flying[number].forwards // self._together(number)
        return average + ours if self.schedule.virtual_stages > 1 else self.limits[number] + more

    def _free(self, number: int, more: int) -> int:
        average = sum(self.fixed) // self.schedule.parts
        return self.limits[self.schedule.rank_of(number)] + more - average * self.schedule.virtual_stages

    def _together(self, number: int) -> int:
        """Microbatches in flight of all parts on this part's rank."""
        others = range(self.schedule.rank_of(number), self.schedule.parts, self.schedule.ranks)
        return sum(self.flying[each].forwards for each in others)

    def part(self, chain: Chain, number: int, begin: int, end: int, sequence: Sequence | None = None) -> Part:
        """Build part `number`, with all memory outside its microbatches; stored whole unless `sequence` is given."""
        part, flying = part_of(chain, begin, end), self.flying[number]
        planned = with_weights_put_off(part) if flying.split else part
        return Part(
            rank=self.schedule.rank_of(number),
            begin=begin,
            end=end,
            chain=planned,
            flying=flying,
            sequence=store_all(part) if sequence is None else sequence,
            fixed_bytes=sum(self.fixed[begin:end])
            + (buffer_bytes(part, number, self.schedule, flying) if self.buffers else 0),
            left_bytes=left_bytes(part) if self.schedule.microbatches > 1 else 0,
            waiting_bytes=left_bytes(planned) if flying.split else 0,
        )


Policy = Callable[[Chain], Sequence]


@dataclass(frozen=True, slots=True)
class EqualCuts:
    """Equal cuts under one `policy`, in words."""

    policy: str
    plan: PipelinePlan

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its limit."""
        return self.plan.fits


def equal_cuts(
    chain: Chain,
    plan: PipelinePlan,
    *,
    fixed: Several[int] | None = None,
    boundaries: Iterable[int] | None = None,
    buffers: bool = False,
) -> tuple[EqualCuts, ...]:
    """Apply every policy to equal cuts of `chain`, with schedule and limits of `plan`, the fastest first.

    The other arguments are those of `plan_pipeline`, which has checked them.
    """
    points, count = cut_points(chain, boundaries), plan.schedule.parts
    cuts = [points[(len(points) - 1) * each // count] for each in range(count + 1)]
    budget = Budget(plan.schedule, plan.limits, tuple(fixed or (0,) * len(chain)), buffers)
    chains = [part_of(chain, begin, end) for begin, end in pairwise(cuts)]

    def under(policy: Policy) -> PipelinePlan:
        parts = tuple(
            budget.part(chain, number, begin, end, policy(chains[number]))
            for number, (begin, end) in enumerate(pairwise(cuts))
        )
        return PipelinePlan(plan.schedule, parts, plan.limits)

    found = [EqualCuts(words, under(policy)) for words, policy in _policies(max(map(len, chains)))]
    return tuple(sorted(found, key=lambda each: each.plan.slowest_seconds))


def _policies(longest: int) -> list[tuple[str, Policy]]:
    def uniform(size: int) -> Policy:
        def run(chain: Chain) -> Sequence:
            segments = segments_from(range(0, len(chain), size), len(chain))
            return recompute_segments(fastest_forwards(chain), segments)

        return run

    def block(count: int) -> Policy:
        def run(chain: Chain) -> Sequence:
            again = [range(stage, stage + 1) for stage in range(min(count, len(chain)))]
            return recompute_segments(fastest_forwards(chain), again)

        return run

    found: list[tuple[str, Policy]] = [("keep everything", store_all)]
    found += [(f"recompute segments of {size} stages", uniform(size)) for size in range(1, longest)]
    found.append(("recompute everything", uniform(longest)))
    found += [(f"recompute the first {count} stages", block(count)) for count in range(1, longest)]
    return found
