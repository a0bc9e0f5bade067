"""Save and load plans as JSON files. These hold only data: loading checks every field and executes none.

Loading compiles stages anew. The file's options of Inductor must equal the user's, since some of them run programs.
"""

from __future__ import annotations

import functools
import json
import logging
import reprlib
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

import torch

from rotor_py.compile.compiled_stage import CompiledStage, StageCompiler
from rotor_py.compile.stage_code import WAYS, Config
from rotor_py.errors import InvalidValueError, PlanMismatchError, kind_of, record_fields, shortened
from rotor_py.execute.instructions import read_sequence
from rotor_py.measure.budget import Budget
from rotor_py.measure.cache import digest_of_data
from rotor_py.measure.cut import Cut, Layer, joined
from rotor_py.measure.measurement import Carried, Measurement
from rotor_py.stage.forward_state import GraphEffects, recall_effects, remember_effects
from rotor_py.stage.protocol import JOINT
from rotor_solver import Chain, Sequence
from rotor_solver.chain import LARGEST_SIZE
from rotor_solver.in_flight import ORDERS
from rotor_solver.offload import Moves

_log = logging.getLogger("rotor_py")

SCHEMA = 14
_LARGEST_FILE = 16 * 2**20  # Bytes of the largest file that is read. A guess, far above the size of any plan.
# Maximum number of carried tensors times number of stages: building a chain takes as many operations. A guess.
_MOST_CARRIED = 10**6
# Minimum and maximum of the fields in bytes that may be negative: a backward may free more than it allocates.
_SIGNED = dict.fromkeys(
    ("backward_temp_bytes", "replay_temp_bytes", "waiting_gradients", "summed_gradients"), (-LARGEST_SIZE, LARGEST_SIZE)
)
# Minimum and maximum of the numeric fields whose range is not from zero to `LARGEST_SIZE`.
_RANGES = {"mem_limit": (1, 2**63 - 1), "room": (1, 2**63 - 1), "forwards": (1, 10**4), **_SIGNED}
_PLAIN = (bool, int, float, str, type(None))


class _Tensor(TypedDict):
    shape: list[int]
    dtype: str
    requires_grad: bool


class _Input(TypedDict):
    device: str
    autocast: str
    tensors: list[_Tensor]


class _Solver(TypedDict):
    algorithm: str
    lower_bound: float | None


class _Stepping(TypedDict):
    optimizer: str
    gradient_bytes: int
    scratch_bytes: int


_hints = functools.cache(get_type_hints)


def read_as(kind: Any, name: str, value: Any) -> Any:
    """Convert `value`, read from JSON as the field `name`, to the type `kind`. ValueError if type or range differ."""
    outer, inside = get_origin(kind) or kind, get_args(kind)
    if type(None) in inside:
        return None if value is None else read_as(inside[0], name, value)
    if isinstance(value, dict) and (is_typeddict(kind) or is_dataclass(kind)):
        return kind(**read_fields(_hints(kind), value))
    if isinstance(value, list) and outer in (list, tuple):
        return outer(read_as(inside[0], name, each) for each in value)
    if isinstance(value, dict) and outer is dict:
        return {key: read_as(inside[1], name, each) for key, each in value.items()}
    least, most = _RANGES.get(name, (0, LARGEST_SIZE))
    # Compare types, since `isinstance` would accept True as a number.
    if kind is Any or (type(value) is kind and (kind in (str, bool) or least <= value <= most)):  # NaN is in no range
        return value
    limits = f" from {least} to {most}" if type(value) is kind else ""
    raise _bad_field(name, f"{name} must be {getattr(kind, '__name__', kind)}{limits}, got {reprlib.repr(value)}")


