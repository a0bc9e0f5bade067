"""Exact simulator of a sequence: seconds, and bytes in memory during and after every operation.

It shares no code with the solvers, and verifies the sequences that they find.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

from rotor_solver.chain import Chain, Option, check_chain
from rotor_solver.described_error import InvalidValueError, listed
from rotor_solver.sequence import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Sequence


@dataclass(frozen=True, slots=True)
class Simulation:
    """Seconds of a step (`makespan`), its peak, and bytes during and after each operation, chain input included."""

    makespan: float
    peak: int
    during: tuple[int, ...]
    after: tuple[int, ...]


def simulate(chain: Chain, sequence: Sequence) -> Simulation:
    """Return the time and memory that `sequence` takes on `chain`.

    Raises ValueError, naming the operation, if an operation uses something that is not in memory, or if the sequence
    does not compute the gradient of the input, δ_0.
    """
    machine = Machine(chain, sequence)
    during, after = [], []
    for position in range(len(machine.sequence)):
        during.append(machine.run(position))
        after.append(machine.held)
    if 0 not in machine.deltas:
        message = f"the sequence of {len(machine.sequence)} operations ends without the gradient of the input, δ_0"
        raise InvalidValueError(message, kind="incomplete_sequence")
    return Simulation(machine.seconds, max([chain.input_bytes, *during]), tuple(during), tuple(after))


def skipped_outputs(sequence: Sequence) -> frozenset[int]:
    """Return the positions of forwards right before the stage's own backward: their output is not computed."""
    operations = listed(sequence, "sequence")
    return frozenset(
        position
        for position, (operation, following) in enumerate(pairwise(operations))
        if isinstance(operation, ForwardEnable) and following == Backward(operation.stage)
    )


@dataclass(slots=True)
class _Attached:
    option: Option
    replayed: bool
    freed: int = 0  # Bytes of the a_i inside this ā_i that were freed after the forward of stage i
    away: bool = False  # Whether the option's `moved` bytes are in host memory now


