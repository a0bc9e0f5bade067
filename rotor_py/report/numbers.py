"""Predicted peaks and times of a plan, and the kind of storage each stage uses."""

from __future__ import annotations

from dataclasses import dataclass

from rotor_py.measure.budget import Budget
from rotor_py.measure.measurement import Measurement
from rotor_py.stage.compression import Packed
from rotor_py.stage.low_precision import word_of
from rotor_py.stage.storage_modes import parted
from rotor_py.units import format_bytes
from rotor_solver import Chain, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Sequence, Stage, store_all

WORDS = {
    "kept": "all that the backward needs",
    "part": "a part of it, the rest is made again",
    "packed": "packed, with the same bits",
    "rounded": "rounded to fewer bits",
    "elsewhere": "what stays of it while the rest is elsewhere",
    "input": "its input alone",
}
"""Words for the kinds of stored memory."""


def kept_kind(stage: Stage, option: int) -> str:
    """The kind of storage of a stage's option.

    A partial option that also packs or rounds counts as packed or rounded, which matters more to the user.
    """
    way = stage.options[option]
    if way.moved:
        return "elsewhere"
    if word_of([way.name]) is not None:
        return "rounded"
    if parted(way.name, (Packed().name,))[1] is not None:
        return "packed"
    return "part" if option else "kept"


@dataclass(frozen=True, slots=True)
class PlanNumbers:
    """A measured model, its budget and its plan. `mem_limit`, in bytes, is None if none was set.

    Derived numbers are computed on access.
    """

    title: str
    device: str
    mem_limit: int | None
    budget: Budget
    measurement: Measurement
    sequence: Sequence

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the limit."""
        return self.mem_limit is None or self.peak_bytes <= self.mem_limit

    @property
    def chain(self) -> Chain:
        """The measured chain, in seconds and bytes."""
        return self.budget.chain

    @property
    def shown(self) -> Sequence:
        """The displayed sequence: of several forwards in flight, the one with the peak."""
        return self.budget.busiest(self.sequence)[0]

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the planned step."""
        return self.budget.peak_bytes(self.sequence)

    @property
    def store_all_bytes(self) -> int:
        """Predicted peak of a step that stores everything."""
        return self.budget.peak_bytes(store_all(self.chain))

    @property
    def step_seconds(self) -> float:
        """Predicted time of the planned forward, loss and backward."""
        return self.seconds_of(self.sequence)

    @property
    def store_all_seconds(self) -> float:
        """Predicted time of the plain forward, loss and backward."""
        return self.seconds_of(store_all(self.chain))

    def seconds_of(self, sequence: Sequence) -> float:
        """Predicted time of forward, loss and backward, all forwards in flight following `sequence`."""
        return self.budget.makespan(sequence) + self.budget.forwards * self.before_chain_seconds

    @property
    def overhead(self) -> float:
        """Ratio of planned to plain time."""
        return self.step_seconds / self.store_all_seconds if self.store_all_seconds else 1.0

    @property
    def gap(self) -> float | None:
        """Upper bound of the distance to the best memory-persistent plan, as a share of time; None without a bound.

        The solver has proved that each forward of such a plan takes at least `sequence.lower_bound` seconds.
        """
        bound = self.sequence.lower_bound
        if bound is None:
            return None
        makespan = self.budget.makespan(self.sequence) / self.budget.forwards
        return makespan / bound - 1 if bound else 0.0

    @property
    def before_chain_seconds(self) -> float:
        """Time of the layers before the chain, which are not planned."""
        return self.measurement.prefix.seconds if self.measurement.prefix else 0.0

    def by_forwards(self) -> dict[str, Sequence]:
        """Sequences of forwards in flight by label: `forward 1`, `forwards 2 to 4`."""
        sequences = self.sequence.of_forwards(self.budget.forwards)
        if not self.sequence.beside:
            return {"sequence": self.sequence}
        starts = [at for at, each in enumerate(sequences) if at == 0 or each.operations != sequences[at - 1].operations]
        ends = [*starts[1:], len(sequences)]
        return {
            f"forward {begin + 1}" if end - begin == 1 else f"forwards {begin + 1} to {end}": sequences[begin]
            for begin, end in zip(starts, ends, strict=True)
        }

    def kinds(self) -> list[str]:
        """Kind of storage of each stage from its forward on, a key of `numbers.WORDS`; empty for nothing."""
        found = [""] * len(self.chain)
        for operation in self.shown:
            match operation:
                case Loss():
                    break
                case ForwardEnable(stage, option):
                    found[stage] = kept_kind(self.chain.stages[stage], option)
                case ForwardCheck(stage):
                    found[stage] = found[stage] or "input"
        return found

    def actions(self) -> list[str]:
        """The action of each stage, in words: "stored", "checkpointed, recomputed 1×"."""
        runs = [0] * len(self.chain)
        kept: dict[int, str] = {}
        before_loss = True
        for operation in self.shown:
            match operation:
                case Loss():
                    before_loss = False
                case ForwardEnable(stage, option):
                    runs[stage] += 1
                    if before_loss:  # after the loss, a ForwardEnable is a recomputation
                        way = self.chain.stages[stage].options[option]
                        size = f"{format_bytes(way.moved)} moved" if way.moved else format_bytes(way.saved)
                        kept[stage] = f"stored {way.name}: {size}" if option else "stored"
                case ForwardCheck(stage):
                    runs[stage] += 1
                    # A sequence may recompute a stage before the loss and store it then; the last storage counts.
                    if before_loss:
                        kept.setdefault(stage, "checkpointed")
                case ForwardNograd(stage):
                    runs[stage] += 1
        return [_action(kept.get(stage), count - 1) for stage, count in enumerate(runs)]


def _action(kept: str | None, again: int) -> str:
    times = f"recomputed {again}×" if again else ""
    return ", ".join(part for part in (kept, times) if part)
