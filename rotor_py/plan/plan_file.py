"""Read, write and check the JSON file of a plan. The file is data only: nothing in it is executed.

Fields:

    schema, torch          the version of this format, and of torch when the plan was made
    model                  `fingerprint.model_fingerprint`: types of layers and shapes of parameters, by name
    input                  `fingerprint.input_fingerprint`: device, autocast, and shape, dtype and gradient by tensor
    prefix, stages         names of the layers that run before the chain, and of the layers of each stage
    answers                the batch's answers to a captured model's questions about its data (`capture`)
    traits                 by stage, facts that a run without a graph does not show (`stage.graph_effects`)
    sequence, solver       the sequence in its notation; the algorithm that found it, and its lower bound in seconds
    beside                 the sequences of further forwards in flight, where they differ (since schema 6)
    mem_limit, limited     the limit in bytes, and whether one was set; a strategy by hand may have none
    peak_bytes             the predicted peak of the whole step
    fresh_grads            whether gradients are freed between steps
    compiled               the compiled stages and Inductor's options, where `compile=` was given (since schema 7); for
    a
                           graph compiled as a whole, the room, and the partitioner (since schema 10)
    predicted_for          the device that costs were predicted for, where nothing was measured (since schema 8)
    step_in_backward       the optimizer that steps parameters in the backward, their bytes, and the bytes of its
                           largest step, where there is one (since schema 8)
    moves                  the offloads and their positions (`moves_data`), where `offload=` was given (since schema 9)
    costs                  all measurements, in seconds and bytes (`plan_costs`); with the names of storage modes, where
                           a stage has others than in part (since schema 9); with sums of gradients where stages share
                           parameters (since schema 11)
    digest                 SHA-256 of everything else; it shows damage, but does not protect against forgery

Loading a plan compiles its stages anew. The file's Inductor options are compared with the user's, and never followed:
some of them make Inductor run an arbitrary program.
"""

from __future__ import annotations

import hashlib
import json
import logging
import reprlib
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch

from rotor_py.compile.compiled_stage import CompiledStage, StageCompiler
from rotor_py.compile.stage_code import Config, is_budget
from rotor_py.errors import InvalidValueError, PlanMismatchError, kind_of, record_fields, shortened
from rotor_py.execute.instructions import read_sequence
from rotor_py.measure.cut import JOINT, Cut, Layer
from rotor_py.plan.plan_costs import PlanCosts, moves_data, with_moves
from rotor_py.stage.side_effects import GraphEffects, recall_effects, remember_effects
from rotor_solver import Chain, Sequence

_log = logging.getLogger("rotor_py")


_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class CompiledStages:
    """The names of the compiled stages, and Inductor's options. Both may be empty: defaults, and no gain.

    If the graph is one stage, compiled as a whole, `room` is the bytes that its partition was chosen for, among those
    of PyTorch's partitioner if `by_torch`, among ours if False, and among all if None.
    """

    stages: list[str]
    options: dict[str, Any]
    room: int | None = None
    by_torch: bool | None = None

    @classmethod
    def of(cls, cut: Cut, config: Config) -> CompiledStages:
        """Return those of a solved plan. Raises ValueError if a file cannot hold an option."""
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
        """Return the entry for the file."""
        found = asdict(self)
        if self.by_torch is None:  # the format of files before there was a choice
            del found["by_torch"]
        return found

    @classmethod
    def from_data(cls, data: Any, stages: Items[list[str]]) -> CompiledStages | None:
        """Read the entry of a plan for these `stages`. Raises ValueError if it is invalid."""
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
        """The options for Inductor."""
        return tuple(sorted(self.options.items()))

    def compiled_again(self, cut: Cut, compiler: StageCompiler, chain: Chain, ways: Items[Items[str]]) -> Cut:
        """Return the same cut, with these stages compiled by `compiler` when they first run.

        `chain` is the measured chain, and `ways` are the storage modes of each of its stages.
        """
        from rotor_py.compile.partitioner import whole_partitioner

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
    """Return Inductor's options for a plan from a file, where `compile=` is `given`.

    Inductor's defaults need not be given. Raises PlanMismatchError for options that differ from the file's: they
    determine bytes and last digits.
    """
    planned = None if file is None else file.config
    if given is None and planned == ():
        return planned
    if planned != given:
        raise PlanMismatchError("compile=", _as_given(planned), _as_given(given))
    return planned


def _as_given(config: Config | None) -> bool | dict[str, Any]:
    return config is not None and (dict(config) or True)


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
    """Check the fields of a plan, each and together; ValueError if they are invalid."""
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
        read_sequence(len(names), each)
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
    """Raise ValueError for malformed fingerprints: comparing them would raise something else."""
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


SCHEMA = 11
_READABLE = 5, 6, 7, 8, 9, 10, 11
"""Each file gets the lowest schema that has its fields: an earlier version would misread fields that it does not
know."""
_LARGEST_FILE = 16 * 2**20
"""Largest file that is read. A plan has some thousand bytes per hundred stages."""
_BESIDE: dict[str, type] = {"torch": str, "digest": str, "solver": dict}
"""Fields of a file beside those of the plan."""


def write(path: str | Path, fields: dict[str, Any]) -> None:
    """Write the fields of a plan as JSON. Raises OSError if the file cannot be written."""
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
    """Return the fields of a plan.

    Raises ValueError if the file is not a plan or is damaged, PlanMismatchError if it has compiled stages and was made
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
    """Parse the file, and check its schema and the presence and type of all fields."""
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
        if type(data.get(name)) is not kind:  # isinstance would accept True as a number of bytes
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
    content = {name: value for name, value in data.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("ascii")).hexdigest()
