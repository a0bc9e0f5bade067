"""Compare a plan with other strategies by predicted costs, and find the lowest level that fits by real steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rotor_py.by_hand.levels import LEVELS
from rotor_py.by_hand.strategy import ByHand, ByLevel
from rotor_py.checkpointable import Checkpointable
from rotor_py.errors import InvalidValueError
from rotor_py.measure.budget import Budget
from rotor_py.measure.device import limit_bytes
from rotor_py.measure.measurement import Measurement
from rotor_py.plan.planned_model import plan_of
from rotor_py.report.numbers import ReportFacts
from rotor_py.report.report import sweep_of
from rotor_py.report.sweep import Sweep
from rotor_py.stage.compression import FEWER_BITS, Packed
from rotor_py.stage.protocol import ELSEWHERE
from rotor_py.units import exact_bytes, format_bytes
from rotor_py.validate.steps import TrainingStep, state_restored
from rotor_py.validate.verification import Verification, default_loss, measure_outcome, measured
from rotor_solver import (
    Algorithm,
    Chain,
    ForwardCheck,
    ForwardEnable,
    GriewankHeterogeneous,
    InfeasibleError,
    Loss,
    Periodic,
    Persistent,
    RecomputeAll,
    Revolve,
    Sequence,
    Sqrt,
    StoreAll,
    simulate,
)
from rotor_solver.offload import Link, solve_moving
from rotor_solver.watching import Progress

_KEEPERS = (Packed().name, *(form.name for form in FEWER_BITS.values()), ELSEWHERE.name)


def one_way_each(measurement: Measurement, slots: int, link: Link | None = None) -> dict[str, Algorithm]:
    """Return algorithms by name: "optimal, whole" stores or recomputes whole stages; others may also use one family of
    options, "in part" or one of `_KEEPERS`. A single family is left out: its plan would be the optimal one.
    """
    known = {name for names in measurement.way_names for name in names}
    families = {"in part": {name for name in known if not name.endswith(_KEEPERS)}}
    families |= {name: {name} & known for name in _KEEPERS}
    present = {f"optimal, {family}": names for family, names in families.items() if names}
    if not known:
        return {}
    if list(present.values()) == [known]:
        present = {}
    found: dict[str, Algorithm] = {}
    for name, ways in {"optimal, whole": set[str](), **present}.items():
        options = tuple(
            (0, *(at for at, each in enumerate(names, 1) if each in ways)) for names in measurement.way_names
        )
        found[name] = OneWay(name, options, slots, link if ELSEWHERE.name in ways else None)
    return found


@dataclass(frozen=True, slots=True)
class OneWay:
    """Finds the fastest sequence in which stage i uses only the options with the indices `options[i]`."""

    name: str
    options: tuple[tuple[int, ...], ...]
    slots: int
    link: Link | None = None

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        stages = tuple(
            replace(stage, options=tuple(stage.options[option] for option in options))
            for stage, options in zip(chain, self.options, strict=True)
        )
        fewer = replace(chain, stages=stages)
        moves = None
        if self.link is None:
            found = Persistent(self.slots).solve(fewer, mem_limit)
        else:
            plan = solve_moving(fewer, mem_limit, self.link, self.slots)
            found, moves = plan.sequence, plan.moves if plan.moves.stages else None
        operations = [
            replace(each, option=self.options[each.stage][each.option]) if isinstance(each, ForwardEnable) else each
            for each in found
        ]
        return Sequence(operations, found.algorithm, found.lower_bound, moves=moves)


OPTIMAL, EVERY = "optimal", "every n layers"


@dataclass(frozen=True, slots=True)
class ComparedStrategy:
    """A strategy, and the predicted bytes and seconds of a step by it.

    If no sequence of the strategy fits, the numbers are those of its sequence with the least peak. `overhead` is the
    ratio of `step_seconds` to the seconds of storing everything.
    """

    strategy: str
    fits: bool
    peak_bytes: int
    step_seconds: float
    overhead: float
    sequence: Sequence
    verified: Verification | None = None
    """Results of training steps by this strategy; None if none were taken."""


def compare(
    model: nn.Module, sample: Any = None, *, slots: int = 500, progress: Progress | None = None, **options: Any
) -> tuple[ComparedStrategy, ...]:
    """Compare the plan with other strategies at its limit: return it, then those that fit, fastest first, then others.

    Args:
        model: a `Checkpointable` with a limit; or any model that it takes, which is measured on `sample` and not
            changed.
        sample: a tensor, a tuple of positional or a dict of keyword arguments. Not for a `Checkpointable`.
        slots: least number of units into which the solver divides memory; more find better plans, but slower.
        progress: called with (number of strategies done, number of all, name of the next).
        options: arguments of `Checkpointable`: mainly `mem_limit`, also `loss`, `optimizer` and so on.

    Raises:
        ValueError: no limit or sample is given; a `Checkpointable` is not measured, or is given a sample or options.
        InfeasibleError: no plan fits the limit.
        UnsupportedModelError: the model cannot be planned.
    """
    network = measured(model, sample, options)
    return compare_at_limit(network.report(), network.model, slots, progress)


def compare_at_limit(
    facts: ReportFacts, model: nn.Module, slots: int = 500, progress: Progress | None = None
) -> tuple[ComparedStrategy, ...]:
    limit = facts.mem_limit
    if limit is None:
        message = "the plan has no limit at which strategies could be compared; plan with mem_limit="
        raise InvalidValueError(message, kind="no_limit")
    known = strategies(model, facts.measurement.names, slots)
    known |= one_way_each(facts.measurement, slots, facts.budget.link)
    others = [
        _compared(facts, limit, name, at_limit(facts.budget, algorithm, limit))
        for name, algorithm in _told(known, progress)
    ]
    others.sort(key=lambda each: (not each.fits, each.step_seconds if each.fits else 0.0, each.peak_bytes))
    return (_compared(facts, limit, OPTIMAL, facts.sequence), *others)


def strategies(model: nn.Module, names: Iterable[str], slots: int) -> dict[str, Algorithm]:
    found: dict[str, Algorithm] = {}
    stages = [*names]
    below: list[str | None] = [None] * len(stages)
    for level in sorted(set(LEVELS) - {0}):  # level 0 equals "store-all"
        by_level = ByLevel.of(model, level)
        units = by_level.units(stages)
        if units != below:  # this level groups the stages differently from the level below
            found[f"level {level}"] = by_level
        below = units
    return {
        **found,
        EVERY: Periodic(),
        "sqrt": Sqrt(),
        "revolve": Revolve(),
        "griewank-heterogeneous": GriewankHeterogeneous(slots),
        "store-all": StoreAll(),
        "recompute-all": RecomputeAll(),
    }


def leanest_of_each(
    facts: ReportFacts, model: nn.Module, slots: int, progress: Progress | None = None
) -> dict[str, Sequence]:
    """Return a dict: the name of each strategy, and its sequence that needs the least memory."""
    known = _told(strategies(model, facts.measurement.names, slots), progress)
    found = [(name, leanest(facts.budget, algorithm)) for name, algorithm in known]
    return {named(name, sequence): sequence for name, sequence in found}


def _told(found: dict[str, Algorithm], progress: Progress | None) -> Iterator[tuple[str, Algorithm]]:
    """Yield the items of `found`; call `progress` before each."""
    for done, (name, algorithm) in enumerate(found.items()):
        if progress is not None:
            progress(done, len(found), name)
        yield name, algorithm


def at_limit(budget: Budget, algorithm: Algorithm, mem_limit: int) -> Sequence:
    """Return the sequence of `algorithm` for a step within `mem_limit` bytes; if none fits, its leanest sequence."""
    # Only plans that recompute need snapshots of random state, whose bytes `chain_limit` subtracts: first try without.
    for room in (mem_limit - budget.fixed.total, budget.chain_limit(mem_limit)):
        try:
            sequence = algorithm.solve(budget.chain, max(0, room))
        except InfeasibleError:
            break
        if budget.peak_bytes(sequence) <= mem_limit:
            return sequence
    return leanest(budget, algorithm)


def leanest(budget: Budget, algorithm: Algorithm) -> Sequence:
    try:
        return algorithm.solve(budget.chain, 0)  # raises an error that has the algorithm's least limit
    except InfeasibleError as error:
        return algorithm.solve(budget.chain, error.min_bytes)


def named(strategy: str, sequence: Sequence) -> str:
    """Return the name of a strategy to print; in "every n layers", the n of `sequence`."""
    if strategy != EVERY:
        return strategy
    before_loss = sequence[: sequence.index(Loss())]
    kept = sum(isinstance(operation, ForwardCheck) for operation in before_loss)
    stored = [operation.stage for operation in before_loss if isinstance(operation, ForwardEnable)]
    # Before the loss, the last segment runs with a graph; each of `kept` others has a checkpoint and `distance` stages.
    distance = stored[0] // kept if kept else len(stored)
    return "every layer" if distance == 1 else f"every {distance} layers"


def _compared(facts: ReportFacts, limit: int, strategy: str, sequence: Sequence) -> ComparedStrategy:
    peak = facts.budget.peak_bytes(sequence)
    return ComparedStrategy(
        strategy=named(strategy, sequence),
        fits=peak <= limit,
        peak_bytes=peak,
        step_seconds=facts.seconds_of(sequence),
        overhead=facts.overhead_of(sequence),
        sequence=sequence,
    )


def sweep(model: nn.Module, sample: Any = None, *, slots: int = 500, **options: Any) -> Sweep:
    """Compute the curve of time against memory over all limits; other strategies are points at their least memory.

    Args:
        model: a measured `Checkpointable`, or any model that it takes, which is measured on `sample` and not changed.
        sample: a tensor, a tuple of positional or a dict of keyword arguments. Not for a `Checkpointable`.
        slots: least number of units into which the solver divides memory; more find better plans, but slower.
        options: arguments of `Checkpointable`, such as `loss`, `optimizer` and `fresh_grads`.

    Raises:
        ValueError: no sample is given; a `Checkpointable` is not measured, or is given a sample or options.
        UnsupportedModelError: the model cannot be planned.
    """
    network = measured(model, sample, options)
    facts = network.report()
    return sweep_of(facts, slots, leanest_of_each(facts, network.model, slots))


def least_limit(
    model: nn.Module, sample: Any = None, *, max_overhead: float | None = None, slots: int = 500, **options: Any
) -> int:
    """Return the least limit, in bytes, for which a step has a plan.

    With `max_overhead`, the least limit whose plan takes at most that share more time than storing everything: 0.1 is
    10 %. Arguments and errors are those of `sweep`.
    """
    facts = measured(model, sample, options, closely=max_overhead is not None).report()
    if max_overhead is None:
        return facts.budget.least_bytes()
    return sweep_of(facts, slots, overhead=max_overhead).least_for(max_overhead).mem_limit


@dataclass(frozen=True, slots=True)
class StepCost:
    """Peak and seconds of a step by a strategy: predicted from measured stages, and measured in real steps.

    The predicted peak includes the optimizer step; the measured one does not, but includes the optimizer's state.
    """

    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_seconds: float
    measured_seconds: float


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """The lowest level that fits `mem_limit` bytes, its cost, and the cost of the optimal plan for the same limit.

    `peaks` are the predicted peaks of the levels 0 to 5, in bytes.
    """

    level: int
    mem_limit: int
    chosen: StepCost
    optimal: StepCost
    peaks: tuple[int, ...]


def best_level(
    model: nn.Module,
    batch: Any,
    mem_limit: float | str,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    fresh_grads: bool = False,
    **options: Any,
) -> LevelChoice:
    """Find the lowest level with which a step of `model` on `batch` has a measured peak of at most `mem_limit`.

    Trains steps without `optimizer.step()`; hooks of parameters run in them. Restores gradients, buffers, random state.

    Args:
        model: any model that `Checkpointable` takes.
        batch: a tensor, a tuple of positional or a dict of keyword arguments.
        mem_limit: limit of a whole step's peak: bytes, or a text such as "4GB", "512MiB", "80%".
        loss: a function of the output that returns a scalar; None: the output's `loss`, else its mean square.
        optimizer: the optimizer, whose state counts toward the limit.
        fresh_grads: whether gradients are freed between steps.
        options: other options of `Checkpointable`.

    Raises:
        InfeasibleError: no level fits. `min_bytes` is the least peak of all levels; the optimal plan may still fit.
        ValueError: `mem_limit` is not a size.
        UnsupportedModelError: the model or the batch cannot be planned.
    """
    loss = loss or default_loss
    planned = Checkpointable(model, batch, loss=loss, optimizer=optimizer, fresh_grads=fresh_grads, **options)
    budget = plan_of(planned).budget
    limit = limit_bytes(mem_limit, planned.device)
    step = TrainingStep(planned.model, batch, loss, optimizer, planned.device, fresh_grads, steps_optimizer=False)
    found = {level: ByHand(level=level).sequence(model, budget, None) for level in LEVELS}
    peaks = {level: budget.peak_bytes(sequence) for level, sequence in found.items()}
    for level, sequence in found.items():
        # Skip levels predicted not to fit: a step could run out of memory.
        if peaks[level] > limit:
            continue
        chosen = _measure_cost(planned, sequence, step)
        # The limit is for real steps, and a prediction may be slightly too low, so check the measured peak, too.
        if chosen.measured_peak_bytes <= limit:
            optimal = _measure_cost(planned, planned.compute_sequence(limit), step)
            return LevelChoice(level, limit, chosen, optimal, tuple(peaks.values()))
    lowest = min(peaks, key=peaks.__getitem__)
    least = peaks[lowest]
    message = (
        f"leave the level out for the optimal plan, which needs {format_bytes(budget.least_bytes())} at least: "
        f"even level {lowest} needs {exact_bytes(least)} for a step; the limit is {exact_bytes(limit)}"
    )
    raise InfeasibleError(message, min_bytes=least, mem_limit=limit, kind="no_level_fits")


def _measure_cost(planned: Checkpointable, sequence: Sequence, step: TrainingStep) -> StepCost:
    budget, planned.sequence = plan_of(planned).budget, sequence
    with state_restored(planned):
        found = measure_outcome(step, planned)
    return StepCost(
        predicted_peak_bytes=budget.peak_bytes(sequence),
        measured_peak_bytes=found.peak_bytes,
        predicted_seconds=simulate(budget.chain, sequence).makespan,
        measured_seconds=found.seconds,
    )
