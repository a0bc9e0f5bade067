"""The trips that a sequence allows: what its forwards before the loss may move, from where to where."""

from __future__ import annotations

from dataclasses import dataclass

from rotor_solver.chain import Chain
from rotor_solver.operations import Backward, ForwardEnable, Loss
from rotor_solver.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Trip:
    """`moved` bytes of a stage, from position `forward` of a sequence, where they are made, to `backward`."""

    stage: int
    moved: int
    forward: int
    backward: int


def loss_position(sequence: Sequence) -> int:
    """Where the loss is; ValueError if there is none."""
    if Loss() not in sequence.operations:
        raise ValueError(f"the sequence of {len(sequence)} operations has no loss")
    return sequence.operations.index(Loss())


def trips_of(chain: Chain, sequence: Sequence) -> tuple[Trip, ...]:
    """All trips of a valid sequence, in the order of the forwards. A forward after the loss moves nothing."""
    before = sequence.operations[: loss_position(sequence)]
    backward = {each.stage: place for place, each in enumerate(sequence) if isinstance(each, Backward)}
    found = []
    for position, operation in enumerate(before):
        if isinstance(operation, ForwardEnable):
            moved = chain.stages[operation.stage].options[operation.option].moved
            if moved:
                found.append(Trip(operation.stage, moved, position, backward[operation.stage]))
    return tuple(found)