def read_fields(kinds: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    for name in (*kinds, *data):
        if name not in data or name not in kinds:
            raise _bad_field(name, f"{reprlib.repr(name)} is {'missing' if name in kinds else 'unknown'}")
    return {name: read_as(kind, name, data[name]) for name, kind in kinds.items()}


def _bad_field(name: str, text: str) -> InvalidValueError:
    return InvalidValueError(text, kind="bad_field", name=name)


def _refuse_other_length(name: str, found: int, stages: int) -> None:
    if found != stages:
        text = f"{name} must have an entry for each of {stages} stages, got {found}"
        raise InvalidValueError(text, kind="wrong_length", name=name, got=found)


# Names of the fields of `Budget` that files contain. The other fields follow from the `Measurement` in the file.
_AROUND = (
    *("fixed", "before_bytes", "stepping_bytes", "step_bytes", "forwards", "held_beside", "backward_order"),
    *("freed_gradients", "view_bytes", "rest_bytes", "link", "link_name"),
)


@dataclass(frozen=True, slots=True)
class PlanCosts:
    measurement: Measurement
    budget: Budget

    def as_data(self) -> dict[str, Any]:
        """Return a dict for `json` with the measurement's fields, and the budget's that do not follow from them."""
        found = asdict(self.measurement) | {name: getattr(self.budget, name) for name in _AROUND}
        del found["names"]
        link = None if self.budget.link is None else asdict(self.budget.link)
        rates = link and {name: float(rate) for name, rate in link.items()}
        return {**found, "fixed": asdict(self.budget.fixed), "link": rates}

    @classmethod
    def from_data(cls, data: Any, names: Items[str], *, fresh_gradients: bool) -> PlanCosts:
        if not isinstance(data, dict):
            raise _bad_field("costs", f"costs must be an object, got {reprlib.repr(data)}")
        found, stages = read_fields(_COSTS, data), len(names)
        for part in ("stages", "gradient_bytes", "ways", "waiting_gradients", "summed_gradients", "sum_bytes"):
            if found[part] or part in ("stages", "gradient_bytes"):
                _refuse_other_length(part, len(found[part]), stages)
        carried: tuple[Carried, ...] = found["carried"]
        if len(carried) * stages > _MOST_CARRIED or any(not each.first <= each.last <= stages for each in carried):
            raise _bad_field("carried", f"the {len(carried)} carried tensors do not fit a chain of {stages} stages")
        for way in (way for ways in found["ways"] for way in ways):
            if not way.name or way.moved_bytes > way.cost.saved_bytes:
                text = "a storage mode must have a name, and offload no more bytes than it saves, got"
                raise _bad_field("ways", f"{text} {reprlib.repr(way)}")
        if found["backward_order"] not in ORDERS:
            raise _bad_field("backward_order", f"backward_order must be {' or '.join(ORDERS)}")
        around = {name: found.pop(name) for name in _AROUND}
        measurement = Measurement(names=tuple(names), **found)
        chain = measurement.chain(fresh_gradients=fresh_gradients, forwards=around["forwards"])
        return cls(measurement, Budget(chain=chain, snapshot_bytes=measurement.snapshot_bytes, **around))


_COSTS = {name: kind for name, kind in _hints(Measurement).items() if name != "names"}
_COSTS |= {name: _hints(Budget)[name] for name in _AROUND}


@dataclass(frozen=True, slots=True)
class CompiledStages:
    """Names of the compiled stages, Inductor's options, and `room`: the bytes that a graph compiled whole may save."""

    stages: list[str]
    options: dict[str, Any]
    room: int | None = None

    @classmethod
    def of(cls, cut: Cut, config: Config) -> CompiledStages:
        for name, value in config:
            if type(value) not in _PLAIN:
                text = f"plan anew in each run: a file cannot hold Inductor's option {name!r}, a {type(value).__name__}"
                raise InvalidValueError(text, kind="option_not_plain", name=name)
        pairs = zip(cut.groups(), cut.stages, strict=True)
        compiled = {JOINT.join(group): stage for group, (_, stage) in pairs if isinstance(stage, CompiledStage)}
        whole = next((stage for stage in compiled.values() if stage.room is not None), None)
        return cls(list(compiled), dict(config), None if whole is None else whole.room)

    def compiled_again(self, cut: Cut, compiler: StageCompiler, chain: Chain, ways: Items[Items[str]]) -> Cut:
        """Return `cut` with these stages as `CompiledStage`, so that `compiler` compiles each when it first runs."""
        from rotor_py.compile.partitioner import whole_partitioner

        partitioner = None if self.room is None else whole_partitioner(self.room, chain)
        stages = dict(cut.stages)
        for (name, function), names in zip(cut.stages, ways, strict=True):
            if name in self.stages:
                own = tuple(name for name in names if name in WAYS)
                stages[name] = CompiledStage(function, f"stage {name}", compiler, partitioner=partitioner, ways=own)
                remember_effects(stages[name], recall_effects(function))
        return replace(cut, stages=tuple(stages.items()))


def config_beside(file: CompiledStages | None, given: Config | None) -> Config | None:
    """Return the options of Inductor in a plan file. PlanMismatchError if those that the user has `given` differ."""
    planned = None if file is None else tuple(sorted(file.options.items()))
    if given is None and planned == ():
        return planned
    if planned != given:
        raise PlanMismatchError("compile=", _as_given(planned), _as_given(given))
    return planned


def _as_given(config: Config | None) -> bool | dict[str, Any]:
    return config is not None and (dict(config) or True)


@dataclass(frozen=True, slots=True)
class Plan:
    """A sequence, with the model, input and limit that it was made for.

    `model` and `input` are fingerprints. `prefix` names the layers before the stages, `stages` the layers of each one.
    `answers` are the results of a captured model's conditions on the batch's data, such as whether there is padding.
    `traits` says of each stage whether its outputs are reproducible, and which of them need no gradient. `costs` are
    the measurements and the budget. `limited` is False if a strategy by hand has no limit; then `mem_limit` is that of
    the device. `compiled` is None without `compile=`, `step_in_backward` without an optimizer in the backward.
    `predicted_for` names the device for which costs were predicted, and is None if they were measured.
    """

    model: dict[str, Any]
    input: dict[str, Any]
    prefix: list[str]
    stages: list[list[str]]
    answers: list[bool]
    traits: list[GraphEffects]
    sequence: Sequence
    mem_limit: int
    peak_bytes: int
    fresh_grads: bool
    costs: PlanCosts
    limited: bool = True
    compiled: CompiledStages | None = None
    predicted_for: str | None = None
    step_in_backward: dict[str, Any] | None = None

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON. Raises OSError if the file cannot be written."""
        sequence, bound = self.sequence, self.sequence.lower_bound
        data = {
            "schema": SCHEMA,
            "torch": str(torch.__version__),
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "traits": [asdict(traits) for traits in self.traits],
            "sequence": str(sequence),
            "beside": [str(each) for each in sequence.beside],
            "solver": {"algorithm": sequence.algorithm, "lower_bound": None if bound is None else float(bound)},
            "moves": None if sequence.moves is None else asdict(sequence.moves),
            "compiled": None if self.compiled is None else asdict(self.compiled),
            "costs": self.costs.as_data(),
        }
        data["digest"] = digest_of_data(data)
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file.

        Raises ValueError if the file is not a plan or is damaged, PlanMismatchError if the plan has compiled stages and
        was made with another version of torch, OSError if the file cannot be read.
        """
        file = Path(path)
        data = _parsed(file)
        try:
            found = _checked(read_fields(_FIELDS, data))
            if data.pop("digest") != digest_of_data(data):
                raise InvalidValueError("it was changed or damaged, since its digest differs", kind="other_digest")
        except (ValueError, RecursionError) as error:
            raise InvalidValueError(
                f"{file} is not a whole plan: {shortened(error)}; save it again",
                kind="damaged_plan",
                name=str(file),
                cause=kind_of(error),
                field=getattr(error, "name", None) or "",
            ) from None
        if data["torch"] != str(torch.__version__):
            if found["compiled"] is not None:
                raise PlanMismatchError("the torch that compiles its stages", data["torch"], torch.__version__)
            _log.warning(
                f"plan again to be sure: {file} was made with torch {shortened(data['torch'])}, and peaks and times "
                f"may differ with torch {torch.__version__}",
                extra=record_fields("other_torch", name=str(file)),
            )
        return cls(**found)

    def cut(self, named: list[Layer]) -> Cut:
        """Join `named` layers, in the order in which they run, into the plan's stages. PlanMismatchError if others."""
        found = dict(named)
        planned = [name for group in [self.prefix, *self.stages] for name in group]
        # Compare the order, too: layers in another order may have the same names, but have other costs.
        if planned != list(found):
            raise PlanMismatchError("the order of layers", ", ".join(planned), ", ".join(found))
        stages = tuple(joined([(name, found[name]) for name in group]) for group in self.stages)
        for (_, function), traits in zip(stages, self.traits, strict=True):
            remember_effects(function, traits)
        return Cut(tuple((name, found[name]) for name in self.prefix), stages)

    def refuse_other_steps(self, found: dict[str, Any] | None) -> None:
        if found != self.step_in_backward:
            field = "the optimizer that steps parameters in the backward (step_in_backward)"
            raise PlanMismatchError(field, self.step_in_backward or "none", found or "none")


# Types of all fields in a file: those of `Plan`, and more. `beside` lists the sequences of the second and later
# forwards in flight, if they differ. `digest`, the SHA-256 of all other fields, reveals damage, not forgery.
_FIELDS = _hints(Plan) | {
    "schema": int,
    "torch": str,
    "sequence": str,
    "beside": list[str],
    "costs": Any,
    "digest": str,
    "model": dict[str, dict[str, str]],
    "input": _Input,
    "step_in_backward": _Stepping | None,
    "solver": _Solver,
    "moves": Moves | None,
}


def _parsed(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        content = opened.read(_LARGEST_FILE + 1)

    def not_a_plan(cause: str, why: str) -> InvalidValueError:
        return InvalidValueError(
            f"{file} is not a plan, {why}; save it again", kind="not_a_plan", name=str(file), cause=cause
        )

    if len(content) > _LARGEST_FILE:
        raise not_a_plan("too_large", f"since it has more than {_LARGEST_FILE} bytes, and any plan has fewer")
    try:
        data: dict[str, Any] = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise not_a_plan("not_json", f"or only part of a plan: {error}") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        raise not_a_plan("other_schema", f"since its schema must be {SCHEMA}, got {reprlib.repr(schema)}")
    return data


def _checked(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Plan` from those of a file. Raises ValueError if they contradict each other."""
    beside, solver, moves = (fields.pop(name) for name in ("beside", "solver", "moves"))
    for name in ("schema", "torch", "digest"):
        del fields[name]
    names = [JOINT.join(group) for group in fields["stages"]]
    costs = PlanCosts.from_data(fields["costs"], names, fresh_gradients=fields["fresh_grads"])
    _refuse_other_length("traits", len(fields["traits"]), len(names))
    sequences = [Sequence(Sequence.parse(text), **solver) for text in (fields["sequence"], *beside)]
    for each in sequences:
        read_sequence(len(names), each)
    if len(beside) >= costs.budget.forwards:
        text = f"there are {len(sequences)} sequences for {costs.budget.forwards} forwards in flight"
        raise InvalidValueError(text, kind="wrong_length", name="beside", got=len(sequences))
    if moves is not None and (
        costs.budget.link is None or {len(moves.wait_out), len(moves.fetch)} != {len(sequences[0])}
    ):
        raise _bad_field("moves", f"the offloads do not fit the sequence and its link: {reprlib.repr(moves)}")
    sequence = replace(sequences[0], beside=tuple(sequences[1:]), moves=moves)
    given, peak = fields["peak_bytes"], costs.budget.peak_bytes(sequence)
    if peak != given:
        text = f"peak_bytes must be {peak}, which follows from the costs, got {given}"
        raise InvalidValueError(text, kind="other_peak", name="peak_bytes", got=given, peak_bytes=peak)
    if (compiled := fields["compiled"]) is not None:
        whole = compiled.room is None or len(compiled.stages) == len(names) == 1
        plain = all(type(each) in _PLAIN for each in compiled.options.values())
        if not (whole and plain and set(compiled.stages) <= set(names)):
            raise _bad_field("compiled", f"compiled does not fit the stages: {reprlib.repr(asdict(compiled))}")
    return {**fields, "sequence": sequence, "costs": costs}
