"""The numbers and words of a report, without anything that shows them: every renderer reads these facts.

Nothing here imports a renderer, or the function that finds a sweep.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rotor_py.devices.device import Devices
from rotor_py.devices.reservation import Reservation
from rotor_py.measure.budget import Budget
from rotor_py.measure.certified.regret import known_regret
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.step_memory import peak_of
from rotor_py.report.basis import Basis
from rotor_py.report.batch_choice import BatchChoice
from rotor_py.report.sweep import Sweep
from rotor_py.stage.keepers.fewer_bits import word_of
from rotor_py.stage.keepers.rounded_stages import rounded_stages
from rotor_py.units import format_bytes, format_seconds
from rotor_solver import (
    Chain,
    ForwardCheck,
    ForwardEnable,
    ForwardNograd,
    Loss,
    Sequence,
    store_all,
)


@dataclass(frozen=True, slots=True)
class ReportFacts:
    """A measured model, its budget and its plan. `mem_limit`, in bytes, is None where none was set.

    What follows from them is computed when it is asked for: peaks in bytes, times in seconds, all of them predicted.
    """

    title: str
    device: str
    mem_limit: int | None
    budget: Budget
    measurement: Measurement
    sequence: Sequence
    sweep: Sweep | None = None
    """What all limits cost, where that is known."""
    compiled: Iterable[str] = ()
    """The names of the stages that run compiled."""
    batches: BatchChoice | None = None
    """How the batch was chosen, if it was."""
    predicted_for: Devices | None = None
    """The devices of the table that this is predicted for, which need not be there; None where it was measured."""
    reserved: Reservation | None = None
    """What the allocator is predicted to reserve there, if a step by the plan was followed for it."""

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is inside the limit."""
        return self.mem_limit is None or self.peak_bytes <= self.mem_limit

    def verdict(self) -> tuple[str, str]:
        """Whether the plan fits, and at what price: the beginning and the rest of one sentence."""
        if self.mem_limit is None:
            begin, limit = f"{self.title} is planned", "without a limit"
        else:
            begin = f"{self.title} fits" if self.fits else f"{self.title} does not fit"
            limit = f"in {format_bytes(self.mem_limit)}"
        plain = self.store_all_bytes
        if self.overhead == 1.0 and self.peak_bytes == plain:
            price = "nothing has to be recomputed."
        else:
            price = (
                f"{self.overhead - 1:+.1%} time compared with storing everything, which needs {format_bytes(plain)}."
            )
        return begin, f" {limit} on {self.device}: predicted peak {format_bytes(self.peak_bytes)}, {price}"

    def peak_reason(self) -> str | None:
        """Where the peak is, in one sentence; None where it is in forward or backward, as one would expect."""
        running = self.budget.beside_chain(self.sequence) + peak_of(self.chain, self.shown)
        if self.peak_bytes <= running:
            return None
        stepping = self.peak_bytes == self.budget.optimizer_peak_bytes
        return (
            f"The peak is {'in the optimizer step' if stepping else 'in the layers before the chain'}: "
            f"{format_bytes(self.peak_bytes)} there, {format_bytes(running)} in forward and backward. No other plan "
            "needs less there."
        )

    def remarks(self) -> tuple[str, ...]:
        """What there is to say beside the verdict, in whole sentences."""
        names = tuple(self.compiled)
        compiled = f"{len(names)} of {len(self.chain)} stages run compiled." if names else None
        chosen = () if self.batches is None else self.batches.sentences()
        freed = f"{self.budget.gradients_freed()}." if self.budget.freed_gradients else None
        words = self.budget.moved_in_words(self.sequence)
        moved = f"{words[0].upper()}{words[1:]}." if words else None
        warning = None if self.reserved is None else self.reserved.warning(self.peak_bytes)
        others = (warning, self.peak_reason(), moved, freed, self.which_forward(), compiled, self.rounded())
        basis = () if self.basis is None else self.basis.sentences()
        return (*chosen, *(each for each in others if each is not None), *basis)

    def rounded(self) -> str | None:
        """What of the plan is inexact, in one sentence; None if nothing may be."""
        asked = word_of(name for names in self.measurement.way_names for name in names)
        if asked is None:
            return None
        count = len(rounded_stages(self.chain, self.sequence))
        if not count:
            return f"No stage is kept in {asked}: the plan is exact."
        stages = f"{count} of {len(self.chain)} stages {'is' if count == 1 else 'are'}"
        return (
            f"{stages} kept in {asked} for the backward: the forward is exact, and gradients differ from those of "
            "plain training."
        )

    @property
    def basis(self) -> Basis | None:
        """What the numbers rest on; None where they were measured."""
        if self.predicted_for is None:
            return None
        fixed = self.budget.fixed
        return Basis(self.predicted_for, fixed, fixed.batch + self.measurement.input_bytes)

    def reserved_bytes(self) -> list[tuple[str, str]]:
        """What the allocator reserves for the planned step, by its name; nothing where that is not known."""
        return [] if self.reserved is None else [("reserved (predicted)", format_bytes(self.reserved.reserved_bytes))]

    def times(self) -> list[tuple[str, str]]:
        """The predicted times of a step by the plan, and of a plain one, by their names.

        Of a device that is not there, they are ranges, and come with what they were fitted to.
        """
        basis = self.basis
        said = format_seconds if basis is None else basis.range
        found = [("planned", said(self.step_seconds)), ("store-all", said(self.store_all_seconds))]
        return found if basis is None else [*found, ("fitted to", basis.anchor)]

    @property
    def regret(self) -> float | None:
        """By how much another plan could be faster at most, since times are not exact; None where nobody can say."""
        if self.mem_limit is None or self.predicted_for is not None or not self.fits:
            return None
        return known_regret(self.sequence, self.measurement, self.budget, self.mem_limit)

    @property
    def chain(self) -> Chain:
        """The measured chain, in seconds and bytes."""
        return self.budget.chain

    @property
    def shown(self) -> Sequence:
        """The sequence that is drawn, and told stage by stage: of several forwards in flight, the one with the peak."""
        return self.budget.busiest(self.sequence)[0]

    def by_forwards(self) -> dict[str, Sequence]:
        """The sequences that forwards in flight follow, by what they are called: `forward 1`, `forwards 2 to 4`."""
        sequences = self.sequence.of_forwards(self.budget.forwards)
        if not self.sequence.beside:
            return {"sequence": self.sequence}
        starts = [at for at, each in enumerate(sequences) if at == 0 or each.operations != sequences[at - 1].operations]
        ends = [*starts[1:], len(sequences)]
        return {
            f"forward {begin + 1}" if end - begin == 1 else f"forwards {begin + 1} to {end}": sequences[begin]
            for begin, end in zip(starts, ends, strict=True)
        }

    def which_forward(self) -> str | None:
        """Which of the forwards in flight is shown, in one sentence; None where they all follow one sequence."""
        found = self.by_forwards()
        if len(found) == 1:
            return None
        name = next(name for name, each in found.items() if each.operations == self.shown.operations)
        order = "come in reverse" if self.budget.backward_order == "reverse" else "may come in any order"
        return (
            f"{self.budget.forwards} forwards are in flight at once, by {len(found)} different sequences; their "
            f"backwards {order}. Stages and pictures are those of {name}, where the peak is."
        )

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
        """Predicted time of forward, loss and backward that follow `sequence`, of all forwards in flight."""
        return self.budget.makespan(sequence) + self.budget.forwards * self.before_chain_seconds

    @property
    def overhead(self) -> float:
        """Planned time as a ratio to the plain one."""
        return self.step_seconds / self.store_all_seconds if self.store_all_seconds else 1.0

    @property
    def gap(self) -> float | None:
        """How far the plan can be from the best memory-persistent one, as a share of time; None if there is no bound.

        The solver has proved that no such plan is faster than `sequence.lower_bound` seconds, for each forward.
        """
        bound = self.sequence.lower_bound
        if bound is None:
            return None
        makespan = self.budget.makespan(self.sequence) / self.budget.forwards
        return makespan / bound - 1 if bound else 0.0

    @property
    def before_chain_seconds(self) -> float:
        """Time of the layers before the chain, which no plan changes."""
        return self.measurement.prefix.seconds if self.measurement.prefix else 0.0

    def actions(self) -> list[str]:
        """What happens to every stage, in words: "stored", "checkpointed, recomputed 1×"; one entry per stage."""
        runs = [0] * len(self.chain)
        kept: dict[int, str] = {}
        before_loss = True
        for operation in self.shown:
            match operation:
                case Loss():
                    before_loss = False
                case ForwardEnable(stage, option):
                    runs[stage] += 1
                    if before_loss:  # after it, a ForwardEnable is a recomputation
                        way = self.chain.stages[stage].options[option]
                        size = f"{format_bytes(way.moved)} moved" if way.moved else format_bytes(way.saved)
                        kept[stage] = f"stored {way.name}: {size}" if option else "stored"
                case ForwardCheck(stage):
                    runs[stage] += 1
                    # A sequence may run a stage again before the loss, and store it then: that is what counts.
                    if before_loss:
                        kept.setdefault(stage, "checkpointed")
                case ForwardNograd(stage):
                    runs[stage] += 1
        return [_action(kept.get(stage), count - 1) for stage, count in enumerate(runs)]


def _action(kept: str | None, again: int) -> str:
    times = f"recomputed {again}×" if again else ""
    return ", ".join(part for part in (kept, times) if part)
