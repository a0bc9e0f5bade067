"""A plan: which stages, in which sequence, for which limit; and its file, which is data and nothing else."""

from __future__ import annotations

import hashlib
import json
import logging
import reprlib
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rotor_py.errors import PlanMismatchError, shortened
from rotor_py.execute.program import program
from rotor_py.measure.cut import JOINT, Cut, Layer, joined, layers
from rotor_py.plan.fingerprint import refuse_difference, refuse_other_input
from rotor_py.plan.plan_costs import PlanCosts
from rotor_py.stage.graph_effects import GraphEffects, remember_effects
from rotor_solver import Sequence

SCHEMA = 4
_LARGEST_FILE = 16 * 2**20
_log = logging.getLogger("rotor_py")


@dataclass(frozen=True, slots=True)
class Plan:
    """A sequence, and all that is needed to know that it fits: what it was made for, and for which limit.

    `prefix` and `stages` name the layers of each part; a stage is a list of layers. `traits` are those
    of each stage. `costs` are what was measured: a report needs nothing else. `limited` says that `mem_limit` is one
    that somebody set, or that the device has; a strategy by hand may have none.
    """

    model: dict[str, Any]
    input: dict[str, Any]
    prefix: list[str]
    stages: list[list[str]]
    traits: list[GraphEffects]
    sequence: Sequence
    mem_limit: int
    peak_bytes: int
    fresh_grads: bool
    costs: PlanCosts
    limited: bool = True

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        fields |= {"traits": [asdict(traits) for traits in self.traits], "sequence": str(self.sequence)}
        fields |= {"solver": _solver_data(self.sequence), "costs": self.costs.as_data()}
        data = {"schema": SCHEMA, "torch": torch.__version__, **fields}
        data["digest"] = _digest(data)
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan. ValueError if the file is not one, or not as it was saved; OSError if it cannot be read."""
        file = Path(path)
        with file.open("rb") as opened:
            content = opened.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise ValueError(f"{file} is not a plan: it has more than {_LARGEST_FILE} bytes, a plan has a few thousand")
        try:
            data = json.loads(content.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not a plan, or only a part of one: {error}; save it again") from None
        if not isinstance(data, dict) or type(data.get("schema")) is not int or data["schema"] != SCHEMA:
            found = reprlib.repr(data.get("schema")) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"{file} is not a plan of schema {SCHEMA} but of {found}; save it again")
        for name, kind in (_FIELDS | _BESIDE).items():
            if type(data.get(name)) is not kind:  # True is no number of bytes
                found = reprlib.repr(data.get(name))
                raise ValueError(f"{file} is not a whole plan: {name!r} is {found}; save it again")
        try:
            fields = {name: data[name] for name in _FIELDS}
            fields |= {"traits": _traits(data["traits"]), "sequence": _sequence(data["sequence"], data["solver"])}
            names = [JOINT.join(group) for group in _names(data["stages"])]
            fields |= {"costs": PlanCosts.from_data(data["costs"], names, fresh_gradients=data["fresh_grads"])}
            plan = cls(**fields)
            plan._refuse_nonsense()
            if _digest(data) != data["digest"]:
                raise ValueError("its digest is that of another content, so it was changed or damaged")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not a whole plan: {shortened(error)}; save it again") from None
        if data["torch"] != str(torch.__version__):
            _log.warning(
                "%s was made with torch %s; with torch %s peaks and times may be others: plan again to be sure",
                file, shortened(data["torch"]), torch.__version__,
            )  # fmt: skip
        return plan

    def _refuse_nonsense(self) -> None:
        """ValueError if the parts of the plan are not what they should be, or do not belong together."""
        _names([self.prefix])
        if len(self.traits) != len(self.stages):
            raise ValueError(f"there are traits of {len(self.traits)} stages, and {len(self.stages)} stages")
        if self.mem_limit <= 0 or self.peak_bytes <= 0:
            raise ValueError("the limit and the peak have to be above zero")
        for part in ("layers", "parameters"):
            table = self.model.get(part)
            if not isinstance(table, dict) or not all(isinstance(text, str) for text in table.values()):
                raise ValueError(f"the {part} of the model have to be a table of texts")
        if not all(isinstance(self.input.get(part), str) for part in ("device", "autocast")):
            raise ValueError("the device and autocast of the input have to be texts")
        shapes = [each.get("shape") if isinstance(each, dict) else None for each in _list(self.input.get("tensors"))]
        if not all(isinstance(shape, list) and all(type(size) is int for size in shape) for shape in shapes):
            raise ValueError("every tensor of the input has to have a shape")
        program(len(self.stages), self.sequence)
        peak = self.costs.budget.peak_bytes(self.sequence)
        if self.peak_bytes != peak:
            raise ValueError(f"the peak is {self.peak_bytes}, and the costs make it {peak}")

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
            remember_effects(function, traits)
        return Cut(tuple((name, found[name]) for name in self.prefix), stages)

    def refuse_other(self, *, model: dict[str, Any] | None = None, value: dict[str, Any] | None = None) -> None:
        """PlanMismatchError if the fingerprint of a model or an input is not that of the plan."""
        if model is not None:
            refuse_difference(self.model, model)
        if value is not None:
            refuse_other_input(self.input, value)


def _traits(entries: list[Any]) -> list[GraphEffects]:
    found = []
    for entry in entries:
        match entry:
            case {"graph_dependent": bool(dependent), "without_gradient": [*positions]} if all(
                type(position) is int for position in positions
            ):
                found.append(GraphEffects(dependent, tuple(positions)))
            case _:
                raise ValueError(f"the traits of a stage are {reprlib.repr(entry)}")
    return found


def _names(groups: list[Any]) -> list[list[str]]:
    if not all(isinstance(group, list) and all(isinstance(name, str) for name in group) for group in groups):
        raise ValueError("the names of layers have to be lists of texts")
    return groups


def _solver_data(sequence: Sequence) -> dict[str, Any]:
    bound = sequence.lower_bound
    return {"algorithm": sequence.algorithm, "lower_bound": None if bound is None else float(bound)}


def _sequence(text: str, solver: dict[str, Any]) -> Sequence:
    match solver:
        case {"algorithm": str(algorithm), "lower_bound": None | float() as bound} if bound is None or 0 <= bound < inf:
            return Sequence(Sequence.parse(text), algorithm, bound)
    raise ValueError(f"what is known of its solver is {reprlib.repr(solver)}")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{reprlib.repr(value)} has to be a list, and not an empty one")
    return value


def _digest(data: dict[str, Any]) -> str:
    """Of all that is in the file, however it is written there."""
    content = {name: value for name, value in data.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("ascii")).hexdigest()


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
    "costs": dict,
    "limited": bool,
}
_BESIDE: dict[str, type] = {"torch": str, "digest": str, "solver": dict}
