"""Which stages of a saved plan run compiled, and with which options of Inductor.

Whoever loads the plan compiles them again. The options in a file are compared with those that the user gives, and never
followed: with some of them, Inductor runs a program of one's choice, and a file is data and nothing else.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rotor_py.compiled.budgets import is_budget
from rotor_py.compiled.compiled_stage import CompiledStage
from rotor_py.compiled.stage_code import Config
from rotor_py.compiled.stage_compiler import StageCompiler
from rotor_py.errors import InvalidValueError, PlanMismatchError
from rotor_py.measure.cut import JOINT, Cut, Layer
from rotor_py.stage.graph_effects import recall_effects, remember_effects
from rotor_solver import Chain

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class CompiledStages:
    """The names of the compiled stages, and Inductor's options. There may be none of both: defaults, and no gain.

    If the graph is one stage, compiled as a whole, `room` is the bytes that its partition was chosen for. It was chosen
    among those of PyTorch's partitioner if `by_torch`, among ours if not, and among all if that is None.
    """

    stages: list[str]
    options: dict[str, Any]
    room: int | None = None
    by_torch: bool | None = None

    @classmethod
    def of(cls, cut: Cut, config: Config) -> CompiledStages:
        """Those of a plan that was made. ValueError if a file cannot hold an option."""
        for name, value in config:
            if type(value) not in _PLAIN:
                raise InvalidValueError(
                    f"compile= has the option {name!r}, which is a {type(value).__name__}, and a file of a plan holds "
                    "numbers and texts alone; plan anew in each process",
                    kind="option_not_plain",
                    name=name,
                )
        pairs = zip(cut.groups(), cut.stages, strict=True)
        compiled = [(JOINT.join(group), stage) for group, (_, stage) in pairs if isinstance(stage, CompiledStage)]
        names = [name for name, _ in compiled]
        whole = next((stage for _, stage in compiled if stage.room is not None), None)
        return cls(names, dict(config)) if whole is None else cls(names, dict(config), whole.room, whole.by_torch)

    def as_data(self) -> dict[str, Any]:
        """What a file says of them."""
        found = asdict(self)
        if self.by_torch is None:  # as files said before there was a choice
            del found["by_torch"]
        return found

    @classmethod
    def from_data(cls, data: Any, stages: Sequence[list[str]]) -> CompiledStages | None:
        """What a file says of a plan for these `stages`. ValueError if it cannot be."""
        match data:
            case None:
                return None
            case {"stages": [*names], "options": dict(options), "room": room, **rest} if not rest.keys() - {"by_torch"}:
                known = [JOINT.join(group) for group in stages]
                right = room is None or (type(room) is int and room > 0 and len(names) == len(known) == 1)
                by_torch: Any = rest.get("by_torch")
                right &= by_torch is None or (type(by_torch) is bool and room is not None)
                named = all(name in known for name in names)
                if right and named and all(type(each) in _PLAIN for each in options.values()):
                    return cls(names, options, room, by_torch)
        raise InvalidValueError(f"what is compiled of it is {reprlib.repr(data)}", kind="bad_field", name="compiled")

    @property
    def config(self) -> Config:
        """The options as Inductor is told them."""
        return tuple(sorted(self.options.items()))

    def compiled_again(self, cut: Cut, compiler: StageCompiler, chain: Chain, ways: Sequence[Sequence[str]]) -> Cut:
        """The same cut, with these stages compiled by `compiler` when they run for the first time.

        `chain` is what it was measured as, and `ways` are those in which each of its stages may be stored.
        """
        from rotor_py.partition.partitioner import whole_partitioner

        partitioner = None if self.room is None else whole_partitioner(self.room, chain, self.by_torch)
        stages: list[Layer] = []
        for (name, function), names in zip(cut.stages, ways, strict=True):
            if name in self.stages:
                own = tuple(filter(is_budget, names))
                compiled = CompiledStage(function, f"stage {name}", compiler, partitioner=partitioner, ways=own)
                remember_effects(compiled, recall_effects(function))
                stages.append((name, compiled))
            else:
                stages.append((name, function))
        return replace(cut, stages=tuple(stages))


def config_beside(file: CompiledStages | None, given: Config | None) -> Config | None:
    """What Inductor is told by a plan from a file, where `compile=` says `given`.

    Inductor's defaults need not be given. PlanMismatchError for other options than the file's: they decide about bytes
    and last digits.
    """
    planned = None if file is None else file.config
    if given is None and planned == ():
        return planned
    if planned != given:
        raise PlanMismatchError("compile=", _as_given(planned), _as_given(given))
    return planned


def _as_given(config: Config | None) -> bool | dict[str, Any]:
    return config is not None and (dict(config) or True)
