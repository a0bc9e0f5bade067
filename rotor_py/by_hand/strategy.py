"""Strategies that choose the stages to recompute without a solver: by `level`, or `every_n_layers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from torch import nn

from rotor_py.by_hand.levels import assign_levels, checked_level
from rotor_py.errors import InvalidValueError
from rotor_py.measure.budget import Budget
from rotor_py.stage.protocol import JOINT
from rotor_py.units import exact_bytes, format_bytes, limit_text
from rotor_solver import Algorithm, Chain, InfeasibleError, Periodic, Sequence, StoreAll, simulate
from rotor_solver.segments import fastest_forwards, recompute_segments

_NO_LIMIT = 2**62  # bytes. The algorithm gets this limit; `ByHand.sequence` then compares with the user's, to name both


@dataclass(frozen=True, slots=True)
class ByHand:
    """Store the inputs of all modules of `level`, or of the stages 0, n, 2n, … for n = `every_n_layers`.

    Raises ValueError if both are given, if `max_checkpoints` is given without `every_n_layers`, if a number is negative
    or not an integer, and for a level above 5.
    """

    level: int | None = None
    every_n_layers: int | None = None
    max_checkpoints: int | None = None

    def __post_init__(self) -> None:
        if self.level is not None and self.every_n_layers is not None:
            raise InvalidValueError(f"{self} are two strategies; give only one of them", kind="excluded_together")
        if self.max_checkpoints is not None and self.every_n_layers is None:
            message = f"{self} limits the checkpoints of every_n_layers, which is not given; give both or none"
            raise InvalidValueError(message, kind="needs_option", name="max_checkpoints")
        if self.level is not None:
            checked_level(self.level)
        for name in ("every_n_layers", "max_checkpoints"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name)

    @classmethod
    def asked_for(cls, level: int | None, every_n_layers: int | None, max_checkpoints: int | None) -> ByHand | None:
        """Return the strategy for these arguments; None if all are None. Raises ValueError as the constructor does."""
        strategy = cls(level, every_n_layers, max_checkpoints)
        return None if strategy == cls() else strategy

    def __str__(self) -> str:
        given = {name: getattr(self, name) for name in ("level", "every_n_layers", "max_checkpoints")}
        return ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)

    def algorithm(self, model: nn.Module) -> Algorithm:
        if self.level:  # level 0 checkpoints nothing
            return ByLevel.of(model, self.level)
        if self.every_n_layers and self.max_checkpoints != 0:
            return Periodic(every=self.every_n_layers, max_checkpoints=self.max_checkpoints)
        return StoreAll()  # without checkpoints, the whole chain is one segment, whose activations are stored

    def sequence(self, model: nn.Module, budget: Budget, mem_limit: int | None) -> Sequence:
        """Return the strategy's sequence. Raises InfeasibleError if a step with it exceeds `mem_limit` bytes."""
        sequence = self.algorithm(model).solve(budget.chain, _NO_LIMIT)
        peak = budget.peak_bytes(sequence)
        if mem_limit is not None and peak > mem_limit:
            message = (
                f"a training step with {self} needs {exact_bytes(peak)}, of which {budget.split()}; the limit is "
                f"{exact_bytes(mem_limit)}, so it would run out of memory. Try {limit_text(peak)}, or leave {self} out "
                f"for the best plan, which needs {format_bytes(budget.least_bytes())} at least."
            )
            raise InfeasibleError(message, min_bytes=peak, mem_limit=mem_limit, kind="strategy_over_limit")
        return sequence


