"""What a plan is compared with: parts of equally many stages, and one policy on all ranks.

The policies are those that training libraries offer: keep everything; run segments of n stages again, one after the
other (Megatron-LM's "uniform"), up to whole parts; run only the first n stages of every part again (its "block").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rotor_solver.chain import Chain
from rotor_solver.extremes import store_all
from rotor_solver.pipeline.budget import Budget
from rotor_solver.pipeline.parts import cut_points, part_of
from rotor_solver.pipeline.plan import PipelinePlan
from rotor_solver.segments import fastest_forwards, recompute_segments, segments_from
from rotor_solver.sequence import Sequence as Operations

Policy = Callable[[Chain], Operations]


@dataclass(frozen=True, slots=True)
class EqualCuts:
    """Equal cuts under one `policy`, in words."""

    policy: str
    plan: PipelinePlan

    @property
    def fits(self) -> bool:
        """Whether every rank stays inside its limit."""
        return self.plan.fits


def equal_cuts(
    chain: Chain,
    plan: PipelinePlan,
    *,
    fixed: Sequence[int] | None = None,
    boundaries: Iterable[int] | None = None,
    buffers: bool = False,
) -> tuple[EqualCuts, ...]:
    """Every policy on equal cuts of `chain`, with schedule and limits of `plan`, the fastest first.

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
    """All policies for parts of up to so many stages."""

    def uniform(size: int) -> Policy:
        def run(chain: Chain) -> Operations:
            segments = segments_from(range(0, len(chain), size), len(chain))
            return recompute_segments(fastest_forwards(chain), segments)

        return run

    def block(count: int) -> Policy:
        def run(chain: Chain) -> Operations:
            again = [range(stage, stage + 1) for stage in range(min(count, len(chain)))]
            return recompute_segments(fastest_forwards(chain), again)

        return run

    found: list[tuple[str, Policy]] = [("keep everything", store_all)]
    found += [(f"recompute segments of {size} stages", uniform(size)) for size in range(1, longest)]
    found.append(("recompute everything", uniform(longest)))
    found += [(f"recompute the first {count} stages", block(count)) for count in range(1, longest)]
    return found
