"""Forwards whose backwards come in reverse are one long chain: the solver knows the best plan for that already."""

from __future__ import annotations

from dataclasses import replace

from rotor_solver.chain import Chain
from rotor_solver.operations import Loss, Operation
from rotor_solver.sequence import Sequence
from rotor_solver.stage import LARGEST_SIZE, Option, Stage


def nested_chain(chain: Chain, forwards: int, *, at_most: bool = False) -> Chain:
    """`forwards` copies of `chain`, one after the other, with a joint between each two.

    A joint stands for what is in memory between two forwards. Its forward makes the input of the next forward, and the
    gradient of the output of the one before; its backward is the loss of the one before. A joint never runs again:
    the backward of a forward cannot run another forward again.

    The nested chain holds no more than the forwards do, or, with `at_most`, no less. It differs in one thing: an output
    that the caller keeps, while its own forward goes backward through the last stage. Where that stage was stored, the
    output is a part of what it saved; if not, it is there beside it. `at_most` counts both, else neither counts twice.
    """
    output, held = chain.activation[-1], chain.activation[-1] if chain.output_held else 0
    loss = Option(
        forward_time=0.0,
        backward_time=chain.loss_time,
        saved=chain.input_bytes + output,
        backward_temp=chain.loss_temp - output,  # the gradient that it makes is saved already
    )
    # The next forward is over when the joint runs backward: its input and the gradient of that are there.
    left = 2 * chain.input_bytes + (held if at_most else 0)
    joint = Stage(chain.input_bytes, (loss,), nograd_temp=LARGEST_SIZE // 4, gradient=left, name="joint")
    copy = chain.stages
    if copy and not at_most:
        copy = (*copy[:-1], replace(copy[-1], gradient=copy[-1].gradient + held))
    return replace(chain, stages=(*(forwards - 1) * (*copy, joint), *chain.stages))


def apart(sequence: Sequence, stages: int, forwards: int) -> tuple[Sequence, ...]:
    """The sequence of each forward, from one for the nested chain of `forwards` times `stages` stages."""
    parts: list[list[Operation]] = [[] for _ in range(forwards)]
    for operation in sequence:
        if isinstance(operation, Loss):
            parts[-1].append(operation)
            continue
        number, stage = divmod(operation.stage, stages + 1)
        if stage < stages:
            parts[number].append(replace(operation, stage=stage))
        elif Loss() not in parts[number]:  # the joint, for the first time: the forward before it is over
            parts[number].append(Loss())
    return tuple(Sequence(part, sequence.algorithm) for part in parts)
