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
    compiled               the compiled stages and Inductor's options, where `compile=` was given (since schema 7); of a
                           graph compiled as a whole, the room, and whose partition it is (since schema 10)
    predicted_for          the device that costs were predicted for, where nothing was measured (since schema 8)
    step_in_backward       the optimizer that steps parameters in the backward, their bytes, and what its largest step
                           needs, where there is one (since schema 8)
    moves                  what is moved to another tier of memory, and when (`moves_data`), where `offload=` was given
                           (since schema 9)
    costs                  all that was measured, in seconds and bytes (`plan_costs`); with the names of the ways to
                           store a stage, where it has other ways than in part (since schema 9); with sums of
                           gradients where stages share parameters (since schema 11)
    digest                 SHA-256 of everything else, which shows damage; it is no protection against forgery
"""

from __future__ import annotations

import hashlib
import json
import logging
import reprlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rotor_py.errors import InvalidValueError, PlanMismatchError, kind_of, record_fields, shortened
from rotor_py.plan.saved.checked_fields import FIELDS, checked_fields
from rotor_py.plan.saved.moves_data import moves_data
from rotor_solver import Sequence

SCHEMA = 11
_READABLE = 5, 6, 7, 8, 9, 10, 11
"""A file is of the least of them that has what it says: who knows earlier ones alone would take the rest for something
else."""
_LARGEST_FILE = 16 * 2**20
"""A plan has some thousand bytes for each hundred stages; nobody's file is read into memory to find that out."""
_BESIDE: dict[str, type] = {"torch": str, "digest": str, "solver": dict}
"""What a file has beside the fields of a plan."""
_log = logging.getLogger("rotor_py")


def write(path: str | Path, fields: dict[str, Any]) -> None:
    """Write the fields of a plan as JSON. OSError if the file cannot be written."""
    sequence, costs = fields["sequence"], fields["costs"]
    measured = costs.as_data()
    compiled, steps, predicted_for = (fields.pop(name) for name in ("compiled", "step_in_backward", "predicted_for"))
    needed = {
        11: "summed_gradients" in measured,
        10: compiled is not None and compiled.by_torch is not None,
        9: "ways" in measured or costs.budget.link is not None,
        8: steps is not None or predicted_for is not None,
        7: compiled is not None,
        6: bool(sequence.beside) or costs.budget.backward_order != "any",
    }
    schema = next((number for number, asked in needed.items() if asked), 5)
    data = {"schema": schema, "torch": torch.__version__, **fields}
    data |= {"traits": [asdict(traits) for traits in fields["traits"]], "sequence": str(sequence)}
    data |= {"solver": _solver_data(sequence), "costs": measured}
    if sequence.beside:
        data["beside"] = [str(each) for each in sequence.beside]
    if compiled is not None:
        data["compiled"] = compiled.as_data()
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
        fields = checked_fields(data)
        if _digest(data) != data["digest"]:
            raise InvalidValueError(
                "its digest is that of another content, so it was changed or damaged", kind="other_digest"
            )
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(
            f"{file} is not a whole plan: {shortened(error)}; save it again",
            kind="damaged_plan",
            name=str(file),
            cause=kind_of(error),
            field=getattr(error, "name", None) or "",
        ) from None
    if data["torch"] != str(torch.__version__):
        if fields["compiled"] is not None:
            raise PlanMismatchError("the torch that compiles its stages", data["torch"], torch.__version__)
        _log.warning(
            "%s was made with torch %s; with torch %s peaks and times may be others: plan again to be sure",
            file, shortened(data["torch"]), torch.__version__,
            extra=record_fields("other_torch", name=str(file)),
        )  # fmt: skip
    return fields


def _parsed(file: Path) -> dict[str, Any]:
    """The JSON of the file, if it is of this schema and has all fields, each of its type."""
    with file.open("rb") as opened:
        content = opened.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise InvalidValueError(
            f"{file} is not a plan: it has more than {_LARGEST_FILE} bytes, a plan has a few thousand",
            kind="not_a_plan",
            name=str(file),
            cause="too_large",
        )
    try:
        data = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(
            f"{file} is not a plan, or only a part of one: {error}; save it again",
            kind="not_a_plan",
            name=str(file),
            cause="not_json",
        ) from None
    if not isinstance(data, dict) or type(data.get("schema")) is not int or data["schema"] not in _READABLE:
        found = reprlib.repr(data.get("schema")) if isinstance(data, dict) else type(data).__name__
        raise InvalidValueError(
            f"{file} is not a plan of schema {SCHEMA} but of {found}; save it again",
            kind="not_a_plan",
            name=str(file),
            cause="other_schema",
        )
    for name, kind in (FIELDS | _BESIDE).items():
        if type(data.get(name)) is not kind:  # isinstance would take True for a number of bytes
            found = reprlib.repr(data.get(name))
            raise InvalidValueError(
                f"{file} is not a whole plan: {name!r} is {found}; save it again",
                kind="damaged_plan",
                name=str(file),
                cause="bad_field",
                field=name,
            )
    return data


def _solver_data(sequence: Sequence) -> dict[str, Any]:
    bound = sequence.lower_bound
    return {"algorithm": sequence.algorithm, "lower_bound": None if bound is None else float(bound)}


def _digest(data: dict[str, Any]) -> str:
    """Of all that is in the file, however it is written there."""
    content = {name: value for name, value in data.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("ascii")).hexdigest()
