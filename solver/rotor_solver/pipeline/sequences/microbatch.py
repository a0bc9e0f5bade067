"""What one microbatch takes by a sequence: a forward, what is kept until the backward, a backward. And several."""

from __future__ import annotations

from dataclasses import dataclass

from rotor_solver.chain import Chain
from rotor_solver.operations import Backward, Loss
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import Machine, last_reads, simulate, skipped_outputs


def bytes_in_flight(kept: int, peak: int, count: int) -> int:
    """The most bytes of `count` microbatches in flight: one is in progress, and takes up to `peak`. Each of the others
    has had its forward, waits for its backward, and holds `kept`.
    """
    return (count - 1) * kept + peak


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Bytes and seconds of one microbatch through a chain, the chain's input counted.

    `kept_bytes` are there when the loss begins, so between forward and backward: the input and the output as well.
    The peaks are those of the forward and of the backward, which begins with the loss.
    """

    kept_bytes: int
    forward_peak: int
    backward_peak: int
    forward_seconds: float
    backward_seconds: float
    stored_backward_seconds: float
    """The part of the backward that is not recomputation."""

    @classmethod
    def of(cls, chain: Chain, sequence: Sequence) -> Microbatch:
        """ValueError, as from `simulate`, if `sequence` is not valid."""
        simulate(chain, sequence)  # for its errors, which name the operation
        machine, reads, skipped = Machine(chain), last_reads(sequence), skipped_outputs(sequence)
        kept, stored = chain.input_bytes, 0.0
        peaks, seconds = {False: kept, True: 0}, {False: 0.0, True: 0.0}  # by whether the loss has begun
        for position, operation in enumerate(sequence):
            if isinstance(operation, Loss):
                kept = machine.held
            before = machine.seconds
            most = machine.run(operation, skip_output=position in skipped)
            if position in reads:
                machine.release_input(reads[position])
            peaks[machine.lost] = max(peaks[machine.lost], most)
            seconds[machine.lost] += machine.seconds - before
            if isinstance(operation, Backward | Loss):
                stored += machine.seconds - before
        return cls(kept, peaks[False], peaks[True], seconds[False], seconds[True], stored)

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_peak, self.backward_peak)

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_seconds + self.backward_seconds
