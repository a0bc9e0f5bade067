"""The file of a plan: JSON, which is data and nothing else, and the checks that it has to pass.

What a field means:

    schema, torch          the version of this format, and of torch when the plan was made
    model                  `fingerprint.model_fingerprint`: types of layers and shapes of parameters, by name
    input                  `fingerprint.input_fingerprint`: device, autocast, and shape, dtype and gradient by tensor
    prefix, stages         names of the layers that run before the chain, and of the layers of each stage
    answers                how the batch answered what a captured model asks about its data (`capture`)
    traits                 for each stage, what a run without a graph does not show (`stage.graph_effects`)
    sequence, solver       the sequence in its notation; the algorithm that found it, and its lower bound in seconds
    beside                 the sequences of further forwards in flight, where they are different ones (since schema 6)
    mem_limit, limited     the limit in bytes, and whether somebody has set it; a strategy by hand may have none
    peak_bytes             the predicted peak of the whole step
    fresh_grads            whether gradients are freed between steps
    compiled               the compiled stages and Inductor's options, where `compile=` was given (since schema 7)
    predicted_for          the device that costs were predicted for, where nothing was measured (since schema 8)
    step_in_backward       the optimizer that steps parameters in the backward, their bytes, and what its largest step
                           needs, where there is one (since schema 8)
    moves                  what is moved to another tier of memory, and when (`moves_data`), where `offload=` was given
                           (since schema 9)
    costs                  all that was measured, in seconds and bytes (`plan_costs`); with the names of the ways to
                           store a stage, where it has other ways than in part (since schema 9)
    digest                 SHA-256 of everything else, which shows damage; it is no protection against forgery
"""

from __future__ import annotations

import hashlib
import json
import logging
import reprlib
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any

import torch

from rotor_py.errors import PlanMismatchError, shortened
from rotor_py.execute.program import program
from rotor_py.measure.cut import JOINT
from rotor_py.plan.saved.compiled_stages import CompiledStages
from rotor_py.plan.saved.moves_data import moves_data, with_moves
from rotor_py.plan.saved.plan_costs import PlanCosts
from rotor_py.stage.graph_effects import GraphEffects
from rotor_solver import Sequence

SCHEMA = 9
_READABLE = 5, 6, 7, 8, 9
"""A file is of schema 5 unless the forwards in flight follow different sequences, or have to go backward in one order:
then it is of schema 6. One that says what is compiled is of schema 7; one that was predicted, or whose backward steps
parameters, of schema 8; one whose stages have several ways to be stored, or which was made with
another tier of memory, of schema 9. Earlier versions would take these
for something else."""
_LARGEST_FILE = 16 * 2**20
"""A plan has some thousand bytes for each hundred stages; nobody's file is read into memory to find that out."""
_log = logging.getLogger("rotor_py")


def write(path: str | Path, fields: dict[str, Any]) -> None:
    """Write the fields of a plan as JSON. OSError if the file cannot be written."""
    sequence, costs = fields["sequence"], fields["costs"]
    plain = not sequence.beside and costs.budget.backward_order == "any"
    compiled, steps, predicted_for = (fields.pop(name) for name in ("compiled", "step_in_backward", "predicted_for"))
    newest = steps is not None or predicted_for is not None
    measured = costs.as_data()
    schema = (
        9
        if "ways" in measured or costs.budget.link is not None
        else 8
        if newest
        else 7
        if compiled is not None
        else 5
        if plain
        else 6
    )
    data = {"schema": schema, "torch": torch.__version__, **fields}
    data |= {"traits": [asdict(traits) for traits in fields["traits"]], "sequence": str(sequence)}
    data |= {"solver": _solver_data(sequence), "costs": measured}
    if sequence.beside:
        data["beside"] = [str(each) for each in sequence.beside]
    if compiled is not None:
        data["compiled"] = asdict(compiled)
    if predicted_for is not None:
        data["predicted_for"] = predicted_for
    if steps is not None:
        data["step_in_backward"] = steps
    if (moves := moves_data(costs.budget, sequence)) is not None:
        data["moves"] = moves
    data["digest"] = _digest(data)
    Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read(path: str | Path) -> dict[str, Any]:
    """The fields of a plan.

    ValueError if the file is not one, or not as it was saved, PlanMismatchError if it has compiled stages and was made
    with another torch, OSError if it cannot be read.
    """
    file = Path(path)
    data = _parsed(file)
    try:
        fields = _checked(data)
        if _digest(data) != data["digest"]:
            raise ValueError("its digest is that of another content, so it was changed or damaged")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a whole plan: {shortened(error)}; save it again") from None
    if data["torch"] != str(torch.__version__):
        if fields["compiled"] is not None:
            raise PlanMismatchError("the torch that compiles its stages", data["torch"], torch.__version__)
        _log.warning(
            "%s was made with torch %s; with torch %s peaks and times may be others: plan again to be sure",
            file, shortened(data["torch"]), torch.__version__,
        )  # fmt: skip
    return fields


