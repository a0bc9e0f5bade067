"""Memory after every operation (inputs, saved tensors, gradients), and the bytes that a plan keeps for its backwards.

Both are read from the simulator's `Machine`, one operation after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rotor_solver.chain import Chain
from rotor_solver.segments import store_all
from rotor_solver.sequence import (
    ForwardCheck,
    ForwardEnable,
    ForwardNograd,
    Loss,
    Operation,
    Sequence,
    check_sequence,
)
from rotor_solver.simulate import Machine, simulate


@dataclass(frozen=True, slots=True)
class Moment:
    """One operation: its begin and duration in seconds, and the bytes in memory after it.

    `inputs[i]` is the bytes of an a_i stored by itself; `attached[i]` is the bytes of the ā_i that stage i - 1 keeps
    for its backward. `output` is the bytes of the chain's output if only the caller keeps it, else 0. `gradients` is
    the bytes of all δ_i and of parameters' gradients. These bytes add up to `after`. `during` is the operation's peak.
    """

    operation: Operation
    begin: float
    seconds: float
    again: bool  # Whether the operation recomputes a stage
    during: int
    after: int
    inputs: Mapping[int, int]
    attached: Mapping[int, int]
    output: int
    gradients: int


def moments(chain: Chain, sequence: Sequence) -> tuple[Moment, ...]:
    """Return a `Moment` for every operation of `sequence`, in order. Raises ValueError if `sequence` is not valid.

    Offloaded bytes leave memory at the operation that waits for their copy out, and count again from the operation that
    fetches them. Copies take no time here; `transfers.timed_moments` adds it.
    """
    check_sequence(sequence)
    simulate(chain, sequence)  # raises ValueError, naming the operation, if the sequence is not valid
    machine = Machine(chain, sequence)
    ran: set[int] = set()
    found = []
    for position, operation in enumerate(sequence):
        if sequence.moves is not None:
            for stage in sequence.moves.wait_out[position]:
                machine.move_out(stage)
            for stage in sequence.moves.fetch[position]:
                machine.move_in(stage)
        begin = machine.seconds
        during = machine.run(position)
        attached = {
            index: (kept.option.saved if kept.away else kept.option.kept) - kept.freed
            for index, kept in machine.attached.items()
        }
        again = False
        if isinstance(operation, ForwardEnable | ForwardCheck | ForwardNograd):
            again = operation.stage in ran
            ran.add(operation.stage)
        inputs, output = dict(machine.plain), chain.activation[-1] if machine.output == "caller" else 0
        found.append(
            Moment(
                operation=operation,
                begin=begin,
                seconds=machine.seconds - begin,
                again=again,
                during=during,
                after=machine.held,
                inputs=inputs,
                attached=attached,
                output=output,
                gradients=machine.held - sum(inputs.values()) - sum(attached.values()) - output,
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage's output and of the tensors saved for its backward, in memory when the loss begins.

    The plan keeps `kept_bytes`; plain training would keep `not_kept_bytes` more.
    """

    name: str
    kept_bytes: int
    not_kept_bytes: int


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Bytes in memory when the loss begins, by stage: those that a plan keeps, and those that only plain training does.

    `input_bytes` is the size of the chain's input, `beside_bytes` the size of tensors that bypass the chain (an
    encoder's output, a skip connection). Every plan has both in memory, so the sums leave them out.
    """

    stages: tuple[StageMemory, ...]
    input_bytes: int = 0
    beside_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        return sum(stage.kept_bytes for stage in self.stages)

    @property
    def not_kept_bytes(self) -> int:
        return sum(stage.not_kept_bytes for stage in self.stages)

    @property
    def share_saved(self) -> float:
        """Share of plain training's bytes that the plan does not keep, in [0, 1]."""
        whole = self.kept_bytes + self.not_kept_bytes
        return self.not_kept_bytes / whole if whole else 0.0


def plan_memory(chain: Chain, sequence: Sequence, beside_bytes: int = 0) -> PlanMemory:
    """Return the bytes that `sequence` and plain training keep at the loss. Raises ValueError for an invalid one."""
    kept, plain = _kept(chain, sequence), _kept(chain, store_all(chain))
    stages = tuple(
        StageMemory(stage.name, planned, max(0, stored - planned))
        for stage, planned, stored in zip(chain, kept, plain, strict=True)
    )
    return PlanMemory(stages, chain.input_bytes, beside_bytes)


def _kept(chain: Chain, sequence: Sequence) -> list[int]:
    """Return, for every stage, the bytes of its output and of its saved tensors when the loss begins."""
    found, loss = moments(chain, sequence), sequence.index(Loss())
    before = found[loss - 1]  # the last operation before the loss; the loss itself if there are no stages
    return [before.inputs.get(i + 1, 0) + before.attached.get(i + 1, 0) for i in range(len(chain))]
