"""What a report says, without anything that shows it: every renderer reads these facts.

Nothing here imports a renderer, or the function that finds a sweep.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rotor_py.data_sheet import Devices, Reservation
from rotor_py.measure.step_memory import peak_of
from rotor_py.report.basis import Basis
from rotor_py.report.batch_choice import BatchChoice
from rotor_py.report.numbers import PlanNumbers
from rotor_py.report.sweep import Sweep
from rotor_py.stage.keepers.fewer_bits import rounded_stages
from rotor_py.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class ReportFacts(PlanNumbers):
    """The numbers of a plan, what else is known of it, and what there is to say about both."""

    sweep: Sweep | None = None
    """What all limits cost, where that is known."""
    compiled: Iterable[str] | None = None
    """The names of the stages that run compiled; None where nobody has asked for it."""
    batches: BatchChoice | None = None
    """How the batch was chosen, if it was."""
    predicted_for: Devices | None = None
    """The devices of the table that this is predicted for, which need not be there; None where it was measured."""
    recurrent: tuple[str, ...] = ()
    """Layers of which such a prediction is not exact, by name."""
    reserved: Reservation | None = None
    """What the allocator is predicted to reserve there, if a step by the plan was followed for it."""

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
        compiled = None if self.compiled is None else _compiled(len(tuple(self.compiled)), len(self.chain))
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
        asked = self.measurement.fewer_bits
        if asked is None:
            return None
        stages = len(rounded_stages(self.chain, self.sequence))
        if not stages:
            return f"No stage is kept in {asked}: the plan is exact."
        return (
            f"{stages} of {len(self.chain)} stages {'is' if stages == 1 else 'are'} kept in {asked} for the backward: "
            "the forward is exact, and gradients differ from those of plain training."
        )

    @property
    def basis(self) -> Basis | None:
        """What the numbers rest on; None where they were measured."""
        if self.predicted_for is None:
            return None
        fixed = self.budget.fixed
        batch = fixed.batch + self.measurement.input_bytes
        return Basis(self.predicted_for, fixed, batch, self.measurement, self.recurrent)

    def followed_step(self) -> list[tuple[str, str]]:
        """What a step by the plan takes, and what the allocator reserves for it, by name; nothing where none was
        followed.
        """
        if self.reserved is None:
            return []
        return [
            ("a step (predicted)", format_bytes(self.reserved.step_bytes)),
            ("reserved (predicted)", format_bytes(self.reserved.reserved_bytes)),
        ]

    def times(self) -> list[tuple[str, str]]:
        """The predicted times of a step by the plan, and of a plain one, by their names.

        Of a device that is not there, they are ranges, and come with where the efficiencies are from.
        """
        basis = self.basis
        said = format_seconds if basis is None else basis.range
        found = [("planned", said(self.step_seconds)), ("store-all", said(self.store_all_seconds))]
        if basis is None:
            return found
        return [*found, ("efficiencies" if basis.device.efficiencies.anchor is None else "fitted to", basis.anchor)]

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


def _compiled(number: int, stages: int) -> str:
    if not number:
        return f"None of {stages} stages runs compiled: none can be, which the log tells, or plain ones are as fast."
    return f"{number} of {stages} stages run compiled."
