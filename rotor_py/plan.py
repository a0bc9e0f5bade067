"""A plan: which stages, in which sequence, for which limit; and its file, which is data and nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rotor_py.chain import Cut, Layer, joined, layers
from rotor_py.errors import PlanMismatchError
from rotor_py.fingerprint import refuse_difference, refuse_other_input
from rotor_py.program import program
from rotor_py.traits import StageTraits, remember
from rotor_solver import Sequence

SCHEMA = 1
_LARGEST_FILE = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """A sequence, and all that is needed to know that it fits: what it was made for, and for which limit.

    `prefix` and `stages` name the layers of each part; a stage is a list of layers. `traits` are those
    of each stage.
    """

    model: dict[str, Any]
    input: dict[str, Any]
    prefix: list[str]
    stages: list[list[str]]
    traits: list[StageTraits]
    sequence: Sequence
    mem_limit: int
    peak_bytes: int
    fresh_grads: bool

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        fields |= {"traits": [asdict(traits) for traits in self.traits], "sequence": str(self.sequence)}
        data = {"schema": SCHEMA, "torch": torch.__version__, **fields}
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan. ValueError if the file is not one; OSError if it cannot be read."""
        file = Path(path)
        if file.stat().st_size > _LARGEST_FILE:
            raise ValueError(f"{file} is not a plan: it has {file.stat().st_size} bytes, a plan has a few thousand")
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not a plan, or only a part of one: {error}; save it again") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"{file} is not a plan of schema {SCHEMA} but of {found!r}; save it again")
        for name, kind in _FIELDS.items():
            if not isinstance(data.get(name), kind):
                raise ValueError(f"{file} is not a whole plan: {name!r} is {data.get(name)!r}; save it again")
        try:
            fields = {name: data[name] for name in _FIELDS}
            fields |= {"traits": _traits(data["traits"]), "sequence": Sequence.parse(data["sequence"])}
            plan = cls(**fields)
            plan._refuse_nonsense()
        except ValueError as error:
            raise ValueError(f"{file} is not a whole plan: {error}; save it again") from None
        return plan

    def _refuse_nonsense(self) -> None:
        """ValueError if the parts of the plan are not what they should be, or do not belong together."""
        if not all(isinstance(name, str) for group in [self.prefix, *map(_list, self.stages)] for name in group):
            raise ValueError("the names of layers have to be texts")
        if len(self.traits) != len(self.stages):
            raise ValueError(f"there are traits of {len(self.traits)} stages, and {len(self.stages)} stages")
        shapes = [each.get("shape") if isinstance(each, dict) else None for each in _list(self.input.get("tensors"))]
        if not all(isinstance(shape, list) and all(isinstance(size, int) for size in shape) for shape in shapes):
            raise ValueError("every tensor of the input has to have a shape")
        program(len(self.stages), self.sequence)

    def cut(self, model: nn.Module) -> Cut:
        """The chain that this plan makes of `model`. PlanMismatchError if it is not the model it was made for."""
        return self.cut_layers(layers(model))

    def cut_layers(self, named: list[Layer]) -> Cut:
        """`cut`, for layers that follow each other."""
        found = dict(named)
        planned = [name for group in [self.prefix, *self.stages] for name in group]
        if planned != list(found):
            raise PlanMismatchError("the order of layers", ", ".join(planned), ", ".join(found))
        stages = tuple(joined([(name, found[name]) for name in group]) for group in self.stages)
        for (_, function), traits in zip(stages, self.traits, strict=True):
            remember(function, traits)
        return Cut(tuple((name, found[name]) for name in self.prefix), stages)

    def refuse_other(self, *, model: dict[str, Any] | None = None, value: dict[str, Any] | None = None) -> None:
        """PlanMismatchError if the fingerprint of a model or an input is not that of the plan."""
        if model is not None:
            refuse_difference(self.model, model)
        if value is not None:
            refuse_other_input(self.input, value)


def _traits(entries: list[Any]) -> list[StageTraits]:
    found = []
    for entry in entries:
        match entry:
            case {"graph_dependent": bool(dependent), "without_gradient": [*positions]} if all(
                isinstance(position, int) for position in positions
            ):
                found.append(StageTraits(dependent, tuple(positions)))
            case _:
                raise ValueError(f"the traits of a stage are {entry!r}")
    return found


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{value!r} has to be a list, and not an empty one")
    return value


_FIELDS: dict[str, type] = {
    "model": dict,
    "input": dict,
    "prefix": list,
    "stages": list,
    "traits": list,
    "sequence": str,
    "mem_limit": int,
    "peak_bytes": int,
    "fresh_grads": bool,
}
