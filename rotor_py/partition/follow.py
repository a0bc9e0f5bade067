"""A sequence of the solver as a program: which values the forward keeps, and when the backward makes others again."""

from __future__ import annotations

from collections import deque

from torch import fx

from rotor_py.partition.chain.stages import Stages
from rotor_py.partition.program import BackwardWriter, Program
from rotor_solver import Sequence
from rotor_solver.sequence import ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation


def follow(stages: Stages, sequence: Sequence, *, keep_outputs: bool) -> Program:
    """The program of a memory-persistent sequence, found for a chain that was made with the same `keep_outputs`.

    A stage that the sequence runs again is run right before the first operator that reads a value of it.
    """
    operations = list(sequence)
    loss = operations.index(Loss())
    kept = set(stages.shared)
    for operation in operations[:loss]:
        match operation:
            case ForwardEnable(stage, option):
                kept |= stages.kept[stage][option]
                if keep_outputs:
                    kept.update(stages.inputs[stage + 1])
            case ForwardCheck(stage):
                kept.update(stages.inputs[stage])
            case _:
                pass
    writer = BackwardWriter(stages.joint, kept)
    ahead = deque(operations[loss + 1 :])
    root, values = stages.joint.root, set(stages.values)
    for node in stages.joint.backward:
        for each in node.all_input_nodes:
            value = root.get(each)
            if value in values and value not in kept and value not in writer.there:
                assert value is not None
                _run_until(stages, writer, ahead, stages.stage_of[value])
        writer.write(node)
    return writer.program()


def _run_until(stages: Stages, writer: BackwardWriter, ahead: deque[Operation], stage: int) -> None:
    """Run what comes next in the sequence, up to the run of `stage` that keeps what its backward reads."""
    if not any(isinstance(operation, ForwardEnable) and operation.stage == stage for operation in ahead):
        return  # it has run; what it did not keep is made again by whoever reads it
    while ahead:
        operation = ahead.popleft()
        match operation:
            case ForwardEnable(number, option):
                _make(stages, writer, number, stages.kept[number][option])
                if number == stage:
                    return
            case ForwardCheck(number):
                _make(stages, writer, number, frozenset())
            case ForwardNograd(number):
                _make(stages, writer, number, frozenset())
                later = set(stages.inputs[number + 1])
                writer.forget(value for value in stages.inputs[number] if value not in later)
            case _:
                pass


def _make(stages: Stages, writer: BackwardWriter, number: int, kept: frozenset[fx.Node]) -> None:
    """Make the output of a stage and `kept`, and forget what else it has made on the way."""
    wanted = {*kept, *(value for value in stages.inputs[number + 1])}
    for value in sorted(wanted, key=stages.joint.order.__getitem__):
        writer.make(value)
    writer.forget(node for node in stages.members[number] if node not in wanted)