class Machine:
    """Simulated memory while `sequence` runs: `held` bytes now. `loss_done` tells whether the loss has run."""

    def __init__(self, chain: Chain, sequence: Sequence) -> None:
        check_chain(chain)
        sequence = sequence if isinstance(sequence, Sequence) else Sequence(sequence)
        self.chain, self.sequence, self.activation = chain, sequence, chain.activation
        self.released = chain.released  # read once: the property goes through all stages
        self.skipped = skipped_outputs(sequence)
        self.held, self.seconds, self.loss_done, self.position = 0, 0.0, False, 0
        self.plain: dict[int, int] = {}  # Bytes of every a_i that is stored by itself, not inside an ā_i
        self.attached: dict[int, _Attached] = {}
        self.deltas: set[int] = set()
        # Where the first a_L is: "none" yet, then "plain" (by itself) or "attached" (in ā_L), at last only "caller".
        self.output = "none"
        # By stage, the position of its last forward: after it, only backwards read the stage's input.
        self.last_forward = {
            each.stage: position
            for position, each in enumerate(sequence)
            if isinstance(each, ForwardEnable | ForwardCheck | ForwardNograd)
        }
        self._add_plain(0)

    def run(self, position: int) -> int:
        """Run the operation at `position`; return the most bytes in memory while it runs.

        Raises ValueError, naming the operation, if it uses something that is not in memory.
        """
        self.position = position
        operation = self.sequence[position]
        if isinstance(operation, Loss):
            return self._loss()
        stage = operation.stage
        if not 0 <= stage < len(self.chain):
            self._refuse(f"must be for one of the chain's {len(self.chain)} stages", "no_such_stage", stage=stage)
        match operation:
            case ForwardEnable():
                most = self._enable(stage, operation.option)
            case ForwardCheck():
                most = self._forward(stage)
            case ForwardNograd():
                most = self._forward(stage)
                self._drop_plain(stage)
            case Backward():
                most = self._backward(stage)
        if self.last_forward.get(stage) == position:
            self._release_input(stage)
        return most

    def _refuse(self, text: str, kind: str, **facts: Any) -> NoReturn:
        message = f"operation {self.position}, {self.sequence[self.position]}, {text}"
        raise InvalidValueError(message, kind=kind, position=self.position, **facts)

    def _need_input(self, stage: int) -> None:
        if stage not in self.plain and stage not in self.attached:
            self._refuse(f"needs a_{stage}, which is not in memory", "no_input", stage=stage)

    def _enable(self, stage: int, option: int) -> int:
        self._need_input(stage)
        if stage + 1 in self.attached:
            self._refuse(f"saves ā_{stage + 1}, which is in memory already", "saved_twice", stage=stage)
        options = self.chain.stages[stage].options
        if not 0 <= option < len(options):
            self._refuse(f"must use an option below {len(options)}", "no_such_option", stage=stage, option=option)
        most = self.held + options[option].kept + options[option].forward_temp
        self.attached[stage + 1] = _Attached(options[option], self.loss_done)
        self.held += options[option].kept
        self._note_output(stage + 1, "attached")
        self.seconds += options[option].forward_time
        if self.position in self.skipped:
            self.seconds -= self.chain.stages[stage].skipped_output_time
        return most

    def _forward(self, stage: int) -> int:
        self._need_input(stage)
        costs = self.chain.stages[stage]
        most = self.held + costs.activation + costs.temp_without_graph
        self._add_plain(stage + 1)
        self._note_output(stage + 1, "plain")
        self.seconds += costs.seconds_without_graph
        return most

    def _loss(self) -> int:
        last = len(self.chain)
        self._need_input(last)
        if self.loss_done:
            self._refuse("is a second loss", "second_loss")
        most = self.held + self.activation[last] + self.chain.loss_temp
        self.loss_done = True
        self._add_delta(last)  # before a_L is dropped, since the loss computes δ_L from a_L
        self._drop_plain(last)
        self.seconds += self.chain.loss_time
        return most

    def _backward(self, stage: int) -> int:
        if stage + 1 not in self.deltas:
            self._refuse(f"needs δ_{stage + 1}, which is not in memory", "no_gradient", stage=stage)
        if stage + 1 not in self.attached:
            self._refuse(f"needs ā_{stage + 1}, which is not in memory", "nothing_saved", stage=stage)
        if self.attached[stage + 1].away:
            self._refuse(f"needs the part of ā_{stage + 1} that is offloaded", "not_moved_back", stage=stage)
        self._need_input(stage)
        before = self.held
        kept = self.attached.pop(stage + 1)
        self.held -= kept.option.kept - kept.freed
        if stage + 1 == len(self.chain) and not kept.replayed:
            self._leave_to_caller("attached")
        self.deltas.remove(stage + 1)
        self.held -= self.activation[stage + 1]
        self._add_delta(stage)
        self._drop_plain(stage)
        self.held += self.chain.stages[stage].gradient
        self.seconds += kept.option.backward_time
        temp = kept.option.backward_temp_of_replay if kept.replayed else kept.option.backward_temp
        # `temp` is the peak less all of ā, measured with all of ā in memory: add back the part that was freed.
        return max(before + kept.freed + self.activation[stage] + temp, self.held)

    def move_out(self, stage: int) -> None:
        self.attached[stage + 1].away = True
        self.held -= self.attached[stage + 1].option.moved

    def move_in(self, stage: int) -> None:
        self.attached[stage + 1].away = False
        self.held += self.attached[stage + 1].option.moved

    def _release_input(self, stage: int) -> None:
        alone, inside = self.released[stage]
        if stage in self.plain:
            self.plain[stage] -= alone
            self.held -= alone
        elif stage in self.attached:
            self.attached[stage].freed = inside
            self.held -= inside

    def _add_plain(self, index: int) -> None:
        if index not in self.plain:
            self.plain[index] = self.activation[index]
            self.held += self.activation[index]

    def _drop_plain(self, index: int) -> None:
        if index in self.plain:
            self.held -= self.plain.pop(index)
            if index == len(self.chain):
                self._leave_to_caller("plain")

    def _add_delta(self, index: int) -> None:
        self.deltas.add(index)
        self.held += self.activation[index]

    def _note_output(self, index: int, where: str) -> None:
        """Record where the first a_L is: the caller receives this one. A recomputed a_L is another tensor."""
        if index == len(self.chain) and self.output == "none":
            self.output = where

    def _leave_to_caller(self, where: str) -> None:
        if self.chain.output_held and self.output == where:
            self.output = "caller"
            self.held += self.activation[-1]
