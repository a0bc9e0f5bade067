"""Read and write the costs in a plan's file: measurements, memory around the chain, and offloads.

Offloads in the file:

    to                     the tier as given in `offload=`; it is given anew on loading
    out_bytes_per_second   the bandwidth planned with; `in_bytes_per_second` for the way back
    wait_out, fetch        pairs of a position in the sequence and a stage (`rotor_solver.moving.Moves`), in their order

Readers convert JSON to the types in memory, and raise ValueError for invalid data.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from typing import Any, TypeVar

from rotor_profiling import LossCost, StageCost
from rotor_py.errors import InvalidValueError
from rotor_py.measure.budget import Budget
from rotor_py.measure.fixed_memory import FixedMemory
from rotor_py.measure.measurement import Carried, Measurement, PrefixCost, Way
from rotor_solver import Sequence
from rotor_solver.chain import LARGEST_SIZE
from rotor_solver.in_flight import ORDERS
from rotor_solver.moving import Link, Moves


def moves_data(budget: Budget, sequence: Sequence) -> dict[str, Any] | None:
    """Return the offload entry of the file; None for a plan without a tier."""
    if budget.link is None:
        return None
    moves = Moves.none(len(sequence)) if sequence.moves is None else sequence.moves
    return {
        "to": budget.link_name,
        "out_bytes_per_second": float(budget.link.out_bytes_per_second),
        "in_bytes_per_second": float(budget.link.in_bytes_per_second),
        "wait_out": _pairs(moves.wait_out),
        "fetch": _pairs(moves.fetch),
    }


def with_moves(entry: Any, budget: Budget, sequence: Sequence) -> tuple[Budget, Sequence]:
    """Return budget and sequence with the moves of `entry`. Raises ValueError if the entry is invalid."""
    match entry:
        case None:
            return budget, sequence
        case {
            "to": str(to),
            "out_bytes_per_second": float(out),
            "in_bytes_per_second": float(back),
            "wait_out": [*waits],
            "fetch": [*fetches],
            **rest,
        } if not rest:
            moves = Moves(_by_position(waits, len(sequence)), _by_position(fetches, len(sequence)))
            found = replace(budget, link=Link(out, back), link_name=to)
            return found, replace(sequence, moves=moves) if moves.stages else sequence
    raise InvalidValueError(f"what is moved to another tier is {reprlib.repr(entry)}", kind="bad_field", name="moves")


def _pairs(by_position: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    return [[position, stage] for position, stages in enumerate(by_position) for stage in stages]


def _by_position(pairs: list[Any], length: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(length)]
    for pair in pairs:
        match pair:
            case [int(position), int(stage)] if 0 <= position < length:
                found[position].append(stage)
            case _:
                raise InvalidValueError(
                    f"a move is {reprlib.repr(pair)}; it has to be a position below {length} and a stage",
                    kind="bad_field",
                    name="moves",
                )
    return tuple(map(tuple, found))


T = TypeVar("T")
Reader = Callable[[str, Any], T]
"""Called with the name of a field and its value in the file."""

_LONGEST = 1e9
"""Most seconds of any cost: about thirty years."""
_BELOW_ZERO = frozenset({"backward_temp_bytes", "replay_temp_bytes", "waiting_gradients", "summed_gradients"})
"""Fields that may be negative: a backward may free more of its input than it needs, or gradients of later stages."""
IN_FILES = {"skipped_output_seconds": "output_seconds"}
"""Fields that files know by an older name, so that saved plans keep loading."""


def size(name: str, value: Any) -> int:
    """Read a number of bytes, negative only for a few fields."""
    least = -LARGEST_SIZE if name in _BELOW_ZERO else 0
    # By type: `isinstance` would accept True.
    if type(value) is not int or not least <= value <= LARGEST_SIZE:
        raise InvalidValueError(
            f"{name} is {reprlib.repr(value)}; it has to be a number of bytes", kind="bad_field", name=name
        )
    return value


def seconds(name: str, value: Any) -> float:
    """Read a number of seconds, zero or more."""
    if type(value) is not float or not 0 <= value <= _LONGEST:  # False for NaN, too
        raise InvalidValueError(
            f"{name} is {reprlib.repr(value)}; it has to be a number of seconds", kind="bad_field", name=name
        )
    return value


def share(name: str, value: Any) -> float:
    """Read a finite number, zero or more."""
    if type(value) is not float or not 0 <= value < inf:
        raise InvalidValueError(
            f"{name} is {reprlib.repr(value)}; it has to be a number from zero on", kind="bad_field", name=name
        )
    return value


def sizes(name: str, value: Any) -> tuple[int, ...]:
    """Read a list of numbers of bytes."""
    return many(size)(name, value)


def many(read: Reader[T]) -> Reader[tuple[T, ...]]:
    """Make a reader of a list of what `read` reads."""

    def read_all(name: str, value: Any) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise InvalidValueError(
                f"{name} is {reprlib.repr(value)}; it has to be a list", kind="bad_field", name=name
            )
        return tuple(read(name, each) for each in value)

    return read_all


def or_none(read: Reader[T]) -> Reader[T | None]:
    """Make a reader of null or what `read` reads."""
    return lambda name, value: None if value is None else read(name, value)


def record(kind: Callable[..., T]) -> Reader[T]:
    """Make a reader of a dataclass of seconds and bytes."""
    names = {IN_FILES.get(field.name, field.name): field for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    readers = {name: _READERS[str(field.type)] for name, field in names.items()}

    def read(name: str, value: Any) -> T:
        if not isinstance(value, dict) or value.keys() != readers.keys():
            raise InvalidValueError(
                f"{name} has {reprlib.repr(value)}; it has to have {', '.join(readers)}", kind="bad_field", name=name
            )
        return kind(**{names[part].name: reader(part, value[part]) for part, reader in readers.items()})

    return read


_READERS: dict[str, Reader[Any]] = {"int": size, "float": seconds, "tuple[int, ...]": sizes}


_MOST_CARRIED = 10**6
"""Most carried tensors times stages: building a chain takes so many steps. A guess far above any model; more is
refused."""
_IN_PART = "in part"
"""The only partial storage mode that files without mode names know."""
_AROUND = ("before_bytes", "stepping_bytes", "step_bytes")
_IN_FLIGHT = {"forwards": 1, "held_beside": 0, "backward_order": "any"}
"""Defaults of fields that a file has only if several forwards are in flight."""
_STEPPED = {"waiting_gradients": [], "summed_gradients": [], "freed_gradients": 0}
"""Defaults of fields that a file has only if parameters are stepped in the backward."""
_MOST_FORWARDS = 10**4
"""Most forwards in flight. A guess far above the microbatches of any pipeline; more is refused."""


@dataclass(frozen=True, slots=True)
class PlanCosts:
    """All numbers that a report is made from."""

    measurement: Measurement
    budget: Budget

    def as_data(self) -> dict[str, Any]:
        """Return seconds and bytes as JSON. Leaves out the chain: it follows from the measurement."""
        found = _renamed(asdict(self.measurement))
        del found["names"]
        if (lean := _lean(self.measurement)) is not None:  # so that earlier versions read the file
            found["lean"] = _renamed(lean)
            del found["ways"]
        else:
            found["ways"] = [[_way_data(way) for way in ways] for ways in found["ways"]]
        found["freed_gradients"] = self.budget.freed_gradients
        for name in [name for name in _STEPPED if not found[name]]:
            del found[name]  # so that earlier versions read the file
        around = {name: getattr(self.budget, name) for name in _AROUND}
        if self.budget.forwards > 1:  # otherwise left out, so that earlier versions read the file
            around |= {name: getattr(self.budget, name) for name in ("forwards", "held_beside")}
            if self.budget.backward_order != "any":
                around["backward_order"] = self.budget.backward_order
        return {**found, "fixed": asdict(self.budget.fixed), **around}

    @classmethod
    def from_data(cls, data: dict[str, Any], names: Items[str], *, fresh_gradients: bool) -> PlanCosts:
        """Read the output of `as_data`, for stages of these names. Raises ValueError for anything else."""
        data = {**_IN_FLIGHT, **_STEPPED, "spread": 0.0, **data}  # fields that earlier versions did not write
        parts = {name: read for name, read in _PARTS.items() if name != ("lean" if "ways" in data else "ways")}
        unknown = data.keys() ^ parts.keys()
        if unknown:
            raise InvalidValueError(
                f"the costs have to have {', '.join(parts)}; {reprlib.repr(sorted(unknown))} is different",
                kind="unknown_fields",
                name="costs",
            )
        found = {name: read(name, data[name]) for name, read in parts.items()}
        if "lean" in found:
            found["ways"] = tuple(() if each is None else (Way(_IN_PART, each),) for each in found.pop("lean"))
        for part in ("stages", "gradient_bytes"):
            if len(found[part]) != len(names):
                raise InvalidValueError(
                    f"there are {part} of {len(found[part])} stages, and {len(names)} stages",
                    kind="wrong_length",
                    name=part,
                    got=len(found[part]),
                )
        for part in ("ways", "waiting_gradients", "summed_gradients"):
            if len(found[part]) not in (0, len(names)):
                raise InvalidValueError(
                    f"there are {part} of {len(found[part])} stages, and {len(names)} stages",
                    kind="wrong_length",
                    name=part,
                    got=len(found[part]),
                )
        _refuse_carried(found["carried"], len(names))
        fixed, around = (
            found.pop("fixed"),
            {name: found.pop(name) for name in (*_AROUND, *_IN_FLIGHT, "freed_gradients")},
        )
        if not 1 <= around["forwards"] <= _MOST_FORWARDS:
            raise InvalidValueError(
                f"forwards is {around['forwards']}; it has to be from one to {_MOST_FORWARDS}",
                kind="bad_field",
                name="forwards",
            )
        measurement = Measurement(names=tuple(names), **found)
        chain = measurement.chain(fresh_gradients=fresh_gradients, forwards=around["forwards"])
        return cls(measurement, Budget(fixed, chain, snapshot_bytes=measurement.snapshot_bytes, **around))


def _lean(measurement: Measurement) -> list[dict[str, Any] | None] | None:
    """Return the costs of partial storage in the older format, where it can express them; else None."""
    if any(
        len(ways) > 1 or ways[:1] != tuple(way for way in ways if way.name == _IN_PART) for ways in measurement.ways
    ):
        return None
    return [asdict(ways[0].cost) if ways else None for ways in measurement.ways]


def _way_data(way: dict[str, Any]) -> dict[str, Any]:
    """Return a storage mode for the file, with `moved_bytes` only if it moves any."""
    return {name: value for name, value in way.items() if name != "moved_bytes" or value}


def _renamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {IN_FILES.get(key, key): _renamed(each) for key, each in value.items()}
    return [_renamed(each) for each in value] if isinstance(value, list | tuple) else value


def _refuse_carried(carried: tuple[Carried, ...], length: int) -> None:
    if len(carried) * length > _MOST_CARRIED:
        raise InvalidValueError(
            f"{len(carried)} tensors are carried past {length} stages; that is no model",
            kind="bad_field",
            name="carried",
        )
    for each in carried:
        if not each.first <= each.last <= length:
            raise InvalidValueError(
                f"a tensor is carried from stage {each.first} to {each.last} of {length}",
                kind="bad_field",
                name="carried",
            )


def _order(name: str, value: Any) -> str:
    if value not in ORDERS:
        raise InvalidValueError(
            f"{name} is {reprlib.repr(value)}; it has to be {' or '.join(ORDERS)}", kind="bad_field", name=name
        )
    return str(value)


def _way(name: str, value: Any) -> Way:
    match value:
        case {"name": str(way), "cost": dict(cost), **rest} if way and rest.keys() <= {"moved_bytes"}:
            found = Way(way, record(StageCost)(name, cost), size("moved_bytes", rest.get("moved_bytes", 0)))
            if found.moved_bytes <= found.cost.saved_bytes:
                return found
    raise InvalidValueError(
        f"{name} has {reprlib.repr(value)}; it has to have a name and a cost", kind="bad_field", name=name
    )


_PARTS: dict[str, Reader[Any]] = {
    "stages": many(record(StageCost)),
    "gradient_bytes": sizes,
    "input_bytes": size,
    "loss": record(LossCost),
    "prefix": or_none(record(PrefixCost)),
    "snapshot_bytes": size,
    "carried": many(record(Carried)),
    "held_bytes": size,
    "lean": many(or_none(record(StageCost))),
    "ways": many(many(_way)),
    "spread": share,
    "waiting_gradients": sizes,
    "summed_gradients": sizes,
    "freed_gradients": size,
    "fixed": record(FixedMemory),
    "before_bytes": size,
    "stepping_bytes": size,
    "step_bytes": or_none(size),
    "forwards": size,
    "held_beside": size,
    "backward_order": _order,
}
