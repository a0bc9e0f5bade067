"""Exact simulator: the memory of a sequence, in bytes, during and after every operation.

It shares no code with the solvers, and has the last word on their results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from rotor_solver.chain import Chain, Option
from rotor_solver.errors import DescribedError, InvalidValueError
from rotor_solver.sequence import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation, Sequence


@dataclass(frozen=True, slots=True)
class Simulation:
    """Makespan in seconds; peak, and memory during and after every operation, in bytes. a_0 is counted."""

    makespan: float
    peak: int
    during: tuple[int, ...]
    after: tuple[int, ...]


def simulate(chain: Chain, sequence: Sequence) -> Simulation:
    """Run `sequence` on `chain`.

    Raises ValueError, naming the operation, if an operation uses something that is not in memory, or if the sequence
    ends without δ_0.
    """
    machine = Machine(chain)
    reads, skipped = last_reads(sequence), skipped_outputs(sequence)
    during, after = [], []
    for position, operation in enumerate(sequence):
        try:
            most = machine.run(operation, skip_output=position in skipped)
            if position in reads:
                machine.release_input(reads[position])
        except _MissingError as missing:
            raise InvalidValueError(
                f"operation {position}, {operation}, {missing}",
                kind=missing.kind,
                stage=missing.stage,
                position=position,
            ) from None
        during.append(most)
        after.append(machine.held)
    if 0 not in machine.deltas:
        raise InvalidValueError(
            f"the sequence of {len(sequence)} operations ends before the gradient of the input, δ_0, is known",
            kind="incomplete_sequence",
        )
    return Simulation(machine.seconds, max([chain.input_bytes, *during]), tuple(during), tuple(after))


def last_reads(sequence: Sequence) -> dict[int, int]:
    """Map each stage's last forward, by position, to the stage: after it, only its backward reads its input."""
    last = {
        operation.stage: position
        for position, operation in enumerate(sequence)
        if isinstance(operation, ForwardEnable | ForwardCheck | ForwardNograd)
    }
    return {position: stage for stage, position in last.items()}


def skipped_outputs(sequence: Sequence) -> frozenset[int]:
    """Return the positions of forwards with unread output: those right before the backward of the same stage."""
    operations = tuple(sequence)
    return frozenset(
        position
        for position, (operation, following) in enumerate(pairwise(operations))
        if isinstance(operation, ForwardEnable) and following == Backward(operation.stage)
    )


class _MissingError(DescribedError):
    """An operation lacks something it needs; the message completes a sentence."""


@dataclass(slots=True)
class _Attached:
    option: Option
    replayed: bool
    freed: int = 0
    """Bytes of the a_i inside this ā_i that were freed before its backward."""
    away: bool = False
    """Whether the option's `moved` bytes are out of memory."""


@dataclass(slots=True)
class Machine:
    """The contents of memory, and their size `held` in bytes. `lost` says that the loss has run."""

    chain: Chain
    held: int = 0
    plain: dict[int, int] = field(default_factory=dict)
    """Bytes of every a_i that stands alone."""
    attached: dict[int, _Attached] = field(default_factory=dict)
    deltas: set[int] = field(default_factory=set)
    seconds: float = 0.0
    lost: bool = False
    output: str = "none"
    """Holder of the caller's a_L: "none" before it exists, "plain", "attached", or "caller"."""

    activation: tuple[int, ...] = ()
    released: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        self.activation = self.chain.activation
        self.released = self.chain.released
        self._add_plain(0)

    def run(self, operation: Operation, *, skip_output: bool = False) -> int:
        """Run one operation; return the peak in bytes while it runs.

        With `skip_output`, a forward with a graph does not compute its output, which saves time.
        """
        match operation:
            case Loss():
                return self._loss()
            case ForwardEnable(stage, option):
                return self._enable(self._stage(stage), option, skip_output)
            case ForwardCheck(stage):
                return self._forward(self._stage(stage))
            case ForwardNograd(stage):
                most = self._forward(self._stage(stage))
                self._drop_plain(stage)
                return most
            case Backward(stage):
                return self._backward(self._stage(stage))

    def _stage(self, stage: int) -> int:
        if not 0 <= stage < len(self.chain):
            raise _MissingError(
                f"is about a stage that is not there: the chain has {len(self.chain)}",
                kind="no_such_stage",
                stage=stage,
            )
        return stage

    def _need_input(self, stage: int) -> None:
        if stage not in self.plain and stage not in self.attached:
            raise _MissingError(f"needs a_{stage}, which is not in memory", kind="no_input", stage=stage)

    def _enable(self, stage: int, option: int, skip_output: bool) -> int:
        self._need_input(stage)
        if stage + 1 in self.attached:
            raise _MissingError(
                f"would make ā_{stage + 1}, which is in memory already", kind="saved_twice", stage=stage
            )
        options = self.chain.stages[stage].options
        if option >= len(options):
            raise _MissingError(
                f"uses option {option} of a stage that has {len(options)}",
                kind="no_such_option",
                stage=stage,
                option=option,
            )
        most = self.held + options[option].kept + options[option].forward_temp
        self.attached[stage + 1] = _Attached(options[option], self.lost)
        self.held += options[option].kept
        self._note_output(stage + 1, "attached")
        self.seconds += options[option].forward_time
        if skip_output:
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
        if self.lost:
            raise _MissingError("is a second loss", kind="second_loss")
        most = self.held + self.activation[last] + self.chain.loss_temp
        self.lost = True
        self._add_delta(last)  # before a_L is dropped: the loss makes one from the other
        self._drop_plain(last)
        self.seconds += self.chain.loss_time
        return most

    def _backward(self, stage: int) -> int:
        if stage + 1 not in self.deltas:
            raise _MissingError(f"needs δ_{stage + 1}, which is not in memory", kind="no_gradient", stage=stage)
        if stage + 1 not in self.attached:
            raise _MissingError(f"needs ā_{stage + 1}, which is not in memory", kind="nothing_saved", stage=stage)
        if self.attached[stage + 1].away:
            raise _MissingError(
                f"needs the part of ā_{stage + 1} that was moved out, which is not back",
                kind="not_moved_back",
                stage=stage,
            )
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
        # Scratch was measured on top of a whole ā, so the part of ā freed already does not lower the peak.
        return max(before + kept.freed + self.activation[stage] + temp, self.held)

    def move_out(self, stage: int) -> None:
        """Free the `moved` bytes of `stage`: they have been copied out."""
        self.attached[stage + 1].away = True
        self.held -= self.attached[stage + 1].option.moved

    def move_in(self, stage: int) -> None:
        """Take the `moved` bytes of `stage` again: their copy back begins."""
        self.attached[stage + 1].away = False
        self.held += self.attached[stage + 1].option.moved

    def release_input(self, stage: int) -> None:
        """Free the part of the input of `stage` that its backward does not need. Its last forward must have run."""
        alone, inside = self.released[stage]
        if stage in self.plain:
            self.plain[stage] -= alone
            self.held -= alone
        elif stage in self.attached and stage not in self.plain:
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
        """Record the holder of the first a_L, which the caller takes. A recomputed a_L is other memory."""
        if index == len(self.chain) and self.output == "none":
            self.output = where

    def _leave_to_caller(self, where: str) -> None:
        if self.chain.output_held and self.output == where:
            self.output = "caller"
            self.held += self.activation[-1]
