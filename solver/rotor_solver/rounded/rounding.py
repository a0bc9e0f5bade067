"""Which checkpoints of a sequence are rounded: all that can be, and then none that need not be."""

from __future__ import annotations

import numpy as np

from rotor_solver.chain import Chain
from rotor_solver.operations import Backward, ForwardCheck, ForwardEnable, Loss, Operation
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate


def with_rounding(chain: Chain, sequence: Sequence) -> Sequence:
    """`sequence` with every checkpoint rounded that takes fewer bytes so: those that stand alone, in no ā."""
    attached: set[int] = set()
    operations: list[Operation] = []
    for operation in sequence:
        match operation:
            case ForwardCheck(stage) if stage and stage not in attached:
                form = chain.stages[stage - 1].rounded
                smaller = form is not None and form.nbytes < chain.activation[stage]
                operations.append(ForwardCheck(stage, smaller))
                continue
            case ForwardEnable(stage):
                attached.add(stage + 1)
            case Backward(stage):
                attached.discard(stage + 1)
        operations.append(operation)
    return Sequence(operations)


def with_exact_again(chain: Chain, sequence: Sequence, limit: int) -> Sequence:
    """`sequence`, which fits into `limit` bytes, with checkpoints exact again as far as these have room.

    One by one, those first that take least room: the difference of both forms, for as long as the checkpoint waits.
    """
    operations = list(sequence)
    room = limit - np.array(simulate(chain, sequence).during, np.int64)
    waits = []
    for position, operation in enumerate(operations):
        if isinstance(operation, ForwardCheck) and operation.rounded:
            form = chain.stages[operation.stage - 1].rounded
            assert form is not None
            more = chain.activation[operation.stage] - form.nbytes
            end = _next_read(operations, position)
            waits.append((more * (end - position), more, position, end))
    for _, more, position, end in sorted(waits):
        between = slice(position + 1, end)
        if int(room[between].min(initial=more)) >= more:
            room[between] -= more
            operation = operations[position]
            assert isinstance(operation, ForwardCheck)
            operations[position] = ForwardCheck(operation.stage)
    return Sequence(operations)


def _next_read(operations: list[Operation], position: int) -> int:
    """Where the stage of the operation at `position` runs again."""
    stage = operations[position].stage  # type: ignore[union-attr] # a forward
    return next(
        at
        for at in range(position + 1, len(operations))
        if not isinstance(each := operations[at], Loss | Backward) and each.stage == stage
    )