@dataclass(frozen=True, slots=True)
class ByLevel:
    """Algorithm that recomputes every module of `level`, for a chain whose stages are named after modules.

    Consecutive stages in one module of the level (the outermost, if such modules are nested) are recomputed together
    from the input of the first. If no stage is in a module of the level, the next lower level applies. At level 1, a
    stage of several layers is recomputed as a whole. A layer without weights is recomputed together with the layer
    before it: to store the inputs of both would save no memory.
    """

    level: int
    levels: Mapping[str, int] = field(repr=False)
    """Maps the dotted path of every module to its level."""
    weightless: frozenset[str] = field(default=frozenset(), repr=False)
    """Dotted paths of modules without parameters."""

    name = "by-level"

    @classmethod
    def of(cls, model: nn.Module, level: int) -> ByLevel:
        """Make the algorithm that recomputes modules of `model`. Raises ValueError unless `level` is one of 0 to 5."""
        # If the model contains a module under several names, include all: a stage may have any of them.
        named = model.named_modules(remove_duplicate=False)
        weightless = frozenset(name for name, module in named if not any(True for _ in module.parameters()))
        levels = {name: assigned.level for name, assigned in assign_levels(model).items()}
        return cls(checked_level(level), levels, weightless)

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """Return the sequence that recomputes the level's modules. InfeasibleError if its peak exceeds `mem_limit`.

        `mem_limit` is in bytes, the chain's input included. The module right before the loss, whose activations the
        backward needs first, is stored, unless recomputing it lowers the peak.
        """
        groups = self.groups([stage.name for stage in chain])
        forwards = fastest_forwards(chain)
        found = [recompute_segments(forwards, groups, self.name)]
        if groups and groups[-1].stop == len(chain):
            found.insert(0, recompute_segments(forwards, groups[:-1], self.name))
        peak, sequence = min(((simulate(chain, each).peak, each) for each in found), key=lambda pair: pair[0])
        if peak > mem_limit:
            message = f"level {self.level} needs {peak} bytes; the limit is {mem_limit}"
            raise InfeasibleError(message, min_bytes=peak, mem_limit=mem_limit, kind="strategy_over_limit")
        return sequence

    def groups(self, names: list[str]) -> list[range]:
        """Return a range of stage indices for each module of the level; `names` are the names of all stages."""
        units = self.units(names)
        # Only consecutive stages form a range: a module that runs twice, with others in between, has two ranges.
        found = [(unit, list(group)) for unit, group in groupby(range(len(names)), key=units.__getitem__)]
        return [range(group[0], group[-1] + 1) for unit, group in found if unit is not None]

    def units(self, names: list[str]) -> list[str | None]:
        """Return, for each stage, the name of the level's module that contains it; None if none does."""
        # If the model has no module of the level, use the next lower one: a ResNet has no transformer layers, say.
        for level in range(self.level, 0, -1):
            found = [self._unit(name, level) for name in names]
            if any(unit is not None for unit in found):
                return self._with_weightless(found) if level == 1 else found
        return [None] * len(names)

    def _unit(self, stage: str, level: int) -> str | None:
        for path in (part.partition("#")[0] for part in stage.split(JOINT)):  # modules in the stage's name
            parts = path.split(".") if path else []
            for count in range(len(parts) + 1):
                if self.levels.get(prefix := ".".join(parts[:count])) == level:
                    return prefix
            # The stage is a module of a higher level: its layers are no stages, so recompute it as a whole.
            if level == 1 and len(parts) > 0 and self.levels.get(path, 0) > 1:
                return stage
        return None

    def _with_weightless(self, units: list[str | None]) -> list[str | None]:
        """Replace the names of layers without weights by that of the layer before, if both are in the same module."""
        result = units[:1]
        for before, unit in pairwise(units):
            follows = unit is not None and before is not None and unit.rpartition(".")[0] == before.rpartition(".")[0]
            result.append(result[-1] if follows and unit in self.weightless else unit)
        return result


def whole_number(value: object, what: str) -> int:
    """Return `value` if it is a nonnegative integer, but not a bool; otherwise raise ValueError. `what` names it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidValueError(
            f"{what} is {value!r}; it has to be a whole number, zero or more", kind="not_a_count", name=what
        )
    return value