def _parsed(file: Path) -> dict[str, Any]:
    """The JSON of the file, if it is of this schema and has all fields, each of its type."""
    with file.open("rb") as opened:
        content = opened.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise ValueError(f"{file} is not a plan: it has more than {_LARGEST_FILE} bytes, a plan has a few thousand")
    try:
        data = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a plan, or only a part of one: {error}; save it again") from None
    if not isinstance(data, dict) or type(data.get("schema")) is not int or data["schema"] not in _READABLE:
        found = reprlib.repr(data.get("schema")) if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{file} is not a plan of schema {SCHEMA} but of {found}; save it again")
    for name, kind in (_FIELDS | _BESIDE).items():
        if type(data.get(name)) is not kind:  # isinstance would take True for a number of bytes
            found = reprlib.repr(data.get(name))
            raise ValueError(f"{file} is not a whole plan: {name!r} is {found}; save it again")
    return data


def _checked(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of the plan; ValueError if they are not what they should be, or do not belong together."""
    fields = {name: data[name] for name in _FIELDS}
    names = [JOINT.join(group) for group in _names(data["stages"])]
    beside = _beside(data.get("beside", []), data["solver"])
    sequence = replace(_sequence(data["sequence"], data["solver"]), beside=beside)
    costs = PlanCosts.from_data(data["costs"], names, fresh_gradients=data["fresh_grads"])
    budget, sequence = with_moves(data.get("moves"), costs.budget, sequence)
    costs = replace(costs, budget=budget)
    traits = _traits(data["traits"])
    _names([data["prefix"]])
    if not all(isinstance(answer, bool) for answer in data["answers"]):
        raise ValueError(f"the answers are {reprlib.repr(data['answers'])}, and have to be true or false")
    if len(traits) != len(names):
        raise ValueError(f"there are traits of {len(traits)} stages, and {len(names)} stages")
    if data["mem_limit"] <= 0 or data["peak_bytes"] <= 0:
        raise ValueError("the limit and the peak have to be above zero")
    _refuse_odd_fingerprints(data["model"], data["input"])
    for each in (sequence, *beside):
        program(len(names), each)
    if len(beside) >= costs.budget.forwards:
        raise ValueError(f"there are {1 + len(beside)} sequences for {costs.budget.forwards} forwards in flight")
    peak = costs.budget.peak_bytes(sequence)
    if data["peak_bytes"] != peak:
        raise ValueError(f"the peak is {data['peak_bytes']}, and the costs make it {peak}")
    compiled = CompiledStages.from_data(data.get("compiled"), data["stages"])
    predicted_for = data.get("predicted_for")
    if not isinstance(predicted_for, str | None):
        raise ValueError(f"it is predicted for {reprlib.repr(predicted_for)}, and has to be for the name of a device")
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
    raise ValueError(f"what steps parameters in the backward is {reprlib.repr(entry)}")


def _refuse_odd_fingerprints(model: dict[str, Any], given: dict[str, Any]) -> None:
    """ValueError for what no fingerprint of a model or an input has: comparing it would raise something else."""
    for part in ("layers", "parameters"):
        table = model.get(part)
        if not isinstance(table, dict) or not all(isinstance(text, str) for text in table.values()):
            raise ValueError(f"the {part} of the model have to be a table of texts")
    if not all(isinstance(given.get(part), str) for part in ("device", "autocast")):
        raise ValueError("the device and autocast of the input have to be texts")
    shapes = [each.get("shape") if isinstance(each, dict) else None for each in _list(given.get("tensors"))]
    if not all(isinstance(shape, list) and all(type(size) is int for size in shape) for shape in shapes):
        raise ValueError("every tensor of the input has to have a shape")


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


def _beside(texts: Any, solver: dict[str, Any]) -> tuple[Sequence, ...]:
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the sequences of further forwards are {reprlib.repr(texts)}, and have to be a list of texts")
    return tuple(_sequence(text, solver) for text in texts)


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
    "answers": list,
    "traits": list,
    "sequence": str,
    "mem_limit": int,
    "peak_bytes": int,
    "fresh_grads": bool,
    "costs": dict,
    "limited": bool,
}
_BESIDE: dict[str, type] = {"torch": str, "digest": str, "solver": dict}
