"""What is in memory after every operation, by owner, read off the simulator's machine as it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rotor_solver.chain import Chain
from rotor_solver.operations import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Operation
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import Machine, last_reads, simulate, skipped_outputs


@dataclass(frozen=True, slots=True)
class Moment:
    """One operation: when it begins and how long it takes, in seconds, and the bytes in memory once it is done.

    `inputs[i]` are the bytes of an a_i that stands alone, `attached[i]` those of the ā_i that stage i - 1 keeps for its
    backward. `output` is the chain's output once only the caller holds it. `gradients` are δ and the gradients of
    parameters made so far. These parts add up to `after`. `during` is the most while the operation runs.
    """

    operation: Operation
    begin: float
    seconds: float
    again: bool
    """Whether it is a forward of a stage that has run before."""
    during: int
    after: int
    inputs: Mapping[int, int]
    attached: Mapping[int, int]
    output: int
    gradients: int


def moments(chain: Chain, sequence: Sequence) -> tuple[Moment, ...]:
    """The operations of `sequence` one after the other. ValueError, as from `simulate`, if `sequence` is not valid.

    What it moves is in memory until an operation waits for it, and again from the one before which it is fetched.
    Copies take no time here (see `moving.timed_moments`).
    """
    simulate(chain, sequence)  # for its errors, which name the operation
    machine, reads, skipped = Machine(chain), last_reads(sequence), skipped_outputs(sequence)
    ran: set[int] = set()
    left = 0
    found = []
    for position, operation in enumerate(sequence):
        if sequence.moves is not None:
            for stage in sequence.moves.wait_out[position]:
                machine.move_out(stage)
            for stage in sequence.moves.fetch[position]:
                machine.move_in(stage)
        begin = machine.seconds
        during = machine.run(operation, skip_output=position in skipped)
        if position in reads:
            machine.release_input(reads[position])
        attached = {
            index: (kept.option.saved if kept.away else kept.option.kept) - kept.freed
            for index, kept in machine.attached.items()
        }
        output = chain.activation[-1] if machine.output == "caller" else 0
        again = False
        if isinstance(operation, Backward):
            left += chain.stages[operation.stage].gradient
        if isinstance(operation, ForwardEnable | ForwardCheck | ForwardNograd):
            again = operation.stage in ran
            ran.add(operation.stage)
        found.append(
            Moment(
                operation=operation,
                begin=begin,
                seconds=machine.seconds - begin,
                again=again,
                during=during,
                after=machine.held,
                inputs=dict(machine.plain),
                attached=attached,
                output=output,
                gradients=left + sum(chain.activation[index] for index in machine.deltas),
            )
        )
    return tuple(found)
