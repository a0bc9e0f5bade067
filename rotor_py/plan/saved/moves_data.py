"""What a plan moves to another tier of memory, as its file has it.

to                     what the tier was called (`offload=`); who loads the plan says anew where things go
out_bytes_per_second   the bandwidth that was planned with, and `in_bytes_per_second` for the way back
wait_out, fetch        pairs of a position in the sequence and a stage (`rotor_solver.moving.Moves`), in their order
"""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any

from rotor_py.errors import InvalidValueError
from rotor_py.measure.budget import Budget
from rotor_solver import Sequence
from rotor_solver.moving import Link, Moves


def moves_data(budget: Budget, sequence: Sequence) -> dict[str, Any] | None:
    """What the file says; None if the plan was made without another tier."""
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
    """The budget and the sequence with what `entry` says of moves. ValueError if that is nothing that was written."""
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
