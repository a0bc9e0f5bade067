"""Every strategy at one limit: what each of them needs, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rotor_cli.facts import Facts, Verified
from rotor_py.by_hand.by_level import ByLevel
from rotor_py.by_hand.levels import LEVELS
from rotor_py.measure.budget import Budget
from rotor_solver import (
    Algorithm,
    ForwardCheck,
    ForwardEnable,
    GriewankHeterogeneous,
    InfeasibleError,
    Loss,
    Periodic,
    RecomputeAll,
    Revolve,
    Sequence,
    Sqrt,
    StoreAll,
)
from rotor_solver.progress import Progress

OPTIMAL, EVERY = "optimal", "every n layers"


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy and the predicted cost of a whole step with it; what does not fit is shown at its least peak."""

    strategy: str
    fits: bool
    peak_bytes: int
    step_seconds: float
    overhead: float
    sequence: Sequence
    verified: Verified | None = None

    def as_json(self) -> dict[str, Any]:
        """One entry of the list "compare": seconds and bytes; what was measured, where it was."""
        data: dict[str, Any] = {
            "strategy": self.strategy,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "step_seconds": self.step_seconds,
            "overhead": self.overhead,
        }
        if self.verified is not None:
            data["measured_peak_bytes"] = self.verified.measured_peak_bytes
            data["measured_step_seconds"] = self.verified.measured_step_seconds
            data["max_grad_difference"] = self.verified.max_grad_difference
        return data


def compare(facts: Facts, model: nn.Module, slots: int, progress: Progress | None = None) -> tuple[Row, ...]:
    """The plan of `facts`, then the other strategies for `model`: those that fit, fastest first, then the others."""
    others = []
    for name, algorithm in _told(strategies(model, facts.measurement.names, slots), progress):
        sequence = at_limit(facts.budget, algorithm, facts.mem_limit)
        others.append(_row(facts, name, sequence))
    others.sort(key=lambda row: (not row.fits, row.step_seconds if row.fits else 0.0, row.peak_bytes))
    return (_row(facts, OPTIMAL, facts.sequence), *others)


def with_verified(rows: tuple[Row, ...], found: list[Verified]) -> tuple[Row, ...]:
    """The rows with what was measured of those that fit, in their order."""
    measured = iter(found)
    return tuple(replace(row, verified=next(measured)) if row.fits else row for row in rows)


def strategies(model: nn.Module, names: Iterable[str], slots: int) -> dict[str, Algorithm]:
    """The strategies by name, for a model whose stages have these names."""
    return {
        **_levels(model, [*names]),
        EVERY: Periodic(),
        "sqrt": Sqrt(),
        "revolve": Revolve(),
        "griewank-heterogeneous": GriewankHeterogeneous(slots),
        "store-all": StoreAll(),
        "recompute-all": RecomputeAll(),
    }


def leanest_of_each(
    facts: Facts, model: nn.Module, slots: int, progress: Progress | None = None
) -> dict[str, Sequence]:
    """Every strategy by name, with the least memory that it can do with."""
    found = {}
    for name, algorithm in _told(strategies(model, facts.measurement.names, slots), progress):
        sequence = leanest(facts.budget, algorithm)
        found[named(name, sequence)] = sequence
    return found


def _told(found: dict[str, Algorithm], progress: Progress | None) -> Iterator[tuple[str, Algorithm]]:
    """The strategies, each of which is told before it is worked on."""
    for done, (name, algorithm) in enumerate(found.items()):
        if progress is not None:
            progress(done, len(found), name)
        yield name, algorithm


def at_limit(budget: Budget, algorithm: Algorithm, mem_limit: int) -> Sequence:
    """What `algorithm` plans for a step within `mem_limit` bytes; where that is too little, its leanest sequence."""
    # What is computed twice needs a snapshot of the random state, and what is not does not.
    for room in (mem_limit - budget.fixed.total, budget.chain_limit(mem_limit)):
        try:
            sequence = algorithm.solve(budget.chain, max(0, room))
        except InfeasibleError:
            break
        if budget.peak_bytes(sequence) <= mem_limit:
            return sequence
    return leanest(budget, algorithm)


def leanest(budget: Budget, algorithm: Algorithm) -> Sequence:
    """What `algorithm` plans at the least limit at which it plans anything."""
    try:
        return algorithm.solve(budget.chain, 0)
    except InfeasibleError as error:
        return algorithm.solve(budget.chain, error.min_bytes)


def named(strategy: str, sequence: Sequence) -> str:
    """The strategy's name, with the distance of its checkpoints where it is about that."""
    if strategy != EVERY:
        return strategy
    before_loss = sequence[: list(sequence).index(Loss())]
    kept = sum(isinstance(operation, ForwardCheck) for operation in before_loss)
    stored = [operation.stage for operation in before_loss if isinstance(operation, ForwardEnable)]
    distance = stored[0] // kept if kept else len(stored)
    return "every layer" if distance == 1 else f"every {distance} layers"


def _levels(model: nn.Module, names: list[str]) -> dict[str, Algorithm]:
    """The levels that the model has: those at which its stages are grouped in another way than one level below."""
    found: dict[str, Algorithm] = {}
    below: list[str | None] = [None] * len(names)
    for level in sorted(set(LEVELS) - {0}):
        by_level = ByLevel.of(model, level)
        units = by_level.units(names)
        if units != below:
            found[f"level {level}"] = by_level
        below = units
    return found


def _row(facts: Facts, strategy: str, sequence: Sequence) -> Row:
    peak, seconds = facts.budget.peak_bytes(sequence), facts.seconds_of(sequence)
    return Row(
        strategy=named(strategy, sequence),
        fits=peak <= facts.mem_limit,
        peak_bytes=peak,
        step_seconds=seconds,
        overhead=seconds / facts.store_all_seconds if facts.store_all_seconds else 1.0,
        sequence=sequence,
    )
