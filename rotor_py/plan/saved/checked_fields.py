"""What the fields of a plan's file have to be, each by itself and together. `plan_file` says what they mean."""

from __future__ import annotations

import reprlib
from dataclasses import replace
from math import inf
from typing import Any

from rotor_py.errors import InvalidValueError
from rotor_py.execute.program import program
from rotor_py.measure.cut import JOINT
from rotor_py.plan.saved.compiled_stages import CompiledStages
from rotor_py.plan.saved.moves_data import with_moves
from rotor_py.plan.saved.plan_costs import PlanCosts
from rotor_py.stage.graph_effects import GraphEffects
from rotor_solver import Sequence

FIELDS: dict[str, type] = {
    "model": dict,
    "input": dict,
    "prefix": list,
    "stages": list,
    "answers": list,
    "traits": list,
    "sequence": str,
    "mem_limit": int,
    "peak_bytes": int,
    "fresh_grads": bool,
    "costs": dict,
    "limited": bool,
}
"""The fields of a plan, and the type of each in JSON."""


def checked_fields(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of the plan; ValueError if they are not what they should be, or do not belong together."""
    fields = {name: data[name] for name in FIELDS}
    names = [JOINT.join(group) for group in _names(data["stages"])]
    beside = _beside(data.get("beside", []), data["solver"])
    sequence = replace(_sequence(data["sequence"], data["solver"]), beside=beside)
    costs = PlanCosts.from_data(data["costs"], names, fresh_gradients=data["fresh_grads"])
    budget, sequence = with_moves(data.get("moves"), costs.budget, sequence)
    costs = replace(costs, budget=budget)
    traits = _traits(data["traits"])
    _names([data["prefix"]])
    if not all(isinstance(answer, bool) for answer in data["answers"]):
        raise InvalidValueError(
            f"the answers are {reprlib.repr(data['answers'])}, and have to be true or false",
            kind="bad_field",
            name="answers",
        )
    if len(traits) != len(names):
        raise InvalidValueError(
            f"there are traits of {len(traits)} stages, and {len(names)} stages",
            kind="wrong_length",
            name="traits",
            got=len(traits),
        )
    if data["mem_limit"] <= 0 or data["peak_bytes"] <= 0:
        raise InvalidValueError("the limit and the peak have to be above zero", kind="not_positive", name="mem_limit")
    _refuse_odd_fingerprints(data["model"], data["input"])
    for each in (sequence, *beside):
        program(len(names), each)
    if len(beside) >= costs.budget.forwards:
        raise InvalidValueError(
            f"there are {1 + len(beside)} sequences for {costs.budget.forwards} forwards in flight",
            kind="wrong_length",
            name="beside",
            got=1 + len(beside),
        )
    peak = costs.budget.peak_bytes(sequence)
    if data["peak_bytes"] != peak:
        raise InvalidValueError(
            f"the peak is {data['peak_bytes']}, and the costs make it {peak}",
            kind="other_peak",
            name="peak_bytes",
            got=data["peak_bytes"],
            peak_bytes=peak,
        )
    compiled = CompiledStages.from_data(data.get("compiled"), data["stages"])
    predicted_for = data.get("predicted_for")
    if not isinstance(predicted_for, str | None):
        raise InvalidValueError(
            f"it is predicted for {reprlib.repr(predicted_for)}, and has to be for the name of a device",
            kind="bad_field",
            name="predicted_for",
        )
    return {
        **fields,
        "traits": traits,
        "sequence": sequence,
        "costs": costs,
        "compiled": compiled,
        "step_in_backward": _steps(data.get("step_in_backward")),
        "predicted_for": predicted_for,
    }


def _steps(entry: Any) -> dict[str, Any] | None:
    match entry:
        case None | {"optimizer": str(), "gradient_bytes": int(), "scratch_bytes": int()}:
            return entry
    raise InvalidValueError(
        f"what steps parameters in the backward is {reprlib.repr(entry)}", kind="bad_field", name="step_in_backward"
    )


def _refuse_odd_fingerprints(model: dict[str, Any], given: dict[str, Any]) -> None:
    """ValueError for what no fingerprint of a model or an input has: comparing it would raise something else."""
    for part in ("layers", "parameters"):
        table = model.get(part)
        if not isinstance(table, dict) or not all(isinstance(text, str) for text in table.values()):
            raise InvalidValueError(f"the {part} of the model have to be a table of texts", kind="bad_field", name=part)
    if not all(isinstance(given.get(part), str) for part in ("device", "autocast")):
        raise InvalidValueError("the device and autocast of the input have to be texts", kind="bad_field", name="input")
    shapes = [each.get("shape") if isinstance(each, dict) else None for each in _list(given.get("tensors"))]
    if not all(isinstance(shape, list) and all(type(size) is int for size in shape) for shape in shapes):
        raise InvalidValueError("every tensor of the input has to have a shape", kind="bad_field", name="tensors")


def _traits(entries: list[Any]) -> list[GraphEffects]:
    found = []
    for entry in entries:
        match entry:
            case {"graph_dependent": bool(dependent), "without_gradient": [*positions]} if all(
                type(position) is int for position in positions
            ):
                found.append(GraphEffects(dependent, tuple(positions)))
            case _:
                raise InvalidValueError(
                    f"the traits of a stage are {reprlib.repr(entry)}", kind="bad_field", name="traits"
                )
    return found


def _names(groups: list[Any]) -> list[list[str]]:
    if not all(isinstance(group, list) and all(isinstance(name, str) for name in group) for group in groups):
        raise InvalidValueError("the names of layers have to be lists of texts", kind="bad_field", name="stages")
    return groups


def _sequence(text: str, solver: dict[str, Any]) -> Sequence:
    match solver:
        case {"algorithm": str(algorithm), "lower_bound": None | float() as bound} if bound is None or 0 <= bound < inf:
            return Sequence(Sequence.parse(text), algorithm, bound)
    raise InvalidValueError(f"what is known of its solver is {reprlib.repr(solver)}", kind="bad_field", name="solver")


def _beside(texts: Any, solver: dict[str, Any]) -> tuple[Sequence, ...]:
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidValueError(
            f"the sequences of further forwards are {reprlib.repr(texts)}, and have to be a list of texts",
            kind="bad_field",
            name="beside",
        )
    return tuple(_sequence(text, solver) for text in texts)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InvalidValueError(
            f"{reprlib.repr(value)} has to be a list, and not an empty one", kind="bad_field", name="tensors"
        )
    return value
