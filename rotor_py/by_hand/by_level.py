"""Checkpointing a measured chain by level: each module of the level is run again from its input, all else is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

from torch import nn

from rotor_py.by_hand.level_assignment import assign_levels
from rotor_py.by_hand.levels import checked_level
from rotor_py.measure.cut import JOINT
from rotor_solver import Chain, InfeasibleError, Sequence, simulate
from rotor_solver.segments import fastest_forwards, recompute_segments


@dataclass(frozen=True, slots=True)
class ByLevel:
    """An algorithm that runs every module of `level` again: for the measured chain of a model, whose stages have names.

    Stages that follow each other in the same module of the level (the outermost, where modules of the level lie in each
    other) are run again together, from the input of the first. If the model has no module of the level, the next lower
    level is used. At level 1 a stage that holds several layers is run again as a whole, and a layer without weights
    goes with the layer before it: its input is the other's output, and keeping both would save nothing.
    """

    level: int
    levels: Mapping[str, int] = field(repr=False)
    """The level of every module, by its dotted path."""
    weightless: frozenset[str] = field(default=frozenset(), repr=False)
    """The modules that have no parameters."""

    name = "by-level"

    @classmethod
    def of(cls, model: nn.Module, level: int) -> ByLevel:
        """The algorithm for the stages of `model`. Raises ValueError if `level` is no whole number from 0 to 5."""
        # Under all of its names, where a module is shared: a stage has one of them.
        named = model.named_modules(remove_duplicate=False)
        weightless = frozenset(name for name, module in named if not any(True for _ in module.parameters()))
        levels = {name: assigned.level for name, assigned in assign_levels(model).items()}
        return cls(checked_level(level), levels, weightless)

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """The schedule of the level; its peak, a_0 counted, is at most `mem_limit` bytes.

        The group before the loss is stored as it runs, since it would be run again at once, unless that peaks higher.
        Raises InfeasibleError if the peak is above the limit.
        """
        groups = self.groups([stage.name for stage in chain])
        forwards = fastest_forwards(chain)
        sequence = recompute_segments(forwards, groups, self.name)
        peak = simulate(chain, sequence).peak
        if groups and groups[-1].stop == len(chain):
            stored = recompute_segments(forwards, groups[:-1], self.name)
            if (needed := simulate(chain, stored).peak) <= peak:
                sequence, peak = stored, needed
        if peak > mem_limit:
            message = f"level {self.level} needs {peak} bytes; the limit is {mem_limit}"
            raise InfeasibleError(message, min_bytes=peak, mem_limit=mem_limit)
        return sequence

    def groups(self, names: list[str]) -> list[range]:
        """The stages of every module of the level, as ranges of positions, in a chain of stages with these names."""
        units = self.units(names)
        # Neighbours only: a module that runs twice, with others in between, is two groups.
        positions = groupby(range(len(names)), key=lambda position: units[position])
        found = [(unit, list(group)) for unit, group in positions]
        return [range(group[0], group[-1] + 1) for unit, group in found if unit is not None]

    def units(self, names: list[str]) -> list[str | None]:
        """For every stage, the module of the level that it lies in; None for stages outside."""
        # A ResNet has blocks and stages, but no layers of a transformer: a level that it lacks is not an error.
        for level in range(self.level, 0, -1):
            found = [self._unit(name, level) for name in names]
            if any(unit is not None for unit in found):
                return self._with_weightless(names, found) if level == 1 else found
        return [None] * len(names)

    def _unit(self, stage: str, level: int) -> str | None:
        for path in _paths(stage):
            parts = path.split(".") if path else []
            inside = [".".join(parts[:count]) for count in range(len(parts) + 1)]
            for prefix in inside:
                if self.levels.get(prefix) == level:
                    return prefix
            # The stage is a larger module that was not cut: there is no single layer to run again, so all of it is.
            if level == 1 and len(parts) > 0 and self.levels.get(path, 0) > 1:
                return stage
        return None

    def _with_weightless(self, names: list[str], units: list[str | None]) -> list[str | None]:
        """Join layers without weights to the layer before them in the same list."""
        result = list(units)
        for position in range(1, len(units)):
            unit, before = units[position], units[position - 1]
            if unit is not None and before is not None and unit in self.weightless and _beside(unit, before):
                result[position] = result[position - 1]
        return result


def _paths(stage: str) -> list[str]:
    """The modules that a stage is named after."""
    return [part.partition("#")[0] for part in stage.split(JOINT)]


def _beside(one: str, other: str) -> bool:
    return one.rpartition(".")[0] == other.rpartition(".")[0]
