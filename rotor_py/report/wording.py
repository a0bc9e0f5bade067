"""Operations in the words of a report."""

from __future__ import annotations

from collections.abc import Sequence

from rotor_py.report.time_text import format_seconds
from rotor_py.units import format_bytes
from rotor_solver import Backward, ForwardEnable, Loss, Moment, Operation


def label(operation: Operation, names: Sequence[str]) -> str:
    """`Fe_3 layers.3`: the operation, and the name of its stage; `L loss`."""
    return f"{operation} {'loss' if isinstance(operation, Loss) else names[operation.stage]}"


def kind(moment: Moment) -> str:
    """What the operation is: "loss", "backward", "again", "keep" (a forward for the backward) or "pass"."""
    match moment.operation:
        case Loss():
            return "loss"
        case Backward():
            return "backward"
        case ForwardEnable():
            return "again" if moment.again else "keep"
    return "again" if moment.again else "pass"


def sentence(moment: Moment, names: Sequence[str], beside_bytes: int) -> str:
    """The operation with its time and the memory of the whole step, fixed part included."""
    return (
        f"{label(moment.operation, names)}{' (recompute)' if moment.again else ''}: {format_seconds(moment.seconds)}, "
        f"{format_bytes(beside_bytes + moment.during)} while it runs, {format_bytes(beside_bytes + moment.after)} after"
    )
